"""The parts of benchmarking that need no GPU: the method on a made-up clock, tables, files, commands."""

from __future__ import annotations

import copy
import ctypes
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import numpy as np
import pytest
from helpers import PlayedTime
from hypothesis import given
from hypothesis import strategies as st

from marlin_jit import _cublas, bench, jit, plan, timing
from marlin_jit.bench import BUSY_FIELDS, TOLERANCE, VARIANTS, Measurement, Problem, as_record, measure
from marlin_jit.device import unavailable_reason
from marlin_jit.errors import LaunchError, ShapeError
from marlin_jit.launch import ARCH_LIMITS, Matrix
from marlin_jit.pack import dequantize, unpack
from marlin_jit.plan import min_bytes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the installed package

from benchmarks import alternate, report, rivals, run, worker  # noqa: E402
from benchmarks.rivals import Layer  # noqa: E402
from benchmarks.shapes import MS, PUBLISHED, SHAPES, floor_us, roof_us  # noqa: E402

no_gpu = pytest.mark.skipif(unavailable_reason() is None, reason="there is a GPU")


# The method


class ClockStub(PlayedTime):
    """A `Timer` whose launches take a known time, plus host time outside of graphs. Notes what happens."""

    def __init__(self, launch_us: list[float], host_us: float = 20.0) -> None:
        super().__init__()
        self.log: list[Any] = []
        self._cost, self._host, self._capturing = launch_us, host_us, None  # type: Any, float, Any

    def launch(self, i: int) -> None:
        if self._capturing is None:
            self.log.append(i)
            self.now += self._host + self._cost[i]
        else:
            self._capturing.append(i)

    def capture(self, body: Any) -> Any:
        self.log.append("capture")
        self._capturing = []
        body()
        nodes, self._capturing = self._capturing, None
        self.log.append(("graph", tuple(nodes)))

        def replay() -> None:
            self.log.append("replay")
            self.now += sum(self._cost[i] for i in nodes)

        return replay

    def synchronize(self) -> None:
        self.log.append("synchronize")


def test_a_graph_hides_the_host_and_rotates_over_all_copies() -> None:
    clock = ClockStub([5.0, 6.0, 7.0, 6.0])
    result = timing.time_launches(clock.launch, 4, clock, replays=9)
    assert result.us == pytest.approx(6.0)
    assert (result.launches, result.copies, result.method) == (16, 4, "graph")
    assert len(result.samples) == 9
    assert ("graph", (0, 1, 2, 3) * 4) in clock.log


def test_every_copy_is_launched_before_the_capture() -> None:
    clock = ClockStub([5.0] * 7)
    timing.time_launches(clock.launch, 7, clock)
    assert set(range(7)) <= set(clock.log[: clock.log.index("capture")])


def test_without_a_graph_the_number_says_so_and_holds_host_time() -> None:
    clock = ClockStub([5.0] * 4, host_us=20.0)
    result = timing.time_launches(clock.launch, 4, clock, graph=False)
    assert (result.us, result.method) == (pytest.approx(25.0), "events")


def test_warm_up_lasts_as_long_as_asked() -> None:
    clock = ClockStub([10.0] * 16)
    timing.time_launches(clock.launch, 16, clock, replays=3, warmup_ms=8.0)
    # 160 us a replay: two to size the warm-up, 50 of it, three samples
    assert clock.log.count("replay") == 2 + 50 + 3


@pytest.mark.parametrize(
    ("weight_bytes", "copies"), [(8_650_752, 37), (30_000_000, 11), (235_000_000, 3), (1000, 48)]
)
def test_copies_exceed_the_cache_within_the_cap(weight_bytes: int, copies: int) -> None:
    assert timing.plan_copies(weight_bytes) == copies
    assert copies == timing.MAX_COPIES or copies * weight_bytes > 300e6


@given(st.integers(1, 60), st.floats(0.01, 1e7), st.integers(1, 30))
def test_launches_are_whole_rounds_unless_time_forbids(copies: int, estimate: float, replays: int) -> None:
    launches = timing.plan_launches(copies, estimate, replays, point_ms=1000.0)
    assert launches >= 2
    whole = launches % copies == 0 and launches >= timing.MIN_LAUNCHES
    assert whole or launches == 2 or launches * estimate * replays <= 1.001e6


def test_spread_and_merge_are_of_all_samples() -> None:
    parts = [
        timing.Timing(2.0, (1.0, 2.0, 3.0), 16, 4, "graph"),
        timing.Timing(9.0, (8.0, 9.0), 16, 4, "graph"),
    ]
    merged = timing.merge(parts)
    assert merged.us == np.median([1, 2, 3, 8, 9])
    low, high = np.percentile([1, 2, 3, 8, 9], [25, 75])
    assert merged.spread == pytest.approx((high - low) / 3.0)
    assert timing.Timing(1.0, (1.0,), 1, 1, "graph").spread == 0.0


# Shapes and what others reach


@pytest.mark.parametrize(
    ("key", "times"),
    [
        ((4096, 4096, 1), (2.1, 12.7, 8.2, 14.1, 8.6)),
        ((4096, 4096, 64), (3.0, 11.4, 12.0, 18.0, 15.4)),
        ((14336, 4096, 32), (7.7, 33.4, 21.1, 30.3, 25.6)),
        ((8192, 10240, 512), (119.3, 144, 129, 124, 238)),
        ((4096, 28672, 16), (15.0, 58.0, 26.1, 27.5, 29.7)),
        ((4096, 28672, 8192), (2672.4, 2837, 2871, 3012, 5887)),
    ],
)
def test_published_times(key: tuple[int, int, int], times: tuple[float, ...]) -> None:
    found = PUBLISHED[key]
    assert (found.roof, found.cublas, found.humming, found.machete, found.vllm_marlin) == times


