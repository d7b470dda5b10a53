"""The container of a GGUF file: key-values, and where each tensor lies. Tensors themselves are not read here.

=============  =====================================================================================
part           content, little-endian, nothing aligned unless said
=============  =====================================================================================
magic          ``GGUF``
version        uint32, 2 or 3
counts         uint64 of tensors, uint64 of key-values
key-values     key string, uint32 type, value; a string is a uint64 length and UTF-8; an array is a
               uint32 type, a uint64 count and the values
tensor infos   name string, uint32 number of dimensions, uint64 for each (the fastest first), uint32
               type, uint64 offset from the data
padding        to ``general.alignment`` (32 if absent)
data           the tensors in the order of their infos, each padded to the alignment
=============  =====================================================================================

Files are untrusted. Every count and length is checked against the bytes that are there before anything is
made of it; the whole header must lie in the first 64 MiB (that of a vocabulary of 262144 tokens with its
merges takes about 20). Tensors must tile the data, as ggml itself demands.

Types and their block sizes come from the ``gguf`` package. Its ``GGUFReader`` is not used: it believes what a
file says about itself, and makes NumPy arrays of every element of every list, which for the vocabulary of
SmolLM2 (49152 tokens) took 4.2 s and 160 MB where this module took 0.15 s.

Sources: ``docs/gguf.md`` of ggml; what ``ggml/src/gguf.cpp`` of llama.cpp refuses is refused here too.
"""

from __future__ import annotations

import importlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.safetensors_io import open_regular

