"""Running a plan and telling what was done: the end of every command that converts a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from marlin_jit.cli.options import Work, on_device
from marlin_jit.cli.show import bytes_bar, counted, print_json, print_line, print_table, size
from marlin_jit.formats import LayerPlan, PackPlan, run_pack

__all__ = ["execute"]


def execute(
    src: Path,
    plan: PackPlan,
    start: float,
    verb: tuple[str, str],
    work: Work,
    *,
    lines: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> None:
    """Run a plan, unless it is a dry run, and show its summary.

    Parameters
    ----------
    src : Path
    plan : PackPlan
    start : float
        Of the command, by `time.perf_counter`.
    verb : (str, str)
        What is being done, and what has been done.
    work : Work
        The options.
    lines : sequence of str
        More lines for the summary.
    more : mapping, optional
        More keys for the JSON.
    """
    doing, done = verb
    taken = 0
    if not work.dry_run:
        device = on_device(work.device)
        try:
            with bytes_bar(doing, plan.bytes_before, wanted=not work.quiet) as advance:
                taken = run_pack(plan, advance, jobs=work.jobs, device=device, resumable=work.resume)
        except (KeyboardInterrupt, SystemExit):
            if work.resume:
                click.echo("finished files are kept: the same command goes on with them", err=True)
            raise
    seconds = time.perf_counter() - start
    if work.resume and not work.dry_run:
        lines = [
            *lines,
            f"taken over from an interrupted run: {taken} of {counted(len(plan.shards), 'file')}",
        ]
    if work.as_json:
        told = _as_json(src, plan, work.dry_run, seconds) | {"files_taken_over": taken}
        print_json(told | dict(more or {}))
    elif not work.quiet:
        _print_summary(src, plan, f"would be {done}" if work.dry_run else f"{done} in {seconds:.2f} s", lines)


def _print_summary(src: Path, plan: PackPlan, done: str, lines: Sequence[str]) -> None:
    groups: dict[tuple[str, str, str, str], list[LayerPlan]] = {}
    dense = []
    for layer in plan.layers.values():
        if layer.target != plan.target:
            dense.append(layer)
            continue
        kind = "symmetric" if layer.outline.symmetric else "asymmetric"
        if layer.outline.permuted:
            kind += ", activation order"
        shape = f"{layer.outline.K} x {layer.outline.N}"
        groups.setdefault((layer.source.format, shape, _group_text(layer), kind), []).append(layer)
    columns = {"format": "left", "K x N": "right", "group": "right", "zero points": "left"}
    columns |= {"layers": "right", "before": "right", "after": "right"}
    rows = []
    for key, layers in groups.items():
        before, after = sum(x.bytes_before for x in layers), sum(x.bytes_after for x in layers)
        rows.append([*key, str(len(layers)), size(before), size(after)])
    print_table(columns, rows)
    if dense:
        before, after = sum(x.bytes_before for x in dense), sum(x.bytes_after for x in dense)
        print_line(
            f"left dense by the patterns: {counted(len(dense), 'layer')} ({size(before)} -> {size(after)})"
        )
    files = plan.checkpoint.files
    widened = [n for n in plan.checkpoint.others if files.stored_nbytes(n) != files.info(n).nbytes]
    if widened:
        before, after = sum(map(files.stored_nbytes, widened)), sum(files.info(n).nbytes for n in widened)
        print_line(
            f"written as float32: {counted(len(widened), 'tensor')} ({size(before)} -> {size(after)}): "
            + ", ".join(widened[:3])
            + (", ..." if len(widened) > 3 else "")
        )
    unchanged = [n for n in plan.checkpoint.others if n not in set(widened)]
    carried = size(sum(files.info(n).nbytes for n in unchanged))
    copied = counted(len(plan.copied), "other file")
    print_line(f"unchanged: {counted(len(unchanged), 'other tensor')} ({carried}), {copied}")
    if plan.skipped:
        print_line(f"left out: {', '.join(plan.skipped)}")
    for line in lines:
        print_line(line)
    print_line(f"{src} -> {plan.destination}: {size(plan.bytes_before)} -> {size(plan.bytes_after)}, {done}")


def _group_text(layer: LayerPlan) -> str:
    packed = layer.group_size
    if layer.outline.group_size in (packed, layer.outline.K):
        return "column" if packed == -1 else str(packed)
    return f"{layer.outline.group_size} as {packed}"


def _as_json(src: Path, plan: PackPlan, dry_run: bool, seconds: float) -> dict[str, Any]:
    return {
        "source": str(src),
        "destination": str(plan.destination),
        "written": not dry_run,
        "layers": [
            {
                "name": name,
                "format": layer.source.format,
                "K": layer.outline.K,
                "N": layer.outline.N,
                "source_group_size": layer.outline.group_size,
                "group_size": layer.group_size,
                "dtype": layer.outline.dtype,
                "symmetric": layer.outline.symmetric,
                "activation_order": layer.outline.permuted,
                "dense": layer.target != plan.target,
                "bytes_before": layer.bytes_before,
                "bytes_after": layer.bytes_after,
            }
            for name, layer in plan.layers.items()
        ],
        "other_tensors": len(plan.checkpoint.others),
        "copied_files": list(plan.copied),
        "left_out_files": list(plan.skipped),
        "notes": list(plan.notes),
        "bytes_before": plan.bytes_before,
        "bytes_after": plan.bytes_after,
        "seconds": round(seconds, 3),
    }
