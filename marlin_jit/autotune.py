"""Timing the plans that the planner thinks good, to keep the best of them for this kind of GPU.

The planner's model is within a few per cent of the best plan; `tune` is for those who want these too. The
time it takes is bounded. Plans take turns in random order, since a GPU at its power limit drifts.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from marlin_jit import launch, tuned
from marlin_jit._array import BFLOAT16, FLOAT16, as_integer, is_device_array
from marlin_jit._cupy import import_cupy
from marlin_jit.device import current_device, device_info
from marlin_jit.errors import DeviceError, DTypeError, MarlinJitError, ValueRangeError
from marlin_jit.plan import Plan, Problem, plans
from marlin_jit.timing import CupyTimer, plan_copies
from marlin_jit.tuned import Tuning
from marlin_jit.weight import MarlinWeight

MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of rows that are tuned for if none are given."""

NOISE = 0.01
"""A plan must be faster than the planner's own by this fraction to be kept."""

_WORTH = 1.3  # plans predicted to take more than this many times the best one's time are not tried
_MOST, _SCHEDULES = 20, 4  # plans of a problem, and of one build among them
_SAMPLE_US = 2000.0
_LARGEST = {FLOAT16: 65504.0, BFLOAT16: 3.3895e38}  # finite numbers
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15

Progress = Callable[[Tuning], None]


def tune(
    w: MarlinWeight, ms: Iterable[int] = MS, *, seconds: float = 10.0, progress: Progress | None = None
) -> list[Tuning]:
    """Find the fastest plan for products with a weight like `w`, and keep what was found for this GPU's kind.

    Parameters
    ----------
    w : MarlinWeight
        On a GPU. What counts of it are K, N, group size, dtype and its kind of zero points.
    ms : iterable of int
        Numbers of rows of x; plans are kept for exactly these.
    seconds : float
        About how long timing may take in all. Compiling kernels for the first time comes on top.
    progress : callable, optional
        Called with each `Tuning` when it is done.

    Returns
    -------
    list of Tuning
        One for each of `ms`.

    Raises
    ------
    DTypeError, DeviceError, ValueRangeError
        Not such a weight, not on a GPU, or a number that is not positive (of rows: or no integer).
    CompileError, LaunchError
    MarlinJitError
        Two plans disagree about the result (nothing is kept then), or the file cannot be written.

    Notes
    -----
    A plan decides in which order sums are added up, so that the last bits of results may change. Products
    that a process repeats (the same weight, shape of x and stream) keep the plan they had.
    `marlin_jit.tuned` says where plans are kept.
    """
    if not isinstance(w, MarlinWeight):
        raise DTypeError(f"w must be a MarlinWeight, got {type(w).__name__}")
    if not is_device_array(w.B):
        raise DeviceError(
            "the weight holds NumPy arrays: move it to the GPU that is tuned for, w.to_device()"
        )
    rows = [as_integer("m", m) for m in ms]
    if not rows or min(rows) < 1 or not seconds > 0:
        raise ValueRangeError(f"rows and seconds must be positive, got {rows} and {seconds}")
    with import_cupy().cuda.Device(w.B.device.id):
        gpu = device_info(w.B.device.id).name
        tuned.destination(gpu)  # said before time is spent
        found = _tune(w, sorted(set(rows)), seconds, progress)
        tuned.record(found, gpu)
    return found


def worth_trying(found: list[Plan]) -> list[Plan]:
    """Of a problem's plans, best first, those to be timed: the planner's own first."""
    count: dict[Any, int] = {}
    worth = []
    for plan in found:
        count[plan.build] = count.get(plan.build, 0) + 1
        if plan.microseconds <= _WORTH * found[0].microseconds and count[plan.build] <= _SCHEDULES:
            worth.append(plan)
    return worth[:_MOST]


def candidates(w: MarlinWeight, ms: Iterable[int]) -> list[tuple[Problem, list[Plan]]]:
    """For each number of rows the problem and its plans that are worth trying, their kernels loaded."""
    limits = launch.limits_of(current_device())
    problems = [launch.problem_of(m, w, asymmetric=not w.symmetric) for m in ms]
    tried = [(problem, worth_trying(plans(problem, limits))) for problem in problems]
    launch.load_all({(plan.build, plan.smem): plan for _, found in tried for plan in found}.values())
    return tried


