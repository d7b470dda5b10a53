"""Typed launchers, one a kernel: they fill in the arguments, the grid and the scratch memory.

Nothing else calls a kernel. Callers have checked dtypes, shapes and devices (`marlin_jit.dispatch` does);
arrays lie on the current device, and work goes to CuPy's current stream. Activations and outputs are given
as a `Matrix`: a pointer and a row stride, so that strided arrays need no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from marlin_jit import _tensor_map
from marlin_jit._array import BFLOAT16, Array
from marlin_jit._cupy import import_cupy
from marlin_jit._tensor_map import NO_MAP, tensor_map
from marlin_jit.device import DeviceInfo, current_device, scratch
from marlin_jit.jit import Kernel, load_kernel
from marlin_jit.layout import CHUNK_N
from marlin_jit.plan import (
    DECODE_BLOCK_K,
    DECODE_MAX_M,
    Build,
    Limits,
    Plan,
    Problem,
    Zeros,
    decode_build,
    decodes,
    gemm_build,
    gemm_stages,
    gemm_tile_shapes,
    type_macros,
    wgmma_build,
    wgmma_stages,
    wgmma_tile_shapes,
)
from marlin_jit.rounding import Iteration
from marlin_jit.weight import MarlinWeight, QuantWeight

_MAX_GRID_Y = 65535


@dataclass(frozen=True)
class Matrix:
    """Rows of 16-bit elements in device memory: address, row stride in elements, rows, columns."""

    pointer: int
    stride: int
    rows: int
    columns: int

    def part(self, first: int, rows: int) -> Matrix:
        """Some of the rows."""
        return Matrix(self.pointer + 2 * first * self.stride, self.stride, rows, self.columns)

    def columns_from(self, first: int, most: int) -> Matrix:
        """Some of the columns."""
        return Matrix(self.pointer + 2 * first, self.stride, self.rows, min(most, self.columns - first))


def limits_of(device: DeviceInfo) -> Limits:
    """What `marlin_jit.plan` needs to know of a device."""
    shared = device.smem_per_block, device.smem_per_sm
    return Limits(device.sm_count, *shared, device.capability[0], _tensor_map.available())


def problem_of(rows: int, weight: MarlinWeight, *, asymmetric: bool) -> Problem:
    """What `marlin_jit.plan` needs to know of a product."""
    padded_k, padded_n = weight.padded_shape
    zeros = Zeros.NONE
    if asymmetric:
        zeros = Zeros.DELTAS if weight.points16 is None else Zeros.POINTS
    return Problem(rows, padded_k, padded_n, weight.group_size, zeros, weight.dtype == BFLOAT16)


# ---- the Marlin GEMM ------------------------------------------------------------------------------------


def whole_vectors(columns: int) -> int:
    """Columns that the tiled kernels read of a row of x: rounded up to whole 16-byte vectors."""
    return -(-columns // 8) * 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """A launch of a planned kernel, complete but for activations, bias and output; made by `prepare`."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int]
    smem: int
    weights: tuple[Any, ...]  # addresses, tensor maps
    sizes: tuple[int, ...]
    keeps: tuple[Any, ...]  # the arrays whose addresses these are
    cluster: int

    def __call__(self, x: int, x_stride: int, bias: int, out: int, out_stride: int) -> None:
        """Launch, with addresses (0: no bias) and row strides in elements, on the current stream."""
        first, boxes = self._activations(x, x_stride), self._boxes(out, out_stride)
        args = (*first, *self.weights, bias, *boxes, out, out_stride, *self.sizes)
        self.kernel(self.grid, self.block, args, self.smem, self.cluster)

    def _activations(self, x: int, x_stride: int) -> tuple[Any, ...]:
        """How a kernel is told of activations; the address is in the first argument alone."""
        return x, x_stride

    def _boxes(self, out: int, out_stride: int) -> tuple[bytes, ...]:
        """By what tensor map outputs leave, if the kernel takes one."""
        return ()

    def _has_boxes(self) -> bool:
        """Whether that map depends on the address."""
        return False

    def repeated(self, x: int, x_stride: int, out_stride: int, stream: int) -> Repeated:
        """The same launch to be made again by this thread on `stream`, where only addresses differ."""
        first, boxes = self._activations(x, x_stride), self._boxes(0, out_stride)
        args = (*first, *self.weights, 0, *boxes, 0, out_stride, *self.sizes)
        frozen = self.kernel.frozen(self.grid, self.block, args, self.smem, self.cluster, stream)
        bias_at = len(first) + len(self.weights)
        fields = frozen.field(0), frozen.field(bias_at), frozen.field(bias_at + 1 + len(boxes))
        boxes_field = frozen.field(bias_at + 1) if self._has_boxes() else None
        return Repeated(self, x_stride, out_stride, *fields, boxes_field, frozen.launch)


