"""``marlin-jit pack SRC DST``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from marlin_jit.cli.options import Work, patterns, reading, work
from marlin_jit.cli.summary import execute
from marlin_jit.formats import ReadOptions, plan_pack

__all__ = ["pack"]


@click.command()
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@patterns
@reading
@work
def pack(
    src: Path,
    dst: Path,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    options: ReadOptions,
    work: Work,
) -> None:
    """Pack the 4-bit checkpoint SRC into DST: a model folder into a folder, a safetensors file into a file.

    Reads GPTQ (v1, v2), AWQ (gemm), compressed-tensors (pack-quantized), Marlin and GGUF (Q4_0, Q4_1, Q4_K)
    checkpoints; a GGUF file becomes a folder unless DST ends in .safetensors. Everything else in SRC goes
    along unchanged; layers that patterns leave out go along dequantized. DST appears when it is complete; SRC
    is only read.
    """
    start = time.perf_counter()
    plan = plan_pack(
        src,
        dst,
        force=work.force,
        options=options,
        include=include,
        exclude=exclude,
        shard_size=work.shard_size,
    )
    execute(src, plan, start, ("packing", "packed"), work)
