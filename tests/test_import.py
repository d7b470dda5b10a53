"""``import marlin_jit`` on machines that have next to nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = """
    import sys
    class Block:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {blocked!r}:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    sys.meta_path.insert(0, Block())
"""


def run_python(code: str, cwd: Path | str = "/", **environment: str) -> str:
    """Run in an interpreter with no environment but what is given, from a directory that is not ours."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/nonexistent", **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_needs_numpy_and_ml_dtypes_only() -> None:
    blocked = ["cupy", "cuda", "safetensors", "click", "rich", "torch"]
    code = BLOCK.format(blocked=blocked) + "    import marlin_jit; print(marlin_jit.__version__)"
    assert run_python(code)


def test_import_loads_no_cupy() -> None:
    code = (
        "import marlin_jit, sys; print([m for m in sys.modules if m.partition('.')[0] in ('cupy', 'cuda')])"
    )
    assert run_python(code) == "[]"


def test_import_without_home_in_a_read_only_directory() -> None:
    code = "import marlin_jit, os; print(os.getcwd(), os.environ['HOME'])"
    assert run_python(code, cwd="/proc", HOME="/proc/nohome") == "/proc /proc/nohome"


def test_import_writes_nothing(tmp_path: Path) -> None:
    run_python("import marlin_jit", cwd=tmp_path, HOME=str(tmp_path), TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_import_is_quick() -> None:
    """It loads little beyond NumPy: a fifth of a second of processor time at most."""
    code = """
        import ml_dtypes, numpy, time
        started = time.process_time()
        import marlin_jit
        print(time.process_time() - started)
    """
    assert min(float(run_python(code)) for _ in range(3)) < 0.2


def test_every_public_name_is_there() -> None:
    code = """
        import marlin_jit
        for name in marlin_jit.__all__:
            assert callable(getattr(marlin_jit, name)), name
            assert name in dir(marlin_jit), name
        for name in "QuantWeight MarlinWeight pack unpack dequantize quantize load save warmup".split():
            assert name in marlin_jit.__all__, name
        for name in "matmul explain set_dispatch dispatch stats".split():
            assert name in marlin_jit.__all__, name
        print(marlin_jit.errors.MarlinJitError is marlin_jit.MarlinJitError)
    """
    assert run_python(code) == "True"


@pytest.mark.parametrize("order", [("pack", "quantize", "dispatch"), ("dispatch", "quantize", "pack")])
def test_functions_are_not_hidden_by_modules_of_the_same_name(order: tuple[str, ...]) -> None:
    imports = "; ".join(f"import marlin_jit.{module}" for module in order)
    code = f"{imports}; print(all(callable(getattr(marlin_jit, name)) for name in {order!r}))"
    assert run_python(code) == "True"


def test_unknown_name_is_an_attribute_error() -> None:
    code = """
        import marlin_jit
        try:
            marlin_jit.gemm
        except AttributeError as error:
            print(error)
    """
    assert run_python(code) == "module 'marlin_jit' has no attribute 'gemm'"
