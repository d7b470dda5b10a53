"""The wheel: built from the source distribution, installed elsewhere, complete and self-contained."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = (".py", ".cu", ".cuh", ".txt", ".typed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing left by an earlier build gets in, and none is left here."""
    pytest.importorskip("build", reason="needs the package `build`")
    setuptools = pytest.importorskip("setuptools", "77", reason="needs setuptools 77")
    assert setuptools
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    for name in ("marlin_jit", "cli"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    # Without --wheel, `build` makes the wheel out of the source distribution, which proves both.
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "dist"), str(source)],
        check=True,
        capture_output=True,
        timeout=200,
    )
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--quiet",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True, timeout=200)
    return target


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def sources() -> dict[str, bytes]:
    """Every file that has to be in the wheel, under its name there."""
    found: dict[str, bytes] = {}
    for folder, prefix in (("marlin_jit", "marlin_jit"), ("cli", "marlin_jit/cli")):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SHIPPED or path.name == "py.typed":
                found[f"{prefix}/{path.relative_to(ROOT / folder).as_posix()}"] = path.read_bytes()
    return found


def test_wheel_holds_every_source_and_kernel_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        shipped = {name: archive.read(name) for name in names}
    assert shipped == sources()
    kinds = {Path(name).suffix for name in names}
    assert {".py", ".cu", ".cuh"} <= kinds
    assert "marlin_jit/py.typed" in names


def test_no_top_level_module_but_the_package(installed: Path) -> None:
    visible = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert visible <= {"marlin_jit", "bin"}
    assert (installed / "marlin_jit" / "cli" / "main.py").is_file()


def test_entry_point(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert archive.read(name).decode().split() == [
            "[console_scripts]",
            "marlin-jit",
            "=",
            "marlin_jit.cli.main:main",
        ]


def test_licence_and_notice_are_shipped(wheel: Path, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name: name for name in archive.namelist() if "/licenses/" in name}
        assert set(names) == {"LICENSE", "NOTICE"}
        assert "Apache License" in archive.read(names["LICENSE"]).decode()
        assert "IST-DASLab/marlin" in archive.read(names["NOTICE"]).decode()


def test_only_the_cuda_extras_bring_cupy(metadata: Message) -> None:
    """Two CuPys in one environment break each other, so each comes through one extra alone."""
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]
    extras = ("", *(metadata.get_all("Provides-Extra") or []))
    brings = {
        extra: sorted(r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra}))
        for extra in extras
    }
    cupy = {extra: [name for name in names if "cupy" in name] for extra, names in brings.items()}
    assert cupy.pop("cuda12") == ["cupy-cuda12x"]
    assert cupy.pop("cuda13") == ["cupy-cuda13x"]
    assert set(cupy) == {"", "bench", "gguf", "models", "plot", "test"}
    assert not any(cupy.values())
    assert brings[""] == ["click", "ml_dtypes", "numpy", "rich", "safetensors"]


def run_installed(installed: Path, code: str) -> str:
    """Run in an interpreter that sees the installed copy first, no CuPy, and none of this folder."""
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('cupy', 'cuda'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", block + code],
        env={"PYTHONPATH": str(installed), "PATH": "/nonexistent"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installed_copy_works_without_cupy(installed: Path) -> None:
    code = (
        "import marlin_jit, marlin_jit.cli.main\n"
        "print(marlin_jit.__file__, marlin_jit.cli.main.__file__)\n"
        "from marlin_jit import jit\n"
        "print(*(name for group in jit._read_sources(None) for name in group))\n"
    )
    files, kernels = run_installed(installed, code).splitlines()
    assert files.split() == [
        str(installed / "marlin_jit" / "__init__.py"),
        str(installed / "marlin_jit" / "cli" / "main.py"),
    ]
    folder = ROOT / "marlin_jit" / "kernels"
    assert sorted(kernels.split()) == sorted(path.name for path in folder.glob("*.cu*"))


def test_installed_command_line(installed: Path) -> None:
    code = (
        "sys.argv = ['marlin-jit', '--help']\n"
        "import runpy\n"
        "runpy.run_module('marlin_jit', run_name='__main__')\n"
    )
    assert "Usage: marlin-jit" in run_installed(installed, code)
