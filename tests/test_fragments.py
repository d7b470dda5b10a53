"""The kernels' register algebra, emulated lane by lane: what tensor cores are fed is what the comments claim.

Fragment shapes are those of the PTX ISA (`mma.m16n8k16`, `mma.m16n8k8` for tf32, `ldmatrix`, `movmatrix`).
Magic numbers and address formulas are read out of the kernels' text (`kernel_source`).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import kernel_source
import ml_dtypes
import numpy as np
import pytest

import marlin_jit as mj
from marlin_jit import launch, layout, plan

BF16 = np.dtype(ml_dtypes.bfloat16)
FP16 = np.dtype(np.float16)
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4  # PTX: groupID and threadID_in_group
PROBLEM = plan.Problem(1, 128, 64, 128, plan.Zeros.DELTAS, False)

SCALE_POSITION = kernel_source.function("layout.cuh", "scale_position(int n, bool one_group)")
CODE_AT = kernel_source.function("layout.cuh", "code_at(const uint32_t* b, int padded_n, int k, int n)")


# ---- numeric.cuh: from codes to the activation type -----------------------------------------------------


def _struct(name: str) -> str:
    return kernel_source.find("numeric.cuh", rf"struct {name} \{{(.*?)\}}; ")[1]


def _number(text: str, name: str) -> int:
    return int(re.search(rf"\b{name} = (0x[0-9a-f]+)", text)[1], 16)


def _half2(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Words as pairs, low half first, in float64."""
    halves = np.stack([bits & 0xFFFF, bits >> 16], axis=-1).astype(np.uint16)
    return halves.view(dtype).astype(np.float64)