def test_published_covers_every_shape_and_our_roof_agrees_with_theirs() -> None:
    assert set(PUBLISHED) == {(k, n, m) for k, n in SHAPES for m in MS}
    for (k, n, m), times in PUBLISHED.items():
        assert roof_us(m, k, n) == pytest.approx(times.roof, abs=0.06), (k, n, m)


def test_floor_by_hand() -> None:
    # 4096 x 4096, M = 1: 8 MiB of codes, 32 x 4096 scales of 2 bytes, one row in and out
    assert min_bytes(1, 4096, 4096) == 8_388_608 + 262_144 + 8_192 + 8_192
    assert min_bytes(1, 4096, 4096, symmetric=False) - min_bytes(1, 4096, 4096) == 262_144
    assert min_bytes(1, 4096, 4096, group_size=-1) == 8_388_608 + 8_192 * 3
    assert floor_us(1, 4096, 4096) == pytest.approx(2.1 + 8.667136 / 4.35)
    assert floor_us(1, 4096, 4096, pdl=True) == pytest.approx(0.8 + 8.667136 / 4.4)
    # M = 8192: 2 * 8192 * 4096 * 4096 operations at 720 TFLOP/s
    assert floor_us(8192, 4096, 4096) == pytest.approx(381.77, abs=0.01)


# The problem and its check


