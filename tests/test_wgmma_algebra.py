"""wgmma.cu without a GPU: what its copies, tensor cores and stores are given, and how its ring turns.

Address formulas are read out of the kernel's text (`kernel_source`). How a box lies in shared memory, what a
wgmma takes from there and from registers, what `stmatrix` does and what a shuffle is as the PTX ISA says.
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


def constants(tile: plan.WgmmaTile, group: int = 128, **of_template: int) -> Any:
    macros = plan.wgmma_build(tile, 4, PROBLEM).defines | {"GROUP": group} | of_template
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
        names["own_slab"] = kernel_source.function("wgmma.cu", "int own_slab()", names)
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
    to = find(r"copy_box\(at\.stage\(ring\) \+ (box [^,]*), maps\.a, unit \* K_STAGE \+ (box [^,]*), row,")
    for box in range(c.K_STAGE // 64):
        start, k0 = (kernel_source.value(to[i], vars(c) | {"box": box}) for i in (1, 2))
        for m in range(c.M_TILE):
            for column in range(8):  # SWIZZLE_128B
                at = start + m * 128 + ((column ^ (m & 7)) << 4)
                memory[at // 2 : at // 2 + 8] = A[m, k0 + 8 * column : k0 + 8 * column + 8]
    assert (memory >= 0).all()
    assert find(r"const int row = first_row\(tile, p\), last")
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


def banks(at: np.ndarray) -> np.ndarray:
    """How many of those that access 16 bytes each at these addresses meet in each bank of shared memory."""
    assert (at % 16 == 0).all()
    return np.bincount((at[:, None] // 4 + np.arange(4)).ravel() % 32, minlength=32)


def store_transposed(memory: np.ndarray, at: np.ndarray, *matrices: np.ndarray) -> None:
    """`stmatrix.trans` of 16-bit pairs, each [32, 2]: lane 4r + t holds elements 2t, 2t+1 of row r.

    Lane 8*i + r has the address of row r of what becomes of matrix i.
    """
    for i, registers in enumerate(matrices):
        rows = at[8 * i : 8 * i + 8]
        assert (banks(rows) == 1).all(), "a bank conflict"
        matrix = np.empty((8, 8), registers.dtype)
        matrix[G[:, None], 2 * T[:, None] + np.arange(2)] = registers
        place = rows[:, None] // 2 + np.arange(8)
        assert (memory[place] == -1).all()
        memory[place] = matrix.T


def sums_of(c: Any, C: np.ndarray, names: dict[str, Any]) -> np.ndarray:
    """What a warp holds in the end of the rows that it stores, C's: `own`, [OWN, END_BLOCKS, 4, 32]."""
    own = np.empty((c.OWN, c.END_BLOCKS, 4, 32), C.dtype)
    for j in range(c.OWN):
        for mb in range(c.END_BLOCKS):
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
    assert len(places) * c.CONSUMERS * 16 == c.SUMS_BYTES == tile.partial_bytes <= tile.least_ring
    assert (
        not tile.apart and c.SUMS_BYTES <= c.END_SLOTS * c.STAGE_BYTES
    )  # all in slots that copies leave alone
    assert find(r"if \(!APART\) Consumers::sync\(\); if constexpr \(WG_K == 1\)")  # and that have been read


