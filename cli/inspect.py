"""``marlin-jit inspect SRC``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from marlin_jit.cli import options, plot
from marlin_jit.cli.picture import check
from marlin_jit.cli.show import counted, print_json, print_line, print_table, size
from marlin_jit.formats import Checkpoint, Parameters, SourceLayer, open_checkpoint
from marlin_jit.formats.convert import chosen_layers
from marlin_jit.formats.health import Finding, distribution, findings, read_grid

__all__ = ["inspect"]


@click.command()
@click.argument("src", type=click.Path(path_type=Path))
@options.patterns
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw how scales and zero points are spread to FILE (.png or .svg). Needs matplotlib.",
)
@click.option("--force", is_flag=True, help="Replace FILE of --plot if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(
    src: Path,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    picture: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Show the quantized layers of SRC: shapes, groups, format, bytes, and the health of scales and zeros.

    SRC is a model folder or a file, of any format that `pack` reads or packed already. Reads scales and zero
    points, not the codes (with --plot those of GGUF layers too). What looks odd is told with its number and
    the [group, column] of the first one, and is no error: the exit code is 0.
    """
    if picture is not None:
        check(picture, force=force)
    elif force:
        raise click.UsageError("--force replaces a picture: also give --plot FILE")
    checkpoint = open_checkpoint(src)
    chosen = chosen_layers(checkpoint, include, exclude)
    sources = {name: layer for name, layer in checkpoint.layers.items() if name in chosen}
    layers = []
    spreads = []
    for name, layer in sources.items():
        found = layer.parameters()
        grid = read_grid(layer, found, codes=picture is not None)
        layers.append(_describe(layer, found, grid.scale, findings(layer, grid)))
        if picture is not None:
            spreads.append(distribution(name, grid, symmetric=found.symmetric))
    if picture is not None:
        plot.draw(picture, str(src), spreads, force=force)
    if as_json:
        print_json(_as_json(src, checkpoint, layers))
    else:
        _print(src, checkpoint, layers)


def _describe(
    layer: SourceLayer, found: Parameters, scale: NDArray[Any], odd: tuple[Finding, ...]
) -> dict[str, Any]:
    return {
        "name": layer.name,
        "format": layer.format,
        "K": found.K,
        "N": found.N,
        "group_size": -1 if found.group_size == found.K else found.group_size,
        "symmetric": found.symmetric,
        "activation_order": found.g_idx is not None,
        "dtype": found.scale.dtype.name,
        "bytes": layer.nbytes,
        "scales": _health(scale),
        "health": [asdict(finding) | {"first": list(finding.first)} for finding in odd],
        "notes": list(found.notes),
    }


def _health(scale: NDArray[Any]) -> dict[str, Any]:
    values = scale.astype(np.float32)
    finite = values[np.isfinite(values)]
    return {
        "min": float(finite.min()) if finite.size else None,
        "max": float(finite.max()) if finite.size else None,
        "nan": int(np.isnan(values).sum()),
        "inf": int(np.isinf(values).sum()),
        "zero": int((values == 0).sum()),
        "negative": int((values < 0).sum()),
    }


def _print(src: Path, checkpoint: Checkpoint, layers: list[dict[str, Any]]) -> None:
    if layers:
        columns = {
            "layer": "left",
            "format": "left",
            "K x N": "right",
            "group": "right",
            "zero points": "left",
        }
        columns |= {"scales": "left", "bytes": "right", "scale min": "right", "max": "right"}
        columns |= {"zero": "right", "< 0": "right", "NaN/Inf": "right"}
        print_table(columns, [_row(layer) for layer in layers])
    for layer in layers:
        for note in layer["notes"]:
            print_line(f"note: {note}")
        for finding in layer["health"]:
            print_line(f"health: {Finding(**finding)}")
    weights = sum(layer["K"] * layer["N"] for layer in layers)
    others = counted(len(checkpoint.others), "other tensor")
    files = counted(len(checkpoint.files.shards), "file")
    nbytes = size(sum(layer["bytes"] for layer in layers))
    total = len(checkpoint.layers)
    shown = (
        counted(total, "layer") if len(layers) == total else f"{len(layers):,} of {counted(total, 'layer')}"
    )
    print_line(
        f"{src}: {checkpoint.format}, {shown} ({_weights_text(weights)}, {nbytes}), "
        f"{others} ({size(_other_bytes(checkpoint))}), {files}"
    )


def _weights_text(count: int) -> str:
    return counted(count, "weight") if count < 1_000_000 else f"{count / 1e6:.4g} M weights"


def _row(layer: dict[str, Any]) -> list[str]:
    health = layer["scales"]
    kind = "symmetric" if layer["symmetric"] else "asymmetric"
    if layer["activation_order"]:
        kind += ", activation order"
    return [
        layer["name"],
        layer["format"],
        f"{layer['K']} x {layer['N']}",
        "column" if layer["group_size"] == -1 else str(layer["group_size"]),
        kind,
        layer["dtype"],
        size(layer["bytes"]),
        *("-" if health[key] is None else f"{health[key]:.3g}" for key in ("min", "max")),
        str(health["zero"]),
        str(health["negative"]),
        str(health["nan"] + health["inf"]),
    ]


def _other_bytes(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.files.stored_nbytes(name) for name in checkpoint.others)


def _as_json(src: Path, checkpoint: Checkpoint, layers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "source": str(src),
        "format": checkpoint.format,
        "files": list(checkpoint.files.shards),
        "layers": layers,
        "other_tensors": [
            {
                "name": name,
                "dtype": checkpoint.files.info(name).dtype,
                "shape": list(checkpoint.files.info(name).shape),
            }
            for name in checkpoint.others
        ],
        "bytes": checkpoint.files.nbytes,
    }
