"""``marlin-jit bench --roofline``: the floor by hand, rivals that are not there, the table and the figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from cli_runner import run
from helpers import PlayedTime

from marlin_jit import roofline
from marlin_jit.bench import Measurement
from marlin_jit.errors import LaunchError
from marlin_jit.plan import min_bytes
from marlin_jit.rivals import Layer, Missing
from marlin_jit.roofline import MS, Rates, Roofline, flops, measure_rates, measure_roofline
from marlin_jit.timing import Timing

K, N = 4096, 4096
RATES = Rates(4.0e6, 700e6, 8192, None)  # 4 TB/s, 700 TFLOP/s
NO_CUBLAS = Rates(4.0e6, None, 0, "cuBLAS is not installed")


def record(variant: str, m: int, us: float | None, reason: str | None = None) -> dict[str, Any]:
    return {"k": K, "n": N, "m": m, "group_size": 128, "dtype": "float16", "variant": variant, "us": us,
            "reason": reason}  # fmt: skip


def found(ms: tuple[int, ...] = MS, rates: Rates = RATES) -> Roofline:
    """Ours at 1.25 times the floor, native slow and for few rows, no humming."""
    records = []
    for m in ms:
        floor = rates.floor_us(min_bytes(m, K, N), flops(m, K, N))
        records.append(record("symmetric", m, 1.25 * floor))
        if m <= 256:
            records.append(record("native", m, 10 * floor))
        records.append(record("cublas", m, max(9.0, 1.05 * floor)))
        records.append(record("humming", m, None, "humming-kernels does not import: no module"))
    return Roofline(K, N, 128, "float16", rates, records, {"cublas": "13.1.0"})


# The floor


def test_the_floor_is_the_larger_of_two_times() -> None:
    few, many = found((1, 8192)).points
    assert (few.nbytes, few.flops) == (8_388_608 + 262_144 + 8_192 + 8_192, 2 * 4096 * 4096)
    assert few.floor_us == pytest.approx(8_667_136 / 4.0e6)
    assert few.moves
    assert many.floor_us == pytest.approx(2 * 8192 * 4096 * 4096 / 700e6)
    assert not many.moves
    assert few.fraction("symmetric") == many.fraction("symmetric") == pytest.approx(0.8)
    assert many.fraction("native") is None


def test_without_cublas_the_floor_is_of_bytes() -> None:
    point = found((8192,), NO_CUBLAS).points[0]
    assert point.moves
    assert point.floor_us == pytest.approx(min_bytes(8192, K, N) / 4.0e6)


def test_default_rows_are_powers_of_two_and_some_between() -> None:
    assert {1 << p for p in range(14)} < set(MS)
    assert list(MS) == sorted(set(MS))
    assert MS[-1] == 8192


# The rates, with memory and launches that are played


class TimerStub(PlayedTime):
    """A `Timer` on whose stream each launch takes what `cost` says at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.cost, self.captured = 0.0, 0

    def launched(self) -> None:
        self.now += self.cost

    def capture(self, body: Any) -> Any:
        self.captured += 1
        return body


def played(monkeypatch: pytest.MonkeyPatch, timer: TimerStub, free: int) -> dict[str, Any]:
    """A device with so much free memory; returns what was copied and multiplied."""
    seen: dict[str, Any] = {}

    def copy_from_device_async(source: Any, nbytes: int) -> None:
        seen["copied"] = nbytes
        timer.cost = nbytes / 2e6
        timer.launched()

    def array(shape: Any, dtype: Any) -> Any:
        data = SimpleNamespace(ptr=0, copy_from_device_async=copy_from_device_async)
        return SimpleNamespace(shape=shape, data=data, nbytes=2 * shape[0] * shape[1])

    def matmul_dense(x: Any, w: Any, out: Any, *, transposed: bool) -> None:
        assert transposed
        seen["size"] = (x.rows, x.columns, out.columns)
        timer.cost = 2 * x.rows * x.columns * out.columns / 600e6
        timer.launched()

    pool = SimpleNamespace(free_all_blocks=lambda: None)
    cupy = SimpleNamespace(
        empty=array, empty_like=lambda like: array(like.shape, np.float16), float16=np.float16,
        get_default_memory_pool=lambda: pool,
        cuda=SimpleNamespace(runtime=SimpleNamespace(memGetInfo=lambda: (free, 1 << 40))),
    )  # fmt: skip
    monkeypatch.setattr(roofline, "import_cupy", lambda: cupy)
    monkeypatch.setattr(roofline, "random_dense", lambda m, k, dtype, seed: array((m, k), dtype))
    monkeypatch.setattr(roofline._cublas, "available", lambda: True)
    monkeypatch.setattr(roofline._cublas, "matmul_dense", matmul_dense)
    return seen


