"""``marlin-jit score MODEL [TEXT_FILE]``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import numpy as np

import marlin_jit as mj
from marlin_jit import models
from marlin_jit.cli.language import device_option, place_of
from marlin_jit.cli.show import counted, print_json, print_line, print_table

__all__ = ["measured", "print_scores", "score"]


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("text_file", type=click.Path(path_type=Path), required=False)
@click.option("--compare", is_flag=True, help="Score with dispatch on and off, and tell the drift.")
@click.option(
    "--chunk",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Tokens that are read at a time; bounds memory.",
)
@click.option(
    "--context",
    type=click.IntRange(2),
    help="Most tokens that a prediction looks back at. Default: those that the model was made for.",
)
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def score(
    model: Path,
    text_file: Path | None,
    compare: bool,
    chunk: int,
    context: int | None,
    device: Any,
    as_json: bool,
) -> None:
    """Tell how well the packed MODEL predicts a text: its perplexity.

    MODEL is a folder that `marlin-jit pack` wrote. TEXT_FILE is UTF-8; without it the opening of Moby-Dick is
    scored, which comes with the package. Every product goes through `mj.matmul`, without a GPU through its
    reference path.
    """
    text = models.sample_text() if text_file is None else _read(text_file)
    tokens = models.Tokenizer.load(model).encode(text)
    if len(tokens) < 2:
        raise mj.ShapeError(f"{text_file}: a text of {counted(len(tokens), 'token')} has nothing to predict")
    loaded = models.load(model, device=device)
    runs = [
        measured(loaded, tokens, enabled, chunk=chunk, context=context)
        for enabled in ((True, False) if compare else (mj.dispatch_enabled(),))
    ]
    name = "the opening of Moby-Dick" if text_file is None else str(text_file)
    if as_json:
        told = {
            "model": str(model),
            "text": name,
            "place": place_of(loaded),
            "tokens": len(tokens),
            "runs": runs,
        }
        print_json(told | ({"drift": drift(runs)} if compare else {}))
        return
    print_line(f"{name}: {counted(len(tokens), 'token')}, on {place_of(loaded)}")
    print_scores(runs)


def measured(
    model: models.Model, tokens: list[int], enabled: bool, *, chunk: int = 512, context: int | None = None
) -> dict[str, Any]:
    """Score with dispatch on or off; return what was found, how long it took and which paths were taken."""
    with mj.dispatch(enabled):
        if model.xp is not np:
            model.score(tokens, chunk=chunk, context=context)  # compiles kernels, which is not to be timed
        mj.reset_stats()
        start = time.perf_counter()
        found = model.score(tokens, chunk=chunk, context=context)
    return {
        "dispatch": enabled,
        "perplexity": found.perplexity,
        "mean_nll": found.mean_nll,
        "predicted": found.tokens,
        "seconds": round(time.perf_counter() - start, 3),
        "paths": mj.stats(),
    }


def drift(runs: list[dict[str, Any]]) -> float:
    """How far the perplexities of two runs are apart, relative to the second."""
    on, off = (float(run["perplexity"]) for run in runs)
    return abs(on - off) / off


def print_scores(runs: list[dict[str, Any]]) -> None:
    """Print a row a run, and the drift if there are two."""
    rows = [
        [
            "on" if run["dispatch"] else "off",
            f"{run['perplexity']:.4f}",
            f"{run['mean_nll']:.5f}",
            f"{run['seconds']:.2f}",
            ", ".join(run["paths"]),
        ]
        for run in runs
    ]
    columns = {
        "dispatch": "left",
        "perplexity": "right",
        "mean nll": "right",
        "seconds": "right",
        "paths": "left",
    }
    print_table(columns, rows)
    if len(runs) == 2:
        print_line(f"drift: {drift(runs):.4%}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise mj.CheckpointError(f"{path}: is not UTF-8 text") from None
