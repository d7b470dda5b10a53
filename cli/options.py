"""Options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from marlin_jit.device import unavailable_reason
from marlin_jit.errors import DeviceError

__all__ = ["Size", "on_device", "patterns", "reading", "work"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
if TYPE_CHECKING:  # older releases of click have no parameter there
    _IntType = click.ParamType[int]
else:
    _IntType = click.ParamType

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([kmgt]?)b?", re.IGNORECASE)


class Size(_IntType):
    """A number of bytes such as ``5GB`` or ``500MB``: decimal units, as Hugging Face's max_shard_size."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        count = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
        if count < 1:
            self.fail(f"{value!r} is no size; give one such as 5GB, 500MB or 100000", param, ctx)
        return count


def patterns(command: _Command) -> _Command:
    """Add ``--include`` and ``--exclude``."""
    command = click.option(
        "--exclude", multiple=True, metavar="PATTERN", help="Not layers called like this. May be repeated."
    )(command)
    return click.option(
        "--include",
        multiple=True,
        metavar="PATTERN",
        help="Only layers called like this, with * ? [ ] as in a shell. May be repeated.",
    )(command)


def reading(command: _Command) -> _Command:
    """Add ``--zero-format``, ``--fix-nan-scales`` and ``--dequantize-others``: what `ReadOptions` holds."""
    for option in (
        click.option(
            "--dequantize-others", is_flag=True, help="Keep GGUF tensors of other types, dequantized."
        ),
        click.option("--fix-nan-scales", is_flag=True, help="Take NaN and infinite scales as 0."),
        click.option(
            "--zero-format",
            type=click.Choice(["auto", "v1", "v2"]),
            default="auto",
            show_default=True,
            help="How GPTQ zero points are stored: v1 minus one, v2 as they are; auto: as the config says.",
        ),
    ):
        command = option(command)
    return command


def work(command: _Command) -> _Command:
    """Add ``--shard-size``, ``--jobs``, ``--device``, ``--resume`` and ``--force``."""
    for option in (
        click.option(
            "--force",
            is_flag=True,
            help="Replace DST if it exists (a folder only if it holds a packed model).",
        ),
        click.option(
            "--resume",
            is_flag=True,
            help="Keep finished files if interrupted, and go on from those that an interrupted run has kept.",
        ),
        click.option(
            "--device",
            type=click.Choice(["auto", "cpu", "gpu"]),
            default="auto",
            show_default=True,
            help="Where layers are converted.",
        ),
        click.option(
            "--jobs",
            type=click.IntRange(1, 256),
            default=min(4, os.cpu_count() or 1),
            show_default="one a core, at most 4",
            help="Layers at the same time; each takes about 4 bytes of memory a weight.",
        ),
        click.option(
            "--shard-size",
            type=Size(),
            help="Most bytes in an output file, e.g. 5GB. Default: the files of SRC.",
        ),
    ):
        command = option(command)
    return command


def on_device(choice: str) -> bool:
    """Whether ``--device`` means the GPU.

    Raises
    ------
    DeviceError
        ``gpu``, and there is none.
    """
    if choice == "cpu":
        return False
    reason = unavailable_reason()
    if reason is not None and choice == "gpu":
        raise DeviceError(reason)
    return reason is None