@dataclass(frozen=True, slots=True)
class Repeated:
    """A launch ready in memory but for three addresses; made by `Prepared.repeated`, for one thread."""

    prepared: Prepared
    x_stride: int
    out_stride: int
    x: Any  # arguments' places in memory
    bias: Any
    out: Any
    boxes: Any  # or None
    launch: Callable[[], None]

    def __call__(self, x: int, bias: int, out: int) -> None:
        """Launch, with addresses (0: no bias)."""
        self.x.value = self.prepared._activations(x, self.x_stride)[0]
        self.bias.value = bias
        self.out.value = out
        if self.boxes is not None:
            (self.boxes.value,) = self.prepared._boxes(out, self.out_stride)
        try:
            self.launch()
        except RuntimeError as error:
            how = self.prepared
            raise how.kernel.refused(how.grid, how.block, how.smem, error) from error


@dataclass(frozen=True, slots=True)
class PreparedWgmma(Prepared):
    """The same of `marlin_wgmma`, which reads activations, and may write outputs, by tensor maps."""

    kind: int
    rows: int
    columns: int
    out_columns: int
    box: tuple[int, int]
    boxed: bool  # whether outputs leave by a map too

    def _activations(self, x: int, x_stride: int) -> tuple[Any, ...]:
        return (self._map(x, self.columns, x_stride),)

    def _boxes(self, out: int, out_stride: int) -> tuple[bytes, ...]:
        # What is not aligned the kernel writes without a map.
        boxed = self.boxed and out and out % 16 == out_stride % 8 == 0
        return (self._map(out, self.out_columns, out_stride) if boxed else NO_MAP,)

    def _has_boxes(self) -> bool:
        return self.boxed

    def _map(self, address: int, columns: int, stride: int) -> bytes:
        return tensor_map(
            address, self.kind, self.rows, columns, 2 * stride, self.box, _tensor_map.SWIZZLE_128
        )


