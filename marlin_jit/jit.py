"""Just-in-time compilation: a source file, macros and an architecture become a loaded kernel.

`compile_cubin` turns one ``.cu`` file of `marlin_jit/kernels/` into a cubin with NVRTC. It needs no GPU,
driver, nvcc or host compiler, and it remembers its results in a disk cache keyed by everything that can
change the code: all sources, macros, options, the architecture and NVRTC's version.
`load_kernel` does the same for the current device and loads the cubin there, once a process.

A kernel file defines exactly one ``extern "C" __global__`` function per build; macros choose the variant.
All ``.cuh`` files beside it can be included by name. CUDA's own headers cannot: kernels need none, so no
header package of another version can change them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from marlin_jit import _disk_cache
from marlin_jit._cupy import INSTALL_HINT, import_cupy
from marlin_jit._driver import Frozen, bind, launch
from marlin_jit._environment import zero_or_one
from marlin_jit.device import device_info, is_capturing, unusable
from marlin_jit.errors import CompileError, LaunchError

logger = logging.getLogger(__name__)

Defines = Mapping[str, "int | str"]

# Bumped when the meaning of a cached file changes without its sources changing.
_FORMAT_VERSION = 1
_OLDEST_CAPABILITY = (8, 0)
OVERLAP = "MARLIN_JIT_OVERLAP"
"""Environment variable: 0 lets no kernel start before the one before it has ended, 1 (the default) does.

