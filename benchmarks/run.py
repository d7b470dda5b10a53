"""Measure marlin-jit, cuBLAS and humming-kernels side by side: ``python -m benchmarks.run --help``."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.shapes import MS, SHAPES, SINGLE_MAX_M
from marlin_jit import timing
from marlin_jit.bench import BUSY_FIELDS, DTYPES, VARIANTS, read_nvidia_smi
from marlin_jit.device import unavailable_reason

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("ours", "ours_single", "cublas", "humming")
OTHER_VARIANTS = {"ours_single": ["symmetric"], "cublas": ["linear", "matmul"], "humming": ["symmetric"]}
QUICK_MS = (1, 16, 64, 256, 2048)
NOT_RUN = "not run:"
"""How the reason of a number begins that was left out, as opposed to one that failed."""
_RESERVE_S = 5.0
"""Time kept back for writing results and printing the table."""


class WorkerLost(Exception):
    """A worker died or did not answer in time."""


class Worker:
    """A library's process (`benchmarks.worker`), started when it is first needed and again after a crash."""

    def __init__(self, library: str, log: Path | None) -> None:
        self.library, self._log = library, log
        self.version: dict[str, str] = {}
        self.missing: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def start(self) -> None:
        """Start the process without waiting for it."""
        command = [sys.executable, "-m", "benchmarks.worker", self.library]
        with contextlib.ExitStack() as stack:
            errors = None if self._log is None else stack.enter_context(self._log.open("a"))
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        lines: queue.Queue[str | None] = queue.Queue()

        def pump() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=pump, daemon=True).start()
        self._process, self._lines = process, lines

    def receive(self, timeout: float) -> dict[str, Any]:
        """The next answer. Raises `WorkerLost` after `timeout` seconds, and ends the process."""
        try:
            line = self._lines.get(timeout=max(timeout, 0.1))
        except queue.Empty:
            self.stop()
            raise WorkerLost(f"no answer within {timeout:.0f} s") from None
        if line is None:
            self.stop()
            raise WorkerLost("its process ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def greet(self, timeout: float) -> bool:
        """Wait until the library is loaded. False, with `missing` set, if it can't be measured here."""
        try:
            hello = self.receive(timeout)
        except WorkerLost as lost:
            hello = {"missing": str(lost)}
        self.version = hello.get("version", {})
        self.missing = hello.get("missing")
        return self.missing is None

    def send(self, request: dict[str, Any]) -> None:
        """Send a request; `receive` gets its answer."""
        if self._process is None or self._process.stdin is None:
            raise WorkerLost("its process ended")
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            self.stop()
            raise WorkerLost("its process ended") from None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Budget:
    """What is left of the time the run may take."""

    def __init__(self, seconds: float) -> None:
        self.started = time.monotonic()
        self._end = self.started + seconds - _RESERVE_S

    @property
    def left(self) -> float:
        """Seconds until measuring must stop."""
        return self._end - time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


def variants_of(library: str, ours: Sequence[str]) -> list[str]:
    """The variants of a library that a run measures."""
    return list(ours) if library == "ours" else OTHER_VARIANTS[library]


def covers(library: str, variant: str, m: int) -> bool:
    """Whether a variant is measured at `m`."""
    if library == "ours_single":
        return m <= SINGLE_MAX_M
    return library != "ours" or VARIANTS[variant].covers(m)


class Run:
    """All measurements of one call of the command."""

    def __init__(
        self,
        libraries: Sequence[str],
        variants: Sequence[str],
        ms: Sequence[int],
        group_size: int,
        dtype: str,
        passes: int,
        options: dict[str, Any],
        budget: Budget,
        log: Path | None,
    ) -> None:
        # Nothing is asked of the process without overlap where all M are large: then it is not started.
        wanted = [name for name in libraries if name != "ours_single" or min(ms) <= SINGLE_MAX_M]
        self.workers = {name: Worker(name, log) for name in wanted}
        self.variants, self.ms, self.group_size, self.dtype = list(variants), list(ms), group_size, dtype
        self.passes, self.options, self.budget = passes, options, budget
        self.records: list[dict[str, Any]] = []
        self.smi_during: list[dict[str, Any]] = []
        self.complete = True

    def start(self) -> None:
        """Start every library at once and wait for all."""
        for worker in self.workers.values():
            worker.start()
        for worker in self.workers.values():
            if not worker.greet(min(120.0, self.budget.left)):
                click.echo(f"{worker.library}: {worker.missing}", err=True)

    def stop(self) -> None:
        """End every library's process."""
        for worker in self.workers.values():
            worker.stop()

    def measure_shape(self, k: int, n: int) -> None:
        """Measure one layer with every library and append the records.

        The libraries prepare (and compile) together, when nothing is timed; then one number is taken at a
        time (see `passes_over`). Few rows take all passes before many rows are timed, which leave a GPU hot.
        """
        answers: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        reasons = self._open_all(k, n)
        points = [
            (library, variant, m)
            for m in self.ms
            for library in self.workers
            for variant in variants_of(library, self.variants)
            if covers(library, variant, m)
        ]
        few = [point for point in points if point[2] <= SINGLE_MAX_M]
        many = [point for point in points if point[2] > SINGLE_MAX_M]
        turns = [point for part in (few, many) for point in passes_over(part, self.passes)]
        for library, variant, m in turns:
            worker = self.workers[library]
            if library in reasons:
                continue
            if self.budget.left < 1.0:
                self.complete = False
                break
            request = {"op": "time", "variant": variant, "m": m, "options": self.options}
            try:
                worker.send(request)
                self._read_busy(library, variant, k, n, m)
                answer = worker.receive(min(60.0, self.budget.left))
            except WorkerLost as lost:
                answer = {"failed": str(lost), "fatal": True}
            answers.setdefault((library, variant, m), []).append(answer)
            if answer.get("fatal"):
                worker.stop()
                reason = self._reopen(worker, k, n)
                if reason is not None:
                    reasons[library] = reason
        for library, variant, m in points:
            got = answers.get((library, variant, m), [])
            reason = reasons.get(library, f"{NOT_RUN} the time allowed was spent")
            self.records.append(self._record(library, variant, k, n, m, got, reason))
        for worker in self.workers.values():
            if worker.alive and worker.library not in reasons:
                try:
                    worker.send({"op": "close"})
                    worker.receive(30.0)
                except WorkerLost:
                    pass

    def _read_busy(self, library: str, variant: str, k: int, n: int, m: int) -> None:
        """Read clock and power once a layer, while the most rows are timed, which takes longest."""
        if m == max(self.ms) and (k, n) not in [(r["k"], r["n"]) for r in self.smi_during]:
            point = {"library": library, "variant": variant, "k": k, "n": n, "m": m}
            self.smi_during.append(point | read_nvidia_smi(BUSY_FIELDS))

    def _open_request(self, library: str, k: int, n: int) -> dict[str, Any]:
        variants = variants_of(library, self.variants)
        ms = [m for m in self.ms if any(covers(library, variant, m) for variant in variants)]
        layer = {"k": k, "n": n, "ms": ms or self.ms, "group_size": self.group_size, "dtype": self.dtype}
        return {"op": "open", "layer": layer | {"variants": variants}}

    def _open_all(self, k: int, n: int) -> dict[str, str]:
        """Open the layer everywhere; return why not, for the libraries that can't."""
        reasons, waiting = {}, []
        for library, worker in self.workers.items():
            if worker.missing is not None:
                reasons[library] = worker.missing
                continue
            if not worker.alive:
                worker.start()
                if not worker.greet(min(60.0, self.budget.left)):
                    reasons[library] = str(worker.missing)
                    continue
            try:
                worker.send(self._open_request(library, k, n))
                waiting.append(worker)
            except WorkerLost as lost:
                reasons[library] = str(lost)
        for worker in waiting:
            reason = self._opened(worker)
            if reason is not None:
                reasons[worker.library] = reason
        return reasons

    def _opened(self, worker: Worker) -> str | None:
        """Wait for the answer to an open; return why it failed."""
        try:
            answer = worker.receive(self.budget.left)
        except WorkerLost as lost:
            return f"while preparing the layer: {lost}"
        worker.version = answer.get("version", worker.version)
        click.echo(f"  {worker.library}: ready after {answer['seconds']:.1f} s", err=True)
        if "failed" in answer:
            if answer.get("fatal"):
                worker.stop()
            return f"while preparing the layer: {answer['failed']}"
        return None

    def _reopen(self, worker: Worker, k: int, n: int) -> str | None:
        """Start a library again after a crash, once more with the same layer; return why not."""
        if self.budget.left < 20.0:
            return f"{NOT_RUN} too little time was left after a crash"
        worker.start()
        if not worker.greet(min(60.0, self.budget.left)):
            return worker.missing
        try:
            worker.send(self._open_request(worker.library, k, n))
        except WorkerLost as lost:
            return str(lost)
        return self._opened(worker)

    def _record(
        self, library: str, variant: str, k: int, n: int, m: int, answers: list[dict[str, Any]], reason: str
    ) -> dict[str, Any]:
        layer = {"library": library, "variant": variant, "k": k, "n": n, "m": m}
        return layer | {"group_size": self.group_size, "dtype": self.dtype} | combine(answers, reason)


def passes_over(points: Sequence[Any], passes: int) -> list[Any]:
    """The points in the order of the first pass and backwards, then in pairs of random orders like that.

    What a GPU at its power limit did just before shows in the next number: with two passes every point has
    the same neighbours twice.
    """
    turns, order = [], list(points)
    for number in range(passes):
        if number and number % 2 == 0:
            random.Random(number).shuffle(order)
        turns += order if number % 2 == 0 else order[::-1]
    return turns


def combine(answers: Sequence[dict[str, Any]], reason: str) -> dict[str, Any]:
    """One record from the answers of all passes for one number.

    The time is the median of all passes' samples together; ``pass_us`` keeps each pass's own median. A
    failure in any pass makes the whole number a failure: a kernel that is right only sometimes is wrong.
    """
    bad = next((a for a in answers if a.get("failed") or a.get("reason")), None)
    if bad is not None or not answers:
        why = reason if bad is None else bad.get("failed") or bad["reason"]
        empty: dict[str, Any] = {"us": None, "pass_us": [], "samples": [], "launches": 0, "copies": 0}
        error = None if bad is None else bad.get("error")
        path = None if bad is None else bad.get("path")
        return empty | {"method": None, "error": error, "path": path, "reason": why}
    fields = ("us", "samples", "launches", "copies", "method")
    merged = timing.merge([timing.Timing(*(a[field] for field in fields)) for a in answers])
    return {
        "us": round(merged.us, 4),
        "pass_us": [a["us"] for a in answers],
        "samples": list(merged.samples),
        "launches": merged.launches,
        "copies": merged.copies,
        "method": merged.method,
        "error": answers[0]["error"],
        "path": answers[0]["path"],
        "reason": None,
    }


def environment(smi_before: dict[str, str], smi_after: dict[str, str]) -> dict[str, Any]:
    """The machine, as far as it matters to the numbers."""
    versions = {}
    for package in ("cupy-cuda12x", "cupy-cuda13x", "torch", "triton", "humming-kernels", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "packages": versions,
        "nvidia_smi_before": smi_before,
        "nvidia_smi_after": smi_after,
    }


def parse_shape(_ctx: Any, _param: Any, values: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Shapes given as KxN."""
    shapes = []
    for value in values:
        try:
            k, n = (int(part) for part in value.lower().split("x"))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not KxN, for example 4096x14336") from None
        shapes.append((k, n))
    return tuple(shapes)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--shape", "shapes", multiple=True, callback=parse_shape, help="KxN; may be repeated.")
@click.option("--m", "ms", multiple=True, type=click.IntRange(1), help="Rows of x; may be repeated.")
@click.option("--library", "libraries", multiple=True, type=click.Choice(LIBRARIES), help="May be repeated.")
@click.option("--variant", "variants", multiple=True, type=click.Choice(list(VARIANTS)), help="Of ours.")
@click.option("--group", "group_size", type=click.Choice(["32", "64", "128", "-1"]), default="128")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float16")
@click.option("--passes", type=click.IntRange(1), default=2, help="Times every number is taken.")
@click.option("--replays", type=click.IntRange(3), default=timing.REPLAYS, help="Samples in a pass.")
@click.option("--quick", is_flag=True, help="Five M, one pass, two variants: about a minute.")
@click.option(
    "--max-seconds", type=click.FloatRange(30), default=290.0, help="Stop and report after this time."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Result file (JSON); what libraries print goes to a .log beside it.",
)
def main(
    shapes: tuple[tuple[int, int], ...],
    ms: tuple[int, ...],
    libraries: tuple[str, ...],
    variants: tuple[str, ...],
    group_size: str,
    dtype: str,
    passes: int,
    replays: int,
    quick: bool,
    max_seconds: float,
    output: Path | None,
) -> None:
    """Time marlin-jit beside cuBLAS and humming-kernels on this machine's GPU and print a table.

    Exit code 1 if a result of ours was wrong or failed, 2 without a GPU, 0 otherwise; a library that is
    missing is a line in the table.
    """
    reason = unavailable_reason()
    if reason is not None:
        click.echo(f"error: {reason}", err=True)
        sys.exit(2)
    budget = Budget(max_seconds)
    ms = ms or (QUICK_MS if quick else MS)
    variants = variants or (("symmetric", "asymmetric") if quick else tuple(VARIANTS))
    passes = 1 if quick else passes
    options = {"replays": replays}
    smi_before = read_nvidia_smi()
    chosen = libraries or LIBRARIES
    log = None
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        log = output.with_suffix(".log")
        log.write_text("")
    run = Run(chosen, variants, ms, int(group_size), dtype, passes, options, budget, log)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def result() -> dict[str, Any]:
        versions = {name: w.version or {"missing": str(w.missing)} for name, w in run.workers.items()}
        return report.document(
            run.records,
            date=date,
            environment=environment(smi_before, read_nvidia_smi()) | {"nvidia_smi_during": run.smi_during},
            libraries=versions,
            method={
                "replays": replays,
                "passes": passes,
                "rotated_bytes": timing.ROTATED_BYTES,
                "warmup_ms": timing.WARMUP_MS,
                "statistic": "median over the samples of all passes, microseconds a launch",
            },
            seconds=budget.spent,
            complete=run.complete,
        )

    try:
        run.start()
        for k, n in shapes or SHAPES:
            click.echo(f"K {k} x N {n}: {budget.spent:.0f} s spent", err=True)
            run.measure_shape(k, n)
            if output is not None:
                report.write(output, result())
    finally:
        run.stop()
    data = result()
    click.echo(f"{data['date']}  {smi_before.get('name', 'unknown GPU')}  {budget.spent:.0f} s")
    for name, version in data["libraries"].items():
        click.echo(f"{name}: " + ", ".join(f"{key} {value}" for key, value in version.items()))
    if not run.complete:
        click.echo("incomplete: the time allowed was spent")
    click.echo()
    click.echo(report.table(data))
    few_rows = report.launches_table(data)
    if few_rows:
        click.echo(f"\n{few_rows}")
    if any(
        r["library"].startswith("ours") and r["reason"] and not r["reason"].startswith(NOT_RUN)
        for r in run.records
    ):
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
