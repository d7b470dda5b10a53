"""Files of tuned plans: what they hold, when they count, and that nothing in them is trusted."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import marlin_jit as mj
from marlin_jit import _disk_cache, autotune, jit, launch, plan, tuned
from marlin_jit.cli import tune as command
from marlin_jit.cli.main import main
from marlin_jit.errors import DeviceError, DTypeError, MarlinJitError, ValueRangeError
from marlin_jit.plan import Problem, Zeros

GPU = "NVIDIA H200"
H200 = plan.Limits(132, *launch.ARCH_LIMITS["90a"])
PROBLEM = Problem(512, 4096, 4096, 128, Zeros.NONE, False)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARLIN_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def forget() -> None:
    """As a new process begins."""
    tuned._known.cache_clear()
    tuned._checked.cache_clear()


def tuning(problem: Problem = PROBLEM, number: int = 3, us: float = 9.0) -> tuned.Tuning:
    return tuned.Tuning(problem, plan.plans(problem, H200)[number], us, 10.0, 8)


def document(path: Path) -> dict:
    return json.loads(path.read_text())


def test_a_recorded_plan_is_taken_for_its_problem_alone(own_cache: Path) -> None:
    one = tuning()
    assert one.plan != plan.choose(PROBLEM, H200)
    path = tuned.record([one], GPU)
    assert path == own_cache / "tuned-nvidia-h200.json"
    forget()
    assert tuned.plan_for(PROBLEM, H200, GPU) == one.plan
    others = {"m": 513, "padded_n": 4160, "group_size": 64, "zeros": Zeros.POINTS, "bfloat16": True}
    for name, value in others.items():
        other = replace(PROBLEM, **{name: value})
        assert tuned.plan_for(other, H200, GPU) == plan.choose(other, H200)
    assert tuned.plan_for(PROBLEM, H200, "NVIDIA H100 PCIe") == plan.choose(PROBLEM, H200)


def test_recording_adds_replaces_and_takes_out(own_cache: Path) -> None:
    second = replace(PROBLEM, m=64)
    tuned.record([tuning()], GPU)
    path = tuned.record([tuning(second)], GPU)
    assert [entry["problem"]["m"] for entry in document(path)["tuned"]] == [512, 64]
    newer = tuning(number=5)
    tuned.record([newer], GPU)
    assert tuned.plan_for(PROBLEM, H200, GPU) == newer.plan
    tuned.record([tuning(number=0, us=10.0)], GPU)  # the planner's own is the best
    assert [entry["problem"]["m"] for entry in document(path)["tuned"]] == [64]
    assert tuned.plan_for(PROBLEM, H200, GPU) == plan.choose(PROBLEM, H200)
    assert [file.name for file in own_cache.iterdir()] == [path.name]  # nothing half-written is left


def test_the_variable_names_the_file_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tuned.record([tuning()], GPU)
    elsewhere = tmp_path / "there" / "plans.json"
    monkeypatch.setenv(tuned.VARIABLE, str(elsewhere))
    forget()
    assert tuned.plan_for(PROBLEM, H200, GPU) == plan.choose(PROBLEM, H200)
    assert "does not exist" in caplog.text
    other = tuning(number=2)
    assert tuned.record([other], GPU) == elsewhere
    assert tuned.plan_for(PROBLEM, H200, GPU) == other.plan
    monkeypatch.setenv(tuned.VARIABLE, "0")
    forget()
    assert tuned.plan_for(PROBLEM, H200, GPU) == plan.choose(PROBLEM, H200)
    with pytest.raises(MarlinJitError, match="nowhere to go"):
        tuned.record([tuning()], GPU)


def damaged(text: str) -> dict[str, str]:
    good = json.loads(text)
    entry = good["tuned"][0]

    def with_entry(**changes: object) -> str:
        return json.dumps({**good, "tuned": [{**entry, **changes}]})

    return {
        "empty": "",
        "half": text[: len(text) // 2],
        "list": "[1, 2]",
        "null": "null",
        "nothing": "{}",
        "schema": json.dumps({**good, "schema": "marlin-jit-tuned/0"}),
        "gpu": json.dumps({**good, "gpu": "NVIDIA A100"}),
        "kernels": json.dumps({**good, "kernels": "0" * 64}),
        "tuned": json.dumps({**good, "tuned": 7}),
        "problem": with_entry(problem={"m": 1}),
        "zeros": with_entry(problem={**entry["problem"], "zeros": 9}),
        "unknown": with_entry(problem={**entry["problem"], "more": 1}),
        "plan": with_entry(plan=3),
        "bytes": '{"\udcff',
        "deep": "[" * 200_000,
    }


@pytest.mark.parametrize("kind", sorted(damaged('{"tuned": [{"problem": {}}]}')))
def test_a_file_that_is_not_right_counts_for_nothing_and_is_replaced(
    kind: str, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tuned.record([tuning()], GPU)
    path.write_bytes(damaged(path.read_text())[kind].encode(errors="surrogateescape"))
    forget()
    assert tuned.plan_for(PROBLEM, H200, GPU) == plan.choose(PROBLEM, H200)
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
    assert str(path) in caplog.text
    assert tuned.plan_for(replace(PROBLEM, m=7), H200, GPU) and len(caplog.records) == 1  # told once
    one = tuning()
    tuned.record([one], GPU)
    assert "begun anew" in caplog.records[-1].getMessage() and str(path) in caplog.records[-1].getMessage()
    assert tuned.plan_for(PROBLEM, H200, GPU) == one.plan


def test_of_a_file_without_end_a_bounded_part_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuned, "_MOST_BYTES", 1000)
    monkeypatch.setenv(tuned.VARIABLE, "/dev/zero")
    if not os.path.exists("/dev/zero"):
        pytest.skip("no /dev/zero")
    assert tuned.plan_for(PROBLEM, H200, GPU) == plan.choose(PROBLEM, H200)
    assert "has more than 1000 bytes" in caplog.text


def test_a_pipe_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "pipe"))
    assert tuned.plan_for(PROBLEM, H200, GPU) == plan.choose(PROBLEM, H200)
    assert "is a pipe" in caplog.text


def test_a_cache_that_may_not_be_searched_is_passed_over(
    own_cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, to whom nothing is closed: the system's answer is played."""
    closed = tmp_path_factory.mktemp("closed")
    monkeypatch.setattr(_disk_cache, "directories", lambda: [closed, own_cache])
    stat = os.stat

    def refuse(path: object, *args: object, **more: object) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and Path(path).parent == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **more)

    monkeypatch.setattr(os, "stat", refuse)
    assert tuned.plan_for(PROBLEM, H200, GPU) == plan.choose(PROBLEM, H200)


