"""Output appears whole or not at all: it is written under another name and renamed when it is complete.

A file replaces a file in one atomic rename. No portable rename replaces a folder that is not empty, so the
old one is moved aside for the moment of a second rename; if that fails it is moved back.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from marlin_jit.errors import CheckpointError

__all__ = ["check_destination", "published"]


def check_destination(
    destination: Path, *, folder: bool, force: bool, may_replace: Callable[[Path], bool] | None = None
) -> None:
    """Raise, before any work is done, if output cannot appear at `destination`.

    Parameters are those of `published`.
    """
    parent = destination.parent
    if not destination.name or destination.name == "..":
        raise CheckpointError(f"{destination}: is no name for a new file or folder")
    if not os.path.isdir(parent):
        raise CheckpointError(f"{destination}: the folder {parent} does not exist")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{destination}: the folder {parent} is not writable")
    if _status(destination) is None:
        return
    if force:
        _check_replaceable(destination, destination, folder, may_replace)
        return
    try:
        _check_replaceable(destination, destination, folder, may_replace)
    except CheckpointError:
        raise CheckpointError(f"{destination}: exists already; remove it or choose another name") from None
    raise CheckpointError(
        f"{destination}: exists already; remove it, choose another name, or replace it with --force (in "
        "Python force=True)"
    )


@contextmanager
def published(
    destination: Path,
    *,
    folder: bool,
    force: bool,
    may_replace: Callable[[Path], bool] | None = None,
    keep: str | None = None,
) -> Iterator[Path]:
    """Yield a path to write to; rename it to `destination` at the end, or remove it if anything fails.

    Parameters
    ----------
    destination : Path
    folder : bool
        The path is made as an empty folder; otherwise it does not exist yet.
    force : bool
        Replace what is there: a file by a file, a folder by a folder. It stays as it is until the new output
        is complete.
    may_replace : callable, optional
        Says whether a folder may be replaced. It is asked before the work and again at the end, because the
        folder may have been exchanged in between. Without it no folder is replaced.
    keep : str, optional
        For a folder: keep the safetensors files in it if anything fails, and start with those that were kept
        under the same text.

    Raises
    ------
    CheckpointError
        What is at `destination`, now or when the output is complete, may not be replaced; it is left alone.
    """
    check_destination(destination, folder=folder, force=force, may_replace=may_replace)
    if keep is not None:
        with _kept(destination, keep) as temporary:
            yield temporary
            _put_in_place(temporary, destination, folder, force, may_replace)
            # Last, so that until the end the folder can be resumed, and is locked for other runs.
            (destination / _KEPT).unlink(missing_ok=True)
        return
    # 50 characters take at most 200 of the 255 bytes that a name may have.
    temporary = destination.with_name(f".{destination.name[:50]}.{secrets.token_hex(4)}.partial")
    try:
        if folder:
            temporary.mkdir()
        yield temporary
        _put_in_place(temporary, destination, folder, force, may_replace)
    except BaseException:  # also Ctrl-C: nothing half-written stays
        if folder:
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


_KEPT = ".marlin-jit-resume"
"""In an unfinished folder that is kept: what it is of. Locked by the run that writes."""


def _kept_name(destination: Path) -> str:
    """Return the name of the unfinished folder, another one for each destination."""
    name = destination.name
    if len(name) > 50:
        name = name[:41] + "-" + hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
    return f".{name}.resume.partial"


@contextmanager
def _kept(destination: Path, text: str) -> Iterator[Path]:
    """Yield the unfinished folder of an earlier run with the same text, or a new one, and keep it."""
    folder = destination.with_name(_kept_name(destination))
    if not _may_be_kept(folder):
        raise CheckpointError(f"{folder}: is in the way of an output that can be resumed; remove it")
    folder.mkdir(exist_ok=True)
    with (folder / _KEPT).open("a+", encoding="utf-8") as marker:
        _lock(marker, folder)
        marker.seek(0)
        same = marker.read() == text
        for entry in folder.iterdir():
            is_folder = entry.is_dir() and not entry.is_symlink()
            if entry.name == _KEPT or (same and entry.suffix == ".safetensors" and not is_folder):
                continue
            if is_folder:
                shutil.rmtree(entry)
            else:
                entry.unlink()
        marker.truncate(0)
        marker.write(text)
        marker.flush()
        os.fsync(marker.fileno())  # before any file that it is about
        yield folder


def _may_be_kept(folder: Path) -> bool:
    """Whether nothing is there, or a folder that a run has kept or had just made when it was killed."""
    status = _status(folder)
    if status is None:
        return True
    return stat.S_ISDIR(status.st_mode) and ((folder / _KEPT).is_file() or not any(folder.iterdir()))


def _lock(file: IO[str], folder: Path) -> None:
    """Hold the file until it is closed, however the process ends, if the system knows such locks."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The run that held it may have finished, and a third one begun, since the file was opened.
        held = os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except OSError:
        held = False
    if not held:
        raise CheckpointError(f"{folder}: another run is writing there")


