"""The planner on every architecture's limits: what it returns fits, and covers all of the product once.

How a block finds its work is read out of the kernels' own text (`kernel_source`), so planner and kernel are
held to the same arithmetic.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import kernel_source
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from marlin_jit import launch, plan
from marlin_jit.layout import padded_shape
from marlin_jit.plan import Limits, Plan, Problem, Zeros

ARCHS = sorted(launch.ARCH_LIMITS)
GROUPS = (32, 64, 128, -1)
TILES = sorted(
    {
        tile
        for arch in ARCHS
        for zeros in Zeros
        for problem in (
            Problem(1, 128, 64, 128, zeros, False),
            Problem(1, 64, 64, -1, zeros, False),
        )
        for tile in plan.gemm_tile_shapes(problem, Limits(132, *launch.ARCH_LIMITS[arch]))
    },
    key=str,
)
H200 = Limits(132, *launch.ARCH_LIMITS["90a"])
WGMMA_TILES = plan.wgmma_tile_shapes(Problem(64, 128, 64, 128, Zeros.NONE, False), H200)
TILED = ("marlin_gemm", "marlin_wgmma")
STATIC_SMEM = 128
"""A block's `arrived`, rounded up to the unit in which shared memory is given out."""
SYSTEM_SMEM = 1024
"""Shared memory that CUDA keeps for itself in each resident block."""