def test_a_read_only_cache_is_used_and_what_is_measured_goes_to_the_next(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, home = own_cache / "image", own_cache / "home"
    image.mkdir(), home.mkdir()
    monkeypatch.setattr(_disk_cache, "directories", lambda: [image])
    brought, second = tuning(), replace(PROBLEM, m=64)
    before = tuned.record([brought], GPU).read_bytes()
    monkeypatch.setattr(_disk_cache, "directories", lambda: [image, home])
    forget()
    assert tuned.path_for(GPU) == image / "tuned-nvidia-h200.json"
    assert tuned.plan_for(PROBLEM, H200, GPU) == brought.plan
    assert tuned.record([tuning(second)], GPU) == home / "tuned-nvidia-h200.json" == tuned.path_for(GPU)
    assert tuned.plan_for(PROBLEM, H200, GPU) == brought.plan
    assert tuned.plan_for(second, H200, GPU) == tuning(second).plan
    assert (image / "tuned-nvidia-h200.json").read_bytes() == before


def _record_row(m: int) -> None:
    tuned.record([tuning(replace(PROBLEM, m=m))], GPU)


def test_processes_that_record_at_the_same_time_lose_nothing() -> None:
    pytest.importorskip("fcntl")
    ms = [100 + i for i in range(8)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_record_row, args=(m,)) for m in ms]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    path = tuned.path_for(GPU)
    assert path is not None
    assert sorted(entry["problem"]["m"] for entry in document(path)["tuned"]) == ms


def test_others_may_read_the_file_as_the_umask_says(own_cache: Path) -> None:
    (own_cache / "plain").write_text("")
    path = tuned.record([tuning()], GPU)
    assert path.stat().st_mode == (own_cache / "plain").stat().st_mode


def test_a_problem_taken_out_meanwhile_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.record([tuning()], GPU)
    checked = tuned._checked

    def taken_out_first(*given: object) -> plan.Plan:
        monkeypatch.setattr(tuned, "_checked", checked)
        tuned.record([tuning(number=0, us=10.0)], GPU)
        return checked(*given)

    monkeypatch.setattr(tuned, "_checked", taken_out_first)
    assert tuned.plan_for(PROBLEM, H200, GPU) == plan.choose(PROBLEM, H200)


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "marlin_native"},
        {"grid": [100000, 1]},
        {"split_tiles": 1},
        {"each": 1},
        {"block": [32, 1]},
        {"cluster": 8},
        {"macros": {"M_TILE": 512}},
        {},
    ],
    ids=str,
)
def test_a_plan_that_the_planner_does_not_list_is_not_taken(
    change: dict, caplog: pytest.LogCaptureFixture
) -> None:
    path = tuned.record([tuning()], GPU)
    content = document(path)
    kept = content["tuned"][0]["plan"]
    content["tuned"][0]["plan"] = {**kept, **change} if change else {}
    path.write_text(json.dumps(content))
    forget()
    assert tuned.plan_for(PROBLEM, H200, GPU) == plan.choose(PROBLEM, H200)
    assert "the planner's is taken" in caplog.text