def _product(problem: Problem, m: int, symmetric: bool) -> np.ndarray[Any, Any]:
    dense = dequantize(problem.weights(symmetric)[0]).astype(np.float32)
    return (problem.x[:m].astype(np.float32) @ dense).astype(problem.x.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_right_product_passes_the_check(dtype: str, group_size: int, symmetric: bool) -> None:
    problem = Problem(256, 192, [1, 40], group_size=group_size, dtype=dtype, xp=np, copies=2)
    for m in (1, 40):
        assert problem.error(_product(problem, m, symmetric), symmetric) < TOLERANCE[dtype]


def test_a_wrong_product_fails_the_check() -> None:
    problem = Problem(256, 192, [1, 40], xp=np, copies=2)
    right = _product(problem, 40, True)
    assert problem.error(right, symmetric=False) > 0.1
    shifted = np.roll(right, 1, axis=0)
    assert problem.error(shifted, True) > 0.5
    unwritten = problem.output(40)
    unwritten[:, 1:] = right[:, 1:]
    assert problem.error(unwritten, True) == np.inf
    last_row = right.copy()
    last_row[39] = 0
    assert problem.error(last_row, True) > TOLERANCE["float16"]


def test_copies_differ_and_all_are_weights() -> None:
    problem = Problem(128, 64, [1], xp=np, copies=3)
    codes = [w.B for w in problem.weights(True)]
    assert all(not np.shares_memory(a, b) for a, b in ((codes[0], codes[1]), (codes[1], codes[2])))
    assert not np.array_equal(codes[0], codes[1])
    assert len(set(np.unique(unpack(problem.weights(True)[2]).q))) == 16
    assert problem.weights(False)[0].B is codes[0]


def test_activations_past_the_first_block_are_not_repeats() -> None:
    problem = Problem(128, 64, [1500], xp=np, copies=1)
    assert problem.x.shape == (1500, 128)
    assert not np.array_equal(problem.x[0], problem.x[1024])
    assert problem.error(_product(problem, 1500, True), True) < TOLERANCE["float16"]


def test_measure_checks_before_it_times() -> None:
    problem = Problem(256, 192, [1, 33], xp=np, copies=3)
    for name, m in (("symmetric", 33), ("asymmetric", 1)):
        clock = ClockStub([0.0])
        result = measure(problem, VARIANTS[name], m, clock, replays=3, warmup_ms=0.0)
        assert result.reason is None and result.timing is not None
        assert (result.timing.copies, len(result.timing.samples)) == (3, 3)
        assert result.error is not None and result.error < TOLERANCE["float16"]
    problem._reference[True] *= 1.001
    wrong = measure(problem, VARIANTS["symmetric"], 33, ClockStub([0.0]))
    assert wrong.timing is None
    assert wrong.reason is not None and wrong.reason.startswith("wrong result: error 1.0")


class _Played:
    """What a launch reads of a device array of half-precision numbers."""

    def __init__(self, pointer: int, shape: tuple[int, int]) -> None:
        self.shape, self.data = shape, SimpleNamespace(ptr=pointer)


def _launched(monkeypatch: pytest.MonkeyPatch, arch: str, m: int) -> tuple[plan.Plan, list[plan.Plan]]:
    """The plan that variant mma_sync launches on a device of `arch`, and all that there are."""
    limits = plan.Limits(132, *ARCH_LIMITS[arch])
    seen: list[Any] = []
    monkeypatch.setattr(bench, "current_device", lambda: None)
    monkeypatch.setattr(bench, "limits_of", lambda _: limits)
    monkeypatch.setattr(bench, "marlin", lambda *given: seen.append(given))
    weight = Problem(256, 192, [1], xp=np, copies=1).weights(True)[0]
    out = _Played(96, (m, 192))
    assert bench.call(VARIANTS["mma_sync"], _Played(32, (m, 256)), weight, out) is out
    ((taken, *given),) = seen
    assert given == [Matrix(32, 256, m, 256), weight, None, Matrix(96, 192, m, 192)]
    problem = plan.Problem(m, 256, 192, 128, plan.Zeros.NONE, False)
    return taken, plan.plans(problem, limits)


@pytest.mark.parametrize("m", [16, 64, 1000])
def test_mma_sync_launches_the_best_plan_of_its_kernel(monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    taken, plans = _launched(monkeypatch, "90a", m)
    assert plans[0].build.name != "marlin_gemm"  # what `matmul` would take
    assert taken.build.name == "marlin_gemm"
    assert taken.microseconds == min(p.microseconds for p in plans if p.build.name == "marlin_gemm")


def test_mma_sync_is_what_matmul_takes_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, plans = _launched(monkeypatch, "80", 64)
    assert taken == plans[0]


def test_mma_sync_is_measured_from_16_rows_on() -> None:
    assert [run.covers("ours", "mma_sync", m) for m in (1, 15, 16, 8192)] == [False, False, True, True]


def test_mma_sync_is_checked_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(256, 192, [33], xp=np, copies=2)
    wrong_by = 1.0

    def marlin_gemm(kernel: str, x: Any, weight: Any, out: Any) -> None:
        assert kernel == "marlin_gemm"
        out[...] = (x.astype(np.float32) @ dequantize(weight).astype(np.float32)) * wrong_by

    monkeypatch.setattr(bench, "_by_kernel", marlin_gemm)
    clock = ClockStub([0.0])
    assert measure(problem, VARIANTS["mma_sync"], 33, clock, replays=3, warmup_ms=0.0).reason is None
    wrong_by = 1.01
    result = measure(problem, VARIANTS["mma_sync"], 33, clock)
    assert result.timing is None and str(result.reason).startswith("wrong result")


def test_a_kernel_without_a_plan_or_with_rows_it_cannot_read_is_refused() -> None:
    limits, problem = (
        plan.Limits(132, *ARCH_LIMITS["80"]),
        plan.Problem(16, 256, 64, 128, plan.Zeros(0), False),
    )
    with pytest.raises(LaunchError, match="no plan of marlin_wgmma fits"):
        bench.best_plan("marlin_wgmma", problem, limits)
    weight = Problem(100, 64, [1], group_size=-1, xp=np, copies=1).weights(True)[0]
    with pytest.raises(ShapeError, match="K is 100"):
        bench.call(VARIANTS["mma_sync"], _Played(0, (16, 100)), weight, None)


def test_problem_refuses_what_it_cannot_make() -> None:
    with pytest.raises(ShapeError, match="float16, bfloat16"):
        Problem(128, 64, [1], dtype="float32", xp=np)
    with pytest.raises(ShapeError, match="each must be 1 or more"):
        Problem(128, 64, [], xp=np)


def test_a_record_is_strict_json() -> None:
    wrong = as_record(Measurement(None, float("inf"), "wrong result"))
    assert json.loads(json.dumps(wrong, allow_nan=False))["error"] == "inf"
    right = as_record(Measurement(timing.Timing(4.25, (4.2, 4.3), 36, 36, "graph"), 2e-4, None))
    assert right == {
        "us": 4.25, "samples": [4.2, 4.3], "launches": 36, "copies": 36, "method": "graph", "error": 2e-4,
        "reason": None,
    }  # fmt: skip


# cuBLAS, which counts by columns


class CublasStub:
    """`cublasGemmEx` over host memory, as its documentation defines it: column-major C = op(A) op(B)."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def cublasCreate_v2(self, handle: Any) -> int:
        self.calls.append("create")
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: int) -> int:
        self.calls.append("stream")
        return 0

    def cublasSetWorkspace_v2(self, handle: Any, pointer: int, size: int) -> int:
        self.calls.append("workspace")
        return 0

    def cublasGemmEx(
        self, handle: Any, op_a: int, op_b: int, m: int, n: int, k: int, alpha: Any,
        a: int, a_type: int, lda: int, b: int, b_type: int, ldb: int, beta: Any,
        c: int, c_type: int, ldc: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        assert (a_type, b_type, c_type, compute, algorithm) == (2, 2, 2, 68, -1)

        def columns(pointer: int, rows: int, count: int, ld: int) -> np.ndarray[Any, Any]:
            assert ld >= rows
            memory = (ctypes.c_uint16 * (ld * count)).from_address(pointer)
            return np.frombuffer(memory, np.float16).reshape(count, ld).T[:rows]

        left = columns(a, k, m, lda).T if op_a else columns(a, m, k, lda)
        right = columns(b, n, k, ldb).T if op_b else columns(b, k, n, ldb)
        columns(c, m, n, ldc)[...] = left.astype(np.float32) @ right.astype(np.float32)
        self.calls.append("gemm")
        return 0


class _OnDevice:
    """What `matmul_dense` reads of a device array, over a NumPy one."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.dtype, self.shape = array.dtype, array.shape
        self.data = SimpleNamespace(ptr=array.ctypes.data)


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("transposed", [False, True])
def test_dense_product_through_cublas(monkeypatch: pytest.MonkeyPatch, m: int, transposed: bool) -> None:
    stub = CublasStub()
    stream = SimpleNamespace(ptr=0)
    cuda = SimpleNamespace(get_current_stream=lambda: stream, runtime=SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setattr(_cublas, "_handles", {})
    monkeypatch.setattr(_cublas, "_library", lambda: stub)
    monkeypatch.setattr(_cublas, "_loaded", lambda: stub)
    monkeypatch.setattr(_cublas, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_cublas.scratch, "get", lambda *_: _OnDevice(np.zeros(1, np.uint8)))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, 10)).astype(np.float16)  # a row stride wider than K
    w = rng.standard_normal((6, 7)).astype(np.float16)
    out = np.zeros((m, 9), np.float16)
    stored = np.ascontiguousarray(w.T) if transposed else w
    x_stride = 10 if m > 1 else 0  # a single row may come without one
    _cublas.matmul_dense(
        Matrix(x.ctypes.data, x_stride, m, 6),
        _OnDevice(stored),
        Matrix(out.ctypes.data, 9, m, 7),
        transposed=transposed,
    )
    want = (x[:, :6].astype(np.float32) @ w.astype(np.float32)).astype(np.float16)
    np.testing.assert_array_equal(out[:, :7], want)
    assert not out[:, 7:].any()
    assert stub.calls == ["create", "stream", "workspace", "gemm"]


# Result files and tables


def _record(library: str, variant: str, m: int, us: float | None, **more: Any) -> dict[str, Any]:
    done = us is not None
    record = {
        "library": library, "variant": variant, "k": 4096, "n": 4096, "m": m, "group_size": 128,
        "dtype": "float16", "us": us, "pass_us": [us] if done else [], "samples": [us] if done else [],
        "launches": 36, "copies": 36, "method": "graph" if done else None, "error": None, "path": None,
        "reason": None if done else "not run: no time",
    }  # fmt: skip
    return record | more


def _document() -> dict[str, Any]:
    records = [
        _record("ours", "symmetric", 16, 5.0),
        _record("ours", "mma_sync", 16, 6.5),
        _record("ours", "asymmetric", 16, 5.25),
        _record("cublas", "linear", 16, 14.0),
        _record("cublas", "matmul", 16, 12.5),
        _record("humming", "symmetric", 16, None, reason="humming-kernels does not import: no module"),
        _record("ours", "symmetric", 2048, 160.0),
    ]
    return report.document(
        records, date="2026-01-01T00:00:00+00:00", environment={"python": "3.12"}, libraries={}, method={},
        seconds=12.34, complete=True,
    )  # fmt: skip


def test_a_result_file_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "results" / "run.json"
    report.write(path, _document())
    assert report.read(path) == _document()
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]
    assert sum(line.startswith('  {"library"') for line in path.read_text().splitlines()) == 7