class Deal:
    """`Deal` of tiles.cuh, evaluated from its text, as one of its blocks sees it."""

    def __init__(self, tiles: int, units: int, each: int, blocks: int) -> None:
        self.names: dict[str, Any] = {"tiles": tiles, "units": units, "each": each, "blocks": blocks}
        self.names |= {"share": 0, "extra": 0, "quotient": lambda a, b: a // b}
        if each == 0 and tiles > 0:
            for name in ("share", "extra"):
                self.names[name] = self.value(
                    rf"\b{name} = ((?:quotient|tiles \*)[^;]*?)[,;] ?(?:extra|const)"
                )
        for head in ("begin(int block)", "owner(int unit)"):
            method = kernel_source.function("tiles.cuh", head, self.names)
            name = head.partition("(")[0]
            setattr(self, name, method)
            self.names[name] = method  # later ones call earlier ones

    def value(self, pattern: str, **names: int) -> int:
        """What an expression of tiles.cuh that matches comes to."""
        return kernel_source.value(kernel_source.find("tiles.cuh", pattern)[1], self.names | names)

    def run(self, block: int) -> tuple[int, int, int]:
        """Of a block: the tile and the unit in it that its run begins with, and the run's length."""
        if self.names["each"] > 0:
            part = self.value(r"part = (quotient\([^;]*);", block=block)
            tile = self.value(r"tile = (block - [^,]*),", block=block, part=part)
            first = self.value(r"first = (part [^;]*);", part=part)
            return tile, first, self.value(r"run = (block \+ [^;]*);", block=block, first=first)
        if self.names["tiles"] == 0:
            return 0, 0, 0
        unit = self.value(r"const int unit = (begin\(block\));", block=block)
        tile = self.value(r"tile = (quotient\(unit[^;]*?\)),", unit=unit)
        first = self.value(r"first = (unit - [^;]*);", unit=unit, tile=tile)
        return tile, first, self.value(r"run = (share [^;]*);", block=block)

    def sharing(self, tile: int, me: int) -> tuple[int, int, int, int]:
        """Count, first, stride, mine."""
        if self.names["each"] > 0:
            values = self.value(r"if \(each > 0\) return \{(quotient[^}]*)\};", tile=tile, me=me)
        else:
            first = self.value(r"const int first = (owner[^,]*),", tile=tile)
            last = self.value(r"last = (owner\([^;]*);", tile=tile)
            values = self.value(r"return \{(last - first \+ 1, [^}]*)\};", first=first, last=last, me=me)
        assert isinstance(values, tuple)
        return values


@st.composite
def problems(draw: st.DrawFn, max_m: int = 8192, max_n: int = 262144, max_k: int = 65536) -> Problem:
    group_size = draw(st.sampled_from(GROUPS))
    m = draw(st.one_of(st.integers(1, 130), st.integers(1, max_m)))
    n = draw(st.one_of(st.integers(1, 1024), st.integers(1, max_n)))
    k = draw(st.one_of(st.integers(1, 1024), st.integers(1, max_k)))
    if group_size != -1:
        k = -(-k // group_size) * group_size
    padded_k, padded_n = padded_shape(k, n, group_size)
    return Problem(m, padded_k, padded_n, group_size, draw(st.sampled_from(Zeros)), draw(st.booleans()))


devices = st.builds(
    lambda sms, arch: (arch, Limits(sms, *launch.ARCH_LIMITS[arch])),
    st.integers(16, 160),
    st.sampled_from(ARCHS),
)


PLAIN = Problem(1, 128, 64, 128, Zeros.NONE, False)


def gemm_tile(p: Plan) -> plan.Tile:
    macros = p.build.defines
    if p.build.name == "marlin_wgmma":
        keys = ("M_TILE", "J", "WG_N", "WG_K", "K_STAGE", "MIN_BLOCKS")
        return plan.WgmmaTile(*(macros[k] for k in keys), pairs=bool(macros["PAIRS"]))
    keys = ("M_TILE", "WARPS_N", "WARPS_K", "K_STAGE", "MIN_BLOCKS")
    shape = tuple(macros[k] for k in keys)
    (tile,) = (t for t in TILES if (t.m_tile, t.warps_n, t.warps_k, t.k_stage, t.blocks) == shape)
    return tile


# ---- what a plan says of itself -------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(problems(), devices)
def test_every_plan_fits_the_device_and_is_listed(problem: Problem, device: tuple[str, Limits]) -> None:
    arch, limits = device
    listed = set(launch.all_builds(arch))
    found = plan.plans(problem, limits)
    assert found
    assert found == sorted(found, key=lambda p: p.microseconds)
    for p in found:
        assert p.build in listed
        assert p.grid[0] >= 1 and 1 <= p.grid[1] <= 65535
        assert p.threads % 32 == 0 and p.threads <= 1024
        assert p.smem <= limits.smem_per_block
        assert p.microseconds > 0 and np.isfinite(p.microseconds)
        if p.build.name == "marlin_decode":
            assert problem.m <= plan.DECODE_MAX_M
            assert p.cluster in (1, p.grid[1])
            assert (p.partial_bytes > 0) == (p.counters > 0) == (p.grid[1] > p.cluster)
            macros = p.build.defines
            assert p.chunks > 0 and p.threads % (32 * p.chunks) == 0 and p.threads <= 32 * macros["MAX_WARPS"]
            assert 8 * (macros["M_BLOCKS"] - 1) < problem.m <= 8 * macros["M_BLOCKS"]
            if p.cluster > 1:  # only where all of them run at once
                assert limits.major >= 9 and p.grid[0] * p.grid[1] <= limits.sm_count
        else:
            tiles, units = plan.gemm_tiles(gemm_tile(p), problem)
            assert 0 <= p.split_tiles <= tiles
            pairs = bool(p.build.defines.get("PAIRS"))
            in_memory = p.split_tiles > 0 and not (pairs and p.grid[0] == tiles)
            assert (p.partial_bytes > 0) == (p.counters > 0) == in_memory
            assert (p.cluster, p.grid[1]) == ((2, 2) if pairs else (1, 1))
            if pairs:  # all of them run at once, and both blocks of each have something to do
                assert limits.major == 9 and p.split_tiles == tiles
                assert p.grid[0] <= limits.sm_count // 2
                assert p.each > 1 and units - p.each * (p.grid[0] // tiles - 1) > 1


@pytest.mark.parametrize("arch", ARCHS)
def test_shared_memory_leaves_room_for_what_blocks_have_besides(arch: str) -> None:
    """Static variables count against a block's limit; and as many blocks as planned fit an SM together."""
    per_block, per_sm, major = launch.ARCH_LIMITS[arch]
    limits = Limits(132, per_block, per_sm, major)
    for group_size in GROUPS:
        for zeros in Zeros:
            problem = Problem(1, 128, 64, group_size, zeros, False)
            for tile in plan.gemm_tile_shapes(problem, limits):
                p, fitting = (
                    plan.gemm_plan(tile, 1, 0, 0, problem, limits),
                    plan.gemm_stages(tile, problem, limits),
                )
                if p is None:
                    continue
                assert fitting is not None
                assert p.smem + STATIC_SMEM <= per_block, (tile, problem)
                for grid in {1, 132, 132 * (fitting[1] - 1) + 1, 132 * fitting[1]}:
                    p = plan.gemm_plan(tile, grid, 0, 0, problem, limits)
                    assert p is not None
                    together = per_sm // (p.smem + STATIC_SMEM + SYSTEM_SMEM)
                    share = -(-grid // 132)
                    assert together >= share, (tile, problem, grid)
                    if major >= 9:  # grids overlap: nor is there room for one block more than the share
                        assert per_sm // (p.smem + SYSTEM_SMEM) == share, (tile, problem, grid)
            for m, split in itertools.product((8, 16, 24), (1, 2)):
                few = replace(problem, m=m, padded_k=8192)
                for shape in plan.decode_shapes(few, split, limits) if plan.decodes(few, limits) else ():
                    p = plan.decode_plan(shape, split, few, limits)
                    assert p is None or p.smem + STATIC_SMEM <= per_block, (shape, few)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_has_a_tile_for_every_weight(arch: str) -> None:
    limits = Limits(80, *launch.ARCH_LIMITS[arch])
    for group_size in GROUPS:
        for zeros in Zeros:
            for m in (1, 17, 300):
                names = {
                    p.build.name for p in plan.plans(Problem(m, 1024, 1024, group_size, zeros, False), limits)
                }
                assert "marlin_gemm" in names


def test_sizes_are_those_the_gemm_kernel_uses() -> None:
    for tile in TILES:
        for group_size in GROUPS:
            for zeros in Zeros:
                problem = Problem(1, 128, 64, group_size, zeros, False)
                c = kernel_source.constants("marlin.cu", plan.gemm_build(tile, 4, problem).defines)
                assert tile.threads == c.THREADS
                assert tile.n_tile == c.TILE_N
                assert tile.stage_bytes(group_size, zeros) == c.STAGE_BYTES
                sent = (4 - c.OWN) * c.WARPS_K * c.M_BLOCKS * c.WARPS_N * 32 * 16 if c.WARPS_K > 1 else 0
                leaving = c.M_TILE * (c.TILE_N + 8) * 2
                assert tile.sums_bytes >= max(sent, leaving)
                assert tile.partial_bytes == c.OWN * c.M_BLOCKS * c.THREADS * 16
                assert c.STAGE_BYTES % 16 == c.S_AT % 16 == c.Z_AT % 16 == 0


def test_gathering_launches_the_blocks_that_its_kernel_takes() -> None:
    c = kernel_source.constants("gather.cu", {})
    assert (launch._GATHER_THREADS, launch._GATHER_COLUMNS) == (c.THREADS, c.COLUMNS)


def test_sizes_are_those_the_decode_kernel_uses() -> None:
    for group_size, zeros, m in itertools.product(GROUPS, Zeros, (8, 16, 24)):
        problem = Problem(m, 8192, 64, group_size, zeros, False)
        if not plan.decodes(problem, H200):
            continue
        for shape in plan.decode_shapes(problem, 2, H200):
            c = kernel_source.constants("decode.cu", plan.decode_build(problem, H200).defines)
            assert (plan.DECODE_BLOCK_K, m) == (c.BLOCK_K, c.ROWS)
            assert shape.smem(m, group_size, zeros) == shape.warps * c.WARP_BYTES
            assert c.WARP_BYTES >= c.ROWS * c.SUM_PITCH * 4
            assert c.BUFFER % 16 == c.S_AT % 16 == c.Z_AT % 16 == 0
            p = plan.decode_plan(shape, 2, problem, H200)
            assert p is not None and p.cluster == 2
            assert p.smem == shape.warps * c.WARP_BYTES + c.ROWS * 16 * shape.chunks * 16  # received quads


def test_sizes_are_those_the_wgmma_kernel_uses() -> None:
    for group_size in GROUPS:
        for zeros in Zeros:
            problem = Problem(64, 128, 64, group_size, zeros, False)
            for tile in WGMMA_TILES:
                fitting = plan.wgmma_stages(tile, problem, H200)
                tiles, units = plan.gemm_tiles(tile, problem)
                schedule = (tiles, tiles, units) if tile.pairs else (132, 0, 0)
                p = plan.wgmma_plan(tile, *schedule, problem, H200)
                assert fitting is not None and p is not None
                stages, blocks = fitting
                c = kernel_source.constants("wgmma.cu", p.build.defines)
                assert (stages, tile.blocks) == (c.STAGES, c.MIN_BLOCKS)
                assert tile.threads == c.THREADS == p.threads
                assert tile.n_tile == c.TILE_N <= 256  # what a box takes at most
                assert tile.stage_bytes(group_size, zeros) == c.STAGE_BYTES
                assert c.COPIED_BYTES <= c.STAGE_BYTES < 1 << 20  # what a barrier counts
                assert c.STAGE_BYTES % 1024 == c.BOX_BYTES % 1024 == 0
                assert c.W_AT % 128 == c.S_AT % 128 == c.Z_AT % 128 == 0
                smem = tile.smem(stages, group_size, zeros)
                assert p.smem >= smem >= c.TOLD_AT + 5 * 4
                assert p.smem + STATIC_SMEM <= H200.smem_per_block
                assert tile.partial_bytes == c.SUMS_BYTES == c.OWN * c.M_BLOCKS * 16 * c.CONSUMERS
                assert tile.output_bytes == c.OUTPUT_BYTES
                ring = stages * c.STAGE_BYTES
                assert ring == c.RING_BYTES >= tile.least_ring >= tile.partial_bytes
                assert tile.apart == c.APART
                if c.APART:
                    assert ring == c.OUTPUT_AT
                    assert ring + tile.output_bytes == c.END_BYTES == c.FULL_AT
                else:
                    assert ring == c.FULL_AT >= max(tile.partial_bytes, c.OUTPUT_AT + c.OUTPUT_BYTES)
                assert (
                    stages >= c.END_SLOTS
                )  # what the kernel asserts of its ring, and of the room behind sums
                assert c.ROOM >= c.BATCH > 0 == c.PARTIAL % c.BATCH
                assert blocks * (p.smem + SYSTEM_SMEM) <= H200.smem_per_sm or blocks > 1
                registers = 2 * c.CONSUMER_REGISTERS + c.PRODUCER_REGISTERS
                at_start = 65536 // (tile.blocks * tile.threads) // 8 * 8  # of each thread
                assert registers <= 3 * at_start
                assert at_start > c.PRODUCER_REGISTERS and at_start <= c.CONSUMER_REGISTERS


# ---- how marlin_gemm and marlin_wgmma deal out work ----------------------------------------------------


def pieces(deal: Deal, grid: int, split_tiles: int, tiles: int, units: int) -> list[tuple[int, ...]]:
    """The kernel's loop: (block, tile, first unit, last unit) of everything any block does."""
    done = []
    for block in range(grid):
        (tile, first, run), index = deal.run(block), split_tiles + block
        while run > 0 or index < tiles:
            if run > 0:
                last = min(units, first + run)
                done.append((block, tile, first, last))
                run, tile, first = run - (last - first), tile + 1, 0
            else:
                done.append((block, index, 0, units))
                index += grid
    return done


def slot_of(deal: Deal, block: int, tile: int) -> int:
    which = kernel_source.find("tiles.cuh", r"const int which = (.*?);")[1]
    names = {"deal": SimpleNamespace(begin=deal.begin, **{k: deal.names[k] for k in ("each", "units")})}
    return 2 * block + kernel_source.value(which, names | {"block": block, "tile": tile})


def check_work(grid: int, split_tiles: int, each: int, tiles: int, units: int) -> None:
    done = np.zeros((tiles, units), np.int64)
    deal = Deal(split_tiles, units, each, grid)
    partial: dict[int, list[tuple[int, int]]] = defaultdict(list)  # tile -> (first unit, block)
    slots: list[int] = []
    of_block: dict[int, int] = defaultdict(int)
    for block, tile, first, last in pieces(deal, grid, split_tiles, tiles, units):
        assert first < last
        done[tile, first:last] += 1
        if last - first < units:
            assert tile < split_tiles
            partial[tile].append((first, block))
            slots.append(slot_of(deal, block, tile))
            of_block[block] += 1
    assert (done == 1).all()
    assert len(set(slots)) == len(slots)
    assert all(0 <= s < 2 * grid for s in slots)
    assert all(count <= 2 for count in of_block.values())
    for tile, shares in partial.items():
        # Exactly these blocks add one to the tile's counter, and their sums are added in ascending k.
        for i, (_, block) in enumerate(sorted(shares)):
            count, first_block, stride, mine = deal.sharing(tile, block)
            assert (count, mine) == (len(shares), i) and count > 1
            assert first_block + i * stride == block


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 40), st.data())
def test_any_deal_covers_every_unit_once(grid: int, tiles: int, units: int, data: st.DataObject) -> None:
    check_work(grid, data.draw(st.integers(0, tiles)), 0, tiles, units)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(2, 16), st.integers(1, 12), st.integers(1, 30))
def test_shares_of_a_tile_cover_every_unit_once(tiles: int, sharers: int, each: int, rest: int) -> None:
    check_work(tiles * sharers, tiles, each, tiles, (sharers - 1) * each + rest)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 20000), st.integers(1, 640))
