"""``marlin-jit info`` and ``marlin-jit warmup``, on a machine without a GPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner, Result

import marlin_jit
from marlin_jit import ahead, jit, launch
from marlin_jit.cli.main import main
from marlin_jit.device import unavailable_reason
from marlin_jit.errors import CompileError, DTypeError, MarlinJitError, ShapeError
from marlin_jit.plan import Build

Run = Callable[..., Result]

# Two small kernels stand for all of them: what is tested here is choosing and counting.
BUILDS = [
    Build("group_sums.cu", "group_sums", (("BF16", 0), ("GROUP", 128))),
    Build("group_sums.cu", "group_sums", (("BF16", 1), ("GROUP", 128))),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MARLIN_JIT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def run() -> Run:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments)

    return run


@pytest.fixture
def nvrtc() -> None:
    try:
        jit.nvrtc_version()
    except MarlinJitError as error:
        pytest.skip(f"needs NVRTC: {error}")


@pytest.fixture
def few_builds(nvrtc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "all_builds", lambda arch: list(BUILDS))


@pytest.fixture
def no_gpu() -> None:
    if unavailable_reason() is None:
        pytest.skip("a GPU is there")


# --- info -------------------------------------------------------------------------------------------------


def test_info_tells_versions_and_the_empty_cache(run: Run, cache: Path, nvrtc: None) -> None:
    result = run("info", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["marlin_jit"] == marlin_jit.__version__
    assert found["numpy"] == np.__version__
    assert found["nvrtc"] == ".".join(map(str, jit.nvrtc_version()))
    assert {"80", "86", "89", "90a", "100", "120"} <= set(found["architectures"])
    assert found["cache"] == {"directory": str(cache), "entries": 0, "bytes": 0}
    assert "dispatch" not in found


def test_info_says_that_there_is_no_gpu(run: Run, nvrtc: None, no_gpu: None) -> None:
    result = run("info")
    assert result.exit_code == 0
    assert "missing: no CUDA device can be used" in result.stdout
    assert "no GPU: NumPy arrays take the reference path; packing and compiling ahead work" in result.stdout


def test_info_without_cupy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it then fails as if it were not installed
    result = run("info")
    assert result.exit_code == 0
    assert "CuPy not installed" in result.stdout
    assert 'in the folder of marlin-jit run pip install ".[cuda12]" (or ".[cuda13]")' in result.stdout
    # Compiling ahead goes through CuPy too.
    assert "packing works here, compiling ahead does not" in result.stdout


def test_info_lists_architectures_that_warmup_takes(run: Run, nvrtc: None) -> None:
    listed = json.loads(run("info", "--json").stdout)["architectures"]
    assert listed == sorted(listed, key=lambda arch: int(arch.rstrip("a")))
    for arch in listed:
        assert ahead.select_builds(arch)


@pytest.mark.parametrize("options", [("--group", "32"), ("--dtype", "bfloat16"), ("--symmetric",)])
def test_info_of_a_weight_needs_a_size(run: Run, options: tuple[str, ...]) -> None:
    result = run("info", *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"{options[0]} describes a product: also give --m, --k or --n" in result.stderr


def test_info_explains_a_product(run: Run, no_gpu: None) -> None:
    found = json.loads(run("info", "--json", "--m", "16", "--k", "1000", "--group", "-1").stdout)["dispatch"]
    assert (found["m"], found["k"], found["n"], found["group_size"]) == (16, 1000, 4096, -1)
    assert found["path"] == "reference"
    assert [path["path"] for path in found["paths"] if path["chosen"]] == ["reference"]
    assert "-> reference" in run("info", "--m", "16").stdout


def test_clear_cache(run: Run, cache: Path, few_builds: None) -> None:
    assert run("warmup", "--arch", "80").exit_code == 0
    assert json.loads(run("info", "--json").stdout)["cache"]["entries"] == 2
    found = json.loads(run("info", "--json", "--clear-cache").stdout)["cache"]
    assert (found["removed"], found["entries"], found["bytes"]) == (2, 0, 0)
    assert list(cache.iterdir()) == []


# --- warmup -----------------------------------------------------------------------------------------------


def test_warmup_compiles_once(run: Run, cache: Path, few_builds: None) -> None:
    result = run("warmup", "--arch", "80", "--arch", "sm_90a", "--jobs", "2")
    assert result.exit_code == 0
    assert "sm_80: 2 compiled, 0 already in the cache" in result.stdout
    assert "sm_90a: 2 compiled, 0 already in the cache" in result.stdout
    assert len(list(cache.iterdir())) == 4
    found = json.loads(run("warmup", "--arch", "80", "--json").stdout)
    assert found["architectures"] == {"80": {"compiled": 0, "cached": 2}}
    assert found["cache"] == str(cache)


def test_warmup_fills_the_cache_that_compiling_reads(run: Run, few_builds: None) -> None:
    run("warmup", "--arch", "80", "--dtype", "bfloat16")
    cached = {
        build.defines["BF16"]: jit.compile_cubin(build.source, "80", build.defines, name=build.name).cached
        for build in BUILDS
    }
    assert cached == {0: False, 1: True}


def test_warmup_for_a_packed_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 64)).astype(np.float16)
    packed = marlin_jit.pack(marlin_jit.quantize(weight, group_size=32))
    marlin_jit.save(tmp_path / "model.safetensors", {"layer": packed})
    asked = {}

    def record(archs: list[str], **options: object) -> list[object]:
        asked.update(options, archs=archs)
        return []

    monkeypatch.setattr(ahead, "warmup", record)
    result = run("warmup", str(tmp_path / "model.safetensors"), "--arch", "90a")
    assert result.exit_code == 0
    assert (asked["archs"], asked["dtypes"], asked["group_sizes"]) == (["90a"], ["float16"], [32])


def test_warmup_needs_an_architecture_without_a_gpu(run: Run, nvrtc: None, no_gpu: None) -> None:
    result = run("warmup")
    assert result.exit_code == 2
    assert "name an architecture with --arch" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "75"), "no kernels for sm_75; there are: 80, 86, 87, 89, 90a, 100, 103, 120, 121"),
        (("--arch", "80", "/nonexistent/model"), "/nonexistent/model"),
        (("--arch", "80", "--group", "48"), "'48' is not one of"),
        (("--arch", "80", "--dtype", "float32"), "'float32' is not one of"),
    ],
)
def test_warmup_refuses_in_one_line(run: Run, nvrtc: None, arguments: tuple[str, ...], message: str) -> None:
    result = run("warmup", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]


def test_warmup_help_names_every_architecture(run: Run) -> None:
    words = " ".join(run("warmup", "--help").stdout.split())
    assert "Architecture: 80, 86, 87, 89, 90a, 100, 103, 120, 121. May be repeated" in words
    assert {*launch.ARCH_LIMITS} <= set(launch.architectures())


def test_builds_are_chosen_by_type_and_group() -> None:
    def chosen(**wanted: object) -> set[tuple[object, object]]:
        builds = ahead.select_builds("90a", **wanted)  # type: ignore[arg-type]
        return {(build.defines.get("BF16"), build.defines.get("GROUP")) for build in builds}

    everything = chosen()
    assert {(bf16, group) for bf16 in (0, 1) for group in (0, 32, 64, 128)} <= everything
    # A build without a macro serves all that the macro tells apart.
    assert chosen(dtypes=["bfloat16"], group_sizes=[-1]) == {
        (bf16, group) for bf16, group in everything if bf16 in (1, None) and group in (0, None)
    }
    assert chosen(dtypes=[np.float16], group_sizes=[32, 128]) == {
        (bf16, group) for bf16, group in everything if bf16 in (0, None) and group in (32, 128, None)
    }


def test_wrong_wishes_are_typed_errors(nvrtc: None) -> None:
    with pytest.raises(DTypeError, match="not for float32"):
        marlin_jit.warmup(["80"], dtypes=[np.float32])
    with pytest.raises(ShapeError, match="not for 48"):
        marlin_jit.warmup(["80"], group_sizes=[48])
    with pytest.raises(ValueError, match="jobs must be at least 1"):
        marlin_jit.warmup([], jobs=0)


def test_one_kernel_that_does_not_compile_ends_the_warmup(few_builds: None) -> None:
    BUILDS.insert(0, Build("group_sums.cu", "no_such_kernel", (("BF16", 0), ("GROUP", 128))))
    try:
        with pytest.raises(CompileError, match="no_such_kernel"):
            marlin_jit.warmup(["80"])
    finally:
        BUILDS.pop(0)


def test_interrupted_warmup_starts_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def compile_slowly(*_: object, **__: object) -> object:
        started.append(1)
        time.sleep(0.02)
        return SimpleNamespace(cached=False)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jit, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(jit, "compile_cubin", compile_slowly)
    monkeypatch.setattr(ahead, "all_builds", lambda arch: BUILDS * 50)
    with pytest.raises(KeyboardInterrupt):
        marlin_jit.warmup(["80"], jobs=1, progress=interrupt)
    assert len(started) < 10  # of 100: those that ran before the interrupt was seen


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_command_promptly(number: signal.Signals, code: int) -> None:
    program = """
        import signal, time
        from marlin_jit import ahead, jit
        from marlin_jit.cli.main import main
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it otherwise
        def compile_slowly(*args, **options):
            print("compiling", flush=True)
            time.sleep(0.2)
        jit.nvrtc_version = lambda: (12, 9)
        jit.compile_cubin = compile_slowly
        main(["warmup", "--arch", "80", "--jobs", "1"])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "compiling\n"
        process.send_signal(number)
        printed, errors = process.communicate(timeout=20)  # all of them would take longer
    assert process.returncode == code, errors
    assert printed.count("compiling") < 5
    assert "Traceback" not in errors


def test_progress_counts_to_the_total(few_builds: None) -> None:
    seen = []
    compiled = marlin_jit.warmup(
        ["80", "86"], progress=lambda done, total, build, kernel: seen.append((done, total, kernel.name))
    )
    assert [done for done, _, _ in seen] == [1, 2, 3, 4]
    assert {total for _, total, _ in seen} == {4}
    assert [kernel.arch for kernel in compiled] == ["80", "80", "86", "86"]