def _without(key: str) -> Any:
    return lambda d: d["records"][0].pop(key)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.update(schema="other/1"), "schema"),
        (lambda d: d.pop("environment"), r"missing \['environment'\]"),
        (lambda d: d.update(more=1), r"unknown \['more'\]"),
        (_without("us"), r"record 0: missing \['us'\]"),
        (lambda d: d["records"][1].update(us="5"), "record 1: us is '5'"),
        (lambda d: d["records"][1].update(m=True), "record 1: m is True"),
        (lambda d: d["records"][0].update(us=None), "record 0: it must have either us or a reason"),
        (lambda d: d["records"][0].update(us=float("nan")), "record 0: us is nan"),
        (lambda d: d["records"][0].update(samples=[]), "record 0: us is 5.0 with 0 samples"),
    ],
)
def test_a_damaged_result_file_is_refused(damage: Any, message: str) -> None:
    data = copy.deepcopy(_document())
    damage(data)
    with pytest.raises(ValueError, match=message):
        report.validate(data)


def test_table_has_a_row_an_m_with_ratios() -> None:
    lines = report.table(_document()).splitlines()
    assert lines[0] == "K 4096 x N 4096, group 128, float16 (us)"
    head, row, last = (line.split() for line in lines[1:4])
    got = dict(zip(head, row, strict=True))
    assert got == {
        "M": "16", "floor": "4.1", "sym": "5.0", "mma.sync": "6.5", "asym": "5.2", "pair": "-", "native": "-",
        "fp16c": "-", "cuBLAS": "12.5", "humming": "-", "vllm*": "9.5", "/floor": "1.21", "/vllm*": "0.53",
        "/cuBLAS": "0.40", "/humm": "-", "asym+": "+5.0%",
    }  # fmt: skip
    assert dict(zip(head, last, strict=True))["vllm*"] == "189"
    assert dict(zip(head, last, strict=True))["mma.sync"] == "-"  # as in files from before it was measured
    assert lines[4] == "  ! humming symmetric: humming-kernels does not import: no module"
    assert len({len(line) for line in lines[1:4]}) == 1


def test_published_times_are_not_set_beside_another_precision() -> None:
    data = _document()
    for record in data["records"]:
        record["dtype"] = "bfloat16"
    lines = report.table(data).splitlines()
    assert dict(zip(lines[1].split(), lines[2].split(), strict=True))["vllm*"] == "-"


# The run: workers and how their answers become records


