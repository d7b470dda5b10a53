"""The ``marlin-jit`` command: which subcommands there are, and how errors, warnings and signals leave it.

Exit codes: 0 done; 1 `verify` found a difference; 2 an error, told in one line on stderr; 129, 130, 141
and 143 ended by a hangup, Ctrl-C, a closed pipe and SIGTERM.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from marlin_jit import __version__
from marlin_jit.errors import MarlinJitError

__all__ = ["main"]


UNEXPECTED = "an unexpected error"


class LazyCommand(NamedTuple):
    """Where a command is, and the line that ``--help`` shows without importing it."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "pack": LazyCommand("marlin_jit.cli.pack", "pack", "Pack a 4-bit checkpoint of any format that is read."),
    "unpack": LazyCommand(
        "marlin_jit.cli.unpack", "unpack", "Turn a packed model back into GPTQ or dense weights."
    ),
    "quantize": LazyCommand("marlin_jit.cli.quantize", "quantize", "Quantize and pack an unquantized model."),
    "inspect": LazyCommand("marlin_jit.cli.inspect", "inspect", "Show what is in a checkpoint."),
    "verify": LazyCommand("marlin_jit.cli.verify", "verify", "Prove that a packed model equals its source."),
    "info": LazyCommand("marlin_jit.cli.info", "info", "Show device, driver, compiler and cache."),
    "warmup": LazyCommand("marlin_jit.cli.warmup", "warmup", "Compile kernels ahead of their first use."),
    "tune": LazyCommand("marlin_jit.cli.tune", "tune", "Keep the fastest plans for this GPU."),
    "bench": LazyCommand("marlin_jit.cli.bench", "bench", "Time the kernels on this machine."),
    "score": LazyCommand("marlin_jit.cli.score", "score", "Tell how well a packed model predicts a text."),
    "generate": LazyCommand("marlin_jit.cli.generate", "generate", "Let a packed model go on with a text."),
    "demo": LazyCommand("marlin_jit.cli.demo", "demo", "Pack, score and run a small language model."),
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

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer commands without importing them: a shell waits for this at each press of Tab."""
        commands = [
            CompletionItem(name, help=place.help)
            for name, place in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.help) for name, place in COMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        # A name that the terminal's encoding lacks is shown escaped; it must not fail a command that is done.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _warnings_in_one_line(), _terminated_like_an_error():
            try:
                return super().invoke(ctx)
            except MarlinJitError as error:
                raise ErrorLine(str(error)) from error
            except BrokenPipeError:  # the reader of our output has gone, as with `| head`: end quietly
                _drop_output()
                raise click.exceptions.Exit(141) from None
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                raise ErrorLine(f"{where}{error.strerror or error}") from error
            except MemoryError as error:
                raise ErrorLine("not enough memory") from error
            except KeyboardInterrupt:
                click.echo("interrupted", err=True)
                raise click.exceptions.Exit(130) from None
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except Exception as error:  # Python would exit with 1: "`verify` found a difference"
                raise ErrorLine(f"{UNEXPECTED}, {type(error).__name__}: {error}; please report it") from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="marlin-jit")
def main() -> None:
    """Pack INT4 checkpoints into the Marlin format, and look after the kernels that multiply with them."""


def _drop_output() -> None:
    """Send what stdout still holds to nowhere, so that flushing it at the exit does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


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
    """Turn SIGTERM and SIGHUP into exceptions: a command removes its half-written output on the way out."""
    before: dict[int, Any] = {}

    def leave(number: int, frame: Any) -> None:
        for handled in before:  # a hangup may come twice, and the way out is not to be interrupted
            signal.signal(handled, signal.SIG_IGN)
        sys.exit(128 + number)

    try:
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                before[number] = signal.signal(number, leave)
    except ValueError:  # not the main thread, which alone may do this
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
