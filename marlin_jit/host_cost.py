"""What a product costs the host: gates, plan, arguments and launch of one `matmul`, in microseconds a call.

Calls are made in batches with a wait for the device after each. A batch is far smaller than the queue of
launches, because a call that finds the queue full waits for the device, and that is not the host's work. The
layer should be so small that the device keeps up.

Three kinds of call are told apart: ``out``, repeated with memory for the result; ``new``, repeated without;
and ``first``, the first one with its number of rows, which is planned and prepared anew. Kernels are compiled
and loaded before anything is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from marlin_jit._cupy import import_cupy
from marlin_jit.bench import TOLERANCE, Problem
from marlin_jit.plan import choose
from marlin_jit.weight import MarlinWeight

__all__ = ["HostCost", "measure_host", "time_calls"]

CALLS = 200
"""Calls in a batch. CUDA queues some thousand launches."""
BATCHES = 150
"""Together some tenths of a second: a processor that was idle is slow for a while."""
FIRST_CALLS = 20


@dataclass(frozen=True)
class HostCost:
    """Microseconds a call.

    Attributes
    ----------
    samples : tuple of float
        One a batch: its time over its calls.
    calls : int
        Calls in a batch.
    """

    samples: tuple[float, ...]
    calls: int

    @property
    def best(self) -> float:
        """The least of the samples."""
        return min(self.samples)

    @property
    def median(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)


def time_calls(
    call: Callable[[], object],
    *,
    calls: int,
    batches: int,
    synchronize: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> HostCost:
    """Time batches of ``call()``.

    Parameters
    ----------
    call : callable
        Enqueues work.
    calls, batches : int
        Calls in a batch, and batches that count; one more goes before them.
    synchronize : callable
        Waits for the device. Called after each batch, untimed.
    prepare : callable
        Called before each batch, untimed.
    clock : callable
        Returns seconds.
    """
    samples = []
    for _ in range(batches + 1):
        prepare()
        start = clock()
        for _ in range(calls):
            call()
        samples.append(1e6 * (clock() - start) / calls)
        synchronize()
    return HostCost(tuple(samples[1:]), calls)


def measure_host(
    problem: Problem,
    ms: Sequence[int],
    *,
    matmul: Callable[..., Any] | None = None,
    synchronize: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Measure what each kind of call costs, at each number of rows.

    Parameters
    ----------
    problem : Problem
        A small layer.
    ms : sequence of int
        Numbers of rows, none above the problem's largest.
    matmul : callable
        `marlin_jit.matmul` unless a test says otherwise.
    synchronize : callable
        That of CuPy's current stream unless a test says otherwise.
    clock : callable
        Returns seconds.

    Returns
    -------
    list of dict
        One record an (M, kind of call): m, call (``"out"``, ``"new"`` or ``"first"``), path, best_us,
        median_us, calls (in a batch), samples, reason. Times are None where `reason` says why.
    """
    # Imported here: the function `marlin_jit.dispatch` hides the module of that name as an attribute.
    from marlin_jit.dispatch import explain
    from marlin_jit.dispatch import matmul as product

    matmul = matmul or product
    synchronize = synchronize or import_cupy().cuda.get_current_stream().synchronize
    weight = problem.weights(True)[0]
    records = []
    for m in ms:
        progress(f"M = {m}")
        x, out = problem.x[:m], problem.output(m)
        place = {"m": m, "path": explain(x, weight, out=out).path}
        matmul(x, weight, out=out)
        error = problem.error(out, True)
        if not error <= TOLERANCE[problem.dtype]:
            reason = f"wrong result: error {error:.2e} against float64"
            records += [place | {"call": kind} | _as_record(None, reason) for kind in ("out", "new", "first")]
            continue
        timed = partial(time_calls, synchronize=synchronize, clock=clock)
        # Activations of a new product seldom lie where those of an old one did, which tensor maps notice.
        others = iter([x.copy() for _ in range(FIRST_CALLS + 1)])
        costs = {
            "out": timed(partial(matmul, x, weight, out=out), calls=CALLS, batches=BATCHES),
            "new": timed(partial(matmul, x, weight), calls=CALLS, batches=BATCHES),
            "first": timed(
                lambda: matmul(next(others), weight, out=out),  # noqa: B023
                calls=1,
                batches=FIRST_CALLS,
                prepare=partial(forget, weight),
            ),
        }
        records += [place | {"call": kind} | _as_record(cost, None) for kind, cost in costs.items()]
    return records


def forget(weight: MarlinWeight) -> None:
    """Make the next product with this weight the first of its number of rows. Kernels stay loaded."""
    weight.repeats.clear()
    choose.cache_clear()


def _as_record(cost: HostCost | None, reason: str | None) -> dict[str, Any]:
    if cost is None:
        return {"best_us": None, "median_us": None, "calls": 0, "samples": [], "reason": reason}
    return {
        "best_us": round(cost.best, 3),
        "median_us": round(cost.median, 3),
        "calls": cost.calls,
        "samples": [round(sample, 3) for sample in cost.samples],
        "reason": reason,
    }