Read as a kernel is loaded.
"""
# CUfunction_attribute: CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES (static), ..._MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED = 1
_MAX_DYNAMIC_SHARED = 8
# Static and dynamic shared memory together; more dynamic memory needs the attribute, on every architecture.
_DEFAULT_SHARED = 48 * 1024


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """One kernel as machine code for one architecture, with what the compiler said about it.

    Attributes
    ----------
    cubin : bytes
        The ELF image that ``cuModuleLoadData`` takes.
    name : str
        The kernel's function name.
    arch : str
        Architecture such as ``"80"`` or ``"90a"``.
    registers, spill_bytes, stack_bytes : int
        Registers a thread, bytes spilled (stores + loads) and bytes of stack frame, from ptxas.
        -1 where the compiler's log did not say.
    log : str
        The compiler's whole log, warnings included.
    key : str
        The content key under which the disk cache holds it.
    cached : bool
        Whether it came from the cache.
    seconds : float
        How long the compilation took (when it was compiled, if it came from the cache).
    """

    cubin: bytes = field(repr=False)
    name: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    log: str = field(repr=False)
    key: str
    cached: bool
    seconds: float


class Kernel:
    """A kernel loaded on one device. Call it to launch it on CuPy's current stream.

    Attributes
    ----------
    name : str
    arch : str
    device_id : int
        The device it can be launched on; the caller makes that device current.
    registers, spill_bytes, stack_bytes : int
        As in `CompiledKernel`.
    dynamic_smem : int
        The largest dynamic shared memory, in bytes, that a launch may ask for.
    overlaps : bool
        Whether launches may start before the one before them in the stream has ended.
    """

    __slots__ = (
        "_function",
        "_layout",
        "_pointer",
        "arch",
        "device_id",
        "dynamic_smem",
        "name",
        "overlaps",
        "registers",
        "spill_bytes",
        "stack_bytes",
    )

    def __init__(
        self, function: Any, compiled: CompiledKernel, device_id: int, static_smem: int, source: str
    ) -> None:
        self._function = function  # keeps its module loaded
        self._pointer: int = function.ptr
        self._layout = parameter_layout(source, compiled.name)
        self.name = compiled.name
        self.arch = compiled.arch
        self.device_id = device_id
        self.registers = compiled.registers
        self.spill_bytes = compiled.spill_bytes
        self.stack_bytes = compiled.stack_bytes
        self.dynamic_smem = _DEFAULT_SHARED - static_smem
        # The device must be able to, and the kernel must wait by itself for what it needs (see ptx.cuh).
        able = int(compiled.arch.rstrip("a")) >= 90 and "wait_for_previous_grid();" in source
        self.overlaps = zero_or_one(OVERLAP, os.environ.get(OVERLAP, "1")) and able

    def __reduce__(self) -> Any:
        raise TypeError("a loaded kernel belongs to its process and cannot be copied or pickled")

    def __repr__(self) -> str:
        return f"<Kernel {self.name} sm_{self.arch} on device {self.device_id}, {self.registers} registers>"

    def __call__(
        self,
        grid: tuple[int, int, int],
        threads: int | tuple[int, int],
        args: tuple[Any, ...],
        smem: int = 0,
        cluster: int = 1,
    ) -> None:
        """Launch on the current stream.

        Parameters
        ----------
        grid : (int, int, int)
        threads : int or (int, int)
            Of a block.
        args : tuple of int, float or bytes
            In the kernel's order, addresses for pointers, bytes for tensor maps.
        smem : int
            Dynamic shared memory in bytes, at most `dynamic_smem`.
        cluster : int
            Blocks along the grid's second dimension that form a cluster; 1 for none.

        Raises
        ------
        LaunchError
            The driver refused the launch. Nothing has run.
        """
        try:
            stream = import_cupy().cuda.get_current_stream().ptr
            block = threads if isinstance(threads, tuple) else (threads, 1)
            how = self.overlaps, cluster
            launch(self._pointer, self.device_id, grid, block, smem, stream, self._layout, args, *how)
        except (RuntimeError, struct.error) as error:
            raise self.refused(grid, threads, smem, error) from error

    def frozen(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int],
        args: tuple[Any, ...],
        smem: int,
        cluster: int,
        stream: int,
    ) -> Frozen:
        """A launch for this thread to make again; arguments as for a call, and the current stream."""
        try:
            bind(self.device_id)
            ready = Frozen(self._layout)
            ready.fill(self._pointer, grid, block, smem, stream, args, self.overlaps, cluster)
            return ready
        except (RuntimeError, struct.error) as error:
            raise self.refused(grid, block, smem, error) from error

    def refused(self, grid: Any, threads: Any, smem: int, error: Exception) -> LaunchError:
        """What is raised when the driver refuses a launch."""
        return LaunchError(
            f"{self.name} (sm_{self.arch}) was refused with grid {grid}, {threads} threads, "
            f"{smem} bytes of dynamic shared memory: {error}"
        )

    def occupancy(self, threads: int, smem: int = 0) -> int:
        """How many blocks of ``threads`` threads with ``smem`` dynamic bytes an SM holds at once."""
        driver = import_cupy().cuda.driver
        return int(driver.occupancyMaxActiveBlocksPerMultiprocessor(self._function.ptr, threads, smem))

    def _allow_dynamic_smem(self, nbytes: int) -> None:
        """Raise the limit of dynamic shared memory for the current device; the loader holds a lock."""
        if nbytes <= self.dynamic_smem:
            return
        try:
            import_cupy().cuda.driver.funcSetAttribute(self._function.ptr, _MAX_DYNAMIC_SHARED, nbytes)
        except RuntimeError as error:
            raise LaunchError(
                f"{self.name} (sm_{self.arch}) cannot have {nbytes} bytes of dynamic shared memory on "
                f"device {self.device_id}: {error}"
            ) from error
        self.dynamic_smem = nbytes


def compile_cubin(
    source: str,
    arch: str,
    defines: Defines | None = None,
    *,
    name: str,
    verbose: bool = False,
    _root: Path | None = None,
) -> CompiledKernel:
    """Compile one kernel for one architecture, or take it from the disk cache.

    Parameters
    ----------
    source : str
        File name in ``marlin_jit/kernels/``.
    arch : str
        Without the ``sm_`` prefix: ``"80"``, ``"86"``, ``"89"``, ``"90a"``, ``"100"``, ``"120"`` and so on.
    defines : mapping of str to int or str, optional
        Macros, as ``-Dname=value``.
    name : str
        The one ``extern "C" __global__`` function that this build defines.
    verbose : bool
        Log what was compiled, and what the compiler said, at level INFO.

    Returns
    -------
    CompiledKernel

    Raises
    ------
    CompileError
        The source does not compile (the message holds the compiler's log), is not there, or does not
        define ``name``; or NVRTC is missing or does not know the architecture.
    DeviceError
        CuPy, through which NVRTC is called, is not installed.
    """
    return _compile(source, arch, defines or {}, name, verbose=verbose, root=_root)


def load_kernel(
    source: str,
    name: str,
    defines: Defines | None = None,
    *,
    dynamic_smem: int = 0,
    _root: Path | None = None,
) -> Kernel:
    """The kernel, loaded on the current device; compiled and loaded at the first call only.

    Parameters
    ----------
    source, name, defines
        As for `compile_cubin`. The architecture is the current device's.
    dynamic_smem : int
        The most dynamic shared memory, in bytes, that a launch will ask for.

    Returns
    -------
    Kernel
        The same object for the same arguments on the same device. Safe to call from many threads.

    Raises
    ------
    CompileError
        As for `compile_cubin`; or the device is older than compute capability 8.0; or the driver
        cannot load the code.
    LaunchError
        The current stream is being captured into a CUDA graph, where a kernel cannot be loaded; or the
        device does not have that much shared memory.
    DeviceError
        There is no CuPy, no driver or no device.
    """
    cupy = import_cupy()
    try:
        device_id: int = cupy.cuda.runtime.getDevice()
    except RuntimeError as error:
        raise unusable(error) from error
    macros = tuple(defines.items()) if defines else ()
    kernel = _loaded.get((device_id, source, name, macros, _root))
    if kernel is not None and dynamic_smem <= kernel.dynamic_smem:
        return kernel
    # The order of macros does not matter; only a first call pays for sorting them.
    memo_key = (device_id, source, name, tuple(sorted(macros)), _root)
    with _lock_for(memo_key):
        kernel = _loaded.get(memo_key)
        if kernel is None:
            kernel = _load_on_device(cupy, device_id, source, name, dict(macros), _root)
        kernel._allow_dynamic_smem(dynamic_smem)
        _loaded[memo_key] = _loaded[device_id, source, name, macros, _root] = kernel
    return kernel


def arch_for(capability: tuple[int, int], supported: Iterable[int] | None = None) -> str:
    """The architecture to compile for, given a device's compute capability.

    Hopper gets ``"90a"`` (its own instructions exist only there); every other device its exact number,
    or, where NVRTC does not know that yet, the nearest older one of the same major version, whose code
    the device also runs.

    Parameters
    ----------
    capability : (int, int)
        Major and minor, e.g. ``(8, 9)``.
    supported : iterable of int, optional
        What NVRTC can compile for, e.g. ``(80, 86, 90)``. Without it, the exact number is returned.

    Raises
    ------
    CompileError
        The device is older than 8.0, or NVRTC knows nothing that would run on it.
    """
    major, minor = capability
    if capability < _OLDEST_CAPABILITY:
        raise CompileError(
            f"compute capability {major}.{minor} is too old: the kernels need 8.0 (Ampere) or newer"
        )
    exact = 10 * major + minor
    if supported is not None:
        usable = [number for number in supported if 10 * major <= number <= exact]
        if not usable:
            raise CompileError(
                f"this NVRTC cannot compile for compute capability {major}.{minor}: install a newer CUDA "
                "toolkit (the extra cuda13 brings 13)"
            )
        exact = max(usable)
    return "90a" if exact == 90 else str(exact)


def nvrtc_version() -> tuple[int, int]:
    """NVRTC's version, e.g. ``(12, 9)``.

    Raises
    ------
    CompileError
        NVRTC is not installed.
    DeviceError
        CuPy is not installed.
    """
    _, version = _nvrtc()
    return version


def supported_archs() -> tuple[int, ...]:
    """The architectures that NVRTC compiles for and the kernels run on, e.g. ``(80, 86, 87, 89, 90)``.

    Raises
    ------
    CompileError, DeviceError
        As for `nvrtc_version`.
    """
    nvrtc, _ = _nvrtc()
    oldest = 10 * _OLDEST_CAPABILITY[0] + _OLDEST_CAPABILITY[1]
    return tuple(sorted(number for number in nvrtc.getSupportedArchs() if number >= oldest))


def cache_directory() -> Path | None:
    """Where compiled kernels are written; None if no directory can be, and they stay in memory."""
    directories = _disk_cache.directories()
    return directories[-1] if directories and os.access(directories[-1], os.W_OK | os.X_OK) else None


# --- compiling -------------------------------------------------------------------------------------------

_nvrtc_lock = threading.Lock()
_locks_lock = threading.Lock()
_locks: dict[Any, threading.Lock] = {}
_loaded: dict[Any, Kernel] = {}
# Kernels that the disk could not take; without this a read-only machine would compile them again and again.
_unsaved: dict[str, CompiledKernel] = {}


def _lock_for(key: Any) -> threading.Lock:
    with _locks_lock:
        return _locks.setdefault(key, threading.Lock())


def _compile(
    source: str,
    arch: str,
    defines: Defines,
    name: str,
    *,
    verbose: bool,
    root: Path | None,
    fresh: bool = False,
) -> CompiledKernel:
    """`compile_cubin`; ``fresh`` ignores what the cache holds and replaces it."""
    nvrtc, version = _nvrtc()
    sources, headers = _read_sources(root)
    if source not in sources:
        raise CompileError(f"no kernel source {source!r}; there are: {', '.join(sorted(sources)) or 'none'}")
    options = _options(arch, defines)
    key = _disk_cache.content_key(
        _FORMAT_VERSION,
        version,
        arch,
        sorted((macro, str(value)) for macro, value in defines.items()),
        name,
        source,
        sources[source],
        sorted(headers.items()),
        options,
    )
    with _lock_for(key):
        if not fresh:
            if key in _unsaved:
                return replace(_unsaved[key], cached=True)
            entry = _disk_cache.load(key)
            if entry is not None:
                header, cubin = entry
                return CompiledKernel(cubin=cubin, key=key, cached=True, **header)
        started = time.perf_counter()
        cubin, log = _run_nvrtc(nvrtc, source, sources[source], headers, options)
        seconds = time.perf_counter() - started
        if b".text." + name.encode() + b"\0" not in cubin:
            raise CompileError(f'{source} defines no extern "C" __global__ function {name!r} in this build')
        registers, spill_bytes, stack_bytes = _parse_ptxas(log, name)
        header = {
            "name": name,
            "arch": arch,
            "registers": registers,
            "spill_bytes": spill_bytes,
            "stack_bytes": stack_bytes,
            "log": log,
            "seconds": seconds,
        }
        compiled = CompiledKernel(cubin=cubin, key=key, cached=False, **header)
        if not _disk_cache.save(key, header, cubin):
            _unsaved[key] = compiled
        level = logging.INFO if verbose else logging.DEBUG
        logger.log(level, "compiled %s (%s) for sm_%s in %.2f s\n%s", name, source, arch, seconds, log)
        return compiled


def _options(arch: str, defines: Defines) -> list[str]:
    # NVRTC's own cache would answer without the log that registers and spills are read from; there is ours.
    options = ["-std=c++17", f"-arch=sm_{arch}", "--ptxas-options=-v"]
    if _nvrtc()[1] >= (12, 9):  # older ones have no cache
        options.append("--no-cache")
    if os.environ.get("MARLIN_JIT_LINEINFO", "0") not in ("", "0"):
        options.append("-lineinfo")  # source lines for profilers and compute-sanitizer; same machine code
    return options + [f"-D{macro}={value}" for macro, value in sorted(defines.items())]


def _run_nvrtc(
    nvrtc: Any, source: str, text: str, headers: Mapping[str, str], options: list[str]
) -> tuple[bytes, str]:
    """Cubin and log. NVRTC runs without Python's lock, so threads compile side by side."""
    program = nvrtc.createProgram(
        text, source, [header.encode() for header in headers.values()], [path.encode() for path in headers]
    )
    try:
        try:
            nvrtc.compileProgram(program, tuple(options))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip()
            given = " ".join(options)
            raise CompileError(f"{source} does not compile with {given}: {error}\n{log}") from None
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program).strip("\0 \n")
    finally:
        nvrtc.destroyProgram(program)