def prepare(plan: Plan, rows: int, columns: int, weight: MarlinWeight, *, gated: bool = False) -> Prepared:
    """Get ready to launch a planned kernel on the current device and stream.

    Parameters
    ----------
    plan : Plan
        For these rows and this weight, whose zero points are used as the plan's build says.
    rows, columns : int
        M, and the columns of the output that are written.
    gated : bool
        The weight is gate and up, eight columns of each in turn; there is no bias.

    Raises
    ------
    CompileError, LaunchError
    """
    kernel = _kernel(plan.build, plan.smem)
    partials = scratch.get("partial sums", plan.partial_bytes) if plan.partial_bytes else None
    counters = scratch.get("arrivals", 4 * plan.counters, zeroed=True) if plan.counters else None
    zeros = _zeros(weight, _defines(plan.build)["ZEROS"])
    keeps = (weight.B, weight.scales, zeros, partials, counters)
    launch = kernel, (*plan.grid, 1), plan.block, plan.smem
    scratch_addresses = _address(partials), _address(counters)
    padded_k, padded_n = weight.padded_shape
    if plan.build.name == "marlin_wgmma":
        return PreparedWgmma(
            *launch,
            weights=(*_weight_maps(plan.build, weight, zeros), _address(weight.scales), _address(zeros)),
            sizes=(rows, columns, padded_n, padded_k, gated, plan.split_tiles, plan.each, *scratch_addresses),
            keeps=keeps,
            cluster=plan.cluster,
            kind=_tensor_map.BFLOAT16 if weight.dtype == BFLOAT16 else _tensor_map.FLOAT16,
            rows=rows,
            columns=whole_vectors(weight.K),
            out_columns=columns,
            box=(_defines(plan.build)["M_TILE"], 64),
            boxed=bool(_defines(plan.build)["APART"]),
        )
    if plan.build.name == "marlin_decode":
        share, extra = divmod(-(-padded_k // DECODE_BLOCK_K), plan.grid[1] * plan.block[1])
        schedule: tuple[int, ...] = (plan.cluster > 1, share, extra)
    else:
        schedule = plan.split_tiles, plan.each
    return Prepared(
        *launch,
        weights=(_address(weight.B), _address(weight.scales), _address(zeros)),
        sizes=(
            *(rows, columns, whole_vectors(weight.K), padded_n, padded_k, gated),
            *(*schedule, *scratch_addresses),
        ),
        keeps=keeps,
        cluster=plan.cluster,
    )


def _zeros(weight: MarlinWeight, kind: int) -> Array | None:
    """What a kernel whose ``ZEROS`` is `kind` reads of zero points."""
    return (None, weight.delta16, weight.points16)[kind]


def _weight_maps(build: Build, weight: MarlinWeight, zeros: Array | None) -> tuple[bytes, bytes, bytes]:
    """Tensor maps of codes (a k16 row of a column is 8 bytes), scales and zeros, with boxes of a stage."""
    macros = _defines(build)
    padded_k, padded_n = weight.padded_shape
    n_tile, k_stage = 64 * macros["J"] * macros["WG_N"], macros["K_STAGE"]
    codes = (_tensor_map.UINT64, padded_k // 16, padded_n, 8 * padded_n, (k_stage // 16, n_tile))
    group_rows = 1 if weight.group_size == -1 else max(1, k_stage // weight.group_size)
    scales = (_tensor_map.UINT16, weight.scales.shape[0], padded_n, 2 * padded_n, (group_rows, n_tile))
    return (
        tensor_map(_address(weight.B), *codes),
        tensor_map(_address(weight.scales), *scales),
        tensor_map(_address(weight.scales if zeros is None else zeros), *scales),
    )


def marlin(
    plan: Plan, x: Matrix, weight: MarlinWeight, bias: Any, out: Matrix, *, gated: bool = False
) -> Prepared:
    """``out = x @ W (+ bias)`` by a planned kernel, or ``silu(x @ gate) * (x @ up)``.

    Parameters
    ----------
    plan, weight, gated
        As for `prepare`.
    x : Matrix [M, K]
        Address and row stride multiples of 16 bytes, rows not overlapping. Where K is no multiple of 8, the
        columns up to the next one are zero.
    bias : cupy.ndarray [N] or None
    out : Matrix [M, N]
        Its columns are those that are written.

    Returns
    -------
    Prepared
        For more launches of the same kind on this stream.

    Raises
    ------
    CompileError, LaunchError
    """
    assert bias is None or not gated
    prepared = prepare(plan, x.rows, out.columns, weight, gated=gated)
    prepared(x.pointer, x.stride, _address(bias), out.pointer, out.stride)
    return prepared


def load(plan: Plan) -> None:
    """Compile and load a plan's kernel ahead of its first launch."""
    _kernel(plan.build, plan.smem)


def load_all(plans: Iterable[Plan]) -> None:
    """The same of many, side by side, on the device that is current here."""
    cupy = import_cupy()
    device = cupy.cuda.runtime.getDevice()

    def load_there(plan: Plan) -> None:
        with cupy.cuda.Device(device):  # a thread's own
            load(plan)

    with ThreadPoolExecutor() as pool:
        list(pool.map(load_there, plans))


# ---- the correction pair --------------------------------------------------------------------------------


def padded_groups(weight: MarlinWeight) -> int:
    """Cells of a row of group sums: groups rounded up to the eight that `correct` takes at a time."""
    return -(-weight.groups // 8) * 8


def group_sums(x: Matrix, weight: MarlinWeight) -> Array:
    """Sums of the activations over each group, in scratch memory until the next call, for `correct`.

    `x` is as for `marlin`. Float32, in the order of `sum_position` in ``layout.cuh``; M is rounded up to 16
    rows, whose sums are not written, and groups to `padded_groups`, whose sums are zero. Meanwhile L2 fetches
    the deltas.
    """
    delta = weight.delta16
    assert delta is not None
    groups = padded_groups(weight)
    sums = scratch.get("group sums", 4 * -(-x.rows // 16) * 16 * groups)
    kernel = _kernel(_sums_build(weight.group_size, weight.dtype == BFLOAT16))
    args = (
        *(x.pointer, x.stride, _address(sums), x.rows, whole_vectors(x.columns), groups),
        *(_address(delta), delta.size),
    )
    lanes = 32 if weight.group_size == -1 else weight.group_size // 8
    kernel((-(-x.rows * groups * lanes // 256), 1, 1), 256, args)
    return sums


def correct(sums: Array, weight: MarlinWeight, out: Matrix) -> None:
    """``out += sums @ delta``, in place."""
    columns, row_blocks = -(-out.columns // 64), -(-out.rows // 16)
    group_warps = correction_group_warps(columns * row_blocks, current_device().sm_count)
    kernel = _kernel(_correction_build(group_warps, weight.dtype == BFLOAT16))
    groups, rows_a_block = padded_groups(weight), 16 * (4 // group_warps)
    # As many rows at a time as a grid holds: 4 million.
    for first in range(0, out.rows, rows_a_block * _MAX_GRID_Y):
        rows = min(out.rows - first, rows_a_block * _MAX_GRID_Y)
        args = (
            *(sums.data.ptr + 4 * first * groups, _address(weight.delta16)),
            *(out.pointer + 2 * first * out.stride, out.stride),
            *(rows, out.columns, weight.padded_shape[1], weight.groups, groups),
        )
        kernel((columns, -(-rows // rows_a_block), 1), 128, args)


def correction_group_warps(pieces: int, sm_count: int) -> int:
    """Warps that share a 16 x 64 piece of the output: as many as the device can hold all at once."""
    resident = 20 * sm_count
    return next((warps for warps in (4, 2) if warps * pieces <= resident), 1)


# ---- scalar kernels -------------------------------------------------------------------------------------


def native(
    x: Matrix,
    weight: MarlinWeight | QuantWeight,
    bias: Any,
    out: Matrix,
    iteration: Iteration | None = None,
) -> None:
    """``out = x @ W (+ bias)``, one thread an output: any shape, any group size.

    For a packed weight with ``perm``, `x` is already in packed order. With `iteration`, codes are those that
    the weight's rounding channel gives them then.
    """
    packed = isinstance(weight, MarlinWeight)
    rounding, channel, key, phase = 0, None, 0, 0
    if iteration is not None:
        assert isinstance(weight, QuantWeight) and weight.rounding is not None
        rounding = _ROUNDING[weight.rounding]
        channel, key, phase = getattr(weight, weight.rounding), iteration.seed_key, iteration.phase
    kernel = _kernel(_native_build(packed, weight.dtype == BFLOAT16, rounding))
    pointers, sizes = _scalar_weight(weight)
    args = (
        *(x.pointer, x.stride, *pointers, _address(bias), out.pointer, out.stride),
        *(x.rows, weight.N, weight.K, *sizes, _address(channel), key, phase),
    )
    kernel((-(-weight.N // 128), min(x.rows, _MAX_GRID_Y), 1), 128, args)


def dequantize(weight: MarlinWeight | QuantWeight, out: Array) -> None:
    """Fill `out` [K, N], contiguous, of the weight's dtype, rows in source order."""
    packed = isinstance(weight, MarlinWeight)
    kernel = _kernel(_scalar_build("dequantize.cu", "dequantize", packed, weight.dtype == BFLOAT16))
    pointers, sizes = _scalar_weight(weight)
    source_row = weight.perm if isinstance(weight, MarlinWeight) else None
    args = (*pointers, _address(source_row), _address(out), weight.N, weight.K, *sizes)
    kernel((-(-weight.N // 256), min(weight.K, _MAX_GRID_Y), 1), 256, args)


def dense_columns(weight: MarlinWeight) -> int:
    """How many columns of a weight are made dense at a time: whole chunks, at least one."""
    chunks = max(1, _DENSE_BYTES // (2 * weight.padded_shape[0] * CHUNK_N))
    return min(weight.padded_shape[1], CHUNK_N * chunks)


def dense_weights(weight: MarlinWeight, first: int, out: Array) -> None:
    """Fill `out` [columns, padded K] with the weight's columns from `first` on, rows in packed order.

    `first` and the number of columns are multiples of 64; `out` is contiguous.
    """
    problem = problem_of(1, weight, asymmetric=not weight.symmetric)
    zeros = _zeros(weight, problem.zeros)
    padded_k, padded_n = weight.padded_shape
    args = (*map(_address, (weight.B, weight.scales, zeros, out)), first // CHUNK_N, padded_n, padded_k)
    kernel = _kernel(_dense_build(problem))
    kernel((out.shape[0] // CHUNK_N, -(-padded_k // (16 * _DENSE_WARPS)), 1), 32 * _DENSE_WARPS, args)


def swiglu(y: Matrix, out: Matrix, *, bfloat16: bool) -> None:
    """``out = silu(gate) * up`` of a product `y` with eight columns of gate and eight of up in turn."""
    kernel = _kernel(_swiglu_build(bfloat16))
    args = (y.pointer, y.stride, out.pointer, out.stride, out.rows, out.columns)
    kernel((-(-out.columns // 256), min(out.rows, _MAX_GRID_Y), 1), 256, args)


def gather(x: Matrix, order: Array, out: Matrix) -> None:
    """``out[:, i] = x[:, order[i]]``; what is left of a row's stride becomes zero."""
    aligned = x.pointer % 16 == x.stride % 8 == x.columns % 8 == 0
    row_bytes = 2 * x.columns
    staged = aligned and row_bytes <= current_device().smem_per_block
    smem = row_bytes if staged else 0
    args = (x.pointer, x.stride, _address(order), out.pointer, out.stride, x.rows, x.columns, staged)
    grid = -(-out.stride // _GATHER_COLUMNS), min(x.rows, _MAX_GRID_Y), 1
    _kernel(_GATHER, smem)(grid, _GATHER_THREADS, args, smem)


def _scalar_weight(weight: MarlinWeight | QuantWeight) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Codes, scales, delta, group of each row; then columns, groups, group size."""
    size = weight.K if weight.group_size == -1 else weight.group_size
    if isinstance(weight, MarlinWeight):
        pointers = (weight.B, weight.scales, weight.delta, None)
        columns = weight.padded_shape[1]
    else:
        pointers = (weight.q, weight.scale, weight.delta, weight.g_idx)
        columns = weight.N
    return tuple(map(_address, pointers)), (columns, weight.groups, size)


# ---- builds ---------------------------------------------------------------------------------------------


def _scalar_build(source: str, name: str, packed: bool, bfloat16: bool) -> Build:
    return Build(source, name, (("BF16", int(bfloat16)), ("PACKED", int(packed))))


_ROUNDING = {"frac4": 1, "sign_bit": 2}  # build constant of native.cu


def _native_build(packed: bool, bfloat16: bool, rounding: int) -> Build:
    plain = _scalar_build("native.cu", "native_int4", packed, bfloat16)
    return replace(plain, macros=(*plain.macros, ("ROUNDING", rounding)))


def _correction_build(group_warps: int, bfloat16: bool) -> Build:
    return Build("correction.cu", "correction", (("BF16", int(bfloat16)), ("GROUP_WARPS", group_warps)))


def _sums_build(group_size: int, bfloat16: bool) -> Build:
    group = 0 if group_size == -1 else group_size
    return Build("group_sums.cu", "group_sums", (("BF16", int(bfloat16)), ("GROUP", group)))


def _swiglu_build(bfloat16: bool) -> Build:
    return Build("swiglu.cu", "swiglu", (("BF16", int(bfloat16)),))


_DENSE_WARPS, _DENSE_BYTES = 8, 64 << 20


def _dense_build(problem: Problem) -> Build:
    return Build("dense.cu", "dense_weights", type_macros(problem, problem.zeros))


_GATHER = Build("gather.cu", "gather_columns", ())
_GATHER_THREADS, _GATHER_COLUMNS = 512, 4096  # of a block

# The architectures we build for: shared memory in bytes of one block (by opting in) and of one SM, and the
# major compute capability. CUDA C++ programming guide, technical specifications per compute capability.
ARCH_LIMITS = {
    "80": (166912, 167936, 8),
    "86": (101376, 102400, 8),
    "89": (101376, 102400, 8),
    "90a": (232448, 233472, 9),
    "100": (232448, 233472, 10),
    "120": (101376, 102400, 12),
}


_BUILT_AS = {"87": "80", "103": "100", "121": "120"}


def architectures() -> list[str]:
    """The architectures that there are builds for, such as ``"90a"``, oldest first."""
    return sorted((*ARCH_LIMITS, *_BUILT_AS), key=lambda arch: int(arch.rstrip("a")))


def all_builds(arch: str) -> list[Build]:
    """Every kernel variant that a device of this architecture can be asked for.

    Parameters
    ----------
    arch : str
        One of `architectures`.

    Raises
    ------
    ValueError
        Another architecture.
    """
    if arch not in architectures():
        raise ValueError(f"there are no kernels for sm_{arch}; there are: {', '.join(architectures())}")
    like = _BUILT_AS.get(arch, arch)
    limits = Limits(132, *ARCH_LIMITS[like])  # the number of SMs changes no build
    builds = [_GATHER]
    for bfloat16 in (False, True):
        builds.append(_swiglu_build(bfloat16))
        for packed in (True, False):
            roundings = (0,) if packed else (0, *_ROUNDING.values())
            builds.extend(_native_build(packed, bfloat16, rounding) for rounding in roundings)
            builds.append(_scalar_build("dequantize.cu", "dequantize", packed, bfloat16))
        builds.extend(_correction_build(warps, bfloat16) for warps in (1, 2, 4))
        for group_size in (32, 64, 128, -1):
            builds.append(_sums_build(group_size, bfloat16))
            for zeros in Zeros:
                problem = Problem(1, 256, 64, group_size, zeros, bfloat16)
                builds.append(_dense_build(problem))
                tiles = dict.fromkeys(gemm_tile_shapes(problem, limits))
                tiles |= dict.fromkeys(gemm_tile_shapes(replace(problem, padded_k=64), limits))
                for tile in tiles:
                    fitting = gemm_stages(tile, problem, limits)
                    if fitting is not None:
                        builds.append(gemm_build(tile, fitting[0], problem))
                for wgmma_tile in wgmma_tile_shapes(problem, limits):
                    fitting = wgmma_stages(wgmma_tile, problem, limits)
                    if fitting is not None:
                        builds.append(wgmma_build(wgmma_tile, fitting[0], problem))
                for rows in range(8, DECODE_MAX_M + 1, 8):
                    few = replace(problem, m=rows)
                    if decodes(few, limits):
                        builds.append(decode_build(few, limits))
    return list(dict.fromkeys(builds))  # tiles may take integer zero points as deltas


@lru_cache(maxsize=1 << 12)
def _defines(build: Build) -> dict[str, int]:
    return build.defines


def _kernel(build: Build, smem: int = 0) -> Kernel:
    return load_kernel(build.source, build.name, _defines(build), dynamic_smem=smem)


def _address(array: Array | None) -> int:
    return 0 if array is None else int(array.data.ptr)
