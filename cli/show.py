"""How commands show things: tables on stdout, a progress bar on stderr, numbers with units."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from marlin_jit.cli.main import one_line

__all__ = ["bytes_bar", "counted", "print_json", "print_line", "print_table", "size"]

# Where stdout is no terminal nothing should be cut to 80 columns: somebody wants to search in it.
_PIPE_WIDTH = 250


def size(count: int) -> str:
    """Return a number of bytes in the unit that suits it, e.g. ``1.5 MB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def counted(count: int, what: str) -> str:
    """Return ``1 layer``, ``14 layers``, ``1,234 layers``: `what` is the singular, its plural a plain -s."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def print_line(text: str) -> None:
    click.echo(one_line(text))


def print_json(value: Any) -> None:
    """Print JSON; what JSON has no number for (infinite, NaN) becomes a string."""
    click.echo(json.dumps(_with_json_numbers(value), indent=2, allow_nan=False))


def _with_json_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_json_numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_json_numbers(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # that of rich exits with 1, which says that `verify` found a difference


def print_table(columns: dict[str, str], rows: list[list[str]]) -> None:
    """Print a table to stdout.

    Parameters
    ----------
    columns : dict of str to str
        Heading and justification (``"left"`` or ``"right"``) of each column.
    rows : list of list of str
        Plain text: what looks like markup is shown as it is.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in columns.items():
        table.add_column(heading, justify="left" if justify == "left" else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    console = _Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(table)


@contextmanager
def bytes_bar(title: str, total: int, *, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, where that is a terminal; yield what advances it by some bytes."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not (wanted and console.is_terminal)
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