@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.pairs], ids=str)
def test_pairs_finish_half_of_the_rows_each(tile: plan.WgmmaTile) -> None:
    """`sum_over_pair` of both blocks: sums are kept, sent to the other's memory, and added to its own."""
    c = constants(tile)
    text = find(r"void sum_over_pair\((.*?)\} // |void sum_over_pair\((.*?)constexpr int COLUMNS")[0]
    order = [
        "cluster_arrive()",
        "cluster_wait()",
        "store_cluster(",
        "cluster_arrive()",
        "cluster_wait()",
        "add_to(",
    ]
    assert re.findall(r"cluster_arrive\(\)|cluster_wait\(\)|store_cluster\(|add_to\(", text) == order
    assert find(r"thread = thread_anew\(\), half = blockIdx\.y;")
    to = find(r"to = cluster_address\(shared_address\(smem\) \+ (thread \* 16), (1 - half)\);")
    high_at = find(r"\(&high\)\[4\] = own\[j\]\[(M_BLOCKS - [^\]]*)\], other\[4\];")[1]
    sent, kept = (
        find(rf"{name} = half == 0 \? (\w+)\[i\] : (\w+)\[i\];").groups()
        for name in (r"other\[i\]", r"low\[i\]")
    )
    further = find(
        r"store_cluster\(to \+ (\(j \* [^,]*), \{other\[0\], other\[1\], other\[2\], other\[3\]\}\);"
    )[1]
    from_of = find(r"add_to\(own\[j\]\[mb\], from\[(\(j [^\]]*)\]\);")[1]
    assert find(r"const Float4\* from = reinterpret_cast<const Float4\*>\(smem\) \+ thread;")
    # What a thread of each block holds, by row block of the tile.
    own = {(half, mb): f"{half}:{mb}" for half in range(2) for mb in range(c.M_BLOCKS)}
    memory: tuple[dict[int, str], dict[int, str]] = ({}, {})
    thread, rows = 77, {}
    for half in range(2):
        for j, mb in itertools.product(range(c.OWN), range(c.END_BLOCKS)):
            names = vars(c) | {"j": j, "mb": mb, "thread": thread, "half": half}
            of = {"low": own[half, mb], "high": own[half, kernel_source.value(high_at, names)]}
            there = kernel_source.value(to[1], names) + kernel_source.value(further, names)
            assert there not in memory[1 - half] and there + 16 <= c.SUMS_BYTES
            memory[kernel_source.value(to[2], names)][there] = of[sent[half]]
            rows[half, j, mb] = of[kept[half]]
    for (half, j, mb), mine in rows.items():
        at = 16 * (thread + kernel_source.value(from_of, vars(c) | {"j": j, "mb": mb}))
        row_block = half * c.END_BLOCKS + mb
        assert {mine, memory[half][at]} == {f"{h}:{row_block}" for h in range(2)}
    assert c.END_ROWS * 2 == c.M_TILE and not c.APART


@pytest.mark.parametrize(("first", "last"), [(0, 2), (0, 3), (5, 7), (4, 32), (3, 12)])
def test_blocks_of_a_pair_have_half_of_its_units_each(first: int, last: int) -> None:
    middle_of = find(r"const int middle = ([^;]*);")[1]
    names = {"piece": SimpleNamespace(tile=9, first=first, last=last)}
    names["middle"] = kernel_source.value(middle_of, names)
    lower, upper = find(
        r"blockIdx\.y == 0 \? Piece\{piece\.tile, ([^}]*)\} : Piece\{piece\.tile, ([^}]*)\};"
    ).groups()
    shares = [kernel_source.value(share, names) for share in (lower, upper)]
    assert (shares[0][0], shares[0][1], shares[1][1]) == (first, shares[1][0], last)
    assert shares[0][1] - shares[0][0] - (shares[1][1] - shares[1][0]) in (0, 1)
    assert find(r"if \(!PAIRS\) return (piece);")
    # Copies and products go through the same units.
    assert find(r"last = own_units\(piece\)\.last; int unit = own_units\(piece\)\.first;")
    assert find(r"run_units\(sums, f, ring, at, w, own_units\(piece\)\.last - own_units\(piece\)\.first\);")


def test_blocks_of_a_pair_hand_in_by_themselves() -> None:
    """Each has a counter a tile, and of the two slots that tiles.cuh has for a pair one."""
    counter = find(r"counter_of\(int tile\) \{ return PAIRS \? ([^:]*) : tile; \}")[1]
    pairs = itertools.product(range(5), range(2))
    found = [kernel_source.value(counter, {"tile": t, "blockIdx": SimpleNamespace(y=y)}) for t, y in pairs]
    assert sorted(found) == list(range(10))
    further = find(r"Float4\* slots = partials \+ \(PAIRS \? ([^:]*) : 0\);")[1]
    names = {"PARTIAL": 3, "CONSUMERS": 256}
    slots = [kernel_source.value(further, names | {"blockIdx": SimpleNamespace(y=y)}) for y in range(2)]
    assert slots == [0, 3 * 256]  # one slot of `slot_of` further
    assert kernel_source.find("tiles.cuh", r"const int which = deal\.each == 0 && ([^;]*) \? 1 : 0;")


def wgmma_function(head: str, c: Any) -> Any:
    return kernel_source.function("wgmma.cu", head, vars(c))


