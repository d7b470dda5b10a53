"""Compiling and caching, without a GPU: real NVRTC, real files, many threads and processes."""

from __future__ import annotations

import copy
import ctypes
import itertools
import logging
import multiprocessing
import os
import struct
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marlin_jit import _cupy, _disk_cache, _driver, jit, launch
from marlin_jit.errors import CompileError, DeviceError, LaunchError, MarlinJitError, ValueRangeError

try:
    jit.nvrtc_version()
except MarlinJitError as error:  # what a plain `pip install marlin-jit[test]` without CuPy gives
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

KERNEL = """
#include "factor.cuh"
extern "C" __global__ void scale(float* values) { values[threadIdx.x] *= FACTOR * offset(); }
"""
HEADER = "__device__ float offset() { return 3.0f; }\n"
# Bounds of 32 registers for code that keeps 64 values alive: ptxas has to spill.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* values, int n) {
    float kept[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) kept[i] = values[i * n];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) values[(i * 7 + threadIdx.x) * n] = kept[i] * kept[63 - i];
}
"""
# An array indexed by what is only known at run time: ptxas has to give it a stack frame.
STACK = """
extern "C" __global__ void stack(float* values, int n) {
    float kept[64];
    for (int i = 0; i < 64; ++i) kept[i] = values[i * n];
    for (int i = 0; i < n; ++i) kept[(i * n) & 63] += kept[i & 63];
    values[threadIdx.x] = kept[n & 63];
}
"""


def write_kernels(folder: Path, kernel: str = KERNEL, header: str = HEADER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scale.cu").write_text(kernel)
    (folder / "factor.cuh").write_text(header)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory for each test, and nothing remembered in the process."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MARLIN_JIT_CACHE_DIR", str(folder))
    monkeypatch.delenv("MARLIN_JIT_LINEINFO", raising=False)
    jit._unsaved.clear()
    return folder


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    return write_kernels(tmp_path / "kernels")


def compile_scale(
    root: Path, arch: str = "80", defines: dict[str, int | str] | None = None
) -> jit.CompiledKernel:
    defines = {"FACTOR": 2} if defines is None else defines
    return jit.compile_cubin("scale.cu", arch, defines, name="scale", _root=root)


# --- compiling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["80", "90a", "120"])
def test_compiles_to_an_elf_image_for_the_architecture(kernels: Path, arch: str) -> None:
    compiled = compile_scale(kernels, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert f"for 'sm_{arch}'" in compiled.log
    assert (compiled.name, compiled.arch, compiled.cached) == ("scale", arch, False)


def test_registers_and_clean_code_are_reported(kernels: Path) -> None:
    compiled = compile_scale(kernels)
    assert 4 <= compiled.registers <= 32
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)


def test_spills_are_reported(tmp_path: Path) -> None:
    (tmp_path / "spilling.cu").write_text(SPILLING)
    compiled = jit.compile_cubin("spilling.cu", "80", name="spilling", _root=tmp_path)
    assert compiled.registers == 32
    assert compiled.spill_bytes > 0


def test_stack_frame_is_reported(tmp_path: Path) -> None:
    (tmp_path / "stack.cu").write_text(STACK)
    assert jit.compile_cubin("stack.cu", "80", name="stack", _root=tmp_path).stack_bytes == 64 * 4


def test_figures_are_those_of_the_named_function() -> None:
    log = textwrap.dedent("""\
        ptxas info    : Compiling entry function 'first' for 'sm_80'
        ptxas info    : Function properties for helper
        ptxas         .     512 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
        ptxas info    : Function properties for first
        ptxas         .     8 bytes stack frame, 4 bytes spill stores, 20 bytes spill loads
        ptxas info    : Used 40 registers, used 1 barriers
        ptxas info    : Compiling entry function 'first_2' for 'sm_80'
        ptxas info    : Function properties for first_2
        ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        ptxas info    : Used 96 registers, used 1 barriers""")
    assert jit._parse_ptxas(log, "first") == (40, 24, 8)
    assert jit._parse_ptxas(log, "first_2") == (96, 0, 0)
    assert jit._parse_ptxas(log, "absent") == (-1, -1, -1)


def test_compile_error_carries_the_compilers_log(kernels: Path) -> None:
    with pytest.raises(CompileError, match=r'identifier "FACTOR" is undefined') as caught:
        compile_scale(kernels, defines={})
    assert "-arch=sm_80" in str(caught.value)
    assert "scale.cu(3)" in str(caught.value)


def test_unknown_source_names_what_there_is(kernels: Path) -> None:
    with pytest.raises(CompileError, match=r"no kernel source 'gone\.cu'; there are: scale\.cu"):
        jit.compile_cubin("gone.cu", "80", name="scale", _root=kernels)


def test_unknown_function_name(kernels: Path) -> None:
    with pytest.raises(CompileError, match=r"defines no .* function 'scal' in this build"):
        jit.compile_cubin("scale.cu", "80", {"FACTOR": 1}, name="scal", _root=kernels)


def test_unknown_architecture(kernels: Path) -> None:
    with pytest.raises(CompileError, match="sm_999"):
        compile_scale(kernels, "999")


def test_verbose_logs_the_compilers_words(kernels: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="marlin_jit.jit"):
        jit.compile_cubin("scale.cu", "80", {"FACTOR": 1}, name="scale", _root=kernels)
        assert not caplog.records
        jit.compile_cubin("scale.cu", "80", {"FACTOR": 2}, name="scale", verbose=True, _root=kernels)
    assert "compiled scale (scale.cu) for sm_80" in caplog.text
    assert "registers" in caplog.text


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "80"),
        ((8, 6), "86"),
        ((8, 7), "87"),
        ((8, 9), "89"),
        ((9, 0), "90a"),
        ((10, 0), "100"),
        ((10, 3), "103"),
        ((12, 0), "120"),
        ((12, 1), "121"),
        ((13, 0), "130"),
    ],
)
def test_architecture_of_a_device(capability: tuple[int, int], arch: str) -> None:
    assert jit.arch_for(capability) == arch


def test_architecture_is_one_that_nvrtc_knows() -> None:
    supported = (75, 80, 86, 90, 100, 120)
    assert jit.arch_for((8, 9), supported) == "86"  # runs what was built for an older 8.x
    assert jit.arch_for((12, 1), supported) == "120"
    assert jit.arch_for((9, 0), supported) == "90a"
    with pytest.raises(CompileError, match=r"cannot compile for compute capability 13\.0.*newer CUDA"):
        jit.arch_for((13, 0), supported)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_too_old_a_device_is_named(capability: tuple[int, int]) -> None:
    with pytest.raises(CompileError, match=rf"capability 7\.{capability[1]} is too old.*8\.0"):
        jit.arch_for(capability)


# --- the cache's key --------------------------------------------------------------------------------------


def test_second_compilation_comes_from_the_cache(kernels: Path, cache: Path) -> None:
    first = compile_scale(kernels)
    second = compile_scale(kernels)
    assert (first.cached, second.cached) == (False, True)
    assert (second.cubin, second.log, second.registers) == (first.cubin, first.log, first.registers)
    assert [path.name for path in cache.iterdir()] == [first.key + ".mjk"]


def test_copied_sources_share_an_entry(kernels: Path, tmp_path: Path) -> None:
    """No path is in the key, so installations of the same version share what they compiled."""
    compile_scale(kernels)
    assert compile_scale(write_kernels(tmp_path / "elsewhere")).cached


def test_everything_that_can_change_the_code_changes_the_key(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count()

    def other_sources(**texts: str) -> Path:
        return write_kernels(tmp_path / f"kernels{next(numbers)}", **texts)

    extra = other_sources()
    (extra / "not_included.cuh").write_text("")
    compiled = {
        "as it is": compile_scale(kernels),
        "source": compile_scale(other_sources(kernel=KERNEL + "// changed")),
        "included header": compile_scale(other_sources(header=HEADER.replace("3.0f", "4.0f"))),
        "added header": compile_scale(extra),
        "value of a macro": compile_scale(kernels, defines={"FACTOR": 3}),
        "another macro": compile_scale(kernels, defines={"FACTOR": 2, "UNUSED": 1}),
        "architecture": compile_scale(kernels, "86"),
    }
    monkeypatch.setenv("MARLIN_JIT_LINEINFO", "1")
    compiled["option"] = compile_scale(kernels)
    monkeypatch.delenv("MARLIN_JIT_LINEINFO")
    monkeypatch.setattr(jit, "_nvrtc_found", (jit._nvrtc()[0], (99, 0)))
    compiled["version of NVRTC"] = compile_scale(kernels)

    assert not any(kernel.cached for kernel in compiled.values())
    assert len({kernel.key for kernel in compiled.values()}) == len(compiled)


def test_order_and_type_of_macros_do_not_matter(kernels: Path) -> None:
    first = compile_scale(kernels, defines={"FACTOR": 2, "B": 1})
    assert compile_scale(kernels, defines={"B": "1", "FACTOR": "2"}).key == first.key


# --- damaged files, unwritable places ---------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "empty", "half", "flipped bit", "foreign", "directory"])
def test_damaged_file_is_compiled_again_and_repaired(kernels: Path, cache: Path, damage: str) -> None:
    first = compile_scale(kernels)
    path = cache / (first.key + ".mjk")
    good = path.read_bytes()
    if damage == "directory":
        path.unlink()
        path.mkdir()
    else:
        flipped = bytearray(good)
        flipped[-5] ^= 0x10
        path.write_bytes(
            {
                "truncated": good[:-1],
                "empty": b"",
                "half": good[: len(good) // 2],
                "flipped bit": bytes(flipped),
                "foreign": b"\x7fELF" + good,
            }[damage]
        )
    again = compile_scale(kernels)
    assert not again.cached
    assert again.cubin == first.cubin
    assert compile_scale(kernels).cached  # from the repaired file, or from memory where it cannot be replaced


@given(st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_change_to_a_file_goes_unseen(data: st.DataObject) -> None:
    key = "0" * 64
    cubin = data.draw(st.binary(max_size=40))
    good = _disk_cache._encode(key, {"name": "k"}, cubin)
    assert _disk_cache._decode(key, good) == ({"name": "k"}, cubin)
    if data.draw(st.booleans()):
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        position = data.draw(st.integers(0, len(good) - 1))
        flipped = good[position] ^ data.draw(st.integers(1, 255))
        bad = good[:position] + bytes([flipped]) + good[position + 1 :]
    assert _disk_cache._decode(key, bad) is None


def test_entry_under_another_key_is_not_taken(kernels: Path, cache: Path) -> None:
    two = compile_scale(kernels, defines={"FACTOR": 2})
    three = compile_scale(kernels, defines={"FACTOR": 3})
    (cache / (three.key + ".mjk")).write_bytes((cache / (two.key + ".mjk")).read_bytes())
    again = compile_scale(kernels, defines={"FACTOR": 3})
    assert not again.cached
    assert again.cubin == three.cubin


def test_order_of_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "private"
    temporary.mkdir()
    monkeypatch.setattr(_disk_cache, "private_temp_dir", lambda name: temporary)
    blocked = tmp_path / "file"
    blocked.write_text("a file, so no directory can be made below it")
    monkeypatch.setenv("MARLIN_JIT_CACHE_DIR", str(tmp_path / "explicit"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert _disk_cache.directories() == [tmp_path / "explicit"]
    monkeypatch.setenv("MARLIN_JIT_CACHE_DIR", str(blocked / "cache"))
    assert _disk_cache.directories() == [tmp_path / "xdg" / "marlin-jit"]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert _disk_cache.directories() == [tmp_path / "home" / ".cache" / "marlin-jit"]
    monkeypatch.setenv("HOME", str(blocked))
    assert _disk_cache.directories() == [temporary]
    monkeypatch.setattr(_disk_cache, "private_temp_dir", lambda name: None)
    assert _disk_cache.directories() == []


def test_read_only_directory_serves_what_it_holds(
    kernels: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image filled ahead of time keeps serving; what is missing goes to the next directory."""
    compile_scale(kernels, defines={"FACTOR": 2})
    held = sorted(cache.iterdir())
    monkeypatch.setattr(  # as a read-only file system answers, also to root
        os, "access", lambda path, mode: Path(path) != cache and os.path.exists(path)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compile_scale(kernels, defines={"FACTOR": 2}).cached
    assert not compile_scale(kernels, defines={"FACTOR": 3}).cached
    assert compile_scale(kernels, defines={"FACTOR": 3}).cached
    assert sorted(cache.iterdir()) == held
    assert len(list((tmp_path / "xdg" / "marlin-jit").iterdir())) == 1


def test_nothing_writable_keeps_kernels_in_memory(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_JIT_CACHE_DIR", "/proc/nohome")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nohome")
    monkeypatch.setenv("HOME", "/proc/nohome")
    monkeypatch.setattr(_disk_cache, "private_temp_dir", lambda name: None)
    first = compile_scale(kernels)
    second = compile_scale(kernels)
    assert (first.cached, second.cached) == (False, True)
    assert second.cubin == first.cubin


@pytest.mark.parametrize("failing", ["mkstemp", "write", "replace"])
def test_full_disk_does_not_break_the_call(
    kernels: Path, cache: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    class FullFile:
        def __init__(self, descriptor: int, mode: str) -> None:
            os.close(descriptor)

        def __enter__(self) -> FullFile:
            return self

        def __exit__(self, *error: object) -> None:
            return None

        write = full

    if failing == "mkstemp":
        monkeypatch.setattr(_disk_cache.tempfile, "mkstemp", full)
    elif failing == "write":
        monkeypatch.setattr(_disk_cache.os, "fdopen", FullFile)
    else:
        monkeypatch.setattr(_disk_cache.os, "replace", full)
    assert not compile_scale(kernels).cached
    assert compile_scale(kernels).cached  # from memory
    assert list(cache.iterdir()) == []  # and no half-written file stays


def test_temporary_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cupy.tempfile, "gettempdir", lambda: str(tmp_path))
    path = _cupy.private_temp_dir("mine")
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o700
    assert _cupy.private_temp_dir("mine") == path
    path.chmod(0o777)
    assert _cupy.private_temp_dir("mine") is None
    path.chmod(0o700)
    path.rename(tmp_path / "real")
    path.symlink_to(tmp_path / "real")
    assert _cupy.private_temp_dir("mine") is None
    stranger = os.getuid() + 1
    (tmp_path / f"mine-{stranger}").mkdir(mode=0o700)  # this user's, found where another expects its own
    monkeypatch.setattr(_cupy.os, "getuid", lambda: stranger)
    assert _cupy.private_temp_dir("mine") is None


def test_cache_of_an_unknown_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARLIN_JIT_CACHE_DIR", "~no such user/x")
    assert _disk_cache.directories() == [Path("~no such user/x")]


def test_usage_and_clear(kernels: Path, cache: Path) -> None:
    assert _disk_cache.usage() == (0, 0)
    compile_scale(kernels, defines={"FACTOR": 2})
    compile_scale(kernels, defines={"FACTOR": 3})
    (cache / "unrelated.txt").write_text("stays")
    (cache / ".tmp-others").write_text("stays too")
    (cache / ".marlin-jit-tmp-left").write_text("by a writer that was killed")
    assert _disk_cache.usage() == (2, sum(path.stat().st_size for path in cache.glob("*.mjk")))
    assert _disk_cache.clear() == 2
    assert sorted(path.name for path in cache.iterdir()) == [".tmp-others", "unrelated.txt"]
    assert not compile_scale(kernels).cached


# --- threads and processes --------------------------------------------------------------------------------


def test_threads_compile_a_kernel_once(kernels: Path) -> None:
    barrier = threading.Barrier(8)

    def work(factor: int) -> jit.CompiledKernel:
        barrier.wait()
        return compile_scale(kernels, defines={"FACTOR": factor})

    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(work, [1, 2] * 4))
    assert sum(not kernel.cached for kernel in compiled) == 2
    assert len({kernel.cubin for kernel in compiled}) == 2