def _put_in_place(
    temporary: Path,
    destination: Path,
    folder: bool,
    force: bool,
    may_replace: Callable[[Path], bool] | None,
) -> None:
    """Rename complete output to its name."""
    _sync_folder(temporary if folder else temporary.parent)
    if force and not folder:
        _check_replaceable(destination, destination, folder, may_replace)
        os.replace(temporary, destination)
    elif force and _status(destination) is not None:
        _replace_folder(temporary, destination, may_replace)
    else:
        _rename_to_new(temporary, destination)
    _sync_folder(destination.parent)


def _status(path: Path) -> os.stat_result | None:
    """Return what `path` itself is (a link is not followed), or None where there is nothing."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # too long a name, a zero byte
        reason = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(f"{path}: cannot be written: {reason or error}") from None


def _check_replaceable(
    path: Path, destination: Path, folder: bool, may_replace: Callable[[Path], bool] | None
) -> None:
    """Raise if what lies at `path`, and is called `destination` in messages, may not be replaced."""
    status = _status(path)
    if status is None:
        return
    if stat.S_ISLNK(status.st_mode):
        raise CheckpointError(
            f"{destination}: is a symbolic link, which --force does not replace; remove it yourself"
        )
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
        kind = "folder" if folder else "file"
        raise CheckpointError(
            f"{destination}: exists and is not a {kind}, which --force does not replace; remove it yourself"
        )
    if folder and not (may_replace is not None and may_replace(path)):
        if _identity(path) != _identity_of(status):  # exchanged while it was being looked at
            _check_replaceable(path, destination, folder, may_replace)
            return
        raise CheckpointError(
            f"{destination}: holds no packed model, so --force does not replace it; remove it yourself"
        )


def _replace_folder(temporary: Path, destination: Path, may_replace: Callable[[Path], bool] | None) -> None:
    """Put one folder in the place of another, unless that is, or has just become, one to be left alone."""
    _check_replaceable(destination, destination, True, may_replace)
    checked = _identity(destination)
    # A name of its own: a killed run may have left such a folder.
    aside = temporary.with_suffix(f".{secrets.token_hex(4)}.old")
    replaceable = False
    try:
        try:
            destination.rename(aside)
        except FileNotFoundError:
            _rename_to_new(temporary, destination)
            return
        # Usually the folder just checked, so that the name is free for no longer than two system calls.
        if checked is None or _identity(aside) != checked:
            _check_replaceable(aside, destination, True, may_replace)
        replaceable = True
        temporary.rename(destination)
    except BaseException as error:
        _put_back(aside, destination, replaceable, error)
        raise
    _remove_folder(aside)


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Return what changes if another folder takes the name, or entries come to it or go."""
    status = _status(path)
    return None if status is None else _identity_of(status)


def _identity_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _put_back(aside: Path, destination: Path, replaceable: bool, error: BaseException) -> None:
    """Undo moving a folder aside. Where its name has been taken again, remove it, if that is allowed."""
    if not os.path.lexists(aside):
        return
    try:
        aside.rename(destination)
    except OSError:
        if not replaceable:
            raise CheckpointError(
                f"{destination}: changed while this was being written; the folder found there before is now "
                f"{aside}"
            ) from error
        _remove_folder(aside)
        if isinstance(error, OSError):
            raise _appeared(destination) from None


def _remove_folder(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:  # Ctrl-C: what has been started is finished
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _rename_to_new(temporary: Path, destination: Path) -> None:
    """Rename without replacing what may have appeared at `destination` meanwhile."""
    if temporary.is_dir():
        try:
            temporary.rename(destination)  # refuses a folder that is not empty, and any file
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise _appeared(destination) from None
            raise
        return
    try:
        os.link(temporary, destination)
    except FileExistsError:
        raise _appeared(destination) from None
    except OSError:  # no hard links on this file system
        if os.path.lexists(destination):
            raise _appeared(destination) from None
        temporary.rename(destination)
    else:
        temporary.unlink()


def _appeared(destination: Path) -> CheckpointError:
    return CheckpointError(f"{destination}: appeared while this was being written; it was left alone")


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
