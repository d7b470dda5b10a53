"""How long one launch takes on the device, measured so that it means something.

The method, the same for every library that is compared:

* **Cold weights.** A decoder layer finds its weights in device memory, not in L2. So a launch is timed over
  several copies of the weight that together exceed the L2 cache many times over, one copy after another.
* **A CUDA graph.** A sequence of launches, one a copy, is captured once and replayed. What the host needs to
  prepare a launch is then no part of the number.
* **A busy device.** Replays are queued back to back with an event between each two, after enough untimed
  ones to bring the clocks up, so that no sample contains the time the host took to submit it.
* **Medians.** A sample is the time of one replay divided by its launches; the result is the median of
  samples.

Times are microseconds a launch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

ROTATED_BYTES = 320_000_000
"""Copies are added until their bytes exceed this: five times the largest L2 cache of today (60 MB)."""

MAX_COPIES = 48
MIN_COPIES = 3
MIN_LAUNCHES = 16
REPLAYS = 9
WARMUP_MS = 40.0
POINT_MS = 1500.0
"""Upper limit for the timed replays of one number; slow kernels get fewer launches a replay."""


@dataclass(frozen=True)
class Timing:
    """One measured number and what it was made of.

    Attributes
    ----------
    us : float
        Median of `samples`: microseconds a launch.
    samples : tuple of float
        Microseconds a launch, one a replay, in the order measured.
    launches : int
        Launches in one replay.
    copies : int
        Copies of the weight those launches rotate over.
    method : str
        ``"graph"`` (replays of a captured graph) or ``"events"`` (plain launches between two events: the
        host's part is in the number wherever the kernel is shorter than its launch).
    """

    us: float
    samples: tuple[float, ...]
    launches: int
    copies: int
    method: str

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median: how far the samples agree."""
        return quartile_spread(self.samples)

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON types."""
        record = asdict(self)
        record["samples"] = [round(s, 4) for s in self.samples]
        record["us"] = round(self.us, 4)
        return record


class Timer(Protocol):
    """What a library must offer to be timed: its stream, its events, its graphs."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Record what `body` launches; return a function that replays it. Raises where capture is refused."""
        ...

    def run(self, body: Callable[[], None]) -> None:
        """Call `body` with the timed stream as the current one."""
        ...

    def mark(self) -> Any:
        """Record an event on the timed stream."""
        ...

    def elapsed_us(self, start: Any, stop: Any) -> float:
        """Microseconds between two recorded events that have completed."""
        ...

    def synchronize(self) -> None:
        """Wait for the timed stream."""
        ...


class CupyTimer:
    """`Timer` on a CuPy stream of its own (capture is refused on the default stream)."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        cupy.cuda.get_current_stream().synchronize()
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        with self.stream:
            self.stream.begin_capture()
            try:
                body()
            except BaseException:
                # A stream left in capture would break everything after it; the graph is worthless.
                try:
                    self.stream.end_capture()
                except Exception:
                    self.stream = self._cupy.cuda.Stream(non_blocking=True)
                raise
            graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def run(self, body: Callable[[], None]) -> None:
        with self.stream:
            body()

    def mark(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record(self.stream)
        return event

    def elapsed_us(self, start: Any, stop: Any) -> float:
        return 1000.0 * float(self._cupy.cuda.get_elapsed_time(start, stop))

    def synchronize(self) -> None:
        self.stream.synchronize()


def plan_copies(weight_bytes: int, rotated_bytes: int = ROTATED_BYTES, cap: int = MAX_COPIES) -> int:
    """Copies of a weight needed so that none of it is in L2 when its turn comes again.

    Parameters
    ----------
    weight_bytes : int
        Bytes one launch reads of one copy.
    rotated_bytes : int
        What the copies must exceed together.
    cap : int
        Most copies to make. Small weights then rotate over less; the count is in the result.
    """
    if weight_bytes <= 0:
        raise ValueError(f"weight_bytes is {weight_bytes}; it must be positive")
    return max(MIN_COPIES, min(cap, rotated_bytes // weight_bytes + 1))


def plan_launches(copies: int, estimate_us: float, replays: int, point_ms: float = POINT_MS) -> int:
    """Launches in one replay: whole rounds of the copies, at least `MIN_LAUNCHES`, within the time allowed.

    A slow kernel gets fewer than a round, but never fewer than two: it moves more bytes than L2 holds in
    activations and outputs alone.
    """
    launches = copies * math.ceil(MIN_LAUNCHES / copies)
    affordable = int(1000.0 * point_ms / (max(estimate_us, 0.1) * replays))
    return max(2, min(launches, affordable))


def quartile_spread(samples: Sequence[float]) -> float:
    """(third quartile - first quartile) / median of `samples`; 0 where there are fewer than two."""
    if len(samples) < 2:
        return 0.0
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return (third - first) / statistics.median(samples)


def time_launches(
    launch: Callable[[int], object],
    copies: int,
    timer: Timer,
    *,
    replays: int = REPLAYS,
    warmup_ms: float = WARMUP_MS,
    point_ms: float = POINT_MS,
    graph: bool = True,
) -> Timing:
    """Time ``launch(i)``, which works on copy `i` of the weight and writes into memory allocated before.

    Parameters
    ----------
    launch : callable
        Launches the work for copy `i` (0 <= i < `copies`) on the current stream, asynchronously.
    copies : int
        Copies there are.
    timer : Timer
        The library's clock, for example `CupyTimer`.
    replays : int
        Samples to take.
    warmup_ms : float
        Untimed work queued right before the samples, so that the clocks are up.
    point_ms : float
        Most time the samples may take together.
    graph : bool
        False times plain launches between events, for libraries that refuse capture.

    Returns
    -------
    Timing

    Notes
    -----
    Every copy is launched once before anything is captured: that compiles kernels, fills caches kept with a
    weight and grows scratch buffers, none of which may happen inside a capture.
    """
    if copies < 1 or replays < 1:
        raise ValueError(f"copies is {copies} and replays is {replays}; both must be at least 1")

    def sequence(count: int) -> None:
        for i in range(count):
            launch(i % copies)

    timer.run(lambda: sequence(copies))
    timer.synchronize()
    start = timer.mark()
    timer.run(lambda: sequence(copies))
    stop = timer.mark()
    timer.synchronize()
    estimate_us = timer.elapsed_us(start, stop) / copies
    launches = plan_launches(copies, estimate_us, replays, point_ms)

    replay: Callable[[], None]
    if graph:
        replay = timer.capture(lambda: sequence(launches))
    else:

        def replay() -> None:
            timer.run(lambda: sequence(launches))

    # The estimate may hold host time, so the warm-up is sized by one replay.
    replay()
    start = timer.mark()
    replay()
    stop = timer.mark()
    timer.synchronize()
    replay_us = max(timer.elapsed_us(start, stop), 0.1)
    for _ in range(max(1, min(1000, math.ceil(1000.0 * warmup_ms / replay_us)))):
        replay()
    marks = [timer.mark()]
    for _ in range(replays):
        replay()
        marks.append(timer.mark())
    timer.synchronize()
    samples = tuple(timer.elapsed_us(a, b) / launches for a, b in itertools.pairwise(marks))
    return Timing(statistics.median(samples), samples, launches, copies, "graph" if graph else "events")


def merge(timings: Sequence[Timing]) -> Timing:
    """One `Timing` from several of the same thing, taken at different moments of one run.

    The median is over all samples together. `launches` and `copies` are the first one's.
    """
    if not timings:
        raise ValueError("merge needs at least one timing")
    samples = tuple(s for t in timings for s in t.samples)
    first = timings[0]
    return Timing(statistics.median(samples), samples, first.launches, first.copies, first.method)
