"""Options that several commands share. Those that belong together reach a command as one argument."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from marlin_jit.device import unavailable_reason
from marlin_jit.errors import DeviceError, ShapeError
from marlin_jit.formats import ReadOptions

__all__ = ["Size", "Work", "check_group", "on_device", "patterns", "reading", "work"]

if TYPE_CHECKING:  # older releases of click have no parameter there
    _IntType = click.ParamType[int]
else:
    _IntType = click.ParamType

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([kmgt]?)b?", re.IGNORECASE)


def check_group(k: int, group_size: int) -> None:
    """Raise, before any work is done, if a layer asked for by --k has no such groups."""
    if group_size != -1 and k % group_size:
        raise ShapeError(f"group size {group_size} does not divide K = {k}: choose another --k or --group")


class Size(_IntType):
    """A number of bytes such as ``5GB`` or ``500MB``: decimal units, as Hugging Face's max_shard_size."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        count = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
        if count < 1:
            self.fail(f"{value!r} is no size; give one such as 5GB, 500MB or 100000", param, ctx)
        return count


def patterns(command: Callable[..., Any]) -> Callable[..., Any]:
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


@dataclass(frozen=True)
class Work:
    """How output is made and told of: the options that `work` adds."""

    shard_size: int | None
    jobs: int
    device: str
    resume: bool
    force: bool
    dry_run: bool
    as_json: bool
    quiet: bool


def _gathered(command: Callable[..., Any], name: str, kind: type[Any]) -> Callable[..., Any]:
    """Return a command whose options that are fields of `kind` arrive as one argument."""

    @functools.wraps(command)
    def gathered(**values: Any) -> Any:
        values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return command(**values)

    return gathered


def reading(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what says how SRC is read, as `ReadOptions` ``options``."""
    command = _gathered(command, "options", ReadOptions)
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


def work(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what says how output is made, as `Work` ``work``."""
    command = _gathered(command, "work", Work)
    for option in (
        click.option("--quiet", is_flag=True, help="No progress bar, no summary."),
        click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON."),
        click.option(
            "--dry-run", is_flag=True, help="Check everything and show what would be done; write nothing."
        ),
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
            help="Layers at the same time; each takes 2 to 6 bytes of memory a weight.",
        ),
        click.option(
            "--shard-size",
            type=Size(),
            help="Most bytes in an output file, e.g. 5GB; what is larger gets a file of its own. Default: as "
            "SRC.",
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
