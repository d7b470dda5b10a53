"""``marlin-jit unpack SRC DST``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from marlin_jit.cli.options import patterns, reading, work
from marlin_jit.cli.summary import execute
from marlin_jit.formats import ReadOptions
from marlin_jit.formats.unpack import UNPACKED, plan_unpack

__all__ = ["unpack"]


@click.command()
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(UNPACKED),
    default="gptq",
    show_default=True,
    help="GPTQ v2; or dense weights in float16, in bfloat16, or (dense) as each layer's scales are.",
)
@patterns
@reading
@work
@click.option("--dry-run", is_flag=True, help="Check everything and show what would be done; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--quiet", is_flag=True, help="No progress bar, no summary.")
def unpack(
    src: Path,
    dst: Path,
    to: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    zero_format: str,
    fix_nan_scales: bool,
    dequantize_others: bool,
    shard_size: int | None,
    jobs: int,
    device: str,
    resume: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Turn SRC, packed or of any format that `pack` reads, into GPTQ v2 or dense weights in DST.

    No weight changes: GPTQ gets the codes, scales and zero points that were packed, and dense weights are
    rounded once. Layers that patterns leave out are written dense. Everything else in SRC goes along
    unchanged. DST appears when it is complete; SRC is only read.
    """
    start = time.perf_counter()
    plan = plan_unpack(
        src,
        dst,
        to,
        force=force,
        options=ReadOptions(zero_format, fix_nan_scales, dequantize_others),
        include=include,
        exclude=exclude,
        shard_size=shard_size,
    )
    execute(
        src,
        plan,
        start,
        ("unpacking", "unpacked"),
        jobs=jobs,
        device=device,
        resume=resume,
        dry_run=dry_run,
        as_json=as_json,
        quiet=quiet,
    )
