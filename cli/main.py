"""The ``marlin-jit`` command: which subcommands there are, and how errors, warnings and signals leave it.

Exit codes: 0 done; 1 `verify` found a difference; 2 an error, told in one line on stderr; 130 and 143
interrupted.
"""

from __future__ import annotations

import importlib
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import click

from marlin_jit import __version__
from marlin_jit.errors import MarlinJitError

__all__ = ["main"]


class LazyCommand(NamedTuple):
    """Where a command is, and the line that ``--help`` shows without importing it."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "pack": LazyCommand("marlin_jit.cli.pack", "pack", "Pack a GPTQ, AWQ or Marlin checkpoint."),
    "inspect": LazyCommand("marlin_jit.cli.inspect", "inspect", "Show what is in a checkpoint."),
    "verify": LazyCommand("marlin_jit.cli.verify", "verify", "Prove that a packed model equals its source."),
    "info": LazyCommand("marlin_jit.cli.info", "info", "Show device, driver, compiler and cache."),
    "warmup": LazyCommand("marlin_jit.cli.warmup", "warmup", "Compile kernels ahead of their first use."),
    "bench": LazyCommand("marlin_jit.cli.bench", "bench", "Time the kernels on this machine."),
}


class ErrorLine(click.ClickException):
    """An error of this package, told in one line."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {one_line(self.message)}", file=file, err=file is None)


class LazyGroup(click.Group):
    """A group whose commands are imported when they are run: ``--help`` and errors stay fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        command: click.Command = getattr(importlib.import_module(place.module), place.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.help) for name, place in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        with _warnings_in_one_line(), _terminated_like_an_error():
            try:
                return super().invoke(ctx)
            except MarlinJitError as error:
                raise ErrorLine(str(error)) from error
            except BrokenPipeError:
                raise  # click ends quietly: the reader of our output has gone
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                raise ErrorLine(f"{where}{error.strerror or error}") from error
            except MemoryError as error:
                raise ErrorLine("not enough memory") from error
            except KeyboardInterrupt:
                click.echo("interrupted", err=True)
                raise click.exceptions.Exit(130) from None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="marlin-jit")
def main() -> None:
    """Pack INT4 checkpoints into the Marlin format, and look after the kernels that multiply with them."""


def one_line(text: str) -> str:
    """Return text that stays on one line and cannot steer a terminal: files are named by strangers."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        click.echo(f"warning: {one_line(str(message))}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def _terminated_like_an_error() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that a command removes its half-written output on the way out."""

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread, which alone may do this
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