def _tune(w: MarlinWeight, ms: list[int], seconds: float, progress: Progress | None) -> list[Tuning]:
    tried = candidates(w, ms)
    weights, x = rotated(w), random_rows(w, ms[-1])
    timer = CupyTimer()  # waits for what was enqueued before
    results: list[Tuning] = []
    end = time.monotonic() + seconds
    for problem, found in tried:
        now = time.monotonic()
        share = (end - now) / (len(ms) - len(results))  # of the time that is left
        times = time_plans(found, weights, x[: problem.m], timer, until=now + share)
        best = min(range(len(found)), key=times.__getitem__)
        if times[best] > (1 - NOISE) * times[0]:
            best = 0
        results.append(Tuning(problem, found[best], times[best], times[0], len(found)))
        if progress is not None:
            progress(results[-1])
    return results


def rotated(w: MarlinWeight) -> list[MarlinWeight]:
    """The weight and as many copies of its codes as `marlin_jit.timing` rotates over."""
    return [w, *(replace(w, B=w.B.copy()) for _ in range(plan_copies(w.nbytes) - 1))]


def random_rows(w: MarlinWeight, rows: int) -> Any:
    """Activations as the tiled kernels read them: standard normal, zeros up to whole vectors."""
    cupy = import_cupy()
    values = cupy.random.default_rng(0).standard_normal((rows, launch.whole_vectors(w.K)), dtype="f4")
    x = values.astype(w.dtype)
    x[:, w.K :] = 0
    return x


def time_plans(
    found: list[Plan],
    weights: list[MarlinWeight],
    x: Any,
    timer: CupyTimer,
    *,
    until: float = math.inf,
    rounds: int = _MOST_ROUNDS,
    sample_us: float = _SAMPLE_US,
) -> list[float]:
    """Time plans of one problem beside each other.

    Parameters
    ----------
    found : list of Plan
        Their kernels are loaded.
    weights, x
        As `rotated` and `random_rows` make them.
    until : float
        A moment of `time.monotonic`; after the third round none begins later.
    rounds : int
        Most of them.
    sample_us : float
        About how long a plan works at a time, within two launches and two for each copy.

    Returns
    -------
    list of float
        Microseconds a launch of each plan: medians over rounds, in which each has a turn, in random order.

    Raises
    ------
    MarlinJitError
        A plan's result is not like the first one's.
    """
    cupy = import_cupy()
    rows, columns = x.shape[0], weights[0].N
    given = launch.Matrix(x.data.ptr, x.shape[1], rows, weights[0].K)
    # The first plan's result is what the others' must be like, but for the order of additions.
    y, like = (cupy.empty((rows, launch.whole_vectors(columns)), x.dtype) for _ in range(2))

    def launches(plan: Plan, copies: Iterable[int], out: Any) -> None:
        to = launch.Matrix(out.data.ptr, out.shape[1], rows, columns)
        for copy in copies:
            launch.marlin(plan, given, weights[copy % len(weights)], None, to)

    timer.run(lambda: launches(found[0], [0], like))
    graphs = []
    for plan in found:
        y.fill(float("nan"))
        cupy.cuda.get_current_stream().synchronize()
        timer.run(partial(launches, plan, [0], y))
        timer.synchronize()
        _agree(cupy, y[:, :columns], like[:, :columns], plan)
        count = max(2, min(2 * len(weights), round(sample_us / plan.microseconds)))
        graphs.append((timer.capture(partial(launches, plan, range(count), y)), count))
    samples: list[list[float]] = [[] for _ in found]
    order = random.Random(0)
    for number in range(rounds):
        if number >= _LEAST_ROUNDS and time.monotonic() > until:
            break
        marks = []
        for i in order.sample(range(len(graphs)), len(graphs)):
            replay, count = graphs[i]
            replay()
            start = timer.mark()
            replay()
            marks.append((i, start, timer.mark(), count))
        timer.synchronize()
        for i, start, stop, count in marks:
            samples[i].append(timer.elapsed_us(start, stop) / count)
    return [statistics.median(taken) for taken in samples]


def _agree(cupy: Any, y: Any, like: Any, plan: Plan) -> None:
    """Sums added up in another order differ by roundings, not more."""
    most = _LARGEST[y.dtype]  # of sums near it one plan may make an infinity, and another none
    y, like = y.astype("f4"), like.astype("f4")
    y, like = (cupy.where(cupy.isinf(a), cupy.sign(a) * cupy.float32(most), a) for a in (y, like))
    difference = float(cupy.abs(y - like).max())
    scale = float(cupy.abs(like).max())
    if not difference <= 0.02 * scale:
        raise MarlinJitError(
            f"a plan's result differs from that of the planner's own by {difference:.3g}, where values reach "
            f"{scale:.3g}: please report {tuned.identity(plan)}"
        )