__all__ = ["MAGIC", "GGUFHeader", "GGUFTensor", "gguf_package", "read_header"]

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 64 << 20
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_NAME = 128  # ggml's own limit is 64; builds of it for image models have 128
_MAX_SHOWN = 128  # characters of a name in a message
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4  # ggml writes no arrays in arrays at all
_STRING, _ARRAY, _BOOL, _UINT32 = 8, 9, 7, 4
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    _UINT32: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# Fewest bytes that a value takes: bounds the length of an array before it is read.
_LEAST_BYTES = {kind: dtype.itemsize for kind, dtype in _SCALARS.items()} | {_STRING: 8, _ARRAY: 12}
_LEAST_KEY_VALUE = 8 + 1 + 4 + 1
_LEAST_TENSOR_INFO = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class GGUFTensor:
    """What the header says about one tensor.

    Attributes
    ----------
    name : str
    kind : str
        ggml's name of the type: ``"F32"``, ``"Q4_0"``, ...
    shape : tuple of int
        In NumPy's order: [out, in] for the weight of a linear layer.
    start, nbytes : int
        Where it lies in the file.
    block, block_nbytes : int
        Elements in a block of the type, and bytes that such a block takes. Blocks lie along the last axis.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    block: int
    block_nbytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GGUFHeader:
    """All of a GGUF file but its data.

    Attributes
    ----------
    values : dict
        The key-values, as JSON can hold them: numbers that are not finite are the strings ``"NaN"``,
        ``"Infinity"`` and ``"-Infinity"``; bytes that are not UTF-8 are lone surrogates (Python's
        ``surrogateescape``).
    tensors : dict of str to GGUFTensor
        In the order of the file.
    """

    values: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def gguf_package() -> Any:
    """Return the ``gguf`` package, or say how to install it."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise CheckpointError(
            'reading GGUF files needs the gguf package; in the folder of marlin-jit run pip install ".[gguf]"'
        ) from None


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file.

    Raises
    ------
    CheckpointError
        No such file, not a GGUF file, or damaged in any way; the ``gguf`` package is missing.
    """
    size = open_regular(path)
    try:
        with path.open("rb") as file:
            data = file.read(min(size, MAX_HEADER_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    _check_start(path, data)
    package = gguf_package()
    cursor = _Cursor(data, size)
    try:
        tensor_count, value_count = cursor.uint64(), cursor.uint64()
        cursor.expect(value_count, _LEAST_KEY_VALUE, "key-values")
        values, types = _read_values(cursor, value_count)
        alignment = _alignment(values, types)
        cursor.expect(tensor_count, _LEAST_TENSOR_INFO, "tensors")
        infos = [_read_info(cursor, package) for _ in range(tensor_count)]
        tensors = _placed(infos, cursor.position, alignment, size)
    except _Damaged as error:
        raise CheckpointError(f"{path}: damaged GGUF file: {error}") from None
    return GGUFHeader(values, tensors)


class _Damaged(Exception):
    """What is wrong with a header, without the name of the file."""


class _Cursor:
    """A place in the header that moves on with every read and never past the end."""

    def __init__(self, data: bytes, file_size: int) -> None:
        self.data = data
        self.position = 8  # after magic and version
        self._complete = len(data) == file_size

    def take(self, count: int) -> int:
        """Return the position of the next `count` bytes and move past them."""
        start = self.position
        if count > len(self.data) - start:
            raise self._too_short()
        self.position = start + count
        return start

    def expect(self, count: int, least_bytes: int, what: str) -> None:
        """Raise unless as many bytes are left as `count` things take at least."""
        left = len(self.data) - self.position
        if count * least_bytes > left:
            raise _Damaged(f"{count} {what} are announced where {left} bytes of header are left")

    def uint32(self) -> int:
        return int.from_bytes(self.data[(start := self.take(4)) : start + 4], "little")

    def uint64(self) -> int:
        return int.from_bytes(self.data[(start := self.take(8)) : start + 8], "little")

    def string(self) -> bytes:
        length = self.uint64()
        start = self.take(length)
        return self.data[start : start + length]

    def strings(self, count: int) -> list[str]:
        """Read `count` strings. The loop of a vocabulary: kept free of calls."""
        data, position, end = self.data, self.position, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            if position + 8 > end:
                raise self._too_short()
            start = position + 8
            position = start + length_at(data, position)[0]
            if position > end:
                raise self._too_short()
            out.append(data[start:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return out

    def array(self, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, np.dtype[Any]]:
        start = self.take(count * dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, start)

    def _too_short(self) -> _Damaged:
        if self._complete:
            return _Damaged("it ends inside its header")
        return _Damaged(f"its header is longer than {MAX_HEADER_BYTES} bytes, the most that is read")


def _check_start(path: Path, data: bytes) -> None:
    """Name what lies where a GGUF file of a version that is read should be."""
    if not data:
        raise CheckpointError(f"{path}: is empty")
    if data.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the data; fetch it with `git lfs pull`")
    if data[:4] != MAGIC:
        raise CheckpointError(f"{path}: is no GGUF file: it starts with {data[:4]!r} instead of {MAGIC!r}")
    version = int.from_bytes(data[4:8], "little")
    if len(data) >= 8 and version and not version & 0xFFFF:
        raise CheckpointError(f"{path}: is a big-endian GGUF file; little-endian ones are read")
    if version not in _VERSIONS:
        raise CheckpointError(f"{path}: is a GGUF file of version {version}; versions 2 and 3 are read")


# ---- key-values -------------------------------------------------------------------------------------------


def _read_values(cursor: _Cursor, count: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Return values and types by key."""
    values: dict[str, Any] = {}
    types: dict[str, int] = {}
    for i in range(count):
        key = _name(cursor.string(), f"key {i}")
        if key in values:
            raise _Damaged(f"key {key[:_MAX_SHOWN]!r} is given twice")
        types[key] = cursor.uint32()
        values[key] = _read_value(cursor, types[key], repr(key[:_MAX_SHOWN]), 0)
    return values, types


def _read_value(cursor: _Cursor, kind: int, key: str, depth: int) -> Any:
    if kind == _ARRAY:
        if depth == _MAX_NESTING:
            raise _Damaged(f"the value of {key} is nested more than {_MAX_NESTING} deep")
        inner, count = cursor.uint32(), cursor.uint64()
        return _read_array(cursor, inner, count, key, depth + 1)
    return _read_array(cursor, kind, 1, key, depth)[0]


