"""Output appears whole or not at all: it is written under another name and renamed when it is complete."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marlin_jit.errors import CheckpointError

__all__ = ["check_destination", "published"]


def check_destination(destination: Path, *, force: bool) -> None:
    """Raise, before any work is done, if output cannot appear at `destination`."""
    parent = destination.parent
    if not destination.name or destination.name == "..":
        raise CheckpointError(f"{destination}: is no name for a new file or folder")
    if not parent.is_dir():
        raise CheckpointError(f"{destination}: the folder {parent} does not exist")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{destination}: the folder {parent} is not writable")
    if os.path.lexists(destination) and not force:
        raise CheckpointError(
            f"{destination}: exists already; remove it, choose another name, or replace it with --force"
        )


@contextmanager
def published(destination: Path, *, folder: bool, force: bool) -> Iterator[Path]:
    """Yield a path to write to; rename it to `destination` at the end, or remove it if anything fails.

    Parameters
    ----------
    destination : Path
    folder : bool
        The path is made as an empty folder; otherwise it does not exist yet.
    force : bool
        Replace what is there. It stays as it is until the new output is complete.
    """
    check_destination(destination, force=force)
    token = secrets.token_hex(4)
    temporary = destination.with_name(f".{destination.name[:100]}.{token}.partial")
    try:
        if folder:
            temporary.mkdir()
        yield temporary
        _sync_folder(temporary if folder else temporary.parent)
        if force and os.path.lexists(destination):
            _replace(temporary, destination, destination.with_name(f".{destination.name[:100]}.{token}.old"))
        else:
            _rename_to_new(temporary, destination)
        _sync_folder(destination.parent)
    except BaseException:  # also Ctrl-C: nothing half-written stays
        if folder:
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


def _replace(temporary: Path, destination: Path, old: Path) -> None:
    destination.rename(old)
    try:
        temporary.rename(destination)
    except BaseException:
        old.rename(destination)
        raise
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def _rename_to_new(temporary: Path, destination: Path) -> None:
    """Rename without replacing what may have appeared at `destination` meanwhile."""
    if temporary.is_dir():
        temporary.rename(destination)  # refuses a folder that is not empty, and any file
        return
    try:
        os.link(temporary, destination)
    except FileExistsError:
        raise CheckpointError(
            f"{destination}: appeared while this was being written; it was left alone"
        ) from None
    except OSError:  # no hard links on this file system
        if os.path.lexists(destination):
            raise CheckpointError(
                f"{destination}: appeared while this was being written; it was left alone"
            ) from None
        temporary.rename(destination)
    else:
        temporary.unlink()


def _sync_folder(folder: Path) -> None:
    """Make names in a folder survive a power cut, where the file system offers that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
