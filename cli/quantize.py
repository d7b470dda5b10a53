"""``marlin-jit quantize SRC DST``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click

from marlin_jit.cli.options import Work, work
from marlin_jit.cli.show import counted
from marlin_jit.cli.summary import execute
from marlin_jit.formats import PackPlan, plan_pack
from marlin_jit.formats.dense import DenseCheckpoint, Settings, open_dense

__all__ = ["quantize"]

SHOWN = 3  # names in a line of plain text; --json has all of them


@click.command()
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--group",
    type=click.Choice(["32", "64", "128", "-1"]),
    default="128",
    show_default=True,
    help="Rows that share a scale; -1 is all of a column.",
)
@click.option("--symmetric", is_flag=True, help="No zero points: code 8 is weight 0.")
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16"]),
    help="Type of the packed layers. Default: that of each weight; float16 for float32 ones.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Quantize by GPTQ. A safetensors file with X.hessian [K, K] or X.activations [T, K] for layers X.",
)
@click.option(
    "--damp", type=float, metavar="SHARE", help="GPTQ: dampening, share of the mean diagonal. Default: 0.01."
)
@click.option("--act-order", is_flag=True, help="GPTQ: activation order, the inputs that count most first.")
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Quantize only layers of such names, like 'model.layers.*'. May be repeated. Default: all but "
    "embeddings, output heads, norms and routers, which are quantized only if named in full.",
)
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Leave layers of such names. May be repeated."
)
@work
def quantize(
    src: Path,
    dst: Path,
    group: str,
    symmetric: bool,
    dtype: str | None,
    calibration: Path | None,
    damp: float | None,
    act_order: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    work: Work,
) -> None:
    """Quantize the float16, bfloat16 or float32 model SRC to 4 bits and pack it into DST.

    SRC is a model folder, which becomes a folder, or a safetensors file, which becomes a file. Weights are
    rounded by min-max, or by GPTQ with --calibration. Everything else in SRC goes along unchanged. DST
    appears when it is complete; SRC is only read.
    """
    if calibration is None and (act_order or damp is not None):
        raise click.UsageError("--act-order and --damp are for GPTQ, which needs --calibration FILE")
    start = time.perf_counter()
    settings = Settings(
        group_size=int(group),
        symmetric=symmetric,
        dtype=dtype,
        calibration=calibration,
        damp=0.01 if damp is None else damp,
        act_order=act_order,
        include=include,
        exclude=exclude,
    )
    checkpoint = open_dense(src, settings)
    plan = plan_pack(src, dst, force=work.force, checkpoint=checkpoint, shard_size=work.shard_size)
    execute(
        src,
        plan,
        start,
        ("quantizing", "packed"),
        work,
        lines=[*_left(checkpoint), *_calibration(checkpoint, plan)],
        more={"left": checkpoint.left, "unused_calibration": list(checkpoint.unused)},
    )


def _left(checkpoint: DenseCheckpoint) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for name, why in checkpoint.left.items():
        names.setdefault(why, []).append(name)
    for why, found in names.items():
        yield f"left, {why}: {_listed(found, 'tensor')}"


def _calibration(checkpoint: DenseCheckpoint, plan: PackPlan) -> Iterator[str]:
    without = [name for name, layer in plan.layers.items() if layer.outline.notes]
    if without:
        yield f"not in the calibration file, by min-max: {_listed(without, 'layer')}"
    if checkpoint.unused:
        yield f"in the calibration file, not used: {_listed(checkpoint.unused, 'tensor')}"


def _listed(names: list[str] | tuple[str, ...], what: str) -> str:
    more = f", and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return f"{counted(len(names), what)} ({', '.join(names[:SHOWN])}{more})"