def test_passes_become_one_record() -> None:
    answers = [
        {"us": us, "samples": samples, "launches": 36, "copies": 36, "method": "graph", "error": 2e-4,
         "reason": None, "path": "marlin", "seconds": 0.1}
        for us, samples in ((5.0, [4.0, 5.0, 6.0]), (7.0, [7.0, 7.0, 8.0]))
    ]  # fmt: skip
    got = run.combine(answers, "unused")
    assert got["us"] == np.median([4, 5, 6, 7, 7, 8])
    assert got["pass_us"] == [5.0, 7.0]
    assert (got["reason"], got["path"]) == (None, "marlin")


def test_a_failure_in_one_pass_is_a_failure() -> None:
    good = {"us": 5.0, "samples": [5.0], "launches": 1, "copies": 1, "method": "graph", "error": 0.0,
            "reason": None, "path": None}  # fmt: skip
    wrong = good | {"us": None, "samples": [], "error": "inf", "reason": "wrong result"}
    assert run.combine([good, wrong], "-")["reason"] == "wrong result"
    assert run.combine([good, {"failed": "LaunchError: x"}], "-")["reason"] == "LaunchError: x"
    assert run.combine([], "not run: no time")["reason"] == "not run: no time"


def test_few_rows_take_all_passes_before_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class PlayedWorker:
        library, missing, alive, version = "ours", None, True, {}

        def send(self, request: dict[str, Any]) -> None:
            if request["op"] == "time":
                asked.append(request["m"])

        def receive(self, timeout: float) -> dict[str, Any]:
            return {"us": 5.0, "samples": [5.0], "launches": 1, "copies": 1, "method": "graph", "error": 0.0,
                    "reason": None, "path": None, "seconds": 0.1}  # fmt: skip

    monkeypatch.setattr(run, "Worker", lambda library, log: PlayedWorker())
    measured = run.Run(
        ["ours"], ["symmetric"], [1, 64, 65, 4096], 128, "float16", 2, {}, run.Budget(100), None
    )
    measured.measure_shape(256, 192)
    assert asked == [1, 64, 64, 1, 65, 4096, 4096, 65]
    assert [record["pass_us"] for record in measured.records] == [[5.0, 5.0]] * 4


def test_passes_beyond_two_have_random_orders_in_pairs() -> None:
    turns = run.passes_over("abcdefgh", 5)
    passes = ["".join(turns[i : i + 8]) for i in range(0, 40, 8)]
    assert passes[:2] == ["abcdefgh", "hgfedcba"] and passes[3] == passes[2][::-1]
    assert all(sorted(order) == list("abcdefgh") for order in passes) and len(set(passes)) == 5
    assert turns == run.passes_over("abcdefgh", 5) and run.passes_over([], 3) == []


def test_clock_and_power_are_read_once_a_layer_while_most_rows_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[Any] = []

    class PlayedWorker:
        library, missing, alive, version = "ours", None, True, {}

        def send(self, request: dict[str, Any]) -> None:
            log.append(("sent", request.get("m")))

        def receive(self, timeout: float) -> dict[str, Any]:
            log.append("answered")
            return {"failed": "no device", "seconds": 0.1}

    def read(fields: Any) -> dict[str, str]:
        log.append("read")
        return dict.fromkeys(fields, "1")

    monkeypatch.setattr(run, "Worker", lambda library, log: PlayedWorker())
    monkeypatch.setattr(run, "read_nvidia_smi", read)
    monkeypatch.setattr(run.Run, "_open_all", lambda *_: {})
    measured = run.Run(["ours"], ["symmetric"], [1, 4096], 128, "float16", 2, {}, run.Budget(100), None)
    for k in (256, 512):
        measured.measure_shape(k, 192)
    first = log[: log.index(("sent", None))]
    many = ("sent", 4096)
    assert first == [*[("sent", 1), "answered"] * 2, many, "read", "answered", many, "answered"]
    assert [(r["k"], r["n"], r["m"], r["variant"]) for r in measured.smi_during] == [
        (256, 192, 4096, "symmetric"),
        (512, 192, 4096, "symmetric"),
    ]
    assert all(r["clocks.sm"] == r["power.draw"] == "1" for r in measured.smi_during)


def test_nvidia_smi_is_asked_for_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(command: list[str], **_: Any) -> Any:
        assert command[1] == "--query-gpu=clocks.sm,power.draw,clocks_event_reasons.active"
        return SimpleNamespace(stdout="1485 MHz, 695.10 W, 0x0000000000000004\n")

    monkeypatch.setattr(subprocess, "run", answer)
    assert bench.read_nvidia_smi(BUSY_FIELDS) == {
        "clocks.sm": "1485 MHz",
        "power.draw": "695.10 W",
        "clocks_event_reasons.active": "0x0000000000000004",
    }


class LibraryStub:
    """A `Library` without a device."""

    version: dict[str, str] = {"stub": "1"}  # noqa: RUF012

    def open(self, layer: Layer) -> None:
        if layer.k == 7:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
        if layer.k == 8:
            raise ValueError("unsupported\nK")

    def measure(self, variant: str, m: int, options: dict[str, Any]) -> tuple[Measurement, str | None]:
        return Measurement(timing.Timing(float(m), (float(m),), 1, 1, "graph"), 0.0, None), variant

    def close(self) -> None:
        pass


def _open(k: int) -> dict[str, Any]:
    layer = {"k": k, "n": 64, "ms": [1], "group_size": 128, "dtype": "float16", "variants": ["symmetric"]}
    return {"op": "open", "layer": layer}