def _round(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round float64 results of at most 24 significant bits once."""
    assert (values == values.astype(np.float32)).all()
    return values.astype(np.float32).astype(dtype)


def _method(name: str, signature: str) -> str:
    """The body of a one- or two-line method of Fp16 or Bf16."""
    return kernel_source.find("numeric.cuh", rf"struct {name} .*?{signature} \{{(.*?)\}}")[1]


def code_fp16(q: np.ndarray, r: int, minus: np.ndarray) -> np.ndarray:
    """`Fp16::code<R>`."""
    text = _method("Fp16", r"uint32_t code\(uint32_t q, uint32_t minus\)")
    low, high = re.findall(r"mask_or<(0x[0-9a-f]+), (0x[0-9a-f]+)>\(q\)", text)
    assert "if (R % 2) q >>= 8;" in text
    assert "if (R < 2) return add(mask_or" in text and text.strip().endswith(", sixteenth, minus);")
    q = q >> (8 if r % 2 else 0)
    mask, bits = low if r < 2 else high
    value = _half2((q & int(mask, 16)) | int(bits, 16), FP16)
    return _round(value * (1 if r < 2 else _half2(np.uint32(_number(text, "sixteenth")), FP16)) + minus, FP16)


def code_bf16(q: np.ndarray, r: int, minus: np.ndarray) -> np.ndarray:
    """`Bf16::code<R>`."""
    text = _method("Bf16", r"uint32_t code\(uint32_t q, uint32_t minus\)")
    mask, bits, shift = re.search(
        r"fma\(mask_or<(0x[0-9a-f]+), (0x[0-9a-f]+)>\(q >> \((.*?)\)\), ONES, minus\)", text
    ).groups()
    q = q >> kernel_source.value(shift, {"R": r})
    return _round(_half2((q & int(mask, 16)) | int(bits, 16), BF16) + minus, BF16)


CODE = {FP16: code_fp16, BF16: code_bf16}


def centered(q: np.ndarray, r: int, dtype: np.dtype) -> np.ndarray:
    """`centered<R>`: the code of which 8 is taken away."""
    text = _struct("Fp16" if dtype == FP16 else "Bf16")
    name = "MINUS_8" if r < 2 or "MINUS_8_UPPER = MINUS_8;" in text else "MINUS_8_UPPER"
    return CODE[dtype](q, r, _half2(np.uint32(_number(text, name)), dtype))


def words_with(nibble: int, code: int) -> np.ndarray:
    background = np.array([0, 0xFFFFFFFF, 0x5A5A5A5A, 0x13579BDF], np.uint32)
    return background & np.uint32(~(15 << 4 * nibble) & 0xFFFFFFFF) | np.uint32(code << 4 * nibble)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_every_code_in_every_nibble(dtype: np.dtype) -> None:
    """Register R takes nibbles R//2 + 2*(R%2) (low half) and that plus 4 (high half), exactly as q - 8."""
    for nibble in range(8):
        for code in range(16):
            high, pair = nibble // 4, nibble % 4
            r = pair // 2 + 2 * (pair % 2)
            values = centered(words_with(nibble, code), r, dtype)
            assert values.dtype == dtype
            assert (values[:, high].astype(np.float64) == code - 8).all(), (nibble, code)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_every_code_less_every_zero_point(dtype: np.dtype) -> None:
    """`points16` takes any zero point away from any code exactly, in the upper registers too."""
    scale = np.full((1, 64), 0.37, np.float32).astype(dtype)
    for z in range(17):
        points = np.full((1, 64), z, np.uint8)
        points[0, 0] = 3  # not all 8, which would be a symmetric weight
        q = np.zeros((16, 64), np.uint8)
        weight = mj.pack(mj.QuantWeight.from_zero_points(q, scale, points, -1))
        assert weight.points16.dtype == dtype
        minus = float(weight.points16[0, SCALE_POSITION(1, True)])
        upper = minus
        if dtype == FP16:
            added = re.search(
                r"return add\(minus, (0x[0-9a-f]+)\);", _method("Fp16", r"upper\(uint32_t minus\)")
            )
            upper = float(_round(minus + _half2(np.uint32(int(added[1], 16)), FP16), FP16)[0])
        for nibble in range(8):
            for code in range(16):
                high, pair = nibble // 4, nibble % 4
                r = pair // 2 + 2 * (pair % 2)
                values = CODE[dtype](words_with(nibble, code), r, np.float64(minus if r < 2 else upper))
                assert (values[:, high].astype(np.float64) == code - z).all(), (nibble, code, z)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_ones_of_the_group_sum(dtype: np.dtype) -> None:
    name = "Fp16" if dtype == FP16 else "Bf16"
    ones = _number(_struct(name), "ONES")
    assert (_half2(np.uint32(ones), dtype) == 1).all()


# ---- mma fragments --------------------------------------------------------------------------------------


def a_fragment_place(r: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    """PTX ISA, m16n8k16 matrix A: row and column of half `half` of register `r` in each lane."""
    return G + 8 * (r % 2), 2 * T + half + 8 * (r // 2)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_a_word_of_b_is_an_a_fragment(dtype: np.dtype, rng: np.random.Generator) -> None:
    """Lane 4g+t's word j of chunk c and k16 row kt: the transposed 16 x 16 tile of codes, minus 8."""
    q = rng.integers(0, 16, (48, 192), dtype=np.uint8)
    q = np.concatenate([q, np.full((16, 192), 8, np.uint8)])
    B = mj.pack(mj.QuantWeight(q, np.ones((1, 192), FP16), None, -1)).B.view(np.uint32)
    for kt in range(4):
        for chunk in range(3):
            vectors = B[kt, 128 * chunk : 128 * (chunk + 1)].reshape(32, 4)  # 16 bytes a lane
            for j in range(4):
                A = np.full((16, 16), np.nan)
                for r in range(4):
                    values = centered(vectors[:, j], r, dtype).astype(np.float64)
                    for half in range(2):
                        A[a_fragment_place(r, half)] = values[:, half]
                n0 = 64 * chunk + 16 * j
                tile = q[16 * kt : 16 * kt + 16, n0 : n0 + 16].T.astype(np.float64) - 8
                assert np.array_equal(A, tile)


def ldmatrix(memory: np.ndarray, addresses: np.ndarray) -> np.ndarray:
    """`ldmatrix.x4` of 16-bit elements: registers [4, 32, 2]; lane 8i + r points at row r of matrix i."""
    assert (addresses % 16 == 0).all()
    rows = memory[addresses[:, None] // 2 + np.arange(8)].reshape(4, 8, 8)
    return rows[:, G][:, LANE, :].reshape(4, 32, 4, 2)[:, LANE, T]


TILES = sorted(
    {
        tile
        for limits in launch.ARCH_LIMITS.values()
        for zeros in plan.Zeros
        for problem in (
            plan.Problem(1, 128, 64, 128, zeros, False),
            plan.Problem(1, 64, 64, -1, zeros, False),
        )
        for tile in plan.gemm_tile_shapes(problem, plan.Limits(132, *limits))
    },
    key=str,
)
H200 = plan.Limits(132, *launch.ARCH_LIMITS["90a"])
DECODES = [plan.decode_build(replace(PROBLEM, m=m), H200).defines for m in (8, 16, 24)]


def shared_stage(c: Any, A: np.ndarray) -> np.ndarray:
    """A stage of activations in shared memory, as the Loader of marlin.cu writes it ([M_TILE, K_STAGE])."""
    a_to = kernel_source.find("marlin.cu", r"a_to = (row \* 128 [^;]*);")[1]
    to = kernel_source.find("marlin.cu", r"copy_async16\(stage \+ (a_to \+ block [^,]*),")[1]
    rows, passes = c.THREADS // 8, c.A_BYTES // 16 // c.THREADS
    a_block = c.M_TILE // rows
    memory = np.full(c.A_BYTES // 2, -1, A.dtype)
    for thread in range(c.THREADS):
        row, column = thread // 8, thread % 8
        names = vars(c) | {"row": row, "column": column, "A_ROWS": rows}
        names["a_to"] = kernel_source.value(a_to, names)
        for i in range(passes):
            names |= {"block": i // a_block, "pass_": i % a_block}
            address = kernel_source.value(re.sub(r"\bpass\b", "pass_", to), names)
            m, k = row + names["pass_"] * rows, 64 * names["block"] + 8 * column
            assert (memory[address // 2 : address // 2 + 8] == -1).all(), "two copies to one place"
            memory[address // 2 : address // 2 + 8] = A[m, k : k + 8]
    return memory


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_ldmatrix_delivers_b_fragments(tile: plan.GemmTile) -> None:
    c = kernel_source.constants("marlin.cu", plan.gemm_build(tile, 4, PROBLEM).defines)
    A = np.arange(c.M_TILE * c.K_STAGE, dtype=np.int64).reshape(c.M_TILE, c.K_STAGE)
    memory = shared_stage(c, A)
    row, column = kernel_source.find(
        "marlin.cu", r"const int row = (\(lane & 7\)[^,]*), column = ([^;]*);"
    ).groups()
    a_at = kernel_source.find("marlin.cu", r" a_at = ([^;]*);")[1]
    first = kernel_source.find("marlin.cu", r"const int first = (wk [^;]*);")[1]
    fetch = kernel_source.find("marlin.cu", r"load_matrix4\(f\.b\[i\], stage \+ (.*?)\);")[1]
    for wk in range(c.WARPS_K):
        names = vars(c) | {"lane": LANE, "wk": wk}
        names["first"] = kernel_source.value(first, names)
        names["row"] = kernel_source.value(row, names)
        names["column"] = kernel_source.value(column, names)
        names["a_at"] = kernel_source.value(a_at, names)
        for step in range(c.WARP_STEPS):
            for i in range(c.M_TILE // 16):
                at = kernel_source.value(fetch.replace("w.a_at", "a_at"), {**names, "step": step, "i": i})
                assert (at + 16 <= c.A_BYTES).all()
                for phase in at.reshape(4, 8):
                    assert len(set(phase // 16 % 8)) == 8, "a bank conflict"
                registers = ldmatrix(memory, at)
                k0 = 16 * (names["first"] + step)
                for mb in range(2):
                    for b in range(2):
                        # PTX ISA, m16n8k16 matrix B: k = 2t, 2t+1 (second register: + 8), column g.
                        for half in range(2):
                            expected = A[16 * i + 8 * mb + G, k0 + 2 * T + half + 8 * b]
                            assert np.array_equal(registers[2 * mb + b][:, half], expected)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_words_reach_the_lane_they_belong_to(tile: plan.GemmTile) -> None:
    c = kernel_source.constants("marlin.cu", plan.gemm_build(tile, 4, PROBLEM).defines)
    padded_n = c.TILE_N
    words = np.arange(c.STEPS * 2 * padded_n).reshape(c.STEPS, 2 * padded_n)
    memory = np.full(c.W_BYTES // 4, -1)
    w_to = kernel_source.find("marlin.cu", r" w_to = ([^;]*);")[1]
    w_rows = c.THREADS // (32 * c.WARPS_N)
    for thread in range(c.THREADS):
        row, within = thread // (32 * c.WARPS_N), thread % (32 * c.WARPS_N)
        at = (kernel_source.value(w_to, vars(c) | {"thread": thread}) - c.W_AT) // 4
        for i in range(c.W_BYTES // 16 // c.THREADS):
            column = 2 * (within // 32 * 64) + within % 32 * 4
            memory[at + i * c.THREADS * 4 :][:4] = words[row + i * w_rows, column : column + 4]
    assert (memory >= 0).all()
    w_at = kernel_source.find("marlin.cu", r" w_at = (W_AT [^;]*);")[1]
    fetch = kernel_source.find("marlin.cu", r"load_shared16\(f\.words, stage \+ (.*?)\);")[1]
    for wk in range(c.WARPS_K):
        for wn in range(c.WARPS_N):
            names = vars(c) | {"wk": wk, "wn": wn, "lane": LANE, "first": wk * c.WARP_STEPS}
            names["w_at"] = kernel_source.value(w_at, names)
            for step in range(c.WARP_STEPS):
                at = kernel_source.value(fetch.replace("w.w_at", "w_at"), {**names, "step": step})
                got = memory[(at - c.W_AT)[:, None] // 4 + np.arange(4)]
                k16 = names["first"] + step
                assert np.array_equal(got.ravel(), words[k16, 128 * wn : 128 * (wn + 1)])


@pytest.mark.parametrize("build", DECODES, ids=str)
def test_ldmatrix_of_the_decode_kernel(build: dict[str, int]) -> None:
    """Two k16 steps at once of a row block: {b0, b1} of step, {b0, b1} of step + 1."""
    c = kernel_source.constants("decode.cu", build)
    A = np.arange(c.ROWS * c.BLOCK_K).reshape(c.ROWS, c.BLOCK_K)
    memory = np.full(c.S_AT // 2, -1)
    for row in range(c.ROWS):
        memory[row * c.A_PITCH // 2 :][: c.BLOCK_K] = A[row]
    start = kernel_source.find("decode.cu", r"const uint32_t from = here \+ ([^;]*);")[1]
    at = kernel_source.value(start, vars(c) | {"lane": LANE})
    for phase in at.reshape(4, 8):
        assert len(set(phase // 16 % 8)) == 8, "a bank conflict"
    further = kernel_source.find("decode.cu", r"load_matrix4\(f\[mb\], from \+ (.*?)\);")[1]
    for mb, step in itertools.product(range(c.M_BLOCKS), range(0, c.STEPS, 2)):
        registers = ldmatrix(memory, at + kernel_source.value(further, vars(c) | {"mb": mb, "step": step}))
        for e in range(2):
            for b in range(2):
                for half in range(2):
                    expected = A[8 * mb + G, 16 * (step + e) + 8 * b + 2 * T + half]
                    assert np.array_equal(registers[2 * e + b][:, half], expected)


# ---- layout.cuh -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_group", [False, True])
def test_scale_positions(one_group: bool, rng: np.random.Generator) -> None:
    scales = rng.permutation(256).reshape(1, 256)
    if not one_group:
        scales = np.concatenate([scales, scales[:, ::-1]])
    permuted = layout.permute_scales(scales)
    positions = np.array([SCALE_POSITION(n, one_group) for n in range(256)])
    assert np.array_equal(permuted[:, positions], scales)


def test_code_positions(rng: np.random.Generator) -> None:
    q = rng.integers(0, 16, (128, 192), dtype=np.uint8)
    B = mj.pack(mj.QuantWeight(q, np.ones((2, 192), FP16), None, 64)).B.view(np.uint32)
    k, n = np.mgrid[:128, :192]
    assert np.array_equal(CODE_AT(B.ravel(), 192, k, n), q)
    row, word, shift = layout.code_position(k, n)
    assert np.array_equal(B[row, word] >> shift & 15, q)


def slab_pairs(chunk: np.ndarray, g: int, one_group: bool) -> np.ndarray:
    """layout.cuh's `slab_pairs`: (n = 16j+g, n + 8) for j = 0..3, as [4, 2]."""
    text = kernel_source.find("layout.cuh", r"void slab_pairs\((.*)\} \} ?$")[1]
    if one_group:
        at = re.search(r"scale_position\((16 \* j \+ g), true\)", text)[1]
        step = int(re.search(r"chunk\[at \+ (\d+)\]", text)[1])
        first = [SCALE_POSITION(kernel_source.value(at, {"j": j, "g": g}), True) for j in range(4)]
        return np.array([[chunk[i], chunk[i + step]] for i in first])
    start = kernel_source.value(re.search(r"\(chunk \+ (.*?)\)", text)[1], {"g": g})
    return chunk[start : start + 8].reshape(4, 2)


@pytest.mark.parametrize("one_group", [False, True])
def test_slab_pairs_are_the_two_columns_of_a_lane(one_group: bool) -> None:
    groups = 1 if one_group else 3
    columns = np.arange(groups * 128).reshape(groups, 128)
    permuted = layout.permute_scales(columns)
    for row in range(groups):
        for chunk in range(2):
            for g in range(8):
                pairs = slab_pairs(permuted[row, 64 * chunk : 64 * chunk + 64], g, one_group)
                for j in range(4):
                    n = 128 * row + 64 * chunk + 16 * j + g
                    assert pairs[j].tolist() == [n, n + 8]


# ---- the way out ----------------------------------------------------------------------------------------


def movmatrix(registers: np.ndarray) -> np.ndarray:
    """`movmatrix.trans` of pairs [32, 2]: lane 4r + t holds (r, 2t), (r, 2t+1) of an 8 x 8 matrix."""
    matrix = np.empty((8, 8), registers.dtype)
    matrix[G[:, None], 2 * T[:, None] + np.arange(2)] = registers
    return matrix.T[G[:, None], 2 * T[:, None] + np.arange(2)]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_epilogue_puts_every_output_in_its_place(tile: plan.GemmTile) -> None:
    """C^T (PTX ISA: c0, c1 at row g, columns 2t, 2t+1; c2, c3 at row g + 8) through movmatrix."""
    c = kernel_source.constants("marlin.cu", plan.gemm_build(tile, 4, PROBLEM).defines)
    column_of = kernel_source.find("marlin.cu", r"const int column = (w\.wn [^;]*);")[1].replace("w.", "")
    to = kernel_source.find("marlin.cu", r"\(shared \+ (\([^=]* \+ column [^=]*)\) = rows_m;")[1]
    pair = kernel_source.find("marlin.cu", r"rows_n = Type::pair\(v\[(.*?)\] [^,]*, v\[(.*?)\] ")
    C = np.arange(c.M_TILE * c.TILE_N).reshape(c.M_TILE, c.TILE_N)
    shared = np.full((c.M_TILE, c.TILE_N + 8), -1).ravel()
    for wn in range(c.WARPS_N):
        for wk in range(c.WARPS_K):
            for j in range(c.OWN):
                slab = wk * c.OWN + j
                for mb in range(c.M_BLOCKS):
                    n, m = 64 * wn + 16 * slab + G, 8 * mb + 2 * T
                    v = np.stack([C[m, n], C[m + 1, n], C[m, n + 8], C[m + 1, n + 8]])
                    for half in range(2):
                        picked = [kernel_source.value(pair[i], {"half": half}) for i in (1, 2)]
                        turned = movmatrix(v[picked].T)
                        names = {
                            "wn": wn,
                            "wk": wk,
                            "OWN": c.OWN,
                            "j": j,
                            "mb": mb,
                            "half": half,
                            "g": G,
                            "t": T,
                        }
                        names |= {"PITCH": c.TILE_N + 8, "column": kernel_source.value(column_of, names)}
                        at = kernel_source.value(to.replace("w.", ""), names)
                        assert (at % 2 == 0).all()
                        shared[at], shared[at + 1] = turned[:, 0], turned[:, 1]
    assert np.array_equal(shared.reshape(c.M_TILE, -1)[:, : c.TILE_N], C)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gated_epilogue_pairs_gate_with_up(tile: plan.GemmTile) -> None:
    """Output f of a tile is made of columns 16*(f // 8) + f % 8 and the one 8 further."""
    c = kernel_source.constants("marlin.cu", plan.gemm_build(tile, 4, PROBLEM).defines)
    feature_of = kernel_source.find("marlin.cu", r"const int feature = (w\.wn [^;]*);")[1].replace("w.", "")
    to = kernel_source.find("marlin.cu", r"\(shared \+ (\([^=]* \+ feature [^=]*)\) = rows_m;")[1]
    factors = kernel_source.find(
        "marlin.cu", r"Type::pair\(silu\(v\[(.)\]\) \* v\[(.)\], silu\(v\[(.)\]\) \* v\[(.)\]\)"
    )
    low_gate, low_up, high_gate, high_up = (int(factors[i]) for i in (1, 2, 3, 4))
    C = np.arange(c.M_TILE * c.TILE_N).reshape(c.M_TILE, c.TILE_N)
    f = np.arange(c.TILE_N // 2)
    gate, up = C[:, 16 * (f // 8) + f % 8], C[:, 16 * (f // 8) + f % 8 + 8]
    pitch = c.TILE_N + 8
    shared = np.full((c.M_TILE * pitch, 2), -1)
    for wn in range(c.WARPS_N):
        for wk in range(c.WARPS_K):
            for j in range(c.OWN):
                for mb in range(c.M_BLOCKS):
                    n, m = 64 * wn + 16 * (wk * c.OWN + j) + G, 8 * mb + 2 * T
                    v = np.stack([C[m, n], C[m + 1, n], C[m, n + 8], C[m + 1, n + 8]])
                    names = {
                        "wn": wn,
                        "wk": wk,
                        "OWN": c.OWN,
                        "j": j,
                        "mb": mb,
                        "g": G,
                        "t": T,
                        "PITCH": pitch,
                    }
                    names["feature"] = kernel_source.value(feature_of, names)
                    at = kernel_source.value(to.replace("w.", ""), names)
                    for side, (low, high) in enumerate(((low_gate, high_gate), (low_up, high_up))):
                        turned = movmatrix(v[[low, high]].T)
                        shared[at, side], shared[at + 1, side] = turned[:, 0], turned[:, 1]
    rows = shared.reshape(c.M_TILE, pitch, 2)[:, : c.TILE_N // 2]
    assert np.array_equal(rows[..., 0], gate)
    assert np.array_equal(rows[..., 1], up)


@pytest.mark.parametrize("build", DECODES, ids=str)
@pytest.mark.parametrize("chunks", [1, 3, 12])
def test_gated_sums_of_the_decode_kernel_pair_gate_with_up(build: dict[str, int], chunks: int) -> None:
    """Quads are [chunk][row][16]; those of C [chunk][row][8]."""
    c = kernel_source.constants("decode.cu", build)
    c.CHUNK_QUADS = c.ROWS * 16
    i = np.arange(chunks * c.CHUNK_QUADS // 2)
    where = kernel_source.find("decode.cu", r"const int row = (i / 8[^,]*), from = ([^;]*);")
    row, gate = (kernel_source.value(where[side], vars(c) | {"i": i}) for side in (1, 2))
    kernel_source.find("decode.cu", r"gate = \*place\(from\), up = \*place\(from \+ 2\);")
    to = kernel_source.find("decode.cu", r"store\(out, nullptr, c \+ row \* ldc, (.*?), n\);")[1]
    names = vars(c) | {"i": i, "chunks": chunks}
    column = kernel_source.value(to.replace("blockIdx.x", "3"), names) - 3 * 32 * chunks
    assert np.array_equal(gate // 16 % c.ROWS, row)
    packed = gate // c.CHUNK_QUADS * 64 + gate % 16 * 4  # column of the block that gate's quad begins with
    assert np.array_equal(packed // 16 * 8 + packed % 16, column)
    assert len(set(zip(row.tolist(), column.tolist(), strict=True))) == len(i)


@pytest.mark.parametrize("build", DECODES, ids=str)
@pytest.mark.parametrize("chunks", [1, 3, 12])
def test_sums_of_the_decode_kernel_go_to_their_columns(build: dict[str, int], chunks: int) -> None:
    c = kernel_source.constants("decode.cu", build)
    c.CHUNK_QUADS, c.CHUNK_FLOATS = c.ROWS * 16, c.ROWS * c.SUM_PITCH
    quad = np.arange(chunks * c.CHUNK_QUADS)
    names = vars(c) | {"quad": quad, "i": quad, "chunks": chunks}
    place = kernel_source.find("decode.cu", r"reinterpret_cast<Float4\*>\(shared \+ ([^;]*)\); }; const")[1]
    at = kernel_source.value(place, names)
    row = kernel_source.value(kernel_source.find("decode.cu", r"const int row = (i / 16[^;]*);")[1], names)
    to = kernel_source.find("decode.cu", r"store\(sum, bias, c \+ row \* ldc, (.*?), n\);")[1]
    column = kernel_source.value(to.replace("blockIdx.x", "0"), names)
    assert np.array_equal(at, column // 64 * c.CHUNK_FLOATS + row * c.SUM_PITCH + column % 64)
    assert set(zip(row.tolist(), column.tolist(), strict=True)) == {
        (r, n) for r in range(c.ROWS) for n in range(0, 64 * chunks, 4)
    }


@pytest.mark.parametrize("build", DECODES, ids=str)
def test_exchange_of_the_decode_kernel_meets_no_bank_twice(build: dict[str, int]) -> None:
    """acc[j][mb][i] goes to row 8mb + 2t + i%2, column 16j + g + 8*(i/2): C[m, n], and 32 different banks."""
    c = kernel_source.constants("decode.cu", build)
    at = kernel_source.find("decode.cu", r"shared\[warp \* CHUNK_FLOATS \+ (.*?)\] = \(&acc")[1]
    places = set()
    for j, mb, e in itertools.product(range(4), range(c.M_BLOCKS), range(4)):
        to = kernel_source.value(at, vars(c) | {"g": G, "t": T, "j": j, "i": 4 * mb + e})
        assert len(set(to % 32)) == 32
        row, column = to // c.SUM_PITCH, to % c.SUM_PITCH
        assert np.array_equal(row, 8 * mb + 2 * T + e % 2)
        assert np.array_equal(column, 16 * j + G + 8 * (e // 2))
        places |= set(to.tolist())
    assert len(places) == c.ROWS * 64


@pytest.mark.parametrize("build", DECODES, ids=str)
def test_copies_of_the_decode_kernel(build: dict[str, int]) -> None:
    """Every 16 bytes of a block's activations once, from their own place; the chunk's scales in one piece."""
    c = kernel_source.constants("decode.cu", build)
    names = vars(c) | {"lane": LANE}
    found = kernel_source.find("decode.cu", r"row = (lane / 16), column = (lane % 16 \* 8); this->a")
    names["row"], names["column"] = (kernel_source.value(found[i], names) for i in (1, 2))
    a_to = kernel_source.value(kernel_source.find("decode.cu", r"a_to = (row \* [^;]*);")[1], names)
    step = kernel_source.find("decode.cu", r"copy_async16_l1\(buffer \+ a_to \+ ([^,]*),")[1]
    kernel_source.find("decode.cu", r"a_pass = lda \* 4;")  # bytes: two rows
    seen = {}
    for i in range(c.ROWS // 2):
        to = a_to + kernel_source.value(step, names | {"i": i})
        for lane in range(32):
            seen[int(to[lane])] = (2 * i + int(names["row"][lane]), int(names["column"][lane]))
    assert seen == {
        row * c.A_PITCH + 2 * column: (row, column)
        for row in range(c.ROWS)
        for column in range(0, c.BLOCK_K, 8)
    }


# ---- correction.cu --------------------------------------------------------------------------------------

SUM_POSITION = kernel_source.function("layout.cuh", "sum_position(int m, int group, int padded_groups)")


def cut_to_tf32(x: np.ndarray) -> np.ndarray:
    """The first 10 mantissa bits, as the kernel's mask keeps them."""
    mask = kernel_source.find("correction.cu", r"first = __float_as_uint\(x\) & (\w+);")[1]
    return (x.astype(np.float32).view(np.uint32) & np.uint32(int(mask, 16))).view(np.float32)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_deltas_are_exact_in_tf32_and_sums_nearly(dtype: np.dtype, rng: np.random.Generator) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        wide = every.astype(np.float32)
    finite = wide[np.isfinite(wide)]
    assert (cut_to_tf32(finite) == finite).all()
    sums = (rng.standard_normal(10000) * 2.0 ** rng.integers(-10, 12, 10000)).astype(np.float32)
    first = cut_to_tf32(sums)
    rest = cut_to_tf32(sums - first)
    assert (np.abs(first.astype(np.float64) + rest - sums) <= 2.0**-20 * np.abs(sums)).all()


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (16, 8), (29, 5), (40, 19)])
def test_group_sums_have_places_of_their_own(rows: int, groups: int) -> None:
    padded = -(-groups // 8) * 8
    m, group = np.mgrid[:rows, :padded]
    places = SUM_POSITION(m, group, padded)
    assert len(set(places.ravel().tolist())) == rows * padded
    assert places.min() == 0 and places.max() < -(-rows // 16) * 16 * padded


@pytest.mark.parametrize("group_warps", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 5, 8, 11, 40])
def test_correction_fragments_multiply_sums_with_deltas(
    groups: int, group_warps: int, rng: np.random.Generator
) -> None:
    """PTX ISA, m16n8k8 tf32: A (g, t), (g+8, t), (g, t+4), (g+8, t+4); B (t, g), (t+4, g); C as m16n8k16."""
    value, find = kernel_source.value, kernel_source.find
    padded = -(-groups // 8) * 8
    sum_at = find("correction.cu", r"const Float4\* sum = sums \+ (.*?);")[1]
    first_group, group_step, sum_step = find(
        "correction.cu",
        r"int group = (.*?); group < padded_groups; group \+= (.*?), sum \+= (.*?)\) add_eight",
    ).groups()
    group_at = find("correction.cu", r"min\((first \+ [^,]*), groups - 1\)")[1]
    half_at = find("correction.cu", r"pair\[i\]\[h / 2\] >> \((.*?)\) & 0xffff")[1]
    column_at = find("correction.cu", r"mine = &tile\[g\]\[(.*?)\];")[1]
    delta = rng.standard_normal((groups, 64))
    permuted = layout.permute_scales(delta)
    sums = np.zeros((32, padded))
    sums[:, :groups] = rng.standard_normal((32, groups))
    memory = np.full(32 * padded, np.nan)
    m, group = np.mgrid[:32, :padded]
    memory[SUM_POSITION(m, group, padded)] = sums
    C = np.full((32, 64), np.nan)
    for block in range(2):
        acc = np.zeros((8, 16, 8))  # [h, row, column]
        turns = [(warp, turn) for warp in range(group_warps) for turn in range(padded)]
        for group_warp, turn in turns:
            names = {"row_block": block, "group_warp": group_warp, "GROUP_WARPS": group_warps}
            names["padded_groups"] = padded
            first = value(first_group, names) + turn * value(group_step, names)
            if first >= padded:
                continue
            A, B = np.full((16, 8), np.nan), np.full((8, 8, 8), np.nan)
            for lane in range(32):
                g, t = lane // 4, lane % 4
                names |= {"first": first, "lane": lane}
                at = 4 * (value(sum_at, names) + turn * value(sum_step, names))
                for register in range(4):
                    A[g + 8 * (register % 2), t + 4 * (register // 2)] = memory[at + register]
                for i in range(2):
                    row = min(value(group_at, {**names, "i": i}), groups - 1)
                    pairs = slab_pairs(permuted[row], g, groups == 1)
                    for h in range(8):
                        B[h, t + 4 * i, g] = pairs[h // 2][value(half_at, {"h": h}) // 16]
            acc += A @ B
        for lane in range(32):
            g, t = lane // 4, lane % 4
            column = value(column_at, {"OWN": 8, "group_warp": 0, "t": t})
            for h in range(8):
                for row in (g, g + 8):
                    C[16 * block + row, [column + 8 * h, column + 8 * h + 1]] = acc[
                        h, row, [2 * t, 2 * t + 1]
                    ]
    np.testing.assert_allclose(C, sums[:, :groups] @ delta, rtol=1e-12, atol=1e-12)


# ---- models/llama.cu ------------------------------------------------------------------------------------

LLAMA = "../models/llama.cu"


def mma(c: np.ndarray, a: list[np.ndarray], b: list[np.ndarray]) -> None:
    """PTX ISA, m16n8k16: c [32, 4] += a (four registers [32, 2]) * b (two), all in float64."""
    A, B = np.full((16, 16), np.nan), np.full((16, 8), np.nan)
    for half in range(2):
        for r in range(4):
            A[a_fragment_place(r, half)] = a[r][:, half]
        for r in range(2):
            B[2 * T + half + 8 * r, G] = b[r][:, half]
    C = A @ B
    for i in range(4):
        c[:, i] += C[G + 8 * (i // 2), 2 * T + i % 2]


def transposed(registers: np.ndarray) -> np.ndarray:
    """What `ldmatrix.trans` returns where `ldmatrix` would return `registers`."""
    matrices = registers.reshape(4, 8, 8)  # lane 4g + t has elements 2t, 2t + 1 of row g
    return matrices.swapaxes(1, 2).reshape(4, 32, 2)


class ManyTokens:
    """One head of `attention_of_many`, by the formulas of its text, in float64 and without rounding."""

    def __init__(self, head_dim: int) -> None:
        self.c = kernel_source.constants(LLAMA, {"HEAD_DIM": head_dim})
        calls = re.findall(
            r"mma\((s|sum)\[(.*?)\], (query\[k\]|p), b\[(\d)\], b\[(\d)\]\);", kernel_source.source(LLAMA)
        )
        assert [call[0] + call[2] for call in calls] == ["squery[k]"] * 2 + ["sump"] * 2
        self.calls = {name: [call[1:] for call in calls if call[0] == name] for name in ("s", "sum")}
        self.pairs = re.findall(
            r"rounded_pair\(s\[(.*?)\]\[(\d)\], s\[(.*?)\]\[(\d)\]\)",
            self.find(r"const unsigned p\[4\] = \{(.*?)\};")[1],
        )

    @staticmethod
    def find(pattern: str) -> re.Match[str]:
        return kernel_source.find(LLAMA, pattern)

    def value(self, text: str, **names: Any) -> Any:
        return kernel_source.value(text, vars(self.c) | names)

    def tile(self, cache: np.ndarray, rows: int) -> np.ndarray:
        """`load_tile`: shared memory [TILE * PITCH], of `cache` from the tile's first row on."""
        memory = np.full(self.c.TILE * self.c.PITCH, np.nan)
        first, column = (
            self.value(text.replace("threadIdx.x", "thread"), thread=np.arange(128))
            for text in self.find(r"int first = (threadIdx[^,]*), column = ([^;]*);").groups()
        )
        mine = 8 * np.arange(128)
        assert self.find(r"mine = from \+ ([^;]*);")[1] == "threadIdx.x * 8"
        step = self.value(self.find(r"row < TILE; row \+= ([^)]*)\)")[1])
        read = self.find(r"bytes = (first \+ row < rows) \? 16 : 0;")[1]
        past = self.find(r'"l"\(mine \+ (.*?)\)')[1]
        assert self.find(r"shared_address\(&to\[(.*?)\]\[column\]\)")[1] == "first + row"
        for row in range(0, self.c.TILE, step):
            names = {"first": first, "row": row, "rows": rows}
            places = mine + self.value(past, **names)
            to = (first + row) * self.c.PITCH + column
            assert np.isnan(memory[to]).all() and (to % 8 == 0).all()
            for i in range(8):
                found = np.take(cache, places + i, mode="clip")
                memory[to + i] = np.where(self.value(read, **names), found, 0)
        return memory

    def b_fragments(self, memory: np.ndarray, at: np.ndarray) -> np.ndarray:
        for phase in at.reshape(4, 8):
            assert len(set(phase // 16 % 8)) == 8, "a bank conflict"
        return ldmatrix(memory, at)

    def block(self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, start: int, z: int) -> np.ndarray:
        """What one block writes, NaN elsewhere."""
        c, find, value = self.c, self.find, self.value
        tokens, d = q.shape
        out = np.full(q.shape, np.nan)
        names: dict[str, Any] = {"g": G, "t": T, "lane": LANE, "tokens": tokens, "start": start}
        names |= {"length": len(keys), "gridDim_z": -(-tokens // 64), "blockIdx_z": z}
        names["first"] = value(
            find(r"const int first = (\(gridDim[^;]*);")[1].replace("Dim.", "Dim_").replace("Idx.", "Idx_"),
            **names,
        )
        end = value(find(r"const int end = (min\(start [^;]*);")[1], **names)
        warp_first, token = find(r"const int warp_first = ([^,]*), token = ([^;]*);").groups()
        key_at, value_at = (
            2 * value(find(rf"const int {name}_at = ([^;]*);")[1], **names) for name in ("key", "value")
        )
        key_step, value_step = (find(rf", {name} \+ (2 \* .*?)\);")[1] for name in ("key", "value"))
        for warp in range(4):
            names["warp_first"] = value(
                warp_first.replace("threadIdx.x", "thread"), thread=32 * warp, **names
            )
            names["token"] = value(token, **names)
            query = np.full((d // 16, 4, 32, 2), np.nan)
            register, which = find(r"query\[([^;]*?)\]\[([^;]*?)\] = from\[8 \* i\] \|").groups()
            row = find(r"\* tokens \+ min\((.*?), tokens - 1\);")[1]
            offset = find(r"from = q \+ row \* q_stride \+ head \* HEAD_DIM \+ ([^;]*);")[1]
            for half in range(2):
                rows = np.minimum(value(row, half=half, **names), tokens - 1)
                for i in range(d // 8):
                    at = 8 * i + value(offset, **names)
                    to = value(register, i=i), value(which, i=i, half=half)
                    query[to] = np.stack([q[rows, at], q[rows, at + 1]], axis=1)
            total, sums = np.zeros((32, 4)), np.zeros((d // 8, 32, 4))
            maximum = np.full((2, 32), -np.inf)
            for place in range(0, end, c.TILE):
                names |= {"place": place, "next": place + c.TILE}
                if value(find(r"if \((place > [^)]*)\) continue;")[1], **names):
                    continue
                k_memory, v_memory = (self.tile(x[place:].ravel(), end - place) for x in (keys, values))
                s = np.zeros((c.TILE // 8, 32, 4))
                for k in range(d // 16):
                    for n in range(c.TILE // 16):
                        b = self.b_fragments(k_memory, key_at + value(key_step, k=k, n=n))
                        for to, _, b0, b1 in self.calls["s"]:
                            mma(s[value(to, n=n)], list(query[k]), [b[int(b0)], b[int(b1)]])
                if value(find(r"if \((next - 1 > [^)]*)\)")[1], **names):
                    later = find(r"if \((place \+ 8 \* n .*?)\) s\[n\]\[i\] = -infinity;")[1]
                    for n in range(c.TILE // 8):
                        for i in range(4):
                            s[n, value(later, n=n, i=i, **names), i] = -np.inf
                for half in range(2):
                    mine = slice(2 * half, 2 * half + 2)
                    largest = s[:, :, mine].max(axis=(0, 2)).reshape(8, 4).max(axis=1).repeat(4)
                    largest = np.maximum(maximum[half], largest * d**-0.5)
                    shrink = np.exp(maximum[half] - largest)[:, None]
                    maximum[half] = largest
                    total[:, mine] *= shrink
                    sums[:, :, mine] *= shrink
                    s[:, :, mine] = np.exp(s[:, :, mine] * d**-0.5 - largest[:, None])
                for k in range(c.TILE // 16):
                    p = [
                        np.stack([s[value(i, k=k), :, int(j)], s[value(m, k=k), :, int(n)]], axis=1)
                        for i, j, m, n in self.pairs
                    ]
                    mma(total, p, [np.ones((32, 2))] * 2)
                    for n in range(d // 16):
                        b = transposed(self.b_fragments(v_memory, value_at + value(value_step, k=k, n=n)))
                        for to, _, b0, b1 in self.calls["sum"]:
                            mma(sums[value(to, n=n)], p, [b[int(b0)], b[int(b1)]])
            offset = find(r"to = out \+ \(row \* heads \+ head\) \* HEAD_DIM \+ ([^;]*);")[1]
            column = find(r"\(to \+ (8 \* n)\) = rounded_pair\(sum\[n\]\[2 \* half\] \* share, ")[1]
            for half in range(2):
                row = names["token"] + 8 * half
                stored = ~value(find(r"if \((token \+ 8 \* half >= tokens)\) break;")[1], half=half, **names)
                for n in range(d // 8):
                    at = value(offset, **names) + value(column, n=n)
                    for i in range(2):
                        assert np.isnan(out[row[stored], at[stored] + i]).all()
                        result = sums[n, :, 2 * half + i] / total[:, 2 * half]
                        out[row[stored], at[stored] + i] = result[stored]
        return out


@pytest.mark.parametrize(
    ("head_dim", "tokens", "start"),
    [(16, 65, 63), (32, 17, 50), (64, 16, 0), (64, 70, 33), (64, 130, 1), (128, 65, 31), (256, 33, 15)],
)
def test_attention_of_many_tokens(head_dim: int, tokens: int, start: int, rng: np.random.Generator) -> None:
    """Every token of every block is softmax(q k) v over its own places, with NaN behind the new tokens."""
    q = rng.standard_normal((tokens, head_dim))
    keys, values = (np.full((start + tokens + 5, head_dim), np.nan) for _ in range(2))
    for cache in (keys, values):
        cache[: start + tokens] = rng.standard_normal((start + tokens, head_dim))
    kernel = ManyTokens(head_dim)
    blocks = [kernel.block(q, keys, values, start, z) for z in range(-(-tokens // 64))]
    assert ((~np.isnan(blocks)).sum(axis=0) == 1).all()  # one block, one thread for each element
    for token in range(tokens):
        scores = keys[: start + token + 1] @ q[token] * head_dim**-0.5
        weights = np.exp(scores - scores.max())
        expected = weights @ values[: start + token + 1] / weights.sum()
        np.testing.assert_allclose(np.nansum(blocks, axis=0)[token], expected, rtol=1e-11, atol=1e-12)