@pytest.mark.parametrize(
    ("free", "copied", "size"), [(100 << 30, 1 << 30, 8192), (256 << 20, 64 << 20, 4096)]
)
def test_rates_are_of_bytes_read_and_written_and_of_operations(
    monkeypatch: pytest.MonkeyPatch, free: int, copied: int, size: int
) -> None:
    timer = TimerStub()
    seen = played(monkeypatch, timer, free)
    rates = measure_rates(timer, replays=3, warmup_ms=0.0)
    assert rates.bytes_us == pytest.approx(4e6)  # copied at 2 TB/s: as much is read as written
    assert rates.flops_us == pytest.approx(600e6)
    assert (rates.gemm_size, rates.reason) == (size, None)
    assert seen == {"copied": copied, "size": (size, size, size)}


def test_rates_without_cublas_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = TimerStub()
    played(monkeypatch, timer, 100 << 30)

    def refuse(*_: Any, **__: Any) -> None:
        raise LaunchError("cublasGemmEx returned status 15\nand more")

    monkeypatch.setattr(roofline._cublas, "matmul_dense", refuse)
    rates = measure_rates(timer, replays=3)
    assert (rates.flops_us, rates.reason) == (None, "cublasGemmEx returned status 15")
    monkeypatch.setattr(roofline._cublas, "available", lambda: False)
    assert measure_rates(timer, replays=3).reason == "cuBLAS is not installed"


# Rivals


class HummingStub:
    """humming-kernels that prints, and fails where M is 3."""

    version: dict[str, str] = {"humming": "1.0"}  # noqa: RUF012

    def open(self, layer: Layer) -> None:
        print("compiling")

    def measure(self, variant: str, m: int, options: dict[str, Any]) -> tuple[Measurement, None]:
        if m == 3:
            raise ZeroDivisionError("no kernel\nfor 3")
        return Measurement(Timing(float(m), (float(m),), 1, 1, "graph"), 0.0, None), None

    def close(self) -> None:
        pass


def measured(monkeypatch: pytest.MonkeyPatch, humming: Any, ms: tuple[int, ...]) -> Roofline:
    def layer(k: int, n: int, ms: Any, *, variants: Any, **_: Any) -> list[dict[str, Any]]:
        assert variants == ("symmetric", "native")
        return [record("symmetric", m, 5.0) for m in ms]

    pool = SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setattr(roofline, "CupyTimer", TimerStub)
    monkeypatch.setattr(roofline, "measure_rates", lambda timer: NO_CUBLAS)
    monkeypatch.setattr(roofline, "measure_layer", layer)
    monkeypatch.setattr(
        roofline, "import_cupy", lambda: SimpleNamespace(get_default_memory_pool=lambda: pool)
    )
    monkeypatch.setattr(roofline, "Humming", humming)
    return measure_roofline(K, N, ms)


def test_humming_is_measured_beside_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measured(monkeypatch, HummingStub, (1, 2))
    assert [point.us for point in result.points] == [
        {"symmetric": 5.0, "humming": 1.0},
        {"symmetric": 5.0, "humming": 2.0},
    ]
    assert result.versions == {"humming": "1.0"}
    assert capsys.readouterr() == ("", "compiling\n")  # stdout belongs to the table or the JSON


def test_a_rival_that_fails_or_is_missing_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(monkeypatch, HummingStub, (1, 3, 4))
    assert [sorted(point.us) for point in result.points] == [
        ["humming", "symmetric"],
        ["symmetric"],
        ["symmetric"],
    ]
    assert [r["reason"] for r in result.records[-2:]] == ["ZeroDivisionError: no kernel"] * 2

    def missing() -> None:
        raise Missing("PyTorch does not import: no module")

    result = measured(monkeypatch, missing, (1, 3))
    assert [r["reason"] for r in result.records[-2:]] == ["PyTorch does not import: no module"] * 2
    assert result.versions == {}


