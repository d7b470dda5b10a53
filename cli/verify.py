"""``marlin-jit verify SRC DST``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from marlin_jit.cli.options import reading
from marlin_jit.cli.show import bytes_bar, counted, print_json, print_line
from marlin_jit.formats import ReadOptions, compare, open_checkpoint

__all__ = ["verify"]

SHOWN = 20  # differences in plain text; --json has all of them


@click.command()
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@reading
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify(
    ctx: click.Context,
    src: Path,
    dst: Path,
    options: ReadOptions,
    as_json: bool,
) -> None:
    """Dequantize SRC and DST layer by layer and compare every weight; compare all other tensors byte by byte.

    A layer that is dense in one of them is compared after rounding to its dtype. The options are about
    reading SRC: those that DST was made with.

    Exit code 0: they mean the same. 1: they do not; the differences are printed. 2: one of them cannot be
    read.
    """
    start = time.perf_counter()
    total = open_checkpoint(src, options).files.nbytes
    with bytes_bar("verifying", total, wanted=not as_json) as advance:
        result = compare(src, dst, advance, options)
    seconds = time.perf_counter() - start
    if as_json:
        print_json({"equal": not result.differences, **asdict(result), "seconds": round(seconds, 3)})
    else:
        for difference in result.differences[:SHOWN]:
            print_line(f"{difference.name}: {difference.what}")
        if result.differences:
            print_line(f"different: {counted(len(result.differences), 'difference')} between {src} and {dst}")
        else:
            print_line(
                f"equal: {counted(result.layers, 'layer')} ({counted(result.weights, 'weight')}) and "
                f"{counted(result.tensors, 'other tensor')}, compared in {seconds:.2f} s"
            )
    ctx.exit(1 if result.differences else 0)
