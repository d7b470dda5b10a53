"""The disk cache of compiled kernels: content-keyed files that are right or count as missing.

One file holds one kernel: ``MAGIC``, the SHA-256 of all that follows, the length of a JSON header
(4 bytes, little endian), the header, and the cubin. Files are written beside and renamed, so a reader
sees a whole file or none, whatever number of processes write at once. A file that is truncated, changed
or of another format is a miss: the caller compiles again and overwrites it. Nothing here ever raises
because a directory is missing, full or read-only; a cache must not break the call it serves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marlin_jit._cupy import private_temp_dir

MAGIC = b"MJITCUB1"
SUFFIX = ".mjk"
# Our own: `clear` removes these, and the directory may be one that others use too.
_TEMPORARY = ".marlin-jit-tmp-"
_DIGEST_BYTES = 32


def content_key(*parts: Any) -> str:
    """SHA-256, in hex, of ``parts`` as canonical JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def directories() -> list[Path]:
    """The directories in use, in the order they are read; entries are written to the last one.

    The candidates are ``$MARLIN_JIT_CACHE_DIR``, ``$XDG_CACHE_HOME/marlin-jit``, ``~/.cache/marlin-jit``
    and a private directory under the system's temporary directory. All of them down to the first
    writable one are used: a read-only ``MARLIN_JIT_CACHE_DIR`` that was filled when an image was built
    still serves its kernels, and new ones go to the next candidate.
    """
    found: list[Path] = []
    for path in _candidates():
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            found.append(path)
            if os.access(path, os.W_OK | os.X_OK):
                break
    return found


def load(key: str) -> tuple[dict[str, Any], bytes] | None:
    """The header and cubin stored under ``key``, or None if no directory has a valid file for it."""
    for directory in directories():
        try:
            data = (directory / (key + SUFFIX)).read_bytes()
        except OSError:
            continue
        entry = _decode(key, data)
        if entry is not None:
            return entry
    return None


def save(key: str, header: dict[str, Any], cubin: bytes) -> bool:
    """Store a kernel; False if it could not be written (no writable directory, or a full disk)."""
    writable = directories()
    if not writable:
        return False
    directory = writable[-1]
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=directory)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_encode(key, header, cubin))
        os.replace(temporary, directory / (key + SUFFIX))
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True


def discard(key: str) -> None:
    """Remove the file stored under ``key`` wherever it can be removed."""
    for directory in directories():
        with contextlib.suppress(OSError):
            (directory / (key + SUFFIX)).unlink()


def usage() -> tuple[int, int]:
    """Number of entries and their total bytes, over all directories in use."""
    entries = 0
    size = 0
    for path in _files(SUFFIX):
        with contextlib.suppress(OSError):
            size += path.stat().st_size
            entries += 1
    return entries, size


def clear() -> int:
    """Remove all entries (and what interrupted writers left); return how many entries went."""
    removed = 0
    for path in _files(SUFFIX):
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
    for path in _files(prefix=_TEMPORARY):
        with contextlib.suppress(OSError):
            path.unlink()
    return removed


def _candidates() -> Iterator[Path]:
    explicit = os.environ.get("MARLIN_JIT_CACHE_DIR")
    if explicit:
        yield Path(os.path.expanduser(explicit))  # that of Path raises where the user is unknown
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and os.path.isabs(xdg):  # the XDG specification says to ignore relative paths
        yield Path(xdg) / "marlin-jit"
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        yield Path(home) / ".cache" / "marlin-jit"
    temporary = private_temp_dir("marlin-jit")
    if temporary is not None:
        yield temporary


def _files(suffix: str = "", prefix: str = "") -> Iterator[Path]:
    for directory in directories():
        with contextlib.suppress(OSError):
            for path in sorted(directory.iterdir()):
                if path.name.startswith(prefix) and path.name.endswith(suffix):
                    yield path


def _encode(key: str, header: dict[str, Any], cubin: bytes) -> bytes:
    text = json.dumps({"key": key, **header}).encode()
    body = struct.pack("<I", len(text)) + text + cubin
    return MAGIC + hashlib.sha256(body).digest() + body


def _decode(key: str, data: bytes) -> tuple[dict[str, Any], bytes] | None:
    start = len(MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if not data.startswith(MAGIC) or data[len(MAGIC) : start] != hashlib.sha256(body).digest():
        return None
    try:
        (length,) = struct.unpack_from("<I", body)
        header: dict[str, Any] = json.loads(body[4 : 4 + length])
        stored_key = header.pop("key")
    except (struct.error, ValueError, AttributeError, KeyError):  # whole, but not written by `_encode`
        return None
    # A file copied under another name is whole, but it is not the kernel asked for.
    return (header, body[4 + length :]) if stored_key == key else None