# What is shown


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The command with a device and its measurements played; returns what was asked."""
    from marlin_jit.cli import bench

    asked: dict[str, Any] = {}

    def measure(k: int, n: int, ms: tuple[int, ...], *, progress: Any, **more: Any) -> Roofline:
        asked.update(k=k, n=n, ms=ms, **more)
        progress("M = 1")
        return found(ms)

    monkeypatch.setattr(bench, "device_facts", lambda: {"gpu": "NVIDIA $GPU_1"})
    monkeypatch.setattr(bench, "measure_roofline", measure)
    return asked


def test_table(on_a_gpu: dict[str, Any]) -> None:
    done = run("bench", "--roofline", "--m", "1", "--m", "8192")
    assert done.code == 0
    assert on_a_gpu == {"k": 4096, "n": 14336, "ms": (1, 8192), "group_size": 128, "dtype": "float16"}
    lines = done.out.splitlines()
    assert lines[1] == (
        "floor: bytes at 4.00 TB/s (a copy of device memory), "
        "or operations at 700 TFLOP/s (cuBLAS fp16, 8192^3)"
    )
    words = [line.split() for line in lines[2:]]
    assert words[0] == ["M", "us", "floor", "ratio", "achieved", "native", "int4", "cuBLAS", "fp16"]
    assert words[1] == ["1", "2.7", "2.2", "1.25", "3.20", "TB/s", "21.7", "9.0"]
    assert words[2] == ["8192", "490.9", "392.7", "1.25", "560", "TFLOP/s", "-", "412.3"]
    assert lines[5:] == ["humming: humming-kernels does not import: no module"]


def test_json_has_points_and_records(on_a_gpu: dict[str, Any]) -> None:
    told = run("bench", "--roofline", "--json", "--k", "4096", "--n", "4096").json
    assert on_a_gpu["ms"] == MS
    assert told["rates"] == {"bytes_us": 4e6, "flops_us": 7e8, "gemm_size": 8192, "reason": None}
    assert told["layer"] == {"k": K, "n": N, "group_size": 128, "dtype": "float16"}
    assert [point["m"] for point in told["points"]] == list(MS)
    assert set(told["points"][0]["us"]) == {"symmetric", "native", "cublas"}
    assert told["device"] == {"gpu": "NVIDIA $GPU_1"} and told["versions"] == {"cublas": "13.1.0"}


def test_without_cublas_the_table_says_that_operations_are_left_out() -> None:
    from marlin_jit.cli.roofline import floor_line

    assert floor_line(NO_CUBLAS).endswith("; the operations are not in it: cuBLAS is not installed")


def test_the_figure_appears_beside_the_table(tmp_path: Path, on_a_gpu: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    done = run("bench", "--roofline", "--plot", tmp_path / "a.png")
    assert (done.code, done.out.splitlines()[2].split()[0]) == (0, "M")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    done = run("bench", "--roofline", "--json", "--plot", tmp_path / "a.svg")
    assert json.loads(done.out)["points"]
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg"]
    again = run("bench", "--roofline", "--plot", tmp_path / "a.png")
    assert (again.code, again.out) == (2, "")
    assert "exists already" in again.err
    assert run("bench", "--roofline", "--plot", tmp_path / "a.png", "--force", "--m", "1").code == 0


def test_the_figure_has_two_panels_over_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    from marlin_jit.cli.roofline import draw

    drawn: list[Any] = []
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda self, path, **_: (drawn.append(self), path.touch())
    )
    ms = (8192, 1, 64)  # as somebody may ask
    draw(tmp_path / "a.svg", "GPU", found(ms), force=False)
    times, fractions = drawn[0].axes
    assert (times.get_xscale(), times.get_yscale(), fractions.get_xscale()) == ("log", "log", "log")
    lines = {line.get_label(): line for line in times.lines}
    assert list(lines) == ["floor", "marlin-jit", "native int4", "cuBLAS fp16"]  # humming has no time
    assert list(lines["marlin-jit"].get_xdata()) == [1, 64, 8192]
    assert list(lines["native int4"].get_xdata()) == [1, 64]
    ours = fractions.lines[1]
    assert list(ours.get_ydata()) == pytest.approx([0.8] * 3)


def test_a_figure_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, on_a_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it then fails
    done = run("bench", "--roofline", "--plot", tmp_path / "a.png")
    assert (done.code, done.out, on_a_gpu) == (2, "", {})
    assert done.err.startswith("error: --plot needs matplotlib: ")
    assert run("bench", "--roofline", "--m", "1").code == 0  # the table does without


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--plot", "a.png"), "--plot draws the roofline: also give --roofline"),
        (("--host", "--plot", "a.png"), "--plot draws the roofline: also give --roofline"),
        (("--roofline", "--force"), "--force replaces a picture: also give --plot FILE"),
        (("--host", "--roofline"), "--host and --roofline measure different things: give one of them"),
        (("--roofline", "--plot", "a.pdf"), "a.pdf: --plot draws .png or .svg"),
        (("--roofline", "--k", "100"), "group size 128 does not divide K = 100"),
        (("--host", "--k", "100"), "group size 128 does not divide K = 100"),
    ],
)
def test_options_that_do_not_go_together(
    on_a_gpu: dict[str, Any], options: tuple[str, ...], message: str
) -> None:
    done = run("bench", *options)
    assert (done.code, done.out, on_a_gpu) == (2, "", {})
    assert message in done.err