def test_a_worker_answers_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "make", lambda name: LibraryStub())
    requests = [
        _open(128),
        {"op": "time", "variant": "symmetric", "m": 3, "options": {}},
        {"op": "close"},
        _open(8),
    ]
    out = io.StringIO()
    worker.serve("ours", io.StringIO("".join(json.dumps(r) + "\n" for r in requests)), out)
    hello, opened, timed, closed, failed = (json.loads(line) for line in out.getvalue().splitlines())
    assert hello == {"version": {"stub": "1"}}
    assert opened["version"] == {"stub": "1"}
    assert (timed["us"], timed["path"]) == (3.0, "symmetric")
    assert set(closed) == {"seconds"}
    assert failed["failed"] == "ValueError: unsupported K"
    assert "fatal" not in failed


def test_a_lost_context_is_fatal() -> None:
    assert worker.answer(LibraryStub(), _open(7))["fatal"] is True


@no_gpu
@pytest.mark.parametrize(
    "command",
    [
        ("-m", "benchmarks.run", "--quick"),
        ("-m", "benchmarks.cliff"),
        ("-m", "benchmarks.sweep"),
        ("tests/gpu/sanitize.py",),
    ],
)
def test_without_a_gpu_measuring_ends_with_one_line(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(("error: no CUDA device can be used", "error: CuPy is not installed"))


def test_plot_without_matplotlib_is_one_line(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text("{}")
    code = (
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "from benchmarks.plot import main\n"
        f"main([{str(results)!r}, {str(tmp_path / 'plot.svg')!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: matplotlib cannot be imported")
    assert line.endswith("run pip install matplotlib")


@no_gpu
def test_a_run_in_which_all_fails_says_why_and_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    code = "from benchmarks import run; run.unavailable_reason = lambda: None; run.main()"
    command = [sys.executable, "-c", code, "--shape", "256x128", "--m", "1", "--m", "512"]
    done = subprocess.run(
        [*command, "--variant", "symmetric", "--variant", "native", "-o", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    data = report.read(path)
    ours = [(r["variant"], r["m"]) for r in data["records"] if r["library"] == "ours"]
    assert ours == [("symmetric", 1), ("native", 1), ("symmetric", 512)]  # native only up to its limit
    assert all(r["us"] is None and r["reason"] for r in data["records"])
    assert "K 256 x N 128" in done.stdout


def test_single_launches_are_shown_beside_chained_ones() -> None:
    data = _document()
    assert report.launches_table(data) == ""  # as in files from before there were any
    data["records"] += [
        _record("ours_single", "symmetric", 16, 6.1),
        _record("ours_single", "symmetric", 32, None),
        _record("ours", "symmetric", 32, 5.5),
    ]
    report.validate(data)
    title, *lines = report.launches_table(data).splitlines()
    assert title == "K 4096 x N 4096, group 128, float16: chained and single launches (us)"
    assert lines[0].split() == ["M", "floor", "chain", "/floor", "single", "/floor", "rival", "which"]
    assert lines[1].split() == ["16", "4.1", "5.0", "1.21", "6.1", "1.47", "12.5", "cublas"]
    floor = floor_us(32, 4096, 4096)
    assert lines[2].split() == ["32", f"{floor:.1f}", "5.5", f"{5.5 / floor:.2f}", "-", "-", "-", "-"]
    assert len(lines) == 3  # more rows have no single launch


def test_older_result_files_are_still_read() -> None:
    files = sorted((ROOT / "benchmarks/results").glob("*-g128.json"))
    assert files
    for file in files:
        data = report.read(file)
        single = any(r["library"] == "ours_single" for r in data["records"])
        assert bool(report.launches_table(data)) == single
        assert report.table(data).startswith("K 4096 x N 4096, group 128")


def test_single_launches_are_of_few_rows() -> None:
    budget = run.Budget(100.0)

    def started(ms: list[int]) -> run.Run:
        return run.Run(run.LIBRARIES, ["symmetric"], ms, 128, "float16", 1, {}, budget, None)

    assert list(started([512]).workers) == ["ours", "cublas", "humming"]
    both = started([1, 64, 65])
    assert list(both.workers) == list(run.LIBRARIES)
    asked = {name: both._open_request(name, 256, 128)["layer"] for name in both.workers}
    assert (asked["ours_single"]["ms"], asked["ours_single"]["variants"]) == ([1, 64], ["symmetric"])
    assert asked["ours"]["ms"] == asked["cublas"]["ms"] == [1, 64, 65]


def test_single_launches_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jit.OVERLAP, "1")
    seen = []

    def init(self: Any) -> None:
        seen.append(os.environ[jit.OVERLAP])
        self.version = {}

    monkeypatch.setattr(rivals.Ours, "__init__", init)
    assert rivals.make("ours").version == {}
    assert rivals.make("ours_single").version == {"MARLIN_JIT_OVERLAP": "0"}
    assert seen == ["1", "0"]
    with pytest.raises(ValueError, match="must be ours, ours_single, humming or cublas"):
        rivals.make("other")


def test_a_worker_compiles_for_all_and_the_other_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    synchronize = SimpleNamespace(synchronize=lambda: done.append("synchronize"))
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: synchronize))
    monkeypatch.setattr(rivals, "_import_cupy", lambda: cupy)
    monkeypatch.setattr(rivals, "warmup", lambda **what: done.append(what))
    monkeypatch.setattr(
        rivals, "Problem", lambda *_, **__: SimpleNamespace(weights=done.append, group_size=128)
    )
    layer = Layer(256, 128, [1], 128, "float16", ["symmetric"])
    for kind in (rivals.Ours, rivals.OursSingle):
        kind.open(kind.__new__(kind), layer)
    ours = [True, {"dtypes": ["float16"], "group_sizes": [128]}, "synchronize"]
    assert done == [*ours, True, "synchronize"]


def test_shapes_are_parsed() -> None:
    assert run.parse_shape(None, None, ("4096x14336", "64X128")) == ((4096, 14336), (64, 128))
    with pytest.raises(click.BadParameter, match="not KxN"):
        run.parse_shape(None, None, ("4096",))


# The command


@no_gpu
def test_bench_without_a_gpu_is_one_line_and_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "marlin_jit", "bench", "--m", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")


def test_bench_refuses_a_group_size_that_does_not_divide() -> None:
    from marlin_jit.cli.bench import bench

    result = click.testing.CliRunner().invoke(bench, ["--k", "100"])
    assert isinstance(result.exception, ShapeError)
    assert "group size 128 does not divide K = 100" in str(result.exception)


def test_bench_table() -> None:
    from marlin_jit.cli.bench import failures, result_table

    records = [
        {"m": 1, "variant": "symmetric", "us": 5.0, "reason": None},
        {"m": 1, "variant": "native", "us": 40.0, "reason": None},
        {"m": 1, "variant": "cublas", "us": None, "reason": "cuBLAS is not installed"},
        {"m": 512, "variant": "symmetric", "us": 30.0, "reason": None},
        {"m": 512, "variant": "cublas", "us": None, "reason": "cuBLAS is not installed"},
    ]
    columns, rows = result_table(records)
    first = dict(zip(columns, rows[0], strict=True))
    assert (first["M"], first["symmetric"], first["x native"], first["x cuBLAS"]) == ("1", "5.0", "8.00", "-")
    assert [row[0] for row in rows] == ["1", "512"]
    assert failures(records) == [("cublas", "cuBLAS is not installed")]


def test_every_variant_says_what_it_is() -> None:
    assert all(v.meaning and v.min_m <= v.max_m for v in VARIANTS.values())
    assert not VARIANTS["native"].covers(512)
    assert VARIANTS["fp16_cache"].covers(512)


def test_pages_show_the_numbers_of_the_newest_result_file() -> None:
    from benchmarks import tables

    for kind in ("*-g128.json", "*-other-layers.json", "*-alternate.json"):
        newest = sorted((tables.ROOT / "benchmarks/results").glob(kind))[-1]
        for path, text in tables.pages(json.loads(newest.read_text()), newest.name).items():
            assert path.read_text() == text, f"python -m benchmarks.tables {newest.relative_to(tables.ROOT)}"


def _result(kind: str) -> dict[str, Any]:
    """The newest committed result file of a kind."""
    from benchmarks import tables

    newest = sorted((tables.ROOT / "benchmarks/results").glob(kind))[-1]
    data: dict[str, Any] = json.loads(newest.read_text())
    return data


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("*-alternate.json", lambda d: d["method"].update(dtype="bfloat16"), "float16 with groups of 128"),
        ("*-alternate.json", lambda d: d["method"].update(group_size=32), "float16 with groups of 128"),
        ("*-alternate.json", lambda d: d["points"].pop(), "the page shows M ="),
        ("*-alternate.json", lambda d: d["points"].clear(), "the page shows M ="),
        ("*-alternate-many.json", lambda d: None, "the page shows M ="),
        ("*-g128.json", lambda d: d["libraries"].update(humming={"missing": "no wheel"}), "beside cuBLAS"),
        ("*-g128.json", lambda d: d.update(complete=False), "complete run"),
        (
            "*-g128.json",
            lambda d: d.update(records=[r for r in d["records"] if r["m"] != 64]),
            r"lacks \[\(4096, 4096, 64\)",
        ),
        ("*-g128.json", lambda d: d.update(schema="another/1"), "not a result file"),
    ],
)
def test_pages_are_not_made_of_a_file_that_is_not_what_they_say(kind: str, change: Any, says: str) -> None:
    from benchmarks import tables

    data = _result(kind)
    change(data)
    with pytest.raises(ValueError, match=says):
        tables.pages(data, "a.json")