def test_every_plan_has_its_own_identity() -> None:
    for m in (1, 24, 100, 1000):
        found = plan.plans(replace(PROBLEM, m=m), H200)
        told = {json.dumps(tuned.identity(p), sort_keys=True) for p in found}
        assert len(told) == len({replace(p, microseconds=0.0) for p in found})


def test_what_is_worth_trying_begins_with_the_planners_own_and_is_bounded() -> None:
    for m in (1, 16, 64, 512, 8192):
        found = plan.plans(replace(PROBLEM, m=m), H200)
        worth = autotune.worth_trying(found)
        assert worth[0] == found[0] and 1 <= len(worth) <= 20
        assert all(p.microseconds <= 1.3 * found[0].microseconds for p in worth)
        assert max(sum(q.build == p.build for q in worth) for p in worth) <= 4


def small_weight(zeros: bool) -> mj.MarlinWeight:
    points = np.full((2, 64), 9, np.uint8) if zeros else np.full((2, 64), 8, np.uint8)
    codes, scale = np.full((256, 64), 5, np.uint8), np.ones((2, 64), np.float16)
    return mj.pack(mj.QuantWeight.from_zero_points(codes, scale, points, 128))


@pytest.mark.parametrize("zeros", [False, True])
def test_candidates_are_a_weights_problems_and_their_kernels_are_loaded_once(
    zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[plan.Plan] = []
    monkeypatch.setattr(autotune, "current_device", lambda: None)
    monkeypatch.setattr(launch, "limits_of", lambda device: H200)
    monkeypatch.setattr(launch, "load_all", loaded.extend)
    tried = autotune.candidates(small_weight(zeros), [3, 700])
    kind = Zeros.POINTS if zeros else Zeros.NONE
    assert [problem for problem, _ in tried] == [Problem(m, 256, 64, 128, kind, False) for m in (3, 700)]
    for problem, found in tried:
        assert found[0] == plan.choose(problem, H200)
    kernels = [(one.build, one.smem) for one in loaded]
    assert len(set(kernels)) == len(kernels)
    assert set(kernels) == {(one.build, one.smem) for _, found in tried for one in found}


def test_a_plan_is_kept_only_where_it_beats_the_planners_own_by_more_than_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems = [replace(PROBLEM, m=m) for m in (16, 64, 512)]
    tried = [(problem, plan.plans(problem, H200)[:3]) for problem in problems]
    times = iter([[10.0, 8.0, 9.0], [10.0, 9.95, 11.0], [10.0, 12.0, 9.8]])
    rows = []

    def time_plans(
        found: list[plan.Plan], weights: object, x: np.ndarray, *_: object, **__: object
    ) -> object:
        rows.append(len(x))
        return next(times)

    monkeypatch.setattr(autotune, "candidates", lambda w, ms: tried)
    monkeypatch.setattr(autotune, "rotated", lambda w: [w])
    monkeypatch.setattr(autotune, "random_rows", lambda w, most: np.empty((most, 1)))
    monkeypatch.setattr(autotune, "CupyTimer", lambda: None)
    monkeypatch.setattr(autotune, "time_plans", time_plans)
    seen: list[tuned.Tuning] = []
    results = autotune._tune(small_weight(False), [16, 64, 512], 1.0, seen.append)
    assert rows == [16, 64, 512] and seen == results
    chosen = [found.index(one.plan) for one, (_, found) in zip(results, tried, strict=True)]
    assert chosen == [1, 0, 2]
    assert [(one.us, one.planned_us) for one in results] == [(8.0, 10.0), (10.0, 10.0), (9.8, 10.0)]


def test_kernels_are_loaded_on_the_device_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads begin with device 0 as theirs."""
    current, seen = threading.local(), []

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        current.device = number
        yield
        del current.device

    runtime = SimpleNamespace(getDevice=lambda: 3)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=device))
    monkeypatch.setattr(launch, "import_cupy", lambda: cupy)
    monkeypatch.setattr(launch, "load", lambda p: seen.append((p, getattr(current, "device", 0))))
    launch.load_all(range(20))
    assert sorted(seen) == [(p, 3) for p in range(20)]


def test_a_directory_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "file" / "plans.json"))
    with pytest.raises(MarlinJitError, match="cannot be written"):
        tuned.record([tuning()], GPU)
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    with pytest.raises(MarlinJitError, match="cannot be written: it is a directory"):
        tuned.destination(GPU)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "pipe"))
    with pytest.raises(MarlinJitError, match="cannot be written: it is not a file"):
        tuned.record([tuning()], GPU)
    assert (tmp_path / "pipe").is_fifo()
    monkeypatch.delenv(tuned.VARIABLE)
    monkeypatch.setattr(_disk_cache, "directories", list)
    with pytest.raises(MarlinJitError, match="nowhere to go"):
        tuned.record([tuning()], GPU)


def test_clearing_the_kernel_cache_leaves_tuned_plans() -> None:
    path = tuned.record([tuning()], GPU)
    _disk_cache.clear()
    assert path.exists() and len(jit.sources_key()) == 64


def test_without_tensor_maps_the_kernel_that_needs_none_is_planned() -> None:
    without = replace(H200, tensor_maps=False)
    for m in (16, 64, 1000):
        names = {p.build.name for p in plan.plans(replace(PROBLEM, m=m), without)}
        assert "marlin_gemm" in names and "marlin_wgmma" not in names


def test_tune_says_what_it_takes(rng) -> None:
    w = mj.pack(mj.quantize(rng.standard_normal((128, 64), dtype=np.float32)))
    with pytest.raises(DeviceError, match=r"to_device"):
        mj.tune(w)
    with pytest.raises(DTypeError, match="MarlinWeight"):
        mj.tune(np.zeros((4, 4)))


@pytest.mark.parametrize(
    ("ms", "error"), [([], ValueRangeError), ([0], ValueRangeError), (["a"], DTypeError), ([1.5], DTypeError)]
)
def test_rows_are_positive_integers(ms: list, error: type, rng, monkeypatch: pytest.MonkeyPatch) -> None:
    w = mj.pack(mj.quantize(rng.standard_normal((128, 64), dtype=np.float32)))
    monkeypatch.setattr(autotune, "is_device_array", lambda _: True)
    with pytest.raises(error):
        mj.tune(w, ms)


def test_that_nothing_can_be_kept_is_said_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    w = SimpleNamespace(B=SimpleNamespace(device=SimpleNamespace(id=0)))
    monkeypatch.setattr(autotune, "MarlinWeight", SimpleNamespace)
    monkeypatch.setattr(autotune, "is_device_array", lambda _: True)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda _: contextlib.nullcontext()))
    monkeypatch.setattr(autotune, "import_cupy", lambda: cupy)
    monkeypatch.setattr(autotune, "device_info", lambda _: SimpleNamespace(name=GPU))
    monkeypatch.setattr(autotune, "_tune", lambda *_: pytest.fail("timed"))
    monkeypatch.setenv(tuned.VARIABLE, "0")
    with pytest.raises(MarlinJitError, match="nowhere to go"):
        mj.tune(w)


def test_results_that_overflow_agree_and_what_was_not_written_does_not() -> None:
    one = tuning().plan
    like = np.array([[np.inf, -np.inf, 100.0]], np.float16)
    autotune._agree(np, like.copy(), like, one)
    autotune._agree(np, np.array([[65504.0, -np.inf, 101.0]], np.float16), like, one)
    for other in (np.nan, -np.inf, 100.0):
        with pytest.raises(MarlinJitError, match="please report"):
            autotune._agree(np, np.array([[other, -np.inf, 100.0]], np.float16), like, one)


def test_layers_of_every_kind_of_zero_points_are_tuned_for(tmp_path: Path, rng) -> None:
    q = rng.integers(0, 16, (256, 192), dtype=np.uint8)
    scale = (0.01 + 0.01 * rng.random((2, 192))).astype(np.float16)
    points = rng.integers(0, 16, (2, 192), dtype=np.uint8)
    kinds = {
        "none": mj.QuantWeight(q, scale, None, 128),
        "integer": mj.QuantWeight.from_zero_points(q, scale, points, 128),
        "real": mj.QuantWeight(q, scale, (-0.1 * rng.random((2, 192))).astype(np.float32), 128),
    }
    layers = {f"{name}{i}": mj.pack(qw) for i in range(2) for name, qw in kinds.items()}
    mj.save(tmp_path / "model.safetensors", layers)
    found = [
        launch.problem_of(1, w, asymmetric=not w.symmetric).zeros
        for w in command._layers((tmp_path / "model.safetensors",))
    ]
    assert found == [Zeros.NONE, Zeros.POINTS, Zeros.DELTAS]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "give PACKED, or both --k and --n"),
        (["--k", "4096"], "give PACKED, or both --k and --n"),
        (["--k", "128", "--n", "64", "model"], "give PACKED, or both --k and --n"),
        (["--k", "100", "--n", "64"], "group size 128 does not divide K = 100"),
        (["--k", "128", "--n", "64", "--seconds", "0"], "--seconds"),
        (["--k", "128", "--n", "64", "--m", "0"], "--m"),
    ],
)
def test_the_command_says_what_it_takes(args: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["tune", *args])
    assert result.exit_code == 2 and says in result.output
