"""Safetensors files: read with suspicion, written at known offsets.

A checkpoint is somebody else's file. The `safetensors` library checks that the header is sane, that the byte
ranges tile the file exactly and that shape, dtype and range agree; this module adds what it lets pass (a name
given twice, text where data should be, things that are not files, names and shapes of absurd length) and
turns every failure into one `CheckpointError` that names the file. The bytes are then read from the checked
ranges directly, because that works for every dtype, also those that NumPy does not have.

File layout: 8 bytes little-endian header length, JSON header ``{name: {dtype, shape, data_offsets}}``, data.
Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from marlin_jit.errors import CheckpointError

__all__ = [
    "SafetensorsFile",
    "SafetensorsWriter",
    "TensorInfo",
    "array_info",
    "load_json",
    "open_regular",
    "shortened",
    "shown",
]

# The library refuses longer headers on reading, so we must not write them.
MAX_HEADER_BYTES = 100_000_000
# A JSON file of a model (config, index) is at most a few MB; an index of a million tensors is about 100 MB.
MAX_JSON_BYTES = 200_000_000
# Of objects and lists in it. Configs use five levels or so; comparing, printing and writing a value recurse.
MAX_JSON_DEPTH = 64
# Names and numbers of dimensions appear in messages; NumPy has no array of more than 64 dimensions.
MAX_NAME_LENGTH = 1024
MAX_DIMENSIONS = 64
# The largest size of an array and position in a file.
MAX_BYTES = (1 << 63) - 1
COPY_CHUNK = 8 << 20

# Every dtype of the format in the library's order, which ascends in width; None where NumPy has no such type.
_NUMPY_DTYPES: dict[str, np.dtype[Any] | None] = {
    "BOOL": np.dtype(np.bool_),
    "F4": None,
    "F6_E2M3": None,
    "F6_E3M2": None,
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "C64": np.dtype("<c8"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
_WIDTH_ORDER = {name: i for i, name in enumerate(_NUMPY_DTYPES)}
_SAFETENSORS_DTYPES = {dtype: name for name, dtype in _NUMPY_DTYPES.items() if dtype is not None}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says about one tensor.

    Attributes
    ----------
    dtype : str
        In the spelling of safetensors: ``"F16"``, ``"I32"``, ...
    shape : tuple of int
    nbytes : int
    start : int
        Position of the first byte in the file; 0 for a tensor that is yet to be written.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    start: int = 0


def array_info(dtype: np.dtype[Any], shape: tuple[int, ...]) -> TensorInfo:
    """Describe an array that is to be written."""
    name = _SAFETENSORS_DTYPES.get(np.dtype(dtype))
    if name is None:
        raise CheckpointError(f"dtype {dtype} cannot be stored in a safetensors file")
    return TensorInfo(
        name, tuple(int(n) for n in shape), int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    )


def open_regular(path: Path) -> int:
    """Return the size of `path`, or say why it is no file that can be read.

    Checked before opening: opening a pipe would block for ever.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        broken = " (a symbolic link to nothing)" if path.is_symlink() else ""
        raise CheckpointError(f"{path}: no such file{broken}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{path}: is a folder where a file is expected")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a regular file")
    return status.st_size


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, refusing names given twice (two readers would disagree on which one counts)."""
    size = open_regular(path)
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {size} bytes is too large for a JSON file of a model")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from None
    if _is_lfs_pointer(data):
        raise CheckpointError(
            f"{path}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        )
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_no_duplicates)
        _check_depth(value)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__} where an object is expected")
    return value


class SafetensorsFile:
    """A checked safetensors file. Holds the header only; tensors are read when asked for.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    metadata : dict of str to str
        The free ``__metadata__`` of the header.
    tensors : dict of str to TensorInfo

    Raises
    ------
    CheckpointError
        If the file is missing, is not a file, or is damaged in any way.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = open_regular(path)
        self._refuse_stand_ins()
        try:
            # Opening checks the whole header: its length, JSON, dtypes, and that the ranges tile the file.
            with safe_open(path, framework="np") as checked:
                self.metadata: dict[str, str] = dict(checked.metadata() or {})
        except MemoryError:
            raise CheckpointError(
                f"{path}: {self.size} bytes are more than memory can be mapped for"
            ) from None
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: damaged safetensors file: {self._wrong_length() or _reason(error)}"
            ) from None
        self.tensors = self._read_header()

    def read(self, name: str) -> NDArray[Any]:
        """Return tensor `name` as a fresh array (BF16 and FP8 as ml_dtypes' types)."""
        info = self.tensors[name]
        dtype = _NUMPY_DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor {name} has dtype {info.dtype}, for which NumPy has no type"
            )
        try:
            out = np.empty(info.shape, dtype)
        except (MemoryError, ValueError):  # ValueError: an empty array whose other dimensions are too large
            raise CheckpointError(
                f"{self.path}: tensor {name}, {info.dtype} {list(info.shape)}, is larger than memory allows"
            ) from None
        view = out.reshape(-1).view(np.uint8).data
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(info.start)
                done = 0
                while done < info.nbytes:
                    count = file.readinto(view[done:])
                    if not count:
                        raise CheckpointError(f"{self.path}: became shorter while being read")
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {_reason(error)}") from None
        return out

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of tensor `name`, a few MB at a time, whatever its dtype."""
        info = self.tensors[name]
        try:
            with self.path.open("rb") as file:
                file.seek(info.start)
                left = info.nbytes
                while left:
                    chunk = file.read(min(left, COPY_CHUNK))
                    if not chunk:
                        raise CheckpointError(f"{self.path}: became shorter while being read")
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {_reason(error)}") from None

    def _refuse_stand_ins(self) -> None:
        """Name what often lies where the data should be; the library would only say 'header too large'."""
        if self.size == 0:
            raise CheckpointError(f"{self.path}: is empty")
        try:
            with self.path.open("rb") as file:
                start = file.read(64)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {_reason(error)}") from None
        if _is_lfs_pointer(start):
            raise CheckpointError(
                f"{self.path}: is a Git LFS pointer, not the data; fetch it with `git lfs pull`"
            )
        if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
            raise CheckpointError(f"{self.path}: is a web page, not a safetensors file; download it again")
        if start.lstrip().startswith(b"{"):
            raise CheckpointError(f"{self.path}: is a JSON file, not a safetensors file")
        if start.startswith(b"GGUF"):
            raise CheckpointError(f"{self.path}: is a GGUF file inside a safetensors model")

    def _wrong_length(self) -> str | None:
        """Say so if the file is too short or too long for its header: what a broken download leaves."""
        try:
            tensors = sorted(self._read_header().values(), key=lambda info: (info.start, info.nbytes))
        except CheckpointError:
            return None
        ends = [info.start + info.nbytes for info in tensors]
        if not tensors or [info.start for info in tensors] != [self._data_start(), *ends[:-1]]:
            return None  # the ranges are wrong in other ways too
        if ends[-1] > self.size:
            return f"cut short, it has {self.size} of the {ends[-1]} bytes that its header announces"
        return f"{self.size - ends[-1]} bytes follow the last tensor" if ends[-1] < self.size else None

    def _data_start(self) -> int:
        with self.path.open("rb") as file:
            return 8 + int.from_bytes(file.read(8), "little")

    def _read_header(self) -> dict[str, TensorInfo]:
        """Parse the header, reading no more than a header may take and the file has."""
        try:
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                text = file.read(min(length, MAX_HEADER_BYTES, self.size))
            header = json.loads(text, object_pairs_hook=_no_duplicates)
            tensors = {
                name: _tensor_info(name, entry, 8 + length)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: damaged safetensors file: {_reason(error)}") from None
        return tensors


class SafetensorsWriter:
    """Write a safetensors file tensor by tensor, in any order.

    Every size is known beforehand, so the header goes first and each tensor straight to its place: memory
    holds one tensor, not one file. Tensors lie in the order of the library's own writer (widest type first,
    then by name), which keeps every tensor aligned to its type.

    Parameters
    ----------
    path : Path
        Must not exist.
    tensors : mapping of str to TensorInfo
        What will be written; `start` is ignored.
    metadata : mapping of str to str
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self.path = path
        self._tensors = dict(tensors)
        self._starts: dict[str, int] = {}
        self._pending = set(tensors)
        position = 0
        for name in sorted(tensors, key=lambda name: (-_WIDTH_ORDER.get(tensors[name].dtype, -1), name)):
            info = tensors[name]
            header[name] = {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "data_offsets": [position, position + info.nbytes],
            }
            self._starts[name] = position
            position += info.nbytes
        try:
            text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(
                f"{path}: a name with {error.object[error.start]!r} in it cannot be written as UTF-8"
            ) from None
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: a header of {len(text)} bytes is over the limit of {MAX_HEADER_BYTES}"
            )
        self.size = 8 + len(text) + position
        self._data = 8 + len(text)
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, data: NDArray[Any] | Iterable[bytes]) -> None:
        """Write one tensor: an array of the announced dtype and shape, or its bytes in pieces."""
        info = self._tensors[name]
        self._pending.remove(name)
        self._file.seek(self._data + self._starts[name])
        if isinstance(data, np.ndarray):
            actual = array_info(data.dtype, data.shape)
            if (actual.dtype, actual.shape) != (info.dtype, info.shape):
                raise CheckpointError(
                    f"{self.path}: tensor {name} was announced as {info.dtype} {info.shape}, not "
                    f"{actual.dtype} {actual.shape}"
                )
            self._file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
            return
        count = 0
        for piece in data:
            self._file.write(piece)
            count += len(piece)
        if count != info.nbytes:
            raise CheckpointError(
                f"{self.path}: tensor {name} was announced with {info.nbytes} bytes, not {count}"
            )

    def close(self) -> None:
        """Flush to the disk; raise if a tensor is missing."""
        try:
            if self._pending:
                raise CheckpointError(
                    f"{self.path}: tensor {min(self._pending)} was announced and never written"
                )
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def _is_lfs_pointer(data: bytes) -> bool:
    return data.startswith(b"version https://git-lfs")