def test_owner_is_the_inverse_of_begin(total: int, grid: int) -> None:
    deal = Deal(1, total, 0, grid)
    assert (deal.begin(0), deal.begin(grid)) == (0, total)
    lengths = [deal.begin(b + 1) - deal.begin(b) for b in range(grid)]
    assert max(lengths) - min(lengths) <= 1
    for unit in {*range(0, total, max(1, total // 97)), *range(max(0, total - 3), total)}:
        owner = deal.owner(unit)
        assert 0 <= owner < grid
        assert deal.begin(owner) <= unit < deal.begin(owner + 1)


@settings(max_examples=60, deadline=None)
@given(problems(max_m=1024, max_n=32768, max_k=16384), devices)
def test_planned_schedules_cover_every_unit_once(problem: Problem, device: tuple[str, Limits]) -> None:
    for p in plan.plans(problem, device[1]):
        if p.build.name not in TILED:
            continue
        tile = gemm_tile(p)
        tiles, units = plan.gemm_tiles(tile, problem)
        if tiles * units > 100_000:
            continue
        check_work(p.grid[0], p.split_tiles, p.each, tiles, units)
        if p.counters:
            assert p.partial_bytes >= 2 * p.grid[0] * tile.partial_bytes // p.cluster
            assert p.counters >= p.split_tiles * p.cluster


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 60), st.sampled_from((*TILES, *WGMMA_TILES)))
def test_tiles_cover_the_output_once(m: int, chunks: int, tile: plan.Tile) -> None:
    band = int(kernel_source.find("tiles.cuh", r"constexpr int BAND = (\d+);")[1])
    quotient = kernel_source.function("tiles.cuh", "quotient(int a, int b)")
    names = {"ROWS": tile.m_tile, "COLUMNS": tile.n_tile, "BAND": band, "quotient": quotient}
    tile_at = kernel_source.function("tiles.cuh", "tile_at(int index, int m, int padded_n)", names)
    problem = Problem(m, 128, 64 * chunks, 128, Zeros.NONE, False)
    tiles, _ = plan.gemm_tiles(tile, problem)
    assume(tiles < 20000)
    found = [tile_at(i, m, 64 * chunks) for i in range(tiles)]
    expected = {(a, b) for a in range(0, m, tile.m_tile) for b in range(0, 64 * chunks, tile.n_tile)}
    assert len(found) == len(expected)
    assert set(found) == expected


# ---- how marlin_decode splits k -------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(problems(max_m=24), devices)
def test_decode_takes_every_block_of_k_once(problem: Problem, device: tuple[str, Limits]) -> None:
    first = kernel_source.find("decode.cu", r"const int first = (worker [^;]*);")[1]
    last = kernel_source.find("decode.cu", r"const int last = (chunk [^;]*);")[1]
    for p in plan.plans(problem, device[1]):
        if p.build.name != "marlin_decode":
            continue
        blocks = -(-problem.padded_k // plan.DECODE_BLOCK_K)
        workers = p.grid[1] * (p.threads // (32 * p.chunks))
        names = {"share": blocks // workers, "extra": blocks % workers, "padded_n": problem.padded_n}
        end = 0
        for worker in range(workers):
            names |= {"worker": worker, "chunk": 0}
            names["first"] = kernel_source.value(first, names)
            assert names["first"] == end
            end = kernel_source.value(last, names)
            assert end >= names["first"]
            past = {**names, "chunk": problem.padded_n // 64}
            assert kernel_source.value(last, past) == names["first"]
        assert end == blocks
        assert p.grid[0] * p.chunks * 64 >= problem.padded_n > (p.grid[0] - 1) * p.chunks * 64
        if p.partial_bytes:
            rows = 8 * p.build.defines["M_BLOCKS"]
            assert p.partial_bytes == p.grid[0] * p.grid[1] * rows * 64 * p.chunks * 4
            assert p.counters == p.grid[0]


# ---- the choice -----------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(problems(), devices)
def test_the_choice_is_the_best_plan_each_time(problem: Problem, device: tuple[str, Limits]) -> None:
    plan.choose.cache_clear()
    first = plan.choose(problem, device[1])
    plan.choose.cache_clear()
    assert plan.choose(problem, device[1]) == first == plan.plans(problem, device[1])[0]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("N", "K", "group_size"),
    [(4096, 4096, 128), (28672, 8192, 128), (1024, 11008, 32), (64, 64, -1), (512, 65536, -1)],
)
def test_more_rows_do_not_take_much_less_time(arch: str, N: int, K: int, group_size: int) -> None:
    """A plan for more rows would do for fewer; not every tile is tried for every M, hence 15%."""
    limits = Limits(132, *launch.ARCH_LIMITS[arch])
    rows = [*range(1, 65), *range(65, 8193, 64)]
    times = [
        plan.choose(Problem(m, K, N, group_size, Zeros.POINTS, False), limits).microseconds for m in rows
    ]
    for before, after, m in zip(times, times[1:], rows[1:], strict=False):
        assert after >= 0.85 * before, f"M = {m}"


@settings(max_examples=80, deadline=None)
@given(problems(), devices)
def test_invariant_plans_cut_k_alike(problem: Problem, device: tuple[str, Limits]) -> None:
    """A row's sums: how many warps and blocks share k, in what order they are added, what codes become."""
    found = [
        plan.choose_invariant(replace(problem, m=m), device[1])
        for m in range(1, plan.decode_max_rows(problem, device[1]) + 1)
    ]
    assert len({(p.threads // p.chunks, p.grid, p.chunks, p.build.defines["ZEROS"]) for p in found}) == 1
    assert {p.build.defines["M_BLOCKS"] for p in found} == {-(-m // 8) for m in range(1, len(found) + 1)}
    assert {p.build for p in found} <= set(launch.all_builds(device[0]))


@settings(max_examples=150, deadline=None)
@given(problems(max_n=60000, max_k=20000), devices)
def test_larger_layers_do_not_take_much_less_time(problem: Problem, device: tuple[str, Limits]) -> None:
    """Twice the columns, or twice the k: what the larger one does includes the smaller one; hence 15%."""
    assume(problem.group_size != -1 or problem.padded_k % 128 == 0)  # fewer tiles than for twice the k
    time = plan.choose(problem, device[1]).microseconds
    for larger in (
        replace(problem, padded_n=2 * problem.padded_n),
        replace(problem, padded_k=2 * problem.padded_k),
    ):
        assert plan.choose(larger, device[1]).microseconds >= 0.85 * time


def test_few_rows_are_decoded_and_many_are_not() -> None:
    def name(m: int) -> str:
        return plan.choose(Problem(m, 4096, 4096, 128, Zeros.NONE, False), H200).build.name

    assert name(1) == "marlin_decode"
    assert {name(m) for m in (9, 16, 24)} == {"marlin_decode"}
    assert {name(m) for m in (100, 4096)} <= set(TILED)


def test_only_hopper_has_wgmma_and_only_for_more_than_a_few_rows() -> None:
    for arch in ARCHS:
        for m in (1, 16, 17, 64, 4096):
            problem = Problem(m, 4096, 4096, 128, Zeros.POINTS, False)
            found = plan.plans(problem, Limits(132, *launch.ARCH_LIMITS[arch]))
            offered = [p for p in found if p.build.name == "marlin_wgmma"]
            assert bool(offered) == (arch == "90a" and m >= plan.WGMMA_MIN_M)
    assert {build.name for build in launch.all_builds("100")} == {
        build.name for build in launch.all_builds("90a")
    } - {"marlin_wgmma"}


@pytest.mark.parametrize("m", [0, -1])
def test_a_plan_needs_rows(m: int) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        plan.plans(Problem(m, 128, 64, 128, Zeros.NONE, False), H200)


def test_sizes_of_the_extremes() -> None:
    """Scratch memory stays modest, and all counts fit 32 bits."""
    for m, n, k in [
        (8192, 262144, 65536),
        (1, 262144, 65536),
        (1, 64, 65536),
        (8192, 64, 64),
        (257, 262144, 64),
    ]:
        p = plan.choose(Problem(m, k, n, 128 if k > 64 else -1, Zeros.POINTS, True), H200)
        assert p.partial_bytes <= 256 << 20
        if p.build.name in TILED:
            tiles, units = plan.gemm_tiles(gemm_tile(p), Problem(m, k, n, 128, Zeros.POINTS, True))
            assert max(tiles, p.split_tiles * units) < 2**31


@pytest.mark.parametrize(("pieces", "warps"), [(1, 4), (660, 4), (661, 2), (1320, 2), (1321, 1), (10**6, 1)])
def test_few_pieces_of_a_correction_are_shared_by_more_warps(pieces: int, warps: int) -> None:
    assert launch.correction_group_warps(pieces, 132) == warps


def test_integer_zero_points_are_taken_from_codes_where_that_is_faster() -> None:
    """As measured on an H200 (docs/notes/gemm.md): all but small tiles of marlin_gemm do."""

    def how(m: int, limits: Limits) -> tuple[str, int]:
        build = plan.choose(Problem(m, 4096, 28672, 128, Zeros.POINTS, False), limits).build
        return build.name, build.defines["ZEROS"]

    assert {how(m, H200)[1] for m in (1, 8, 16, 64, 4096)} == {Zeros.POINTS}
    a100 = Limits(108, *launch.ARCH_LIMITS["80"])
    assert how(8, a100) == ("marlin_decode", Zeros.POINTS)
    assert how(32, a100) == ("marlin_gemm", Zeros.DELTAS)
    for m in (1, 8, 16, 64, 300, 4096):
        for zeros in (Zeros.NONE, Zeros.DELTAS):
            for p in plan.plans(Problem(m, 4096, 28672, 128, zeros, False), H200):
                assert p.build.defines["ZEROS"] == zeros


@pytest.mark.parametrize(("split_tiles", "each"), [(0, 0), (64, 0), (32, 16)])
def test_pairs_have_one_piece_of_one_tile(split_tiles: int, each: int) -> None:
    """With another one consumers would wait, at the cluster's barrier, for a producer that waits for them."""
    problem = Problem(64, 4096, 8192, 128, Zeros.NONE, False)
    (tile,) = (t for t in WGMMA_TILES if t.pairs and t.m_tile == 64)
    assert plan.wgmma_plan(tile, 64, 64, 32, problem, H200) is not None
    with pytest.raises(ValueError, match="pairs share every tile"):
        plan.wgmma_plan(tile, 64, split_tiles, each, problem, H200)