def _parse_ptxas(log: str, name: str) -> tuple[int, int, int]:
    """Registers, spilled bytes and stack bytes of the kernel ``name`` from ``ptxas -v``; -1 if absent."""
    registers = spill_bytes = stack_bytes = -1
    _, found, block = log.partition(f"Compiling entry function '{name}'")
    block = block.partition("Compiling entry function")[0] if found else ""
    # Functions that were not inlined are listed too, each with its frame; the kernel is the one named.
    frame = re.search(
        rf"Function properties for {re.escape(name)}\s.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads",
        block,
        re.DOTALL,
    )
    if frame:
        stack_bytes, spill_bytes = int(frame[1]), int(frame[2]) + int(frame[3])
    used = re.search(r"Used (\d+) registers", block)
    if used:
        registers = int(used[1])
    return registers, spill_bytes, stack_bytes


@functools.cache
def _read_sources(root: Path | None) -> tuple[dict[str, str], dict[str, str]]:
    """The kernels (``.cu``) and headers (``.cuh``), as name to text, in order of name."""
    folder = importlib.resources.files("marlin_jit") / "kernels" if root is None else root
    texts = {
        entry.name: entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith((".cu", ".cuh"))
    }
    kernels = {name: text for name, text in texts.items() if name.endswith(".cu")}
    headers = {name: text for name, text in texts.items() if name.endswith(".cuh")}
    return kernels, headers