def _tensor_info(name: str, entry: Any, data: int) -> TensorInfo:
    """Return a header's entry for a file whose data start at byte `data`."""
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"a tensor name has {len(name)} characters; at most {MAX_NAME_LENGTH} are read")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are read")
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= MAX_BYTES - data:
        raise ValueError(f"tensor {name} has the data_offsets {shown([begin, end])}")
    return TensorInfo(entry["dtype"], shape, end - begin, data + begin)


def _check_depth(value: Any) -> None:
    """Raise if objects and lists are nested deeper than any sensible JSON file nests them."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [node for node in level if isinstance(node, (dict, list))]
        if not level:
            return
        inner = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for children in inner for child in children]
    raise ValueError(f"nested more than {MAX_JSON_DEPTH} levels deep")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice!r} is given twice")
    return out


def _reason(error: BaseException) -> str:
    """Return the first line of an error's text, not too long, without the file name an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip() or type(error).__name__
    return shortened(text.splitlines()[0].removeprefix("Error while deserializing header: "))


def shown(value: Any) -> str:
    """Return `value` as Python spells it, shortened: a stranger's text in a message of ours."""
    return shortened(repr(value))


def shortened(text: str, limit: int = 200) -> str:
    """Return `text`, or its beginning where it is longer than `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
