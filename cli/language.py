"""What the commands that run language models share: where they run, and how text reaches the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click
import numpy as np

from marlin_jit import models
from marlin_jit.cli.main import one_line

__all__ = ["device_option", "place_of", "stream_text"]


def device_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--device``."""
    return click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "gpu"]),
        default="auto",
        show_default=True,
        help="Where the model runs: a GPU if there is one, else NumPy.",
    )(command)


def place_of(model: models.Model) -> str:
    """Return where a model runs, in words."""
    if model.xp is np:
        return "NumPy"
    properties = model.xp.cuda.runtime.getDeviceProperties(model.embedding.device.id)
    return str(properties["name"].decode())


def stream_text(pieces: Iterable[str]) -> str:
    """Print text as it comes, what could steer the terminal escaped; return it as it was."""
    told = []
    for piece in pieces:
        told.append(piece)
        click.echo("".join(c if c in "\n\t" else one_line(c) for c in piece), nl=False)
    click.echo()
    return "".join(told)
