"""The clock for PyTorch libraries: the method of `marlin_jit.timing` on torch's streams, events and graphs.

The measuring itself is `marlin_jit.timing.time_launches` for every library; only the calls differ here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marlin_jit.timing import Timing, merge, plan_copies, time_launches

__all__ = ["Timing", "TorchTimer", "merge", "plan_copies", "time_launches"]


class TorchTimer:
    """`marlin_jit.timing.Timer` for PyTorch."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.synchronize()
        self.stream = torch.cuda.Stream()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self.stream):
            body()

        def replay() -> None:
            with self._torch.cuda.stream(self.stream):
                graph.replay()

        return replay

    def run(self, body: Callable[[], None]) -> None:
        with self._torch.cuda.stream(self.stream):
            body()

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def elapsed_us(self, start: Any, stop: Any) -> float:
        return 1000.0 * float(start.elapsed_time(stop))

    def synchronize(self) -> None:
        self.stream.synchronize()