@functools.cache
def sources_key() -> str:
    """A digest of all kernel sources: what was measured with one may not hold for another."""
    return _disk_cache.content_key(*_read_sources(None))


_nvrtc_found: tuple[Any, tuple[int, int]] | None = None


def _nvrtc() -> tuple[Any, tuple[int, int]]:
    """CuPy's binding of NVRTC and NVRTC's version, the library loaded and ready for many threads.

    The first call into NVRTC loads it, and its loader is not safe from two threads at once: one of them
    may then fail to find libnvrtc-builtins. So the first call happens here, under a lock. Some builds of
    NVRTC also cannot find that library when another package loaded NVRTC first; loading the one beside
    it by its path cures that.
    """
    global _nvrtc_found
    if _nvrtc_found is None:
        with _nvrtc_lock:
            if _nvrtc_found is None:
                import_cupy()
                from cupy.cuda import nvrtc

                try:
                    major, minor = nvrtc.getVersion()
                except (RuntimeError, OSError, ImportError) as error:
                    raise CompileError(f"NVRTC cannot be loaded ({error}): {INSTALL_HINT}") from error
                _preload_builtins()
                _nvrtc_found = nvrtc, (int(major), int(minor))
    return _nvrtc_found


def _preload_builtins(maps: Path = Path("/proc/self/maps")) -> None:
    """Load libnvrtc-builtins from beside each libnvrtc in this process (Linux; elsewhere nothing to do)."""
    try:
        mapped = maps.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for library in sorted(set(re.findall(r"(/\S*/libnvrtc\.so[^\s]*)", mapped))):
        for builtins in sorted(Path(library).parent.glob("libnvrtc-builtins.so.*")):
            try:
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                # Not fatal here: if NVRTC does need it, compiling says so.
                logger.debug("cannot load %s: %s", builtins, error)