def rounded(c: Any, C: np.ndarray, gated: bool) -> np.ndarray:
    """What `round_tile` or `round_gated_tile` leaves of a tile: each wn's place in shared memory."""
    memory = np.full((c.WG_N, c.END_ROWS * c.COLUMNS), -1)
    vector_at = wgmma_function("vector_at(int row, int vector)", c)
    if gated:
        lane_of = r"\(thread_anew\(\) (% 8), "
        pairs = r"Type::pair\(silu\(v\[0\]\) \* v\[2\], silu\(v\[1\]\) \* v\[3\]\)"
    else:
        lane_of = r"\(lane (% 8), "
        pairs = ", ".join(
            rf"Type::pair\(v\[{2 * i}\] \+ bias\[{i}\], v\[{2 * i + 1}\] \+ bias\[{i}\]\)" for i in range(2)
        )
        assert find(r"const int lane = thread_anew\(\) % 32, g = lane / 4;")
    row_of, vector_of = find(rf"to = output \+ vector_at{lane_of}([^;]*own_slab[^;]*)\);").groups()
    step = find(rf"store_transposed\(to \+ ([^,]*), {pairs}\);")[1]
    for names in warps(c):
        own = sums_of(c, C, names)
        names["w"] = SimpleNamespace(**names)
        for j in range(c.OWN):
            row = kernel_source.value("lane" + row_of, names)
            start = vector_at(row, kernel_source.value(vector_of, {**names, "j": j}))
            for mb in range(c.END_BLOCKS):
                at = start + kernel_source.value(step, {"mb": mb})
                if gated:  # gate and up are 8 columns apart
                    assert (own[j, mb, 2:] - own[j, mb, :2] == 8).all()
                matrices = [own[j, mb, 2 * i : 2 * i + 2].T for i in range(1 if gated else 2)]
                store_transposed(memory[names["wn"]], at, *matrices)
    return memory


