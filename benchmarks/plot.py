"""Draw a result file: ``python -m benchmarks.plot results.json plot.svg``. Needs matplotlib."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks.report import read, select
from benchmarks.shapes import PUBLISHED, floor_us
from marlin_jit.formats.publish import published

_LINES = (
    ("marlin-jit", "ours", "symmetric", "#c0392b", "-"),
    ("marlin-jit, zero points", "ours", "asymmetric", "#e67e22", "--"),
    ("cuBLAS fp16", "cublas", "best", "#2c3e50", "-"),
    ("humming", "humming", "symmetric", "#2980b9", "-"),
)


def require_matplotlib() -> None:
    """End the command, with what to do, if matplotlib is not there."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        click.echo(f"error: matplotlib cannot be imported ({error}): run pip install matplotlib", err=True)
        sys.exit(2)


def save(figure: Any, path: Path, kind: str, *, salt: str) -> None:
    """Write a figure as `write_text` does text. As SVG the same data give the same bytes."""
    import matplotlib

    metadata = {"Date": None} if kind == "svg" else None
    with (
        published(path.resolve(), folder=False, force=True) as temporary,
        matplotlib.rc_context({"svg.hashsalt": salt}),
    ):
        figure.savefig(temporary, format=kind, metadata=metadata)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("picture", type=click.Path(dir_okay=False, path_type=Path))
def main(results: Path, picture: Path) -> None:
    """Draw each layer's times over the floor against M, one panel a layer."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        data = read(results)
    except ValueError as error:
        raise click.ClickException(f"{results}: {error}") from error
    layers: dict[tuple[int, int, int, str], list[dict[str, Any]]] = {}
    for record in data["records"]:
        layer = (record["k"], record["n"], record["group_size"], record["dtype"])
        layers.setdefault(layer, []).append(record)
    columns = 2 if len(layers) > 1 else 1
    rows = -(-len(layers) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(6 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for axis, ((k, n, group_size, dtype), records) in zip(axes.flat, layers.items(), strict=False):
        ms = list(dict.fromkeys(r["m"] for r in records))
        for label, library, variant, colour, style in _LINES:
            times = [(m, us) for m in ms if (us := select(records, m, library, variant)) is not None]
            over = [us / floor_us(m, k, n, group_size) for m, us in times]
            axis.plot([m for m, _ in times], over, style, color=colour, marker=".", label=label)
        if group_size == 128 and dtype == "float16":
            known = [m for m in ms if (k, n, m) in PUBLISHED]
            over = [PUBLISHED[k, n, m].vllm_marlin / floor_us(m, k, n) for m in known]
            axis.plot(known, over, ":", color="#7f8c8d", label="vLLM Marlin (another run)")
        axis.set(
            xscale="log", yscale="log", xlabel="M", ylabel="time / floor", title=f"K {k} x N {n}, {dtype}"
        )
        axis.set_xticks(ms, [str(m) for m in ms], minor=False)
        axis.minorticks_off()
        ticks = (1, 1.5, 2, 3, 4, 6)
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(layers) :]:
        axis.remove()
    axes.flat[0].legend(fontsize="small")
    if not picture.suffix:
        picture = picture.with_name(picture.name + ".png")
    save(figure, picture, picture.suffix[1:], salt=data["schema"])


if __name__ == "__main__":
    main()