def _compile_at_the_barrier(barrier: Any, results: Any, root: Path) -> None:
    jit.nvrtc_version()
    barrier.wait(timeout=120)
    compiled = compile_scale(root)
    results.put((compiled.cubin, compiled.cached))


def test_processes_share_an_empty_cache(kernels: Path, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(8), context.Queue()
    processes = [
        context.Process(target=_compile_at_the_barrier, args=(barrier, results, kernels)) for _ in range(8)
    ]
    for process in processes:
        process.start()
    answers = [results.get(timeout=200) for _ in processes]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    expected = compile_scale(kernels)
    assert expected.cached
    assert {cubin for cubin, _ in answers} == {expected.cubin}
    assert [path.name for path in cache.iterdir()] == [expected.key + ".mjk"]  # no temporary file is left


def run_python(code: str, **environment: str) -> str:
    """Run ``code`` in a new interpreter; an empty value removes a variable."""
    names = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={name: value for name, value in names.items() if value},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COMPILE = """
    from pathlib import Path
    from marlin_jit import jit
    kernel = jit.compile_cubin("scale.cu", "80", {{"FACTOR": 2}}, name="scale", _root=Path({root!r}))
    print(kernel.cached, kernel.registers)
"""


def test_missing_home(kernels: Path, tmp_path: Path) -> None:
    """CuPy alone cannot be imported where no home directory can be made."""
    code = COMPILE.format(root=str(kernels)) + "    import os; print(os.environ['CUPY_CACHE_DIR'])\n"
    unset = dict.fromkeys(("XDG_CACHE_HOME", "CUPY_CACHE_DIR", "MARLIN_JIT_CACHE_DIR"), "")
    output = run_python(code, HOME="/proc/nohome", TMPDIR=str(tmp_path), **unset)
    compiled, cupy_cache = output.splitlines()
    assert compiled.startswith("False ")
    assert Path(cupy_cache).parent == tmp_path
    assert any(path.name.startswith("marlin-jit-") for path in tmp_path.iterdir())


def test_chosen_cupy_cache_is_kept(tmp_path: Path) -> None:
    code = "import os; from marlin_jit import jit; jit.nvrtc_version(); print(os.environ['CUPY_CACHE_DIR'])"
    assert run_python(code, HOME="/proc/nohome", CUPY_CACHE_DIR=str(tmp_path / "own")).strip() == str(
        tmp_path / "own"
    )


def test_unwritable_cupy_cache_says_what_to_set() -> None:
    code = """
        from marlin_jit import jit
        try:
            jit.nvrtc_version()
        except Exception as error:
            print(type(error).__name__, error)
    """
    output = run_python(code, CUPY_CACHE_DIR="/proc/nohome/cupy")
    assert output.startswith("DeviceError CuPy cannot create its cache directory")
    assert "set CUPY_CACHE_DIR" in output


def test_missing_cupy_says_what_to_install() -> None:
    code = """
        import sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name == "cupy":
                    raise ModuleNotFoundError("No module named 'cupy'", name="cupy")
        sys.meta_path.insert(0, Block())
        from marlin_jit import jit
        try:
            jit.nvrtc_version()
        except Exception as error:
            print(type(error).__name__, error)
    """
    assert run_python(code).startswith(
        'DeviceError CuPy is not installed: in the folder of marlin-jit run pip install ".[cuda12]"'
    )


def test_no_compiler_is_needed_on_the_path(kernels: Path) -> None:
    code = COMPILE.format(root=str(kernels))
    assert run_python(code, PATH="/nonexistent", CUDA_PATH="", CUDA_HOME="").startswith("False ")


def test_first_use_from_many_threads(kernels: Path) -> None:
    """NVRTC's own loading is not safe from two threads at once."""
    code = """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from marlin_jit import jit
        barrier = threading.Barrier(8)
        def work(factor):
            barrier.wait()
            return jit.compile_cubin(
                "scale.cu", "80", {{"FACTOR": factor}}, name="scale", _root=Path({root!r})
            ).cached
        with ThreadPoolExecutor(8) as pool:
            print(list(pool.map(work, range(8))))
    """
    assert run_python(code.format(root=str(kernels))).strip() == str([False] * 8)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
def test_builtins_are_found_when_nvrtc_was_loaded_by_another_package() -> None:
    with open("/proc/self/maps") as maps:
        library = next(line.split()[-1] for line in maps if "/libnvrtc.so" in line)
    code = f"""
        import ctypes
        ctypes.CDLL({library!r})
        from marlin_jit import jit
        jit.nvrtc_version()
        print(open("/proc/self/maps").read().count("libnvrtc-builtins") > 0)
    """
    assert run_python(code).strip() == "True"


# --- loading, with a driver that is not there -------------------------------------------------------------


class FakeDriver:
    """Stands for CuPy and the driver below it: counts loads, and refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.device = 0
        self.loads: list[tuple[int, bytes]] = []
        self.refused_loads = 0
        self.attributes: list[tuple[int, int, int]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.capturing = False
        self.static_smem = 0
        fake = self

        class Module:
            def load(self, cubin: bytes) -> None:
                if fake.refused_loads:
                    fake.refused_loads -= 1
                    raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
                fake.loads.append((fake.device, cubin))

            def get_function(self, name: str) -> Any:
                return Function()

        class Function:
            ptr = 4096

        def set_attribute(function: int, attribute: int, value: int) -> None:
            if value > 227 * 1024:
                raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
            fake.attributes.append((function, attribute, value))

        runtime = SimpleNamespace(getDevice=lambda: fake.device)
        static_smem = {(1, Function.ptr): lambda: fake.static_smem}
        driver = SimpleNamespace(
            funcSetAttribute=set_attribute,
            funcGetAttribute=lambda attribute, function: static_smem[attribute, function](),
        )
        self.cupy = SimpleNamespace(
            cuda=SimpleNamespace(
                Module=Module,
                runtime=runtime,
                driver=driver,
                get_current_stream=lambda: SimpleNamespace(ptr=7),
            )
        )

    def launch(self, function: int, device: int, *arguments: Any) -> None:
        assert (function, device) == (4096, self.device)
        if arguments[2] > 227 * 1024:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        if -1 in arguments[5]:
            raise struct.error("argument out of range")
        self.launches.append(arguments)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(jit, "import_cupy", lambda: fake.cupy)
    monkeypatch.setattr(jit, "launch", fake.launch)
    monkeypatch.setattr(jit, "is_capturing", lambda cupy: fake.capturing)
    monkeypatch.setattr(
        jit, "device_info", lambda number: SimpleNamespace(capability=(8, 0 if number == 0 else 6))
    )
    monkeypatch.setattr(jit, "_loaded", {})
    return fake


def load_scale(root: Path, **options: Any) -> jit.Kernel:
    return jit.load_kernel("scale.cu", "scale", {"FACTOR": 2}, _root=root, **options)


def test_kernel_is_loaded_once_a_device(kernels: Path, driver: FakeDriver) -> None:
    on_0 = load_scale(kernels)
    assert load_scale(kernels) is on_0
    driver.device = 1
    on_1 = load_scale(kernels)
    assert load_scale(kernels) is on_1
    assert [(kernel.device_id, kernel.arch) for kernel in (on_0, on_1)] == [(0, "80"), (1, "86")]
    assert [device for device, _ in driver.loads] == [0, 1]
    assert on_0.registers == compile_scale(kernels, "80").registers


def test_order_of_macros_loads_nothing_new(kernels: Path, driver: FakeDriver) -> None:
    orders: list[dict[str, int | str]] = [{"FACTOR": 2, "B": 1}, {"B": 1, "FACTOR": 2}]
    first, second = (jit.load_kernel("scale.cu", "scale", order, _root=kernels) for order in orders)
    assert first is second
    assert len(driver.loads) == 1


def test_threads_load_a_kernel_once(kernels: Path, driver: FakeDriver) -> None:
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(lambda _: load_scale(kernels), range(32)))
    assert len(driver.loads) == 1
    assert len(set(map(id, loaded))) == 1


def test_large_shared_memory_is_set_up_once(kernels: Path, driver: FakeDriver) -> None:
    kernel = load_scale(kernels, dynamic_smem=48 * 1024)
    assert driver.attributes == []
    assert load_scale(kernels, dynamic_smem=100_000) is kernel
    assert load_scale(kernels, dynamic_smem=60_000) is kernel
    assert driver.attributes == [(4096, 8, 100_000)]
    with pytest.raises(LaunchError, match="cannot have 300000 bytes of dynamic shared memory on device 0"):
        load_scale(kernels, dynamic_smem=300_000)


def test_static_shared_memory_counts_too(kernels: Path, driver: FakeDriver) -> None:
    driver.static_smem = 4096
    load_scale(kernels, dynamic_smem=44 * 1024)
    assert driver.attributes == []
    load_scale(kernels, dynamic_smem=44 * 1024 + 1)
    assert driver.attributes == [(4096, 8, 44 * 1024 + 1)]


def test_launch_passes_everything_on_and_names_what_was_refused(kernels: Path, driver: FakeDriver) -> None:
    kernel = load_scale(kernels)
    kernel((3, 1, 1), 32, (4096,), 64)
    kernel((3, 2, 1), (32, 4), (0,), cluster=2)
    assert driver.launches == [
        ((3, 1, 1), (32, 1), 64, 7, "P", (4096,), False, 1),
        ((3, 2, 1), (32, 4), 0, 7, "P", (0,), False, 2),
    ]
    with pytest.raises(LaunchError, match=r"scale \(sm_80\) was refused with grid \(3, 1, 1\).*300000 bytes"):
        kernel((3, 1, 1), 32, (0,), 300_000)
    with pytest.raises(LaunchError, match="argument out of range"):
        kernel((3, 1, 1), 32, (-1,), 64)
    with pytest.raises(TypeError, match="belongs to its process"):
        copy.deepcopy(kernel)


def test_a_launch_that_cannot_be_made_ready_is_refused_like_one_that_cannot_be_made(
    kernels: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread of its own, say, whose binding to the device fails: the long way then says what to do."""

    def bind(device: int) -> None:
        raise RuntimeError("cudaErrorDevicesUnavailable")

    monkeypatch.setattr(jit, "bind", bind)
    with pytest.raises(LaunchError, match=r"scale \(sm_80\) was refused with grid \(3, 1, 1\).*Unavailable"):
        load_scale(kernels).frozen((3, 1, 1), (32, 1), (4096,), 0, 1, 7)


@pytest.mark.parametrize(("value", "overlaps"), [(None, True), ("1", True), ("0", False)])
def test_kernels_that_wait_overlap_where_the_device_can(
    kernels: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, value: str | None, overlaps: bool
) -> None:
    monkeypatch.delenv(jit.OVERLAP, raising=False)
    if value is not None:
        monkeypatch.setenv(jit.OVERLAP, value)
    capability = (9, 0)
    monkeypatch.setattr(jit, "device_info", lambda number: SimpleNamespace(capability=capability))
    assert not load_scale(kernels).overlaps  # it does not wait
    assert jit.load_kernel("gather.cu", "gather_columns", {}).overlaps == overlaps
    capability = (8, 9)
    monkeypatch.setattr(jit, "_loaded", {})
    assert not jit.load_kernel("gather.cu", "gather_columns", {}).overlaps


def test_another_value_of_the_overlap_switch_is_refused(
    kernels: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(jit.OVERLAP, "off")
    with pytest.raises(ValueRangeError, match="MARLIN_JIT_OVERLAP must be 0 or 1, got 'off'"):
        load_scale(kernels)


@pytest.mark.parametrize(("version", "there"), [((12, 4), False), ((12, 9), True), ((13, 0), True)])
def test_old_compilers_have_no_cache_to_turn_off(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], there: bool
) -> None:
    monkeypatch.setattr(jit, "_nvrtc", lambda: (None, version))
    assert ("--no-cache" in jit._options("90a", {})) == there


def test_what_the_compiler_says_is_heard_with_every_cache_of_ours(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRTC remembers what it compiled, without its log."""
    for name in ("one", "two"):
        monkeypatch.setenv("MARLIN_JIT_CACHE_DIR", str(tmp_path / name))
        compiled = compile_scale(kernels)
        assert not compiled.cached
        assert compiled.registers > 0


def test_parameters_are_read_from_the_source() -> None:
    text = """// __global__ void k(no)
    extern "C" __global__ void __launch_bounds__(THREADS, 2)
        k(const uint16_t* a, int64_t lda,  // a, b
          const void *b, int m, uint32_t seed, const __grid_constant__ TensorMap map,
          float f) { if (m) g(a); }"""
    assert jit.parameter_layout(text, "k") == "PqPiITf"
    with pytest.raises(CompileError, match="no __global__ function other"):
        jit.parameter_layout(text, "other")
    with pytest.raises(CompileError, match="'double x' of k"):
        jit.parameter_layout('extern "C" __global__ void k(double x) {', "k")
    found = {build.source: build.name for build in launch.all_builds("90a")}
    sources = jit._read_sources(None)[0]
    assert {name: jit.parameter_layout(sources[name], function) for name, function in found.items()} == {
        "correction.cu": "PPPqiiiii",
        "decode.cu": "PqPPPPPqiiiiiiiiiPP",
        "dense.cu": "PPPPiii",
        "dequantize.cu": "PPPPPPiiiii",
        "gather.cu": "PqPPqiii",
        "group_sums.cu": "PqPiiiPq",
        "marlin.cu": "PqPPPPPqiiiiiiiiPP",
        "native.cu": "PqPPPPPPqiiiiiiPIi",
        "swiglu.cu": "PqPqii",
        "wgmma.cu": "TTTTPPPTPqiiiiiiiPP",
    }


def test_arguments_lie_where_the_compiler_puts_parameters() -> None:
    """Each on a multiple of its own size, as C does for a struct."""
    arguments = _driver._Arguments("PiqIPf")
    start = ctypes.addressof(arguments.buffer)
    assert [place - start for place in arguments.places] == [0, 8, 16, 24, 32, 40]
    arguments.packing.pack_into(arguments.buffer, 0, 1 << 40, -2, -3, 4, 5, 0.5)
    kinds = (
        ctypes.c_uint64,
        ctypes.c_int32,
        ctypes.c_int64,
        ctypes.c_uint32,
        ctypes.c_uint64,
        ctypes.c_float,
    )
    values = [kind.from_address(place).value for kind, place in zip(kinds, arguments.places, strict=True)]
    assert values == [1 << 40, -2, -3, 4, 5, 0.5]


def test_tensor_maps_among_arguments_lie_on_multiples_of_64() -> None:
    arguments = _driver._Arguments("iTPT")
    start = ctypes.addressof(arguments.buffer)
    assert start % 64 == 0
    assert [place - start for place in arguments.places] == [0, 64, 192, 256]
    first, second = bytes(range(128)), bytes(range(128, 256))
    arguments.packing.pack_into(arguments.buffer, 0, 7, first, 1 << 40, second)
    assert ctypes.string_at(arguments.places[1], 128) == first
    assert ctypes.c_uint64.from_address(arguments.places[2]).value == 1 << 40
    assert ctypes.string_at(arguments.places[3], 128) == second


def test_launches_are_what_the_driver_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUlaunchConfig and CUlaunchAttribute of cuda.h, written out with ctypes."""

    class Config(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "smem")] + [
            ("stream", ctypes.c_void_p),
            ("attributes", ctypes.c_void_p),
            ("count", ctypes.c_uint),
        ]

    class Attribute(ctypes.Structure):
        _fields_ = [
            ("id", ctypes.c_int),
            ("pad", ctypes.c_char * 4),
            ("value", ctypes.c_uint * 3),  # of a cluster; of a switch the first
            ("rest", ctypes.c_char * 52),
        ]

    seen: list[Any] = []
    passed: list[int] = []

    class Library:
        status = 0

        def cuLaunchKernelEx(self, config: int, function: int, places: int, extra: Any) -> int:
            passed.append(places)
            c = Config.from_address(config)
            attributes = [Attribute.from_address(c.attributes + 72 * i) for i in range(c.count)]
            given = {a.id: tuple(a.value) for a in attributes}
            first = ctypes.c_int.from_address(ctypes.c_uint64.from_address(places + 8).value).value
            seen.append((c.gx, c.gy, c.gz, c.bx, c.by, c.bz, c.smem, c.stream, given, first, extra))
            return self.status

        def cuGetErrorName(self, status: int, text: Any) -> None:
            text._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"

        def cuGetErrorString(self, status: int, text: Any) -> None:
            text._obj.value = b"an illegal memory access was encountered"

    assert (ctypes.sizeof(Config), ctypes.sizeof(Attribute)) == (56, 72)
    library = Library()
    bound: list[tuple[int, int]] = []

    def set_device(number: int) -> None:
        bound.append((threading.get_ident(), number))

    runtime = SimpleNamespace(setDevice=set_device)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(_driver, "import_cupy", lambda: cupy)
    monkeypatch.setattr(_driver, "_library", lambda: library)
    monkeypatch.setattr(_driver, "_thread", _driver._Thread())

    def launch(device: int, overlap: bool, cluster: int = 1) -> None:
        how = {"overlap": overlap, "cluster": cluster}
        _driver.launch(99, device, (2, 6, 4), (128, 3), 1000, 7, "Pi", (0, -5), **how)

    overlapping, pairs, triples = {6: (1, 0, 0)}, {4: (1, 2, 1)}, {4: (1, 3, 1)}
    expected = [overlapping, {}, overlapping | pairs, triples, overlapping]
    for overlap, cluster in ((True, 1), (False, 1), (True, 2), (False, 3), (True, 1)):
        launch(0, overlap, cluster)
    assert seen == [(2, 6, 4, 128, 3, 1, 1000, 7, given, -5, None) for given in expected]
    for overlap, cluster, attributes in zip(
        (True, False, True, False), (1, 1, 2, 3), expected[:4], strict=True
    ):
        seen.clear()
        frozen = _driver.Frozen("PiT")
        frozen.fill(99, (2, 6, 4), (128, 3), 1000, 7, (0, -5, b"\1" * 128), overlap, cluster)
        for address, tensor_map in ((1 << 40, bytes(range(128))), (48, b"\0" * 128)):
            frozen.field(0).value = address
            frozen.field(2).value = tensor_map
            frozen.launch()
            assert seen.pop() == (2, 6, 4, 128, 3, 1, 1000, 7, attributes, -5, None)
            places = ctypes.c_uint64.from_address
            assert places(places(passed[-1]).value).value == address
            assert ctypes.string_at(places(passed[-1] + 16).value, 128) == tensor_map
    # A thread's first launch on a device binds the device's context to it; the driver does not.
    launch(1, False)
    thread = threading.Thread(target=launch, args=(0, False))
    thread.start()
    thread.join()
    assert [number for _, number in bound] == [0, 1, 0]
    assert bound[0][0] == bound[1][0] != bound[2][0]
    library.status = 700
    for call in (lambda: launch(0, True), frozen.launch):
        with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"):
            call()


def test_cached_code_that_does_not_load_is_compiled_again(
    kernels: Path, cache: Path, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    compile_scale(kernels)
    (path,) = cache.iterdir()
    before = path.stat().st_mtime_ns
    driver.refused_loads = 1
    load_scale(kernels)
    assert len(driver.loads) == 1
    assert "does not load (CUDA_ERROR_INVALID_IMAGE); compiling it again" in caplog.text
    assert path.stat().st_mtime_ns != before


@pytest.mark.parametrize(("cached", "refusals"), [(False, 1), (True, 2)])
def test_code_that_never_loads_is_an_error(
    kernels: Path, driver: FakeDriver, cached: bool, refusals: int
) -> None:
    if cached:
        compile_scale(kernels)
    driver.refused_loads = refusals
    with pytest.raises(CompileError, match="driver cannot load scale for sm_80 on device 0: CUDA_ERROR"):
        load_scale(kernels)
    assert driver.refused_loads == 0
    assert load_scale(kernels).device_id == 0  # a failure is not remembered


def test_first_load_during_capture_is_refused(kernels: Path, driver: FakeDriver) -> None:
    driver.capturing = True
    with pytest.raises(LaunchError, match=r"captured into a CUDA graph.*once before the capture"):
        load_scale(kernels)
    driver.capturing = False
    kernel = load_scale(kernels)
    driver.capturing = True
    assert load_scale(kernels) is kernel


def test_no_driver_is_a_device_error(
    kernels: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(driver.cupy.cuda.runtime, "getDevice", refuse)
    with pytest.raises(DeviceError, match=r"^no CUDA device can be used: .*NVIDIA driver is"):
        load_scale(kernels)
