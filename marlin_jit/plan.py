"""From a problem and a device to a kernel build, a grid and a split of the work.

A pure function: no GPU is asked, so that every decision can be tested, and printed, on any machine. It
lists the builds that fit the device, predicts each one's time from a small model of the work, and takes the
least.

The model's constants were fitted to an H200; on other devices they only rank builds (see docs/kernels.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

from marlin_jit.layout import CHUNK_N

Defines = dict[str, int]


@dataclass(frozen=True)
class Build:
    """One kernel variant: what is compiled, and under which macros."""

    source: str
    name: str
    macros: tuple[tuple[str, int], ...]

    @property
    def defines(self) -> Defines:
        """The macros as a mapping."""
        return dict(self.macros)


class Zeros(IntEnum):
    """What a kernel does about zero points: its ``ZEROS``."""

    NONE = 0
    """Nothing: the weight is ``(q - 8)*scale``."""
    DELTAS = 1
    """Adds deltas, which stand for any zero."""
    POINTS = 2
    """Subtracts integers from the codes instead of 8. Such weights have deltas too."""


@dataclass(frozen=True)
class Problem:
    """What a GEMM launch is planned for.

    Parameters
    ----------
    m : int
        Rows of the activations, at least 1.
    padded_k, padded_n : int
        The shape that B holds.
    group_size : int
        32, 64, 128 or -1.
    zeros : Zeros
        What the kernel does about zero points.
    bfloat16 : bool
        Activation type: bfloat16, else float16.
    """

    m: int
    padded_k: int
    padded_n: int
    group_size: int
    zeros: Zeros
    bfloat16: bool


@dataclass(frozen=True)
class Limits:
    """What a plan must know of a device.

    SMs, bytes of shared memory, major compute capability; and whether the driver makes tensor maps, without
    which `marlin_gemm` does what `marlin_wgmma` would.
    """

    sm_count: int
    smem_per_block: int
    smem_per_sm: int
    major: int
    tensor_maps: bool = True


@dataclass(frozen=True)
class Plan:
    """A launch: build, grid, shared memory, scratch memory, and the predicted time in microseconds."""

    build: Build
    grid: tuple[int, int]
    threads: int
    smem: int
    split_tiles: int  # marlin_gemm, marlin_wgmma: tiles that blocks share
    each: int  # the same: units that a split tile's blocks take, the last the others; 0: dealt out evenly
    partial_bytes: int  # float32 partial sums in global memory
    counters: int  # arrival counters, one a split tile; of pairs two
    microseconds: float
    chunks: int = 0  # marlin_decode: columns of 64 a block
    cluster: int = 1  # blocks along the grid's second dimension that add their sums in shared memory

    @property
    def block(self) -> tuple[int, int]:
        """Threads of a block; those of marlin_decode stand in columns, and by warps that share their k."""
        return (32 * self.chunks, self.threads // (32 * self.chunks)) if self.chunks else (self.threads, 1)


def type_macros(problem: Problem, zeros: Zeros) -> tuple[tuple[str, int], ...]:
    """Build constants that kernels which unpack have in common."""
    return (
        ("BF16", int(problem.bfloat16)),
        ("GROUP", 0 if problem.group_size == -1 else problem.group_size),
        ("ZEROS", int(zeros)),
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# ---- marlin_gemm (marlin.cu): any M ---------------------------------------------------------------------

_SYSTEM_SMEM = 1024  # bytes of shared memory that CUDA keeps a block
_STATIC_SMEM = 128  # bytes of a block besides: our static variables, and aligning what follows them
_MAX_STAGES = 6
_MIN_STAGES = 3


@dataclass(frozen=True)
class GemmTile:
    """The shape of a block's work in marlin.cu.

    Parameters
    ----------
    m_tile : int
        Rows.
    warps_n, warps_k : int
        Warps along N (64 columns each), and warps that share a stage's k.
    k_stage : int
        k of a stage.
    blocks : int
        Blocks an SM should hold, which bounds registers and shared memory.
    """

    m_tile: int
    warps_n: int
    warps_k: int
    k_stage: int
    blocks: int

    @property
    def cluster(self) -> int:
        """Blocks that do together what a schedule gives to one."""
        return 1

    @property
    def n_tile(self) -> int:
        return CHUNK_N * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    def zeros(self, given: Zeros) -> Zeros:
        """How a tile takes zero points: integers as deltas too, but for the tile with registers to spare."""
        return Zeros.DELTAS if given == Zeros.POINTS and self.warps_n < 4 else given

    def stage_bytes(self, group_size: int, zeros: Zeros) -> int:
        """Shared memory of a stage: activations, codes, scales and zeros."""
        rows = 0 if group_size == -1 else max(1, self.k_stage // group_size)
        scales = rows * self.n_tile * 2 * (2 if zeros else 1)
        return self.m_tile * self.k_stage * 2 + self.k_stage * self.n_tile // 2 + scales

    @property
    def sums_bytes(self) -> int:
        """Shared memory that the end of a tile needs: to add warps' sums, to keep a block's own, to leave."""
        sent = 4 - 4 // self.warps_k  # slabs of 16 columns that a warp gives away
        exchange = self.threads * sent * (self.m_tile // 8) * 16
        return max(exchange, self.partial_bytes, self.m_tile * (self.n_tile + 8) * 2)

    @property
    def partial_bytes(self) -> int:
        """Float32 sums of a tile."""
        return self.m_tile * self.n_tile * 4


def _half_tail(problem: Problem) -> bool:
    """Whether a last stage of 128 k would be half empty under the one scale of its column.

    Its missing codes would be 0, not 8: harmless times activations of zero, unless 8 scales overflow float16.
    """
    return problem.group_size == -1 and problem.padded_k % 128 != 0


def gemm_tile_shapes(problem: Problem, limits: Limits) -> tuple[GemmTile, ...]:
    """The tile shapes for a problem on a device."""
    if limits.smem_per_sm < _SMALL_SM:  # compute capability 8.6, 8.9, 12.x: short stages let two blocks fit
        long = () if _half_tail(problem) else (GemmTile(16, 2, 2, 128, 2),)
        return (*long, GemmTile(32, 2, 2, 64, 3), GemmTile(64, 2, 2, 64, 2))
    # ptxas needs some registers more for compute capability 10.
    blocks_of_32 = 2 if limits.major == 10 else 3
    if _half_tail(problem):
        return (GemmTile(32, 2, 2, 64, blocks_of_32), GemmTile(64, 2, 2, 64, 2))
    return (
        GemmTile(16, 2, 2, 128, 3),
        GemmTile(32, 2, 2, 128, blocks_of_32),
        GemmTile(64, 2, 2, 64, 2),
        GemmTile(64, 4, 1, 128, 2),
    )


_SMALL_SM = 128 * 1024


def gemm_stages(tile: GemmTile, problem: Problem, limits: Limits) -> tuple[int, int] | None:
    """Stages and blocks an SM that the device's shared memory allows, or None if the tile does not fit it."""
    stage = tile.stage_bytes(problem.group_size, problem.zeros)
    for blocks in range(tile.blocks, 0, -1):
        room = min(limits.smem_per_block, limits.smem_per_sm // blocks - _SYSTEM_SMEM) - _STATIC_SMEM
        stages = min(_MAX_STAGES, room // stage)
        if stages >= _MIN_STAGES and room >= tile.sums_bytes:
            return stages, blocks
    return None


def gemm_build(tile: GemmTile, stages: int, problem: Problem) -> Build:
    """The build of marlin.cu for a tile."""
    return Build(
        "marlin.cu",
        "marlin_gemm",
        (
            *type_macros(problem, tile.zeros(problem.zeros)),
            ("M_TILE", tile.m_tile),
            ("WARPS_N", tile.warps_n),
            ("WARPS_K", tile.warps_k),
            ("K_STAGE", tile.k_stage),
            ("STAGES", stages),
            ("MIN_BLOCKS", tile.blocks),
        ),
    )


def gemm_plan(
    tile: GemmTile, grid: int, split_tiles: int, each: int, problem: Problem, limits: Limits
) -> Plan | None:
    """The plan of one tile shape with a given schedule, or None if it does not fit the device.

    Parameters
    ----------
    grid : int
        Blocks; with `each` a multiple of `split_tiles`.
    split_tiles : int
        Tiles, the first ones, whose k is shared by blocks.
    each : int
        Units that each of a split tile's blocks takes, all but the last, which takes the others; or 0 for
        units dealt out evenly over the grid.
    """
    fitting = gemm_stages(tile, problem, limits)
    if fitting is None:
        return None
    stages, _ = fitting
    smem = max(stages * tile.stage_bytes(problem.group_size, problem.zeros), tile.sums_bytes)
    schedule = grid, split_tiles, each
    microseconds = _gemm_microseconds(tile, *schedule, problem, limits)
    return _tiled_plan(tile, gemm_build(tile, stages, problem), smem, schedule, limits, microseconds)


def _tiled_plan(
    tile: Tile, build: Build, smem: int, schedule: tuple[int, int, int], limits: Limits, microseconds: float
) -> Plan:
    grid, split_tiles, each = schedule
    cluster = tile.cluster
    in_memory = split_tiles > 0 and (cluster == 1 or grid > split_tiles)
    return Plan(
        build=build,
        grid=(grid, cluster),
        threads=tile.threads,
        smem=_uncrowded(smem, grid * cluster, limits),
        split_tiles=split_tiles,
        each=each,
        partial_bytes=2 * grid * tile.partial_bytes // cluster if in_memory else 0,
        counters=split_tiles * cluster if in_memory else 0,
        microseconds=microseconds,
        cluster=cluster,
    )


def _uncrowded(smem: int, grid: int, limits: Limits) -> int:
    """Shared memory of a block, enlarged so that no SM has room for more blocks than its share of the grid.

    Where grids overlap (compute capability 9.0), the blocks of the next one go wherever there is room just
    then: with room for more than their share some SMs would get too many, others too few.
    """
    if limits.major < 9:
        return smem
    share = _ceil_div(grid, limits.sm_count)
    too_much_for_another = limits.smem_per_sm // (share + 1) - _SYSTEM_SMEM + 256
    most = min(limits.smem_per_block, limits.smem_per_sm // share - _SYSTEM_SMEM) - _STATIC_SMEM
    return max(smem, too_much_for_another) if too_much_for_another <= most else smem


def gemm_tiles(tile: Tile, problem: Problem) -> tuple[int, int]:
    """Number of tiles, and units of k in each."""
    tiles = _ceil_div(problem.m, tile.m_tile) * _ceil_div(problem.padded_n, tile.n_tile)
    return tiles, _ceil_div(problem.padded_k, tile.k_stage)


def _gemm_plans(problem: Problem, limits: Limits) -> Iterator[Plan]:
    shapes = gemm_tile_shapes(problem, limits)
    smallest = min(tile.m_tile for tile in shapes)
    for tile in shapes:
        if smallest < tile.m_tile >= 2 * problem.m:
            continue  # half the rows or more would be padding, and a smaller tile exists
        if tile.m_tile < 64 and problem.m > 256:
            continue  # unpacks every weight more often than a larger tile
        fitting = gemm_stages(tile, problem, limits)
        if fitting is None:
            continue
        for schedule in _schedules_of(tile, fitting[1], problem, limits):
            plan = gemm_plan(tile, *schedule, problem, limits)
            if plan is not None:
                yield plan


def _schedules_of(
    tile: Tile, blocks: int, problem: Problem, limits: Limits
) -> Iterator[tuple[int, int, int]]:
    tiles, units = gemm_tiles(tile, problem)
    unit = _unit_microseconds(tile, problem)
    if tile.cluster > 1:
        clusters = limits.sm_count // tile.cluster
        return _equal_shares(tiles, units, clusters, clusters, unit, tile.cluster)
    return _schedules(tiles, units, limits.sm_count * blocks, limits.sm_count, unit)


_SHARERS = (2, 3, 4, 5, 6, 7, 8, 12, 16)
_LEADS = (0.0, 1.5, 3.0)  # microseconds by which a tile's other blocks are done before its last


def _schedules(tiles: int, units: int, slots: int, sms: int, unit: float) -> Iterator[tuple[int, int, int]]:
    """(grid, split tiles, each) worth trying on a device of `sms` SMs that hold `slots` blocks at once."""
    yield min(tiles, slots), 0, 0
    # Dealt out evenly: one block an SM exchanges less, several hide it better. Where there are whole tiles
    # for every block, only the ragged wave and one more are dealt, so that few blocks share a tile.
    for grid in sorted({sms, slots}):
        rest = tiles % grid
        if tiles > grid:
            if rest:
                yield grid, rest + grid, 0
        elif rest and grid // tiles < units:
            yield grid, tiles, 0
    yield from _equal_shares(tiles, units, slots, sms, unit)


def _equal_shares(
    tiles: int, units: int, slots: int, sms: int, unit: float, cluster: int = 1
) -> Iterator[tuple[int, int, int]]:
    """Schedules in which every tile has the same number of blocks; or of clusters, where all count those."""
    for sharers in _SHARERS if cluster == 1 else (1, *_SHARERS):
        grid = tiles * sharers
        if grid > slots or sharers * cluster > units:
            break
        resident = _ceil_div(grid, sms)
        leads = _LEADS if sharers > 1 else (0.0,)
        for each in sorted({round((units - cluster * lead / (unit * resident)) / sharers) for lead in leads}):
            if each >= cluster and units - each * (sharers - 1) >= cluster:
                yield grid, tiles, each


# ---- marlin_wgmma (wgmma.cu): compute capability 9.0, more than eight rows --------------------------------

WGMMA_MIN_M = 9
"""Below, wgmma would multiply more rows of zeros than of activations: its tiles have no fewer than 16."""
_WGMMA_MAX_STAGES = 8
_WGMMA_MIN_STAGES = 2
_WGMMA_BARRIERS = 256  # bytes behind the ring


@dataclass(frozen=True)
class WgmmaTile:
    """The shape of a block's work in wgmma.cu.

    Parameters
    ----------
    m_tile : int
        Rows.
    slabs : int
        Instructions that a consumer warpgroup issues a k16 step, each for 64 columns.
    wg_n, wg_k : int
        Consumer warpgroups along N, and those that share a stage's k.
    k_stage : int
        k of a stage.
    blocks : int
        Blocks an SM should hold, which bounds registers and shared memory.
    pairs : bool
        Whether two blocks of a cluster, each with half of the k and of the rows, do what else a block does.
    """

    m_tile: int
    slabs: int
    wg_n: int
    wg_k: int
    k_stage: int
    blocks: int
    pairs: bool = False

    @property
    def cluster(self) -> int:
        """Blocks that do together what a schedule gives to one."""
        return 2 if self.pairs else 1

    @property
    def n_tile(self) -> int:
        return CHUNK_N * self.slabs * self.wg_n

    @property
    def threads(self) -> int:
        """Those that multiply, and a warpgroup that copies and passes on its registers."""
        return 128 * (self.wg_n * self.wg_k + 1)

    def scales_sums(self, group_size: int, zeros: Zeros) -> bool:
        """Whether codes are multiplied as they are, and sums scaled: see wgmma.cu."""
        if zeros == Zeros.DELTAS or group_size == -1:
            return zeros != Zeros.DELTAS
        share = self.k_stage // self.wg_k
        return self.m_tile * 2 <= group_size and share % group_size == 0

    def stage_bytes(self, group_size: int, zeros: Zeros) -> int:
        """Shared memory of a stage: activations, codes, scales and zeros, on a multiple of 1024."""
        rows = 0 if group_size == -1 else max(1, self.k_stage // group_size)
        scales = rows * self.n_tile * 2 * (2 if zeros else 1)
        copied = self.m_tile * self.k_stage * 2 + self.k_stage * self.n_tile // 2 + scales
        return _ceil_div(copied, 1024) * 1024

    @property
    def apart(self) -> bool:
        """Whether the output has shared memory of its own, behind the ring, not in it."""
        return self.blocks == 1 and self.wg_k == 1 and not self.pairs

    @property
    def output_bytes(self) -> int:
        """Shared memory through which a block's output leaves."""
        return self.m_tile * self.n_tile * 2 // self.cluster

    @property
    def least_ring(self) -> int:
        """Shared memory of the ring that the end of a tile needs."""
        return self.partial_bytes if self.apart else max(self.partial_bytes, self.output_bytes)

    @property
    def partial_bytes(self) -> int:
        """Float32 sums of a tile."""
        return self.m_tile * self.n_tile * 4

    def smem(self, stages: int, group_size: int, zeros: Zeros) -> int:
        """Shared memory of a block."""
        ring = stages * self.stage_bytes(group_size, zeros)
        return ring + (self.output_bytes if self.apart else 0) + _WGMMA_BARRIERS


Tile = GemmTile | WgmmaTile


def wgmma_tile_shapes(problem: Problem, limits: Limits) -> tuple[WgmmaTile, ...]:
    """The tile shapes for a problem on a device; none but for compute capability 9.0."""
    if limits.major != 9 or not limits.tensor_maps:
        return ()
    shapes = (
        WgmmaTile(16, 2, 1, 2, 256, 2),
        WgmmaTile(24, 2, 1, 2, 256, 2),
        WgmmaTile(32, 2, 1, 2, 256, 2),
        WgmmaTile(48, 1, 2, 1, 128, 2),
        WgmmaTile(64, 1, 2, 1, 128, 2),
        WgmmaTile(96, 1, 2, 1, 128, 2),
        WgmmaTile(96, 2, 2, 1, 128, 1),
        WgmmaTile(128, 1, 2, 1, 128, 1),
        WgmmaTile(128, 2, 2, 1, 128, 1),
        WgmmaTile(32, 2, 1, 2, 256, 2, pairs=True),
        WgmmaTile(48, 2, 1, 2, 256, 1, pairs=True),
        WgmmaTile(64, 2, 1, 2, 256, 1, pairs=True),
        WgmmaTile(96, 1, 2, 1, 128, 1, pairs=True),
        WgmmaTile(128, 1, 2, 1, 128, 1, pairs=True),
    )
    # Codes that are missing from a last stage are 0, not 8. Where the one scale of a column is applied to
    # sums, they are harmless times activations of zero; where to weights, unless 8 scales overflow float16.
    if problem.group_size == -1 and problem.zeros == Zeros.DELTAS:
        return tuple(tile for tile in shapes if problem.padded_k % tile.k_stage == 0)
    return shapes


def wgmma_stages(tile: WgmmaTile, problem: Problem, limits: Limits) -> tuple[int, int] | None:
    """Stages and blocks an SM that the device's shared memory allows, or None if the tile does not fit it."""
    stage = tile.stage_bytes(problem.group_size, problem.zeros)
    for blocks in range(tile.blocks, 0, -1):
        room = min(limits.smem_per_block, limits.smem_per_sm // blocks - _SYSTEM_SMEM) - _STATIC_SMEM
        stages = min(_WGMMA_MAX_STAGES, (room - tile.smem(0, problem.group_size, problem.zeros)) // stage)
        if stages >= _WGMMA_MIN_STAGES and stages * stage >= tile.least_ring:
            return stages, blocks
    return None


def wgmma_build(tile: WgmmaTile, stages: int, problem: Problem) -> Build:
    """The build of wgmma.cu for a tile."""
    return Build(
        "wgmma.cu",
        "marlin_wgmma",
        (
            *type_macros(problem, problem.zeros),
            ("M_TILE", tile.m_tile),
            ("J", tile.slabs),
            ("WG_N", tile.wg_n),
            ("WG_K", tile.wg_k),
            ("K_STAGE", tile.k_stage),
            ("STAGES", stages),
            ("MIN_BLOCKS", tile.blocks),
            ("APART", int(tile.apart)),
            ("PAIRS", int(tile.pairs)),
        ),
    )


def wgmma_plan(
    tile: WgmmaTile, grid: int, split_tiles: int, each: int, problem: Problem, limits: Limits
) -> Plan | None:
    """As `gemm_plan`. With a tile of pairs `grid` counts pairs, of which each has one piece of one tile."""
    if tile.pairs and not (split_tiles == gemm_tiles(tile, problem)[0] and each > 0):
        raise ValueError(f"pairs share every tile by `each`, got {split_tiles} tiles and each = {each}")
    fitting = wgmma_stages(tile, problem, limits)
    if fitting is None:
        return None
    stages, _ = fitting
    smem = tile.smem(stages, problem.group_size, problem.zeros)
    schedule = grid, split_tiles, each
    microseconds = _wgmma_microseconds(tile, *schedule, problem, limits)
    return _tiled_plan(tile, wgmma_build(tile, stages, problem), smem, schedule, limits, microseconds)


def _wgmma_plans(problem: Problem, limits: Limits) -> Iterator[Plan]:
    if problem.m < WGMMA_MIN_M:
        return
    shapes = wgmma_tile_shapes(problem, limits)
    enough = min((tile.m_tile for tile in shapes if tile.m_tile >= problem.m), default=0)
    for tile in shapes:
        if tile.m_tile > enough > 0:
            continue  # more rows than there are, and a smaller tile exists
        if tile.m_tile < 128 and problem.m > 512:
            continue  # unpacks every weight more often than a larger tile
        fitting = wgmma_stages(tile, problem, limits)
        if fitting is None:
            continue
        for schedule in _schedules_of(tile, fitting[1], problem, limits):
            plan = wgmma_plan(tile, *schedule, problem, limits)
            if plan is not None:
                yield plan


# ---- marlin_decode (decode.cu): few rows ----------------------------------------------------------------

DECODE_BLOCK_K = 128
DECODE_MAX_M = 24
_DECODE_ROW = DECODE_BLOCK_K * 2 + 16  # bytes of activations in a warp's buffer


@dataclass(frozen=True)
class DecodeShape:
    """The shape of a block's work in decode.cu: columns of 64, and warps that share a column's k."""

    chunks: int
    k_warps: int

    @property
    def warps(self) -> int:
        return self.chunks * self.k_warps

    def smem(self, rows: int, group_size: int, zeros: Zeros) -> int:
        """The warps' buffers of activations and scales, whose place sums take in the end."""
        scales = 0 if group_size == -1 else DECODE_BLOCK_K // group_size * 128 * (2 if zeros else 1)
        return self.warps * 2 * (rows * _DECODE_ROW + scales)


def decode_row_blocks(problem: Problem) -> int:
    """How many times eight rows a block multiplies."""
    return _ceil_div(problem.m, 8)


def decode_max_warps(problem: Problem, limits: Limits) -> int:
    """Warps that a block can have: rows take registers, and from capability 10 on small groups do."""
    return 8 if problem.m > 8 or (problem.group_size == 32 and limits.major >= 10) else 12


def decode_max_rows(problem: Problem, limits: Limits) -> int:
    """Rows that there are builds of decode.cu for: more leave no registers for small groups."""
    if problem.group_size == 32 and problem.zeros == Zeros.DELTAS and limits.major == 12:
        return 8
    return 16 if problem.group_size in (32, 64) else DECODE_MAX_M


def decodes(problem: Problem, limits: Limits) -> bool:
    """Whether there is a build of decode.cu for a problem; it counts bytes of scales in 32 bits."""
    groups = 1 if problem.group_size == -1 else problem.padded_k // problem.group_size
    fits = 2 * (groups + DECODE_BLOCK_K) * problem.padded_n < 2**32
    return fits and problem.m <= decode_max_rows(problem, limits)


def decode_build(problem: Problem, limits: Limits) -> Build:
    """The build of decode.cu, taking zero points as the problem says."""
    return Build(
        "decode.cu",
        "marlin_decode",
        (
            *type_macros(problem, problem.zeros),
            ("M_BLOCKS", decode_row_blocks(problem)),
            ("MAX_WARPS", decode_max_warps(problem, limits)),
        ),
    )


def decode_shapes(problem: Problem, split: int, limits: Limits) -> list[DecodeShape]:
    """Block shapes worth trying where k is split over `split` blocks.

    All the warps that a block can have, and eight: fewer share memory as well, and add up sooner.
    """
    most = decode_max_warps(problem, limits)
    share = _ceil_div(_ceil_div(problem.padded_k, DECODE_BLOCK_K), split)
    shapes = []
    for chunks in range(1, most + 1):
        for warps in {8, most}:
            k_warps = min(warps // chunks, share)
            if k_warps > 0:
                shapes.append(DecodeShape(chunks, k_warps))
    return list(dict.fromkeys(shapes))


def decode_plan(shape: DecodeShape, split: int, problem: Problem, limits: Limits) -> Plan | None:
    """The plan of one block shape with k split over `split` blocks, or None if it does not fit the device."""
    columns = _ceil_div(problem.padded_n, CHUNK_N * shape.chunks)
    rows = 8 * decode_row_blocks(problem)
    outputs = rows * CHUNK_N * shape.chunks
    # Pairs of blocks: those that all run at once, for devices place larger clusters worse.
    cluster = 2 if limits.major >= 9 and split == 2 and 2 * columns <= limits.sm_count else 1
    smem = shape.smem(rows, problem.group_size, problem.zeros) + (cluster - 1) * outputs * 4
    if smem + _STATIC_SMEM > limits.smem_per_block:
        return None
    in_memory = split > 1 and cluster == 1
    return Plan(
        build=decode_build(problem, limits),
        grid=(columns, split),
        threads=32 * shape.warps,
        smem=smem,
        split_tiles=0,
        each=0,
        partial_bytes=columns * split * outputs * 4 if in_memory else 0,
        counters=columns if in_memory else 0,
        microseconds=_decode_microseconds(shape, columns, split, cluster, problem, limits),
        chunks=shape.chunks,
        cluster=cluster,
    )


def _decode_plans(problem: Problem, limits: Limits) -> Iterator[Plan]:
    if not decodes(problem, limits):
        return
    blocks_of_k = _ceil_div(problem.padded_k, DECODE_BLOCK_K)
    for split in range(1, min(8, blocks_of_k) + 1):
        for shape in decode_shapes(problem, split, limits):
            columns = _ceil_div(problem.padded_n, CHUNK_N * shape.chunks)
            if columns * (split - 1) >= limits.sm_count:
                continue  # a smaller split keeps every SM busy
            plan = decode_plan(shape, split, problem, limits)
            if plan is not None:
                yield plan


# ---- the model ------------------------------------------------------------------------------------------
#
# A launch takes a fixed time, plus the larger of reading everything once and multiplying, plus the exchange
# of partial sums. Multiplying is linear in the units of work of the busiest SM, whether they belong to one
# block there or to several: docs/notes/planner.md has the measurements and the fit.

_START = 3.5  # microseconds from launch to the first product, and from the last one to the end
_STREAM = 4.1e6  # bytes of global memory a microsecond


def min_bytes(m: int, k: int, n: int, group_size: int = 128, symmetric: bool = True) -> int:
    """Bytes a 4-bit GEMM must move: codes, scales (and zero terms), x once, the result once."""
    groups = 1 if group_size == -1 else k // group_size
    per_group = 2 if symmetric else 4
    return k * n // 2 + groups * n * per_group + 2 * m * k + 2 * m * n


def _stream_microseconds(problem: Problem, stream: float = _STREAM) -> float:
    """Time to move those bytes once."""
    layer = problem.padded_k, problem.padded_n, problem.group_size
    return min_bytes(problem.m, *layer, symmetric=not problem.zeros) / stream


def _unit_microseconds(tile: Tile, problem: Problem) -> float:
    """What a unit costs an SM: for 64 columns x 128 k, unpacking, and fetching and multiplying the rows."""
    chunks = tile.n_tile // CHUNK_N * tile.k_stage / 128
    if isinstance(tile, WgmmaTile):
        # Two instructions a k16 step share what surrounds them; few rows take an instruction's time too.
        if tile.slabs == 1:
            chunk = 0.128 + 0.00139 * tile.m_tile + 0.00081 * max(0, tile.m_tile - 72)
        elif tile.wg_k == 2:
            chunk = 0.0667 + 0.0024 * min(32, max(20, tile.m_tile)) + 0.0018 * max(0, tile.m_tile - 32)
        else:
            chunk = 0.00276 * tile.m_tile - 0.0008
        if tile.m_tile <= 64 and not tile.scales_sums(problem.group_size, problem.zeros):
            chunk += 0.0063
        return (chunk + (0.0107 if problem.zeros else 0.0)) * chunks
    chunk = 0.094 + (0.0034 + 0.0007 / tile.warps_n) * tile.m_tile
    if problem.zeros:
        chunk += 0.008
    return chunk * chunks


def _both(a: float, b: float, how: int = 3) -> float:
    """Two times that hide behind each other, the more completely the larger `how` is."""
    return math.pow(a**how + b**how, 1 / how)


def _busiest_units(tile: Tile, grid: int, split_tiles: int, each: int, problem: Problem, sms: int) -> float:
    """Units of the busiest SM."""
    tiles, units = gemm_tiles(tile, problem)
    resident = _ceil_div(grid * tile.cluster, sms)
    if each:
        rest = units - (grid // split_tiles - 1) * each
        return (resident - 1) * (each / tile.cluster) + _ceil_div(max(each, rest), tile.cluster)
    turns, rest = divmod(tiles - split_tiles, grid)
    # Half of the SMs get their second block before the other half gets its first, so a rest falls unevenly.
    uneven = min(resident, _ceil_div(2 * rest, sms))
    return (resident * split_tiles / grid + turns * resident + uneven) * units


def _sharers(grid: int, split_tiles: int, each: int) -> float:
    """Blocks that share a split tile, on average."""
    return grid // split_tiles if each else grid / split_tiles + 1


def _gemm_microseconds(
    tile: GemmTile, grid: int, split_tiles: int, each: int, problem: Problem, limits: Limits
) -> float:
    resident = _ceil_div(grid, limits.sm_count)
    unit = _unit_microseconds(tile, problem) * (1.0 if resident == 1 else 0.962)
    busiest = _busiest_units(tile, grid, split_tiles, each, problem, limits.sm_count)
    work = max(busiest * unit, _stream_microseconds(problem))
    if not split_tiles:
        return _START + work
    # Adding the partial sums of the blocks that share a tile: 1 KiB of them is written, and read by the last.
    kilobytes, sharers = tile.partial_bytes / 1024, _sharers(grid, split_tiles, each)
    exchange = 1.0 + kilobytes * (0.0145 * resident + 0.028 * sharers)
    if each:
        lead = (gemm_tiles(tile, problem)[1] - sharers * each) * unit * resident
        return _START + work + exchange + 0.2 * max(0.0, 3.0 - lead)
    # Dealt out evenly, most blocks take part in two exchanges, and blocks walk k out of step: what caches
    # cannot hold of the activations is read again.
    again = min(0.7e-6 * 2 * problem.m * problem.padded_k, 0.135 * work)
    return _START + work + exchange + 2.25 + again


_WGMMA_STREAM = 5.2e6  # as _STREAM, seen from grids that overlap
# Multiplications and additions a microsecond at the power limit: the fewer rows of a tile, the more unpacking
# a product takes. Tiles of 128 columns fetch activations twice as often, seen from thousands of rows on.
_WGMMA_POWER, _UNPACKING_ROWS = 1045e6, 34
_MANY_ROWS, _NARROW = 2048, 0.95
_L2 = 25e6  # bytes of activations that caches hold beside the rest
_PAIR_EXCHANGE = 1.2  # microseconds that the two blocks of a pair take to exchange sums


def _wgmma_microseconds(
    tile: WgmmaTile, grid: int, split_tiles: int, each: int, problem: Problem, limits: Limits
) -> float:
    tiles, units = gemm_tiles(tile, problem)
    resident = _ceil_div(grid * tile.cluster, limits.sm_count)
    unit = _unit_microseconds(tile, problem)
    work = _busiest_units(tile, grid, split_tiles, each, problem, limits.sm_count) * unit
    flops = 2 * tiles * units * tile.m_tile * tile.n_tile * tile.k_stage
    power = _WGMMA_POWER / (1 + _UNPACKING_ROWS / tile.m_tile)
    if tile.n_tile <= 128 and problem.m >= _MANY_ROWS:
        power *= _NARROW
    work = _both(work, flops / power, 8)
    # More blocks wait longer for the first bytes; few leave SMs idle, whose share of L2 others do not get.
    full = grid * tile.cluster / limits.sm_count
    took = 0.8 + min(1.0, max(0.4, full)) + 1.8 * max(0.0, 1.0 - full)
    took += _both(work, _stream_microseconds(problem, _WGMMA_STREAM))
    turns = _ceil_div(tiles - split_tiles, grid)
    turn = 1.4 if tile.apart else 2.59  # that a block takes to begin another tile
    if not split_tiles:
        return took + turn * (turns - 1)
    kilobytes = tile.partial_bytes / 1024 / tile.cluster
    sharers = _sharers(grid, split_tiles, each)
    if tile.pairs:
        took += _PAIR_EXCHANGE
        if sharers == 1:
            return took
    took += 0.022 * kilobytes if resident > 1 else 0.0
    if each:
        # The longer the last block is at work after the others, the more of the exchange is over by then.
        lead = (units - sharers * each) / tile.cluster * unit * resident
        hidden = max(0.0, 5.98 + 0.331 * kilobytes - lead)
        return took + sharers * (0.0096 * kilobytes + 0.088) + 0.124 * hidden
    # Blocks walk k out of step: of activations that caches cannot hold more is read again.
    beyond = min(1.0, max(0.0, 2 * problem.m * problem.padded_k / _L2 - 1.0))
    again = (0.0914 if tile.n_tile <= 128 else 0.0687) * beyond * min(1.0, split_tiles / tiles) * work
    exchange = sharers * (0.0335 * kilobytes + 0.102) + 0.786
    return took + exchange + turn * (split_tiles / grid + turns) + again


# Microseconds that a warp takes for a block of 128 k: alone, and more for each warp of the SM, by row blocks.
_DECODE_STEP = 0.48
_DECODE_ISSUE = (0.030, 0.066, 0.121)
# What zero points make of the latter, with one row block and with more.
_DECODE_ISSUE_ZEROS = {Zeros.NONE: (1.0, 1.0), Zeros.DELTAS: (1.1, 1.25), Zeros.POINTS: (1.02, 1.1)}
_DECODE_STREAM = 4.8e6  # as _STREAM, seen from grids that overlap
_DECODE_START = 1.8


def _decode_microseconds(
    shape: DecodeShape, columns: int, split: int, cluster: int, problem: Problem, limits: Limits
) -> float:
    row_blocks = decode_row_blocks(problem)
    held = max(1, decode_max_warps(problem, limits) // shape.warps)  # blocks an SM, by their registers
    resident = min(held, _ceil_div(columns * split, limits.sm_count))
    waves = _ceil_div(columns * split, limits.sm_count * held)
    steps = waves * _ceil_div(_ceil_div(problem.padded_k, DECODE_BLOCK_K), split * shape.k_warps)
    issue = _DECODE_ISSUE[row_blocks - 1] * _DECODE_ISSUE_ZEROS[problem.zeros][row_blocks > 1]
    if problem.group_size == 32 and row_blocks > 1:
        issue *= 1.1
    pace = steps * (_DECODE_STEP + issue * shape.warps * resident)
    work = _both(pace, _stream_microseconds(problem, _DECODE_STREAM))
    exchange = 0.0
    if split > 1:
        exchange = (
            0.2 + shape.chunks * (0.06 * row_blocks + (0.25 if row_blocks > 1 else 0.0))
            if cluster > 1
            else 0.86 + 0.055 * split * row_blocks * shape.chunks
        )
    return _DECODE_START + work + exchange + 1.7 * (waves - 1)


def plans(problem: Problem, limits: Limits) -> list[Plan]:
    """All plans worth trying, best first.

    Raises
    ------
    ValueError
        ``m`` is not positive.
    """
    if problem.m < 1:
        raise ValueError(f"a plan needs at least one row, got m = {problem.m}")
    found = [*_decode_plans(problem, limits), *_gemm_plans(problem, limits), *_wgmma_plans(problem, limits)]
    return sorted(found, key=lambda plan: plan.microseconds)


@lru_cache(maxsize=1 << 14)
def choose(problem: Problem, limits: Limits) -> Plan:
    """The plan with the least predicted time."""
    return plans(problem, limits)[0]


@lru_cache(maxsize=1 << 14)
def choose_invariant(problem: Problem, limits: Limits) -> Plan:
    """A plan for at most `decode_max_rows` rows that gives a row the same bits whatever their number.

    What a row's sums are made of, in which order, is decode.cu's share of k: that of the best plan for the
    most rows, taken for any number of them.
    """
    most = decode_max_rows(problem, limits)
    if problem.m == most:
        return min(_decode_plans(problem, limits), key=lambda plan: plan.microseconds)
    best = choose_invariant(replace(problem, m=most), limits)
    shape = DecodeShape(best.chunks, best.block[1])
    plan = decode_plan(shape, best.grid[1], problem, limits)
    assert plan is not None, "fewer rows need less shared memory"
    return plan