# --- loading ---------------------------------------------------------------------------------------------


def _load_on_device(
    cupy: Any, device_id: int, source: str, name: str, defines: Defines, root: Path | None
) -> Kernel:
    if is_capturing(cupy):
        raise LaunchError(
            f"{name} is needed for the first time while the stream is being captured into a CUDA graph, "
            "where no kernel can be loaded: make the same call once before the capture"
        )
    arch = arch_for(device_info(device_id).capability, supported_archs())
    compiled = _compile(source, arch, defines, name, verbose=False, root=root)
    try:
        function = _get_function(cupy, compiled)
    except RuntimeError as error:
        if not compiled.cached:
            raise _cannot_load(compiled, device_id, error) from error
        logger.warning("the cached %s for sm_%s does not load (%s); compiling it again", name, arch, error)
        _disk_cache.discard(compiled.key)
        compiled = _compile(source, arch, defines, name, verbose=False, root=root, fresh=True)
        try:
            function = _get_function(cupy, compiled)
        except RuntimeError as again:
            raise _cannot_load(compiled, device_id, again) from again
    static_smem = cupy.cuda.driver.funcGetAttribute(_STATIC_SHARED, function.ptr)
    return Kernel(function, compiled, device_id, static_smem, _read_sources(root)[0][source])


_PARAMETERS = {"int64_t": "q", "int": "i", "uint32_t": "I", "float": "f", "TensorMap": "T"}


def parameter_layout(text: str, name: str) -> str:
    """The parameters of a kernel of this text as `marlin_jit._driver.launch` takes them.

    Raises
    ------
    CompileError
        A parameter of another type, or no such kernel.
    """
    text = re.sub(r"//[^\n]*", "", text)
    found = re.search(rf"__global__[^{{;]*?\b{name}\(([^()]*)\)\s*{{", text)
    if found is None:
        raise CompileError(f"no __global__ function {name} is found in its source")
    layout = ""
    for parameter in found[1].split(",") if found[1].strip() else ():
        words = re.sub(r"\b(const|__grid_constant__)\b", "", parameter).split()
        kind = "P" if "*" in parameter else _PARAMETERS.get(words[0])
        if kind is None:
            raise CompileError(f"parameter {parameter.strip()!r} of {name}: of no type that is passed")
        layout += kind
    return layout


def _get_function(cupy: Any, compiled: CompiledKernel) -> Any:
    module = cupy.cuda.Module()
    module.load(compiled.cubin)
    return module.get_function(compiled.name)  # it keeps its module alive


def _cannot_load(compiled: CompiledKernel, device_id: int, error: Exception) -> CompileError:
    return CompileError(
        f"the driver cannot load {compiled.name} for sm_{compiled.arch} on device {device_id}: {error}"
    )