def complete(
    c: Any,
    boxed: bool,
    output: np.ndarray,
    to: np.ndarray,
    at: int,
    ldc: int,
    begin: int,
    end: int,
    vectors: int,
) -> None:
    """`complete` by all threads of a wn, statement by statement; ``to[at]`` is where the tile begins.

    `c` are constants under its LOG_SLAB.
    """
    number = r"[^;]*?"
    names: dict[str, Any] = vars(c) | {"thread": np.arange(c.STORERS), "ldc": ldc}
    for head in ("vector_at(int row, int vector)", "turned(int slab, int i)"):
        names[head.partition("(")[0]] = wgmma_function(head, c)

    def value(text: str, **more: int) -> Any:
        return kernel_source.value(re.sub(r"\bpass\b", "of_pass", text), names | more)

    part_of, first_of = find(
        rf"thread = thread_anew\(\) % STORERS, part = ({number}), first = ({number});"
    ).groups()
    names["part"], names["first"] = value(part_of), value(first_of)
    lanes_of = find(rf"lanes\[i\] = ({number});")[1]
    lanes = [value(lanes_of, i=i) for i in range(4)]
    output_at = value(find(rf"uint8_t\* at = output \+ (vector_at{number});")[1])
    target = at + value(find(rf"to \+= (first {number});")[1])
    exists, from_of = find(
        r"const bool there = END_ROWS % STEP == 0 \|\| (first [^<]* < END_ROWS); vector\[i\] = "
        r"\*reinterpret_cast<const Vec4\*>\(at \+ \(there \? (.*?) : 0\)\);"
    ).groups()
    row_of = find(rf"const int row = ({number}); uint32_t\* pairs = &vector\[i\]\.x;")[1]
    exchanged = find(
        r"for \(int pair = 1; pair < 4; pair\+\+\) if \((pair [^)]*)\) pairs\[pair\] = "
        r"__shfl_sync\(0xffffffff, pairs\[pair\], lanes\[pair\]\);"
    )[1]
    boxed_row, back_to = find(
        r"if \(BOXED\) \{ if \((row < \w+)\) \*reinterpret_cast<Vec4\*>\(at \+ (.*?)\) = vector\[i\]; \}"
    ).groups()
    row_begins, row_exists, part_exists, further = find(
        r"if \((row >= \w+) && (row < \w+) && (part < \w+)\) \*reinterpret_cast<Vec4\*>\(to\) = vector\[i\]; "
        r"to \+= (STEP [^;]*);"
    ).groups()
    assert find(r"for \(int pass = 0; pass < PASSES; pass \+= AT_ONCE\)")
    assert c.PASSES % c.AT_ONCE == 0 and c.STEP % 8 == 0

    # A gated row of 64 columns fills half of its 128 bytes: eight lanes then read halves of two rows, which
    # lie in the same banks.
    ways = 2 if c.LOG_SLAB == 0 and c.J == 1 else 1
    eight = np.arange(8)
    for of_pass in range(0, c.PASSES, c.AT_ONCE):
        vector = np.full((c.AT_ONCE, c.STORERS, 4, 2), -2)
        for i in range(c.AT_ONCE):
            loaded = value(exists, of_pass=of_pass, i=i)
            assert loaded.all() or c.END_ROWS % c.STEP
            place = output_at + np.where(loaded, value(from_of, of_pass=of_pass, i=i), 0)
            assert (
                place.max() + 16 <= c.END_ROWS * c.COLUMNS * 2
            )  # what is read for nothing is the output's too
            for lanes_at_once in np.split(np.arange(c.STORERS), c.STORERS // 8):
                if loaded[lanes_at_once].any():
                    assert banks(place[lanes_at_once][loaded[lanes_at_once]]).max() == ways, "a bank conflict"
            vector[i, loaded] = output[place[loaded, None] // 2 + eight].reshape(-1, 4, 2)
        for i in range(c.AT_ONCE):
            names["row"] = value(row_of, of_pass=of_pass, i=i)
            for pair in range(1, 4):
                if value(exchanged, pair=pair):
                    source = names["thread"] & ~31 | lanes[pair] & 31  # a shuffle's lane counts modulo 32
                    vector[i, :, pair] = vector[i, source, pair]
            elements = vector[i].reshape(-1, 8)
            if boxed:
                stored = value(boxed_row)
                place = output_at + value(back_to, of_pass=of_pass, i=i)
                output[place[stored, None] // 2 + eight] = elements[stored]
            else:
                stored = value(row_begins, begin=begin) & value(row_exists, end=end)
                stored &= value(part_exists, vectors=vectors)
                assert (target[stored] % 8 == 0).all()
                places = target[stored, None] + eight
                assert (to[places] == -1).all()
                to[places] = elements[stored]
                target = target + value(further)


def boxes_of(c: Any, output: np.ndarray) -> np.ndarray:
    """The boxes of a wn's place as a tensor map with SWIZZLE_128 takes them, [J, END_ROWS, 64]."""
    from_of = find(r"shared_address\(output\) \+ (i \* [^;]*)\);")[1]
    boxes = np.empty((c.J, c.END_ROWS, 64), output.dtype)
    for i in range(c.J):
        start = kernel_source.value(from_of, vars(c) | {"i": i})
        assert start % 1024 == 0  # else its rows are not numbered from its beginning
        for row in range(c.END_ROWS):
            for vector in range(8):
                at = (start + row * 128 + (vector ^ row % 8) * 16) // 2
                boxes[i, row, 8 * vector : 8 * vector + 8] = output[at : at + 8]
    return boxes


def finished(c: Any, C: np.ndarray, gated: bool) -> np.ndarray:
    """A tile's output: `C`, or of each 16 columns the product of the two halves, named by its gate."""
    f = np.arange(c.TILE_N // 2)
    return C[:, 16 * (f // 8) + f % 8] if gated else C


def test_lanes_turn_to_the_slab_that_a_pair_is_of() -> None:
    """Pair i of a vector is of rows g = 2i and 2i + 1 of a warp's first operand, so of slab `slab_of(g)`."""
    for tile in TILES:
        c = constants(tile)
        turned = wgmma_function("turned(int slab, int i)", c)
        for names in warps(c):
            for g in range(8):
                for u in range(names["slab"], names["slab"] + c.J):  # the place, and whose it is
                    of = (names["slab_of"](g) + u - names["slab"]) % 4
                    assert of + turned(of, g // 2) == u


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_epilogue_puts_every_output_in_its_place(tile: plan.WgmmaTile, gated: bool, boxed: bool) -> None:
    c = constants(tile, LOG_SLAB=0 if gated else 1)
    C = np.arange(c.END_ROWS * c.TILE_N).reshape(c.END_ROWS, c.TILE_N)
    # Bias: of the lane's own columns n = g and g + 8, as the sums that it is added to.
    bias_of = find(r"const int n = tile\.n0 \+ (w\.own_column\(g\) \+ [^;]*);")[1]
    for i, further in ((0, ""), (1, r" \+ 8")):
        assert find(rf"if \(n{further} < p\.n\) bias\[{i}\] = Type::to_float\(p\.bias\[n{further}\]\);")
    for names in warps(c):
        own = sums_of(c, C, names)
        for j in range(c.OWN):
            n = kernel_source.value(bias_of, {"w": SimpleNamespace(**names), "g": G, "j": j})
            for half in range(2):
                assert (own[j, :, 2 * half : 2 * half + 2] % c.TILE_N == n + 8 * half).all()
    memory, width = rounded(c, C, gated), c.COLUMNS // (2 if gated else 1)
    expected = np.split(finished(c, C, gated), c.WG_N, axis=1)
    for wn in range(c.WG_N):
        to = np.full(c.END_ROWS * width, -1)
        complete(c, boxed, memory[wn], to, 0, width, 0, c.END_ROWS, width // 8)
        if boxed:
            found = boxes_of(c, memory[wn]).transpose(1, 0, 2).reshape(c.END_ROWS, -1)
            assert np.array_equal(found[:, :width], expected[wn])
            assert (to == -1).all()
        else:
            assert np.array_equal(to.reshape(c.END_ROWS, width), expected[wn])


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_output_has_a_place_that_nothing_else_uses_then(tile: plan.WgmmaTile, stages: int) -> None:
    c = kernel_source.constants("wgmma.cu", plan.wgmma_build(tile, stages, PROBLEM).defines)
    if tile.least_ring > c.RING_BYTES:
        return
    assert tile.apart == c.APART
    begin = find(r"uint8_t\* output = smem \+ (OUTPUT_AT [^;]*);")[1]
    places: list[int] = []
    for wn in range(c.WG_N):
        place = kernel_source.value(begin, vars(c) | {"w": SimpleNamespace(wn=wn)})
        assert place % 1024 == 0  # as `vector_at` counts rows, and boxes are swizzled
        places += range(place, place + c.END_ROWS * c.COLUMNS * 2)
    assert places == list(range(c.OUTPUT_AT, c.OUTPUT_AT + c.OUTPUT_BYTES))
    assert tile.output_bytes == c.OUTPUT_BYTES
    if c.APART:
        assert c.RING_BYTES == c.OUTPUT_AT and c.OUTPUT_AT + c.OUTPUT_BYTES <= c.FULL_AT
        assert c.END_SLOTS == c.STAGES  # of the pieces that are shared
        assert c.SUMS_BYTES <= c.RING_BYTES  # this block's, and behind them others'
    else:
        # In front: then threads wait until sums are read.
        assert c.OUTPUT_AT in (0, c.SUMS_BYTES) and c.FULL_AT == c.RING_BYTES
        assert find(r"if \(OUTPUT_AT == 0\) Consumers::sync\(\);")
        end = max(c.SUMS_BYTES, c.OUTPUT_AT + c.OUTPUT_BYTES)
        assert end <= c.END_BYTES <= c.END_SLOTS * c.STAGE_BYTES <= c.RING_BYTES
    assert c.FULL_AT % 8 == 0
    bytes_of = find(r"const int bytes = (APART [^;]*) \* STAGE_BYTES;")[1]
    room_of = find(r"room = (\(bytes [^;]*);")[1]
    for left in (False, True):
        text = re.sub(r"pieces\.left\(deal\)", "left", bytes_of) + " * STAGE_BYTES"
        names = vars(c) | {"left": left}
        names["bytes"] = kernel_source.value(text, names)
        room = kernel_source.value(room_of, names)
        assert names["bytes"] <= c.FULL_AT and room >= 1
        assert c.SUMS_BYTES + room * c.BATCH * c.VECTOR_BYTES <= names["bytes"]


def of_store_tile() -> str:
    return find(r"void store_tile\((.*?)__device__ __forceinline__ void consume\(")[1]


class Truncated(int):
    """An int that is divided as in C++: towards zero."""

    def __floordiv__(self, other: int) -> int:
        return -(-int(self) // other) if self < 0 else int(self) // other

    def __mod__(self, other: int) -> int:
        return int(self) - self // other * other


def store_elements(
    c: Any,
    output: np.ndarray,
    to: np.ndarray,
    at: int,
    ldc: int,
    begin: int,
    end: int,
    columns: int,
    first_column: int,
) -> None:
    """`store_elements` by all threads of a wn. `c` are constants under its LOG_SLAB."""
    names: dict[str, Any] = vars(c) | {"thread": np.arange(c.STORERS), "first_column": first_column}
    names |= {"begin": begin, "end": end, "columns": columns, "ldc": ldc}
    for head in ("vector_at(int row, int vector)", "turned(int slab, int i)"):
        names[head.partition("(")[0]] = wgmma_function(head, c)

    def value(text: str) -> Any:
        return kernel_source.value(text, names)

    names["log"] = value(find(r"log = (first_column [^;,]*), thread = thread_anew\(\) % STORERS;")[1])
    names["column"] = value(find(r"const int column = (first_column [^;]*);")[1])
    names["vector"] = value(find(r"const int vector = (column [^;]*);")[1])
    step = value(find(r"for \(int first = 0; first < END_ROWS; first \+= (STORERS [^)]*)\)")[1])
    names["first"] = np.arange(0, c.END_ROWS, step)[:, None]
    names["row"] = value(find(r"const int row = (first \+ \(thread [^;]*);")[1])
    row_begins, row_exists, column_exists, to_of, from_of = find(
        r"if \((row >= \w+) && (row < \w+) && (column < \w+)\) to\[([^\]]*)\] = "
        r"\*reinterpret_cast<const uint16_t\*>\(output \+ (.*?)\);"
    ).groups()
    exists = value(row_begins) & value(row_exists) & value(column_exists)
    target, source = at + value(to_of)[exists], value(from_of)[exists]
    assert (source % 2 == 0).all() and len(set(target)) == len(target)
    assert (to[target] == -1).all()
    to[target] = output[source // 2]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_stores_write_what_exists_of_a_tile_and_nothing_else(
    tile: plan.WgmmaTile, aligned: bool, gated: bool, rng: np.random.Generator
) -> None:
    """`store_tile`, bounds and offsets as the kernel has them, of whole matrices and of parts of them.

    A box is taken to write the whole of every 16-byte vector of which something exists. Sums are named by
    their row of the whole matrix, so that tiles that begin sooner are seen to store their own rows only.
    """
    c = constants(tile, LOG_SLAB=0 if gated else 1)
    text = of_store_tile()

    def formula(pattern: str) -> str:
        (found,) = re.findall(pattern, text)
        assert isinstance(found, str)
        return found

    first_row = wgmma_function("first_row(const Tile& tile, const Problem& p)", c)
    n0_of = formula(r", n0 = (\(tile\.n0 [^;]*);")
    m0_of = formula(r"const int m0 = (first_row\([^;]*);")
    begin_of, end_of = re.findall(
        r"const int begin = ([^;]*), end = (min\([^;]*\)); const int columns", text
    )[0]
    columns_of = formula(r"const int columns = (min\([^)]*\));")
    to_of = formula(r"uint16_t\* to = p\.c \+ ([^;]*);")
    boxed_if = formula(r"if \((APART &&[^;{]*)\) \{ complete<1, true>\(output, nullptr, 0, 0, 0, 0\);")
    x_of, y_of = re.findall(r"store_box\(boxes, ([^,]*), ([^,]*), ", text)[0]
    vectors_of = formula(r"vectors = (aligned [^;]*);")
    by_vectors = formula(
        r"if \(([^;{]*)\) \{ if \(p\.gated\) complete<0, false>\(output, to, p\.ldc, begin, end, vectors\); "
        r"else complete<1, false>\(output, to, p\.ldc, begin, end, vectors\); \}"
    )
    elements = r"\(output, to, p\.ldc, begin, end, columns, ([^;]*)\);"
    by_elements, *first_column = re.findall(
        rf"if \(([^;{{]*)\) \{{ if \(p\.gated\) store_elements<0>{elements} else store_elements<1>{elements}",
        text,
    )[0]
    assert first_column[0] == first_column[1]

    C = np.arange(c.END_ROWS * c.TILE_N).reshape(c.END_ROWS, c.TILE_N)
    memory, output = rounded(c, C, gated), finished(c, C, gated)
    width, tiles = output.shape[1], 2
    sizes = [
        (tiles * width, tiles * c.M_TILE),
        (tiles * width - 8, tiles * c.M_TILE - 3),  # boxes, of which the last is not whole
        (width // 2 - 1, 5),  # of the second warpgroup there are no columns, of the second tile fewer
        (tiles * width, c.M_TILE + 1),  # one row is the second tile's own
        *rng.integers(1, (tiles * width, tiles * c.M_TILE), (6, 2)),
    ]
    by_boxes = 0
    for (n, m), last in itertools.product(sizes, (False, True) if c.APART else (True,)):
        ldc = int(n) + 9 if not aligned else -(-int(n) // 8) * 8 + 8
        to = np.full((tiles * c.M_TILE + 1) * ldc, -1)
        places = itertools.product(range(0, m, c.M_TILE), (0, c.TILE_N), range(2 if c.PAIRS else 1))
        for m0, tile_n0, half in places:
            names: dict[str, Any] = vars(c) | {"halved": int(gated), "aligned": aligned, "last": last}
            names["p"] = SimpleNamespace(n=int(n), m=int(m), ldc=ldc, gated=gated)
            names["tile"] = SimpleNamespace(m0=m0, n0=tile_n0)
            first = first_row(names["tile"], names["p"])
            assert first >= 0 and (first + c.M_TILE <= m or first == 0)  # no rows but those there are
            names |= {"first_row": first_row, "blockIdx": SimpleNamespace(y=half)}
            names["m0"] = kernel_source.value(m0_of, names)
            for wn in range(c.WG_N):

                def value(formula: str, names: dict[str, Any] = names) -> Any:
                    return kernel_source.value(formula, names)

                names["w"] = SimpleNamespace(wn=wn)
                names["n0"] = value(n0_of)
                names["columns"] = Truncated(value(columns_of))
                at, begin, end = value(to_of), value(begin_of), value(end_of)
                image = memory[wn] + names["m0"] * c.TILE_N + tile_n0 * 10**6
                names["begin"] = begin
                if value(boxed_if):
                    by_boxes += 1
                    assert aligned and not gated and not last
                    complete(c, True, image, to, 0, 0, 0, 0, 0)
                    for i, box in enumerate(boxes_of(c, image)):
                        names["i"] = i
                        x, y = value(x_of), value(y_of)
                        column = np.arange(x, x + 64)
                        some = (column // 8 * 8 < n)[None] & (np.arange(y, y + c.END_ROWS) < m)[:, None]
                        target = (np.arange(y, y + c.END_ROWS)[:, None] * ldc + column)[some]
                        assert (to[target] == -1).all()
                        to[target] = box[some]
                    continue
                names["vectors"] = vectors = value(vectors_of)
                if value(by_vectors):
                    complete(c, False, image, to, at, ldc, begin, end, vectors)
                if value(by_elements):
                    start = value(first_column[0])
                    store_elements(c, image, to, at, ldc, begin, end, names["columns"], start)
        row, column = np.mgrid[: tiles * c.M_TILE, :ldc]
        expected = output[0, column % width] + row * c.TILE_N + column // width * c.TILE_N * 10**6
        expected[m:], expected[:, n:] = -1, -1
        assert np.array_equal(to[: expected.size].reshape(expected.shape), expected)
        assert (to[expected.size :] == -1).all()
    assert (by_boxes > 0) == (c.APART and aligned and not gated)


def test_boxes_leave_by_a_map_of_what_the_kernel_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map is one of the output, of boxes [M_TILE][64], and is there wherever the kernel sends boxes."""
    monkeypatch.setattr(launch, "tensor_map", lambda *of: of)
    aligned_if = find(r"const bool aligned = ([^;]*);")[1]
    fields: dict[str, Any] = dict.fromkeys(launch.PreparedWgmma.__dataclass_fields__)
    fields |= {"kind": _tensor_map.FLOAT16, "rows": 300, "columns": 128, "out_columns": 1000, "box": (96, 64)}
    for boxed, out, stride in itertools.product(
        (False, True), (4096, 4096 + 8, 4096 + 2), (1000, 1004, 1003, 1008)
    ):
        prepared = launch.PreparedWgmma(**fields | {"boxed": boxed})
        aligned = kernel_source.value(aligned_if, {"p": SimpleNamespace(c=out, ldc=stride)})
        asked = (out, _tensor_map.FLOAT16, 300, 1000, 2 * stride, (96, 64), _tensor_map.SWIZZLE_128)
        expected = asked if boxed and aligned else _tensor_map.NO_MAP
        assert prepared._boxes(out, stride) == (expected,)


def test_output_is_written_only_when_its_boxes_are_read() -> None:
    """One thread sends a wn's boxes once all have written, and waits for them before the next are written."""
    calls = r"\b(\w+)(?:<[^<>;]*>)?\("
    known = {"sends", "boxes_read", "sync_storers", "sync", "round_gated_tile", "round_tile", "complete"}
    known |= {"hand_to_copies", "store_box", "boxes_commit", "boxes_written", "store_elements"}
    known |= {"store_tile", "sum_over_warpgroups", "run_units", "hand_in", "add_up", "barrier_arrive"}

    def order(text: str) -> list[str]:
        return [name for name in re.findall(calls, text) if name in known]

    text = of_store_tile()
    assert order(text) == [
        "sync",  # where the output lies on sums
        *("sends", "boxes_read", "sync_storers"),
        *("round_gated_tile", "round_tile", "sync_storers"),
        *("complete", "hand_to_copies", "sync_storers", "sends", "store_box", "boxes_commit"),
        *("complete", "complete", "store_elements", "store_elements"),
    ]
    assert "if (APART) { if (sends(warp)) boxes_read(); sync_storers(w); }" in text
    assert re.search(
        r"hand_to_copies\(\); sync_storers\(w\); if \(sends\(warp\)\) \{[^}]*boxes_commit\(\); \}", text
    )
    text = find(r"void consume\((.*?)extern \"C\"")[1]
    assert order(text) == [
        *("run_units", "sum_over_warpgroups"),
        *(
            "sends",
            "boxes_read",
            "sync",
            "hand_in",
            "add_up",
        ),  # sums of other blocks take the output's place too
        *("store_tile", "hand_to_copies", "barrier_arrive", "sends", "boxes_written"),
    ]
    assert "if (shares) { if (APART) { if (sends(warp)) boxes_read(); Consumers::sync(); }" in text
    assert text.rstrip().endswith("} if (sends(warp)) boxes_written(); }")  # after the last piece

    group = kernel_source.find("hopper.cuh", r"void boxes_read\(\) \{ asm volatile\(\"([^;]*);")[1]
    assert group == "cp.async.bulk.wait_group.read 0"
    group = kernel_source.find("hopper.cuh", r"void boxes_written\(\) \{ asm volatile\(\"([^;]*);")[1]
    assert group == "cp.async.bulk.wait_group 0"


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_storers_are_all_of_a_wn_and_one_of_them_sends(tile: plan.WgmmaTile) -> None:
    c = constants(tile)
    sends = find(r"bool sends\(int warp\) \{ return (APART && [^;]*) && elected\(\); \}")[1]
    number = find(r"if \(WG_N == 1\) Consumers::sync\(\); else sync_some<STORERS>\(([^)]*)\);")[1]
    own: dict[int, list[int]] = {}
    senders: dict[int, int] = {}
    for warp, names in enumerate(warps(c)):
        own.setdefault(names["wn"], []).extend(range(32 * warp, 32 * warp + 32))
        senders[names["wn"]] = senders.get(names["wn"], 0) + kernel_source.value(sends, names)
    assert sorted(own) == list(range(c.WG_N))
    for wn, threads in own.items():
        assert len(threads) == c.STORERS
        assert sorted(t % c.STORERS for t in threads) == list(range(c.STORERS))  # each has its own part
        assert all(t % 32 == t % c.STORERS % 32 for t in threads)  # in its own warp, where lanes exchange
        assert senders[wn] == c.APART
    barriers = {kernel_source.value(number, {"w": SimpleNamespace(wn=wn)}) for wn in own}
    assert len(barriers) == c.WG_N and all(
        1 < barrier < 16 for barrier in barriers
    )  # 0, 1: the block's, Consumers'


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


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", range(200))
def test_ring_hands_over_every_stage_and_never_stops(seed: int, apart: bool) -> None:
    """`produce` and `run_units` step by step, in any order that their barriers allow.

    No stage is overwritten before every warp has read it, none is read before it is complete, and between
    pieces the ring's first slots are the consumers': in builds that are APART only after shared pieces, and
    then the whole ring.
    """
    order = random.Random(seed)
    stages, warps, parts = order.choice([2, 3, 5]), order.choice([1, 2, 8]), 3
    assert find(r"constexpr int END_SLOTS = (APART \? STAGES) :")
    end_slots = stages if apart else order.randint(1, stages)
    early = order.randint(1, stages)
    assert find(r"const int filled = min\(last, unit \+ (EARLY)\);")
    pieces = [order.randint(1, 3 * stages) for _ in range(order.randint(1, 4))]
    full, empty = ([Barrier(n) for _ in range(stages)] for n in (1, warps))
    shared = [order.random() < 0.5 for _ in pieces]  # with other blocks: then the producer tells by whom
    idle, tell, sync = Barrier(warps), Barrier(1), Barrier(warps)
    told: list[int | None] = [None]
    content: list[Any] = [None] * stages
    flying: list[tuple[int, Any]] = []
    leaving = [0]  # consumers that use the ring's memory between pieces

    leaving_of = find(r"; leaving = ([^;]*); \}")[1]
    waits = find(r"if \((leaving && \(at\.slot [^{]*)\) \{ barrier_wait\(ring \+ IDLE_AT, idle_parity\);")[1]
    arrives = find(r"if \(w\.lane == 0 && \(([^;{]*)\)\) barrier_arrive\(ring \+ IDLE_AT\);")[1]
    assert (
        find(r"const bool shares = ([^;]*); if \(shares\) tell")[1] == "piece.last - piece.first < deal.units"
    )
    assert find(r"const bool shares = ([^;]*); bool whole")[1] == "piece.last - piece.first < deal.units"

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
                filled, first = min(units, early), [0, 0]
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
            for i in range(unit, units):
                names = {"leaving": leaves, "at": SimpleNamespace(slot=at[0]), "END_SLOTS": end_slots}
                names |= {"unit": i, "last": units}
                if kernel_source.value(waits, names):
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
            assert not leaves, "an end of which the producer never heard"
            leaves = kernel_source.value(leaving_of, {"shares": shared[piece], "APART": apart})

    def consume() -> Iterator[Any]:
        at, tell_parity, sync_parity = [0, 0], 0, 0
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
            if piece + 1 == len(pieces):
                over[0] = True
                assert not flying
            yield True
            if shared[piece] or not apart:
                leaving[0] += 1
                sync.arrive()  # the ring is read, and may be written
                while not sync.passed(sync_parity):
                    yield False
                sync_parity ^= 1
                mine = stages if over[0] else end_slots
                assert not any(slot < mine for slot, _ in flying)
                content[:mine] = ["sums"] * mine
                yield True
            if shared[piece]:
                while not tell.passed(tell_parity):
                    yield False
                tell_parity ^= 1
                yield True
                assert told[0] == piece
            if shared[piece] or not apart:
                leaving[0] -= 1
            if kernel_source.value(arrives, {"shares": shared[piece], "APART": apart}):
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