def _read_array(cursor: _Cursor, kind: int, count: int, key: str, depth: int) -> list[Any]:
    if kind not in _LEAST_BYTES:
        raise _Damaged(f"the value of {key} has type {kind}; types 0 to 12 are known")
    cursor.expect(count, _LEAST_BYTES[kind], f"values of {key}")
    if kind == _STRING:
        return cursor.strings(count)
    if kind == _ARRAY:
        return [_read_value(cursor, _ARRAY, key, depth) for _ in range(count)]
    array = cursor.array(_SCALARS[kind], count)
    if kind == _BOOL:
        if (array > 1).any():
            raise _Damaged(f"the value of {key} is a truth value that is neither 0 nor 1")
        return [bool(value) for value in array.tolist()]
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return [_as_json(value) for value in array.tolist()]
    values: list[Any] = array.tolist()
    return values


def _as_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _alignment(values: dict[str, Any], types: dict[str, int]) -> int:
    value = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if types.get("general.alignment", _UINT32) != _UINT32 or value == 0 or value & (value - 1):
        shown = value if isinstance(value, int) else type(value).__name__
        raise _Damaged(f"general.alignment is {shown}; expected a power of two, as uint32")
    return int(value)


def _name(data: bytes, what: str) -> str:
    """Return a key or the name of a tensor, which end up in messages and in other files' headers."""
    try:
        name = data.decode()
    except UnicodeDecodeError:
        raise _Damaged(f"{what} is not UTF-8") from None
    if not name.isprintable() or not name:
        raise _Damaged(f"{what} is empty or has control characters: {name[:_MAX_SHOWN]!r}")
    return name


# ---- tensors ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Info:
    """A tensor's info as in the file: dimensions the fastest first, offset from the data."""

    name: str
    kind: str
    dimensions: tuple[int, ...]
    offset: int
    block: int
    block_nbytes: int


def _read_info(cursor: _Cursor, package: Any) -> _Info:
    name = _name(cursor.string(), "the name of a tensor")
    if len(name) > _MAX_NAME or name == "__metadata__":  # which the header of a safetensors file reserves
        raise _Damaged(f"a tensor cannot be called {name[:_MAX_SHOWN]!r}")
    count = cursor.uint32()
    if not 1 <= count <= _MAX_DIMENSIONS:
        raise _Damaged(f"tensor {name} has {count} dimensions; expected 1 to {_MAX_DIMENSIONS}")
    dimensions = tuple(cursor.uint64() for _ in range(count))
    number = cursor.uint32()
    try:
        kind = package.GGMLQuantizationType(number)
        block, block_nbytes = package.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise _Damaged(f"tensor {name} has type {number}, which the gguf package does not know") from None
    if dimensions[0] % block:
        raise _Damaged(
            f"tensor {name} has rows of {dimensions[0]} elements; {kind.name} has blocks of {block}"
        )
    return _Info(name, kind.name, dimensions, cursor.uint64(), block, block_nbytes)


def _placed(infos: list[_Info], header_end: int, alignment: int, file_size: int) -> dict[str, GGUFTensor]:
    """Return the tensors, which must lie one after the other, each padded to the alignment, up to the end."""
    data = _padded(header_end, alignment)
    tensors: dict[str, GGUFTensor] = {}
    end = position = 0  # of the last tensor, without and with padding
    for info in infos:
        if info.name in tensors:
            raise _Damaged(f"tensor {info.name} is given twice")
        if 0 in info.dimensions:
            raise _Damaged(f"tensor {info.name} is empty: its dimensions are {list(info.dimensions)}")
        if info.offset != position:
            raise _Damaged(
                f"tensor {info.name} is at offset {info.offset}; expected {position}, after the last one"
            )
        nbytes = math.prod(info.dimensions) // info.block * info.block_nbytes
        end = position + nbytes
        position = _padded(end, alignment)
        tensors[info.name] = GGUFTensor(
            info.name,
            info.kind,
            info.dimensions[::-1],
            data + info.offset,
            nbytes,
            info.block,
            info.block_nbytes,
        )
    if tensors and data + end > file_size:
        raise _Damaged(f"cut short, it has {file_size} of the {data + end} bytes that its header announces")
    if data + position < file_size:
        raise _Damaged(f"{file_size - data - position} bytes follow the last tensor")
    return tensors


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