@pytest.mark.parametrize("nothing", [[], None, 3])
def test_pages_are_not_made_of_json_that_is_no_result(nothing: Any) -> None:
    from benchmarks import tables

    with pytest.raises(ValueError, match="not a result file"):
        tables.pages(nothing, "a.json")


@pytest.mark.parametrize("text", ["[]", "{", '{"schema": "marlin-jit-cliff/1"}'])
def test_commands_say_in_a_line_that_a_file_is_no_result(text: str, tmp_path: Path) -> None:
    from benchmarks import plot, tables

    file = tmp_path / "a.json"
    file.write_text(text)
    pytest.importorskip("matplotlib")
    for main, args in ((tables.main, [str(file)]), (plot.main, [str(file), str(tmp_path / "a.svg")])):
        done = click.testing.CliRunner().invoke(main, args)
        assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
        assert done.output.startswith("Error: ") and done.output.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_text_and_pictures_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    from benchmarks import plot

    (tmp_path / "page").write_text("old")
    (tmp_path / "link").symlink_to("page")
    with pytest.raises(UnicodeEncodeError):
        report.write_text(tmp_path / "link", "new \udcff")
    with pytest.raises(ValueError, match="not supported"):
        plot.save(figure, tmp_path / "link", "nonsense", salt="a")
    assert (tmp_path / "page").read_text() == "old"
    report.write_text(tmp_path / "link", "new")
    assert (tmp_path / "page").read_text() == "new" and (tmp_path / "link").is_symlink()
    plot.save(figure, tmp_path / "a.svg", "svg", salt="a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "link", "page"]


def test_a_picture_without_an_ending_does_not_replace_what_has_that_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plot import main

    results = tmp_path / "results"
    results.write_text(json.dumps(_result("*-g128.json")))
    before = results.read_bytes()
    main([str(results), str(results)], standalone_mode=False)
    assert results.read_bytes() == before
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_pages_have_a_column_of_mma_sync_where_it_was_measured() -> None:
    from benchmarks import tables

    columns = ("symmetric", "mma_sync", "cublas")
    new = tables.markdown(tables.times(_document()), columns, None).splitlines()
    assert new[0] == "| K x N | M | symmetric | mma.sync | cuBLAS fp16 |"
    assert new[2:] == ["| 4096 x 4096 | 16 | 5.0 | 6.5 | 12.5 |", "| 4096 x 4096 | 2048 | 160 | - | - |"]
    before = _document()
    before["records"] = [r for r in before["records"] if r["variant"] != "mma_sync"]
    old = tables.markdown(tables.times(before), columns, None).splitlines()
    assert old[:3] == [
        "| K x N | M | symmetric | cuBLAS fp16 |",
        "|---|---|---|---|",
        "| 4096 x 4096 | 16 | 5.0 | 12.5 |",
    ]


def test_the_pages_of_a_new_run_show_mma_sync() -> None:
    from benchmarks import tables

    newest = sorted((tables.ROOT / "benchmarks/results").glob("*-g128.json"))[-1]
    data = report.read(newest)
    data["records"].append(_record("ours", "mma_sync", 1024, 77.7))
    data["records"] = [
        r
        for r in data["records"]
        if r["variant"] != "mma_sync" or (r["k"], r["m"], r["us"]) == (4096, 1024, 77.7)
    ]
    pages = tables.pages(data, newest.name)
    assert {path.name for path in pages} == {"README.md", "performance.md"}
    for text in pages.values():
        assert "symmetric | mma.sync | zero points" in text
        assert sum("| 77.7 |" in line for line in text.splitlines()) == 1


def test_pages_take_nothing_but_what_they_say() -> None:
    from benchmarks import tables

    file = tables.ROOT / "benchmarks/results/h200-2026-12-01-few-rows-"
    for other in ("bfloat16", "group-32"):
        with pytest.raises(ValueError, match="a complete run of float16 with groups of 128"):
            tables.pages(report.read(Path(f"{file}{other}.json")), "x.json")
    with pytest.raises(ValueError, match="beside cuBLAS, through PyTorch, and humming-kernels"):
        tables.pages(report.read(Path(f"{file}float16.json")), "x.json")


# Variants in alternation


def test_alternation_finds_costs_below_the_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(256, 192, [33], xp=np, copies=2)
    cost = {"symmetric": 100.0, "asymmetric": 103.0, "pair": 108.0}
    order: list[str] = []
    monkeypatch.setattr(alternate, "call", lambda variant, x, weight, out: order.append(variant.name))
    monkeypatch.setattr(Problem, "error", lambda *_: 1e-4)

    def time_launches(launch: Any, copies: int, timer: Any, **_: Any) -> Any:
        launch(copies - 1)
        us = cost[order[-1]] * (1 + 0.002 * len(order))  # the clock falls all the time
        return timing.Timing(us, (us,), 16, copies, "graph")

    monkeypatch.setattr(alternate, "time_launches", time_launches)
    taken = alternate.alternate(problem, list(cost), 33, ClockStub([0.0]), passes=4)
    timed = order[3:]  # after the checks
    assert timed == [*cost, *list(cost)[::-1]] * 2
    assert alternate.costs(taken, "asymmetric")[1] == pytest.approx(0.03, abs=2e-3)
    assert alternate.costs(taken, "pair")[0] == pytest.approx(10, abs=2)
    line = alternate.table([{"k": 256, "n": 192, "m": 33, "us": taken}]).splitlines()[1]
    assert line.split()[:4] == ["256", "x", "192", "33"]
    assert "+3.0%" in line


def test_activation_order_in_alternation_is_the_same_product() -> None:
    problem = Problem(256, 192, [5], xp=np, copies=2)
    variant, x, weights = alternate.product_of(problem, alternate.ORDERED, 5)
    assert all(w.perm is not None for w in weights)
    out = problem.output(5)
    alternate.call(variant, x, weights[0], out)
    assert problem.error(out, variant.symmetric) < 1e-3


def test_alternation_times_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(256, 192, [33], xp=np, copies=2)
    problem._reference[False] *= 1.01
    monkeypatch.setattr(alternate, "time_launches", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(ValueError, match=r"asymmetric at M = 33: error 9\..*e-03"):
        alternate.alternate(problem, ["symmetric", "asymmetric"], 33, ClockStub([0.0]), passes=1)
