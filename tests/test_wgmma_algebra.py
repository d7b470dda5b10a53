"""wgmma.cu without a GPU: what its copies, tensor cores and stores are given, and how its ring turns.

Address formulas are read out of the kernel's text (`kernel_source`). How a box lies in shared memory, what a
wgmma takes from there and from registers, and what `movmatrix` does is as the PTX ISA says.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kernel_source
import numpy as np
import pytest

from marlin_jit import _tensor_map, launch, layout, plan
from marlin_jit.errors import LaunchError

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
H200 = plan.Limits(132, *launch.ARCH_LIMITS["90a"])
PROBLEM = plan.Problem(64, 128, 64, 128, plan.Zeros.DELTAS, False)
TILES = plan.wgmma_tile_shapes(PROBLEM, H200)
SHORT = tuple(plan.WgmmaTile(t.m_tile, t.slabs, t.wg_n, t.wg_k, 64, t.blocks) for t in TILES)  # never planned


def find(pattern: str) -> re.Match[str]:
    return kernel_source.find("wgmma.cu", pattern)


def constants(tile: plan.WgmmaTile, group: int = 128) -> Any:
    macros = plan.wgmma_build(tile, 4, PROBLEM).defines | {"GROUP": group}
    return kernel_source.constants("wgmma.cu", macros)


def warps(c: Any) -> Iterator[dict[str, Any]]:
    """Each consumer warp's names and functions, as `Warp` has them; per-lane values as arrays."""
    text = find(r"struct Warp \{(.*?)\}; using Accumulators")[1]
    of_warp = ("warpgroup", "wn", "tile_slab", "wk", "chunk", "slab")
    of_lane = ("word", "first", "SHARE_ROWS", "a_at", "w_at", "s_at")
    formulas = {name: re.findall(rf"\b{name} = ([^,;]*)[,;]", text) for name in of_warp + of_lane}
    for warp in range(c.CONSUMERS // 32):
        names = vars(c) | {"warp": warp, "lane": LANE, "g": G, "t": T}

        def know(which: tuple[str, ...], names: dict[str, Any] = names) -> None:
            for name in which:
                (formula,) = formulas[name]
                names[name] = kernel_source.value(formula, names)

        know(of_warp)
        for method in ("slab_of", "column", "own_column"):
            names[method] = kernel_source.function("wgmma.cu", f"int {method}(int g)", names)
        know(of_lane)
        yield names


@pytest.mark.parametrize("tile", TILES + SHORT, ids=str)
def test_every_word_of_a_stage_is_one_warps(tile: plan.WgmmaTile) -> None:
    """Slab j of a warp is 16 columns from `column + 16*j` on, in the k16 steps of its warpgroup's share."""
    c = constants(tile)
    box = np.arange(c.STEPS * 2 * c.TILE_N)  # a plain box of 8-byte elements, as words
    step_at = find(r"load_shared\(f\.words\[i\], stage \+ w\.w_at \+ ([^;]*)\);")[1]
    taken = np.zeros_like(box)
    for names in warps(c):
        for step in range(c.WG_STEPS):
            at = names["w_at"] + kernel_source.value(step_at, {**names, "step": 0, "i": step}) - c.W_AT
            assert (at % (4 * c.J) == 0).all()
            for lanes in np.split(LANE, c.J):  # those that shared memory serves at once
                banks = {(at[lane] // 4 + j) % 32 for lane in lanes for j in range(c.J)}
                assert len(banks) == 32, "a bank conflict"
            for j in range(c.J):
                n = names["column"](G) + 16 * j
                row = (names["first"] + step) * 2 * c.TILE_N
                word = row + 128 * (n // 64) + 4 * LANE + n % 64 // 16  # layout.code_position
                assert np.array_equal(box[at // 4 + j], word)
                taken[word] += 1
    assert (taken == 1).all()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("tile", TILES + SHORT, ids=str)
def test_scales_are_those_of_the_slabs_columns(tile: plan.WgmmaTile, group: int) -> None:
    c = constants(tile, group)
    columns = np.arange(c.SCALE_ROWS * c.TILE_N).reshape(c.SCALE_ROWS, c.TILE_N)
    rows = np.concatenate([columns, columns])  # two groups at least: with one the order is another
    box = layout.permute_scales(rows)[: c.SCALE_ROWS].ravel()
    row_at = find(r"const uint32_t from = stage \+ w\.s_at \+ ([^;]*);")[1]
    begins = find(r"return GROUP != 0 && \((step == 0 [^;]*)\);")[1]
    for names in warps(c):
        current = None
        for step in range(c.WG_STEPS):
            if kernel_source.value(begins, {**names, "step": step}):
                current = names["s_at"] + kernel_source.value(row_at, {**names, "step": step}) - c.S_AT
            row = (names["first"] + step) * 16 // group
            for j in range(c.J):
                for half in range(2):
                    n = names["column"](G) + 16 * j + G + 8 * half
                    assert np.array_equal(box[current // 2 + 2 * j + half], row * c.TILE_N + n)


def test_scales_of_one_group_a_column() -> None:
    position = kernel_source.function("layout.cuh", "scale_position(int n, bool one_group)")
    column = r"min\(tile\.n0 \+ w\.column\(w\.g\), p\.padded_n - 16 \* J\) \+ 16 \* j \+ w\.g"
    assert find(rf"scale_position\({column}, true\);")
    second = int(find(r"p\.scales\[at \+ (\d+)\]")[1])
    row = layout.permute_scales(np.arange(256).reshape(1, 256))[0]
    for column in range(0, 256, 16):
        at = np.array([position(column + g, True) for g in range(8)])
        assert np.array_equal(row[at], column + np.arange(8))
        assert np.array_equal(row[at + second], column + 8 + np.arange(8))


def operand(address: int) -> SimpleNamespace:
    """`operand_at`, taken apart as the PTX ISA's matrix descriptor."""
    text = kernel_source.find("hopper.cuh", r"return static_cast<uint64_t>\(address >> 4\) \| (.*?); \}")[1]
    names = {"EIGHT_ROWS": 1024 >> 4, "SWIZZLE_128": 1}
    assert kernel_source.find("hopper.cuh", r"EIGHT_ROWS = (.*?), SWIZZLE_128 = (.*?);").groups() == (
        "1024 >> 4",
        "1",
    )
    bits = address >> 4 | kernel_source.value(text.replace("1ull", "1"), names)
    return SimpleNamespace(
        start=(bits & 0x3FFF) << 4, stride=(bits >> 32 & 0x3FFF) << 4, base=bits >> 49 & 7, swizzle=bits >> 62
    )


@pytest.mark.parametrize("tile", TILES + SHORT, ids=str)
def test_operands_are_the_steps_of_the_swizzled_activations(tile: plan.WgmmaTile) -> None:
    c = constants(tile)
    memory = np.full(c.A_BYTES // 2, -1)
    A = np.arange(c.M_TILE * c.K_STAGE).reshape(c.M_TILE, c.K_STAGE)
    to = find(r"copy_box\(at\.stage\(ring\) \+ (box [^,]*), maps\.a, unit \* K_STAGE \+ (box [^,]*), tile")
    for box in range(c.K_STAGE // 64):
        start, k0 = (kernel_source.value(to[i], vars(c) | {"box": box}) for i in (1, 2))
        for m in range(c.M_TILE):
            for column in range(8):  # SWIZZLE_128B
                at = start + m * 128 + ((column ^ (m & 7)) << 4)
                memory[at // 2 : at // 2 + 8] = A[m, k0 + 8 * column : k0 + 8 * column + 8]
    assert (memory >= 0).all()
    further = find(r"constexpr int FURTHER = (STEP [^;]*);")[1]
    assert find(r"\(slab\(sums\.open\(\), j\), a\[j\], operand \+ FURTHER / (16)\);")
    used = set()
    for names in warps(c):
        for step in range(c.WG_STEPS):
            base = operand(5 * 1024 + names["a_at"])
            assert (base.swizzle, base.base, base.stride) == (1, 0, 1024)
            start = base.start - 5 * 1024 + kernel_source.value(further, {**names, "STEP": step})
            m, k = np.mgrid[: c.M_TILE, :16]
            linear = start + m // 8 * base.stride + m % 8 * 128 + 2 * k
            at = linear ^ (linear >> 7 & 7) << 4
            k0 = 16 * (names["first"] + step)
            assert np.array_equal(memory[at // 2], A[:, k0 : k0 + 16])
            used.add(k0)
    assert used == set(range(0, c.K_STAGE, 16))


@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_each_product_has_its_own_words_and_each_groups_sum_its_own_scale(
    tile: plan.WgmmaTile, zeros: int, group: int
) -> None:
    """`multiply` and `run_units`, statement by statement, on names of steps and groups instead of numbers."""
    macros = plan.wgmma_build(tile, 4, PROBLEM).defines | {"GROUP": group, "ZEROS": zeros}
    c = kernel_source.constants("wgmma.cu", macros)
    begins, ends = (
        find(rf"bool group_{name}\(int step\) \{{ return ([^;]*);")[1] for name in ("begins", "ends")
    )
    scales_sums = bool(kernel_source.value(find(r"SCALES_SUMS = ([^;]*);")[1], vars(c)))
    assert scales_sums == tile.scales_sums(group or -1, plan.Zeros(zeros))
    group_sums = scales_sums and group != 0
    ahead = kernel_source.value(
        find(r"int AHEAD = ([^;]*);")[1], {"SCALES_SUMS": scales_sums, "ZEROS": zeros}
    )
    per = kernel_source.value(find(r"int PER = ([^;]*);")[1], vars(c) | {"GROUP_SUMS": group_sums})
    order = [
        r"scale\[j\] = f\.scales\.scale\[j\];",
        r"multiply_step<STEP>\(sums, a\[SET\]\[0\], operand\);",
        r"if \(PER == 2\) multiply_step<STEP \+ 1>\(sums, a\[SET\]\[PER - 1\], operand\);",
        r"if \(AHEAD == 1\) fetch_ahead<STEP \+ PER>\(f, unit, w\);",
        r"weigh_words\(a, 1 - SET, f\);",
        r"if \(AHEAD == 2\) fetch_ahead<STEP \+ 2 \* PER>\(f, unit, w\);",
        r"group_ends\(STEP \+ PER - 1\)",
        r"add_scaled\(sums\.all, sums\.open\(\), scale\);",
        r"if constexpr \(STEP \+ PER < WG_STEPS\) multiply<STEP \+ PER>",
    ]
    assert [find(one).start() for one in order] == sorted(find(one).start() for one in order)
    assert find(r"constexpr int SET = (STEP / PER % 2);")
    assert find(r"for \(int i = 0; i < PER \* J; i\+\+\) hold\(a\[SET\]\[i / J\]\[i % J\]\);")
    assert find(r"for \(int i = 0; i < PER; i\+\+\) load_shared\(f\.words\[i\],")
    assert find(r"product<GROUP_SUMS && group_begins\(STEP\)>")

    units, scaled, weighed = 3, [], {}
    words, scale_of, scale, open_sum = (-1, -1), None, None, []

    def fetch(unit: int, step: int) -> None:
        nonlocal words, scale_of
        words = unit, step
        if kernel_source.value(begins, vars(c) | {"step": step}):
            scale_of = (unit * c.STEPS + step) * 16 // group

    def fetch_ahead(unit: int, step: int) -> None:
        fetch(unit + step // c.WG_STEPS, step % c.WG_STEPS)

    def weigh(which: int) -> None:
        (unit, step) = words
        for i in range(per):
            weighed[which, i] = (unit, step + i), scale_of

    fetch(0, 0)
    weigh(0)
    if ahead == 2:
        fetch(0, per)
    for unit in range(units):
        for first in range(0, c.WG_STEPS, per):
            if group_sums and kernel_source.value(begins, vars(c) | {"step": first}):
                scale, open_sum = scale_of, []
            for i in range(per):
                step = first + i
                assert not (group_sums and i and kernel_source.value(begins, vars(c) | {"step": step}))
                of_words, of_scale = weighed[first // per % 2, i]
                assert of_words == (unit, step)
                mine = (unit * c.STEPS + step) * 16 // group if group else None
                assert group_sums or group == 0 or of_scale == mine
                open_sum.append(mine)
            if ahead == 1:
                fetch_ahead(unit, first + per)
            weigh(1 - first // per % 2)
            if ahead == 2:
                fetch_ahead(unit, first + 2 * per)
            if group_sums and kernel_source.value(ends, vars(c) | {"step": first + per - 1}):
                assert set(open_sum) == {scale}
                scaled += open_sum
                open_sum = []
    assert c.WG_STEPS % (2 * per) == 0
    assert not group_sums or len(scaled) == units * c.WG_STEPS


# ---- sums and the way out -------------------------------------------------------------------------------


def transpose8x8(registers: np.ndarray) -> np.ndarray:
    """`movmatrix.trans` of 16-bit pairs, [32, 2]: lane 4r + t holds elements 2t, 2t+1 of row r."""
    matrix = np.empty((8, 8), registers.dtype)
    matrix[G[:, None], 2 * T[:, None] + np.arange(2)] = registers
    return matrix.T[G[:, None], 2 * T[:, None] + np.arange(2)]


def sums_of(c: Any, C: np.ndarray, names: dict[str, Any]) -> np.ndarray:
    """What a warp's warpgroup holds after the sum over wk: `own`, [OWN, M_BLOCKS, 4, 32]."""
    own = np.empty((c.OWN, c.M_BLOCKS, 4, 32), C.dtype)
    for j in range(c.OWN):
        for mb in range(c.M_BLOCKS):
            n = names["column"](G) + 16 * (names["wk"] * c.OWN + j) + G
            m = 8 * mb + 2 * T
            own[j, mb] = C[m, n], C[m + 1, n], C[m, n + 8], C[m + 1, n + 8]
    return own


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_warpgroups_exchange_the_halves_they_do_not_keep(tile: plan.WgmmaTile) -> None:
    c = constants(tile)
    if c.WG_K == 1:
        return
    other = find(r"WG_K == 1 \? thread : (thread [^)]*\))\)")[1]
    give = find(r"give\[(\(j [^\]]*)\] = \{other\[0\], other\[1\], other\[2\], other\[3\]\};")[1]
    assert find(r"const Float4 v = take\[(.*?)\];")[1] == give
    kept = r"low\)\[4\] = acc\[(\w+)\]\[mb\], \(&high\)\[4\] = acc\[(OWN \+ j)\]\[mb\];"
    assert find(kept)[1] == "j"
    assert find(r"other\[i\] = w\.wk == 0 \? (\w+)\[i\] : (\w+)\[i\];").groups() == ("high", "low")
    assert find(r"own\[j\]\[mb\]\[i\] = w\.wk == 0 \? (\w+)\[i\] : (\w+)\[i\];").groups() == ("low", "high")
    thread = np.arange(c.CONSUMERS)
    partner = kernel_source.value(other, vars(c) | {"thread": thread})
    assert sorted(partner) == list(thread)  # a place is read, and used further, by one thread only
    assert np.array_equal(partner % (128 * c.WG_N), thread % (128 * c.WG_N))  # same columns
    assert (partner // (128 * c.WG_N) != thread // (128 * c.WG_N)).all()  # the other share of k
    names = [vars(c) | {"j": j, "mb": mb} for j in range(c.OWN) for mb in range(c.M_BLOCKS)]
    places = [int(kernel_source.value(give, n)) for n in names]
    assert sorted(places) == [i * c.CONSUMERS for i in range(c.OWN * c.M_BLOCKS)]
    assert len(places) * c.CONSUMERS * 16 == c.SUMS_BYTES <= tile.sums_bytes


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_epilogue_puts_every_output_in_its_place(tile: plan.WgmmaTile, gated: bool) -> None:
    c = constants(tile)
    C = np.arange(c.M_TILE * c.TILE_N).reshape(c.M_TILE, c.TILE_N)
    memory = np.full(c.M_TILE * c.PITCH, -1)
    # Bias: of the lane's own columns n = g and g + 8, before it is turned.
    assert find(r"const int n = tile\.n0 \+ w\.own_column\(g\) \+ 16 \* j \+ g;")
    for i, further in ((0, ""), (1, r" \+ 8")):
        assert find(rf"if \(n{further} < p\.n\) bias\[{i}\] = Type::to_float\(p\.bias\[n{further}\]\);")
    assert find(r"v\[2 \* half\] \+ bias\[half\], v\[2 \* half \+ 1\] \+ bias\[half\]\)")
    first = find(
        rf"to = output \+ (g \* PITCH \+ w\.own_column\(2 \* t\){' / 2' if gated else ''} \+ [^;]*);"
    )[1]
    step = find(rf"to \+ (mb [^)]*\) \+ j \* {'8' if gated else r'16 [^)]*'})\) = transpose8x8\(pair\);")[1]
    for names in warps(c):
        own = sums_of(c, C, names)
        start = kernel_source.value(first.replace("w.", ""), names)
        for j in range(c.OWN):
            for mb in range(c.M_BLOCKS):
                for half in range(1 if gated else 2):
                    at = start + kernel_source.value(step, {**names, "j": j, "mb": mb, "half": half})
                    if gated:  # silu(v[0]) * v[2], silu(v[1]) * v[3]: gate and up are 8 columns apart
                        assert (own[j, mb, 2:] - own[j, mb, :2] == 8).all()
                    pair = transpose8x8(own[j, mb, 2 * half : 2 * half + 2].T)
                    assert (at % 2 == 0).all()
                    assert len(set(at // 2 % 32)) == 32, "a bank conflict"
                    assert (memory[at] == -1).all()
                    memory[at], memory[at + 1] = pair.T
    assert c.OUTPUT_AT in (0, c.SUMS_BYTES) and c.SUMS_BYTES % 16 == 0
    assert c.OUTPUT_AT + 2 * len(memory) <= c.END_BYTES <= c.END_SLOTS * c.STAGE_BYTES
    found = memory.reshape(c.M_TILE, c.PITCH)
    if gated:
        f = np.arange(c.TILE_N // 2)
        assert np.array_equal(found[:, : c.TILE_N // 2], C[:, 16 * (f // 8) + f % 8])
    else:
        assert np.array_equal(found[:, : c.TILE_N], C)


@pytest.mark.parametrize("halved", [0, 1])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_stores_write_what_exists_of_a_tile_and_nothing_else(
    tile: plan.WgmmaTile, aligned: bool, halved: int, rng: np.random.Generator
) -> None:
    """`store_tile` and `for_rows`, bounds and offsets as the kernel has them."""
    c = constants(tile)
    number = r"[^;]*?"
    columns_of, rows_of = find(rf"columns = (min\({number}\)), m_left = ({number});").groups()
    log_of, vectors_of = (
        find(rf"log = (LOG_VECTORS {number});")[1],
        find(rf"vectors = (aligned {number});")[1],
    )
    part_of, pass_of = find(rf"part = (thread & {number});")[1], find(r"first \+= (CONSUMERS [^)]*)\) \{")[1]
    row_of, row_exists = find(rf"const int row = ({number}); if \((row .*?)\) copy\(row, part\);").groups()
    base_of = find(rf"uint16_t\* to = p\.c \+ ({number});")[1]
    by_vectors = find(rf"if \((vectors > 0)\) for_rows\(m_left, ({number}), \[&\]")
    by_elements = find(rf"if \((vectors \* 8 {number})\) for_rows\(m_left, ({number}), \[&\]")
    left_out = find(r"if \((part [^)]*)\) return;")[1]
    vector_from = find(rf"const Vec4\*>\(output \+ ({number})\);")[1]
    vector_to = find(rf"reinterpret_cast<Vec4\*>\(to \+ ({number})\) = vector;")[1]
    column_of = find(rf"const int column = (vectors {number});")[1]
    element = find(rf"if \((column [^)]*)\) to\[({number})\] = output\[({number})\];").groups()

    width, tiles = c.TILE_N >> halved, 2
    thread = np.arange(c.CONSUMERS)
    for n, m in (
        (tiles * width, tiles * c.M_TILE),
        *rng.integers(1, (tiles * width, tiles * c.M_TILE), (8, 2)),
    ):
        ldc = int(n) + 9 if not aligned else -(-int(n) // 8) * 8 + 8
        C = np.full((tiles * c.M_TILE + 1) * ldc, -1)
        for m0, n0 in itertools.product((0, c.M_TILE), (0, width)):
            if m0 >= m or n0 >= n:
                continue
            output = np.arange(c.M_TILE * c.PITCH) + (m0 + n0) * 10**6
            names = vars(c) | {"halved": halved, "n0": n0, "aligned": aligned, "thread": thread}
            names |= {"p": SimpleNamespace(n=int(n), m=int(m), ldc=ldc), "tile": SimpleNamespace(m0=m0)}

            def value(text: str, names: dict[str, Any] = names) -> Any:
                return kernel_source.value(text, names)

            names |= {"columns": value(columns_of), "m_left": value(rows_of)}
            names |= {"vectors": value(vectors_of), "log": value(log_of)}
            whole_log, base = names["log"], value(base_of)
            for wanted, log in (by_vectors.groups(), by_elements.groups()):
                if not value(wanted):
                    continue
                names["log"] = whole_log
                names["log"] = value(log)
                names["part"] = value(part_of)
                for first in range(0, c.M_TILE, value(pass_of)):
                    names["first"] = first
                    names["row"] = value(row_of)
                    names["column"] = value(column_of)
                    exists = value(row_exists)
                    if wanted == by_vectors[1]:
                        exists &= ~value(left_out)
                        source, target = value(vector_from)[exists], base + value(vector_to)[exists]
                        assert (source % 8 == 0).all() and (target % 8 == 0).all()
                        source, target = ((at[:, None] + np.arange(8)).ravel() for at in (source, target))
                    else:
                        exists &= value(element[0])
                        source, target = value(element[2])[exists], base + value(element[1])[exists]
                    assert (C[target] == -1).all()
                    C[target] = output[source]
        row, column = np.mgrid[: tiles * c.M_TILE, :ldc]
        m0, n0 = row // c.M_TILE * c.M_TILE, column // width * width
        expected = (row - m0) * c.PITCH + column - n0 + (m0 + n0) * 10**6
        expected[m:], expected[:, n:] = -1, -1
        assert np.array_equal(C[: expected.size].reshape(expected.shape), expected)
        assert (C[expected.size :] == -1).all()


# ---- the ring -------------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def arrive(self, expected: int = 0) -> None:
        assert self.pending > 0, "one arrival too many"
        self.pending -= 1
        self.add(expected)

    def add(self, number: int) -> None:
        self.bytes += number
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


@pytest.mark.parametrize("seed", range(200))
def test_ring_hands_over_every_stage_and_never_stops(seed: int) -> None:
    """`produce` and `run_units` step by step, in any order that their barriers allow.

    No stage is overwritten before every warp has read it, none is read before it is complete, and between
    pieces the ring's first slots are the consumers'.
    """
    order = random.Random(seed)
    stages, warps, parts = order.choice([2, 3, 5]), order.choice([1, 2, 8]), 3
    end_slots = order.randint(1, stages)
    pieces = [order.randint(1, 3 * stages) for _ in range(order.randint(1, 4))]
    full, empty = ([Barrier(n) for _ in range(stages)] for n in (1, warps))
    shared = [order.random() < 0.5 for _ in pieces]  # with other blocks: then the producer tells by whom
    idle, tell = Barrier(warps), Barrier(1)
    told: list[int | None] = [None]
    content: list[Any] = [None] * stages
    flying: list[tuple[int, Any]] = []
    leaving = [0]  # consumers that use the ring's memory between pieces

    def advance(at: list[int]) -> None:
        at[0] = 0 if at[0] + 1 == stages else at[0] + 1
        if at[0] == 0:
            at[1] ^= 1

    over = [False]  # the last piece: all of the ring is the consumers'

    def copy(slot: int, what: Any, count: int) -> None:
        assert not over[0]
        assert leaving[0] == 0 or slot >= end_slots, "the slot is in use"
        content[slot] = None
        flying.extend((slot, what) for _ in range(count))

    def produce() -> Iterator[Any]:
        at, idle_parity, leaves = [0, 0], 0, False
        for piece, units in enumerate(pieces):
            unit = 0
            if piece == 0:
                filled, first = min(units, stages), [0, 0]
                for i in range(filled):
                    full[first[0]].arrive(parts)
                    copy(first[0], (piece, i), 1)
                    advance(first)
                    yield True
                for unit in range(filled):
                    copy(at[0], (piece, unit), parts - 1)
                    advance(at)
                    yield True
                unit = filled
            else:
                leaves = True
            for i in range(unit, units):
                if leaves and (at[0] < end_slots or i + 1 == units):
                    while not idle.passed(idle_parity):
                        yield False
                    idle_parity, leaves = idle_parity ^ 1, False
                while not empty[at[0]].passed(at[1] ^ 1):
                    yield False
                full[at[0]].arrive(parts)
                copy(at[0], (piece, i), parts)
                advance(at)
                yield True
            if shared[piece]:
                last = (at[0] - 1) % stages, at[1] ^ (at[0] == 0)
                while not full[last[0]].passed(last[1]):
                    yield False
                told[0] = piece
                tell.arrive()
                yield True

    def consume() -> Iterator[Any]:
        at, tell_parity = [0, 0], 0
        for piece, units in enumerate(pieces):
            read = None
            while not full[at[0]].passed(at[1]):
                yield False
            for unit in range(units):
                assert content[at[0]] == (piece, unit)
                yield True
                if read is not None:
                    empty[read].arrive()
                read = at[0]
                advance(at)
                yield True
                if unit + 1 < units:  # words of the next unit are taken before this one's last products
                    while not full[at[0]].passed(at[1]):
                        yield False
                    assert content[at[0]] == (piece, unit + 1)
                    yield True
                assert content[read] == (piece, unit)
            empty[read].arrive()
            leaving[0] += 1
            if piece + 1 == len(pieces):
                over[0] = True
                assert not flying
            yield True
            if shared[piece]:
                while not tell.passed(tell_parity):
                    yield False
                tell_parity ^= 1
                yield True
                assert told[0] == piece
            leaving[0] -= 1
            idle.arrive()
        yield True

    running = [produce(), *(consume() for _ in range(warps))]
    slow, pace = order.choice(running), order.choice([1.0, 0.02])
    waiting = 0
    while running:
        if flying and order.random() < 0.3:
            slot, what = flying.pop(order.randrange(len(flying)))
            if not any(s == slot for s, _ in flying):
                content[slot] = what
            full[slot].add(-1)
            continue
        one = order.choice(running)
        if one is slow and len(running) > 1 and order.random() > pace:
            continue
        moved = next(one, None)
        if moved is None:
            running.remove(one)
        waiting = waiting + 1 if moved is False and not flying else 0
        assert waiting < 100_000, "all wait for each other"
    assert not flying


# ---- tensor maps ----------------------------------------------------------------------------------------


def test_tensor_maps_are_asked_for_as_the_driver_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda.h: CUtensorMap* (aligned), type, rank, address, sizes, strides but the first, box, and so on."""
    asked: list[Any] = []

    def encode(to: int, kind: int, rank: int, address: int, *rest: Any) -> int:
        sizes, strides, box, steps, interleave, swizzle, promotion, outside = rest
        assert to % 64 == 0
        ctypes.memset(to, len(asked) + 1, 128)
        assert [type(v)._type_ for v in (sizes, strides, box, steps)] == [ctypes.c_uint64] * 2 + [
            ctypes.c_uint32
        ] * 2
        asked.append(
            (kind, rank, address, *map(list, (sizes, strides, box, steps)), interleave, swizzle, outside)
        )
        assert promotion == 3
        return 0 if address else 1

    library = SimpleNamespace(cuTensorMapEncodeTiled=encode)
    monkeypatch.setattr(_tensor_map, "_library", lambda: library)
    _tensor_map.tensor_map.cache_clear()
    x = _tensor_map.tensor_map(4096, _tensor_map.FLOAT16, 33, 1000, 2048, (64, 64), _tensor_map.SWIZZLE_128)
    w = _tensor_map.tensor_map(8192, _tensor_map.UINT64, 8, 192, 1536, (8, 256))
    one = _tensor_map.tensor_map(4096, _tensor_map.BFLOAT16, 1, 1000, 0, (64, 64), _tensor_map.SWIZZLE_128)
    assert (x, w, one) == (b"\1" * 128, b"\2" * 128, b"\3" * 128)
    assert _tensor_map.tensor_map(8192, _tensor_map.UINT64, 8, 192, 1536, (8, 256)) is w
    assert asked == [
        (6, 2, 4096, [1000, 33], [2048], [64, 64], [1, 1], 0, 3, 0),
        (4, 2, 8192, [192, 8], [1536], [256, 8], [1, 1], 0, 0, 0),
        (9, 2, 4096, [1000, 1], [2000], [64, 64], [1, 1], 0, 3, 0),
    ]
    with pytest.raises(LaunchError, match="no tensor map of 33 x 1000"):
        _tensor_map.tensor_map(0, _tensor_map.FLOAT16, 33, 1000, 2048, (64, 64))
    _tensor_map.tensor_map.cache_clear()
