"""Cross-iteration rounding on a whole model: how the mean over iterations approaches the unrounded model.

python -m benchmarks.rounding FOLDER [-o OUT.json] [--group 64] [--tokens 512]

The weights of the packed model in FOLDER are taken as the unrounded ones. They are rounded to 4 bits again in
larger groups, with a rounding channel; then the model reads a text once for each iteration. Told are the
error of the logits, relative to the unrounded ones, and the perplexity, after so many iterations.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

import marlin_jit as mj
from benchmarks.report import write_text
from benchmarks.run import environment
from marlin_jit import models
from marlin_jit.bench import read_nvidia_smi
from marlin_jit.models.scoring import negative_log_likelihood
from marlin_jit.rounding import PERIOD

SCHEMA = "marlin-jit-rounding/1"
COUNTS = (1, 2, 4, 8, 16)


def logits_of(model: models.Model, ids: Any) -> Any:
    """Logits [tokens, vocab] in float32."""
    xp = model.xp
    tokens = xp.asarray(np.array([ids], np.int32))
    return model.forward(tokens, model.new_cache(len(ids)))[0].astype(np.float32)


def perplexity(xp: Any, logits: Any, ids: Any) -> float:
    """Of each next token."""
    return models.Score(negative_log_likelihood(xp, logits[:-1], np.array(ids[1:]))).perplexity


class Averaged(models.Linear):
    """A layer of a loop: the mean of its products over iterations, each with another rounding."""

    count, layer_seed = 1, 0

    def __call__(self, x: Any) -> Any:
        products = []
        for i in range(Averaged.count):
            with mj.iteration(i, seed=self.layer_seed):
                products.append(super().__call__(x).astype(np.float32))
        return (sum(products) / len(products)).astype(x.dtype)


def curve(
    path: Path, device: Any, ids: Any, rounding: Literal["frac4", "sign_bit"], group_size: int, exact: Any
) -> dict[str, Any]:
    """Errors and perplexities of nearest codes; of layers averaged over iterations; of logits averaged."""
    model = models.load(path, device=device, fuse=False)
    xp = model.xp
    for seed, linear in enumerate(model.linears):
        if linear is not model.head:
            dense = mj.dequantize(linear.weight, np.float32)
            linear.weight = mj.quantize(dense, group_size=group_size, rounding=rounding)
            linear.layer_seed = seed  # type: ignore[attr-defined]

    def told(logits: Any) -> dict[str, float]:
        away = float(xp.sqrt(((logits - exact) ** 2).sum() / (exact**2).sum()))
        return {"error": away, "perplexity": perplexity(xp, logits, ids)}

    found: dict[str, Any] = {"nearest": told(logits_of(model, ids)), "mean of products": {}}
    mj.reset_stats()
    found["mean of logits"], total = {}, xp.zeros(exact.shape, np.float64)
    for i in range(PERIOD):
        with mj.iteration(i):
            total += logits_of(model, ids)
        if i + 1 in COUNTS:
            found["mean of logits"][i + 1] = told((total / (i + 1)).astype(np.float32))
    for linear in model.linears:
        if linear is not model.head:
            linear.__class__ = Averaged
    for count in COUNTS:
        Averaged.count = count
        found["mean of products"][count] = told(logits_of(model, ids))
    found["paths"] = mj.stats()
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--group", "group_size", default=64, help="Of the rounded weights; divides every K.")
@click.option("--tokens", default=512, help="Of the opening of Moby-Dick.")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Result file (JSON).")
def main(folder: Path, group_size: int, tokens: int, device: Any, output: Path | None) -> None:
    """Measure the curve on a packed model."""
    smi_before = read_nvidia_smi()
    ids = models.Tokenizer.load(folder).encode(models.sample_text())[:tokens]
    model = models.load(folder, device=device)
    exact = logits_of(model, ids)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": repr(model),
        "group_size": group_size,
        "tokens": len(ids),
        "unrounded": {"perplexity": perplexity(model.xp, exact, ids)},
    }
    del model
    click.echo(f"unrounded: perplexity {document['unrounded']['perplexity']:.3f}")
    for rounding in ("frac4", "sign_bit"):
        found = document[rounding] = curve(folder, device, ids, rounding, group_size, exact)
        rows = {"nearest": found["nearest"]}
        for what in ("mean of products", "mean of logits"):
            rows |= {f"{what}, {count}": row for count, row in found[what].items()}
        for name, row in rows.items():
            click.echo(
                f"{rounding:9s} {name:20s} error {row['error']:.4f}  perplexity {row['perplexity']:.3f}"
            )
    document["environment"] = environment(smi_before, read_nvidia_smi())
    if output is not None:
        write_text(output, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
