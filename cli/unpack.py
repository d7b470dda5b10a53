"""``marlin-jit unpack SRC DST``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from marlin_jit.cli.options import Work, patterns, reading, work
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
def unpack(
    src: Path,
    dst: Path,
    to: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    options: ReadOptions,
    work: Work,
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
        force=work.force,
        options=options,
        include=include,
        exclude=exclude,
        shard_size=work.shard_size,
    )
    execute(src, plan, start, ("unpacking", "unpacked"), work)
