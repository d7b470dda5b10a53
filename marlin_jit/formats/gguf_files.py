"""GGUF files: 4-bit matrices become layers, everything else dense tensors.

================================================  =====================================================
tensor of the file                                read as
================================================  =====================================================
matrix ``X.weight`` of type Q4_0, Q4_1 or Q4_K    layer ``X`` in groups of 32 (see `gguf_blocks`)
embedding of type Q4_0, Q4_1 or Q4_K              dense F32
Q8_0                                              dense F32, exactly: int8 times float16 has 19 bits
F16, BF16, F32, F64, I8, I16, I32, I64            as it is
other types (Q5_0, Q6_K, ...); other tensors of   refused, with the types and their counts; or, if asked
4-bit types (experts have three dimensions)       for, dense F32
================================================  =====================================================

A dense tensor keeps its name and the order of its elements, [out, in] for a weight, as in other checkpoints.
Embeddings are looked up by row, not multiplied, so they are no layers; a model without a head of its own
multiplies by the dense one. Rows stay where they are: those of attn_q and attn_k of llama-like models were
permuted for interleaved rotary embeddings when the GGUF file was made, and still are.

The file's key-values (architecture, hyperparameters, tokenizer) are one document, ``gguf.json``.

Scales lie between the codes, so to check them is to read the whole tensor, about a MB at a time: packing
reads a GGUF file twice. Tensors are read, not mapped: mapped pages count as memory of the process, and a file
that is cut while it is mapped kills it.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit._array import BFLOAT16
from marlin_jit.errors import CheckpointError
from marlin_jit.formats.gguf_blocks import BLOCK_FORMATS, GROUP_SIZE, BlockFormat
from marlin_jit.formats.gguf_container import MAGIC, GGUFTensor, gguf_package, read_header
from marlin_jit.formats.layer import CheckpointWarning, Outline, Parameters, ReadOptions, SourceLayer
from marlin_jit.formats.model_files import ModelFiles, confined
from marlin_jit.formats.safetensors_io import COPY_CHUNK, TensorInfo, array_info
from marlin_jit.weight import QuantWeight

__all__ = ["GGUFFile", "GGUFFiles", "GGUFLayer", "find", "make_layers"]

SUFFIX = ".gguf"
_WEIGHT = ".weight"
_EMBEDDINGS = tuple(
    name + _WEIGHT for name in ("token_embd", "token_types", "position_embd", "per_layer_token_embd")
)
_PLAIN = {
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
_FLOAT32 = np.dtype("<f4")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_READ_BYTES = 1 << 20


def is_layer(tensor: GGUFTensor) -> bool:
    """Whether a tensor is a 4-bit matrix that x is multiplied by."""
    return (
        tensor.kind in BLOCK_FORMATS
        and len(tensor.shape) == 2
        and tensor.name.endswith(_WEIGHT)
        and tensor.name != _WEIGHT
        and tensor.name not in _EMBEDDINGS
    )


def _is_dense(tensor: GGUFTensor) -> bool:
    """Whether a tensor that is no layer is kept without being asked for."""
    embedding = tensor.kind in BLOCK_FORMATS and tensor.name in _EMBEDDINGS
    return embedding or tensor.kind == "Q8_0" or tensor.kind in _PLAIN


class GGUFFile:
    """One GGUF file behind the interface of `SafetensorsFile`: only its header is in memory.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    header : GGUFHeader
    metadata : dict
        Empty: what the file says about itself is in `header`.
    tensors : dict of str to TensorInfo
        A layer with the type and bytes of its blocks, any other tensor as what `read` returns.

    Raises
    ------
    CheckpointError
        Damaged files, parts of a split model, a missing ``gguf`` package.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        self.metadata: dict[str, str] = {}
        parts = self.header.values.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise CheckpointError(
                f"{path}: is one of {parts} parts of a model; join them with `llama-gguf-split --merge`"
            )
        self.tensors = {name: self._info(tensor) for name, tensor in self.header.tensors.items()}

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor that is no layer as a fresh array; of a layer, its blocks as uint8 [N, bytes]."""
        tensor = self.header.tensors[name]
        out = np.empty(self.tensors[name].nbytes, np.uint8)
        done = 0
        for chunk in self.chunks(name):
            out[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)
            done += len(chunk)
        if is_layer(tensor):
            return out.reshape(tensor.shape[0], -1)
        dense: NDArray[Any] = out.view(_PLAIN.get(tensor.kind, _FLOAT32))
        return dense.reshape(tensor.shape)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of what `read` returns, in pieces of the size in which safetensors are read."""
        tensor = self.header.tensors[name]
        if is_layer(tensor) or tensor.kind in _PLAIN:
            yield from (piece.tobytes() for piece in self._stored(tensor, COPY_CHUNK))
            return
        package = gguf_package()
        kind = package.GGMLQuantizationType[tensor.kind]
        blocks = COPY_CHUNK // (_FLOAT32.itemsize * tensor.block)  # a power of two: no remainder
        for piece in self._stored(tensor, blocks * tensor.block_nbytes):
            with np.errstate(all="ignore"):  # NaN and infinite scales stay what they are
                yield package.quants.dequantize(piece[None], kind).astype(_FLOAT32, copy=False).tobytes()

    def slabs(self, name: str) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
        """Yield the rows of a matrix, uint8 [n, bytes of a row], a few at a time, with where they are."""
        tensor = self.header.tensors[name]
        count = tensor.shape[0]
        row_nbytes = tensor.nbytes // count
        step = max(1, _READ_BYTES // row_nbytes)
        for i, piece in enumerate(self._stored(tensor, step * row_nbytes)):
            yield slice(i * step, min(i * step + step, count)), piece.reshape(-1, row_nbytes)

    def _info(self, tensor: GGUFTensor) -> TensorInfo:
        if is_layer(tensor):
            return TensorInfo(tensor.kind, tensor.shape, tensor.nbytes, tensor.start)
        return array_info(_PLAIN.get(tensor.kind, _FLOAT32), tensor.shape)

    def _stored(self, tensor: GGUFTensor, step: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of a tensor as they are in the file, `step` at a time."""
        buffer = np.empty(min(step, tensor.nbytes), np.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(tensor.start)
                for start in range(0, tensor.nbytes, step):
                    piece = buffer[: min(step, tensor.nbytes - start)]
                    if file.readinto(piece.data) != piece.size:
                        raise CheckpointError(f"{self.path}: became shorter while being read")
                    yield piece
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from None


class GGUFFiles(ModelFiles):
    """A GGUF file as a model.

    Attributes
    ----------
    file : GGUFFile
    documents : dict of str to dict
        ``gguf.json``: the key-values of the file.
    """

    becomes_folder = True

    def __init__(self, path: Path) -> None:
        # Not that of ModelFiles, which looks for safetensors files.
        self.path, self.folder, self.is_folder = path, path.parent, False
        self.index_name, self.index_metadata = None, {}
        self.file = GGUFFile(path)
        self.shards = {path.name: self.file}
        self._where = dict.fromkeys(self.file.tensors, path.name)
        self.documents = {"gguf.json": self.file.header.values}

    def stored_nbytes(self, name: str) -> int:
        return self.file.header.tensors[name].nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file, where some are smaller than what they are read as."""
        return sum(tensor.nbytes for tensor in self.file.header.tensors.values())


@dataclass(frozen=True)
class GGUFLayer(SourceLayer):
    """A matrix of 4-bit blocks: K = in, N = out, groups of 32 along K."""

    file: GGUFFile

    @property
    def format(self) -> str:
        return f"gguf-{self._tensor.kind.lower()}"

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.name + _WEIGHT,)

    @property
    def scale_name(self) -> str:
        return self.name + _WEIGHT

    def parameters(self) -> Parameters:
        scale, _ = self._read()
        N, K = self._tensor.shape
        return Parameters(K, N, GROUP_SIZE, scale, None, None, self._blocks.zero_dtype is None)

    def outline(self) -> Outline:
        scale, zero = self._read()
        notes = self._check(scale, zero)
        N, K = self._tensor.shape
        return Outline(K, N, GROUP_SIZE, scale.dtype.name, zero is None, False, notes)

    def read(self) -> QuantWeight:
        N, K = self._tensor.shape
        q = np.empty((K, N), np.uint8)
        scale, zero = self._read(q)
        self._check(scale, zero)
        return QuantWeight(q, scale, zero, GROUP_SIZE)

    @property
    def _tensor(self) -> GGUFTensor:
        return self.file.header.tensors[self.name + _WEIGHT]

    @property
    def _blocks(self) -> BlockFormat:
        return BLOCK_FORMATS[self._tensor.kind]

    def _read(self, q: NDArray[np.uint8] | None = None) -> tuple[NDArray[np.float16], NDArray[Any] | None]:
        """Return scale and zero, [G, N]; write the codes to `q` [K, N] if there is one."""
        N, K = self._tensor.shape
        form = self._blocks
        scale = np.empty((K // GROUP_SIZE, N), np.float16)
        zero = None if form.zero_dtype is None else np.empty(scale.shape, form.zero_dtype)
        for columns, rows in self.file.slabs(self.name + _WEIGHT):
            some_scale, some_zero = form.read_scales(form.blocks(rows))
            scale[:, columns] = some_scale.T
            if zero is not None and some_zero is not None:
                zero[:, columns] = some_zero.T
            if q is not None:
                form.read_codes(rows, q[:, columns])
        return scale, zero

    def _check(self, scale: NDArray[np.float16], zero: NDArray[Any] | None) -> tuple[str, ...]:
        """Raise if a number is not finite or too large for a kernel; with `fix_nan_scales`, mend in place."""
        where = self.where(self.scale_name)
        notes: tuple[str, ...] = ()
        bad = ~np.isfinite(scale)
        if zero is not None:
            bad |= ~np.isfinite(zero)
        if bad.any():
            what = f"{_count_of(bad)} groups have a NaN or infinite scale or minimum"
            if not self.options.fix_nan_scales:
                raise CheckpointError(f"{where}: {what}, the first at index {_first(bad)}")
            scale[bad] = 0
            if zero is not None:
                zero[bad] = 0
            notes = (f"{where}: {what} and are taken as 0, the first at index {_first(bad)}",)
            warnings.warn(notes[0], CheckpointWarning, stacklevel=3)
        if zero is not None:
            with np.errstate(over="ignore"):
                delta = zero.astype(np.float32) + np.float32(8) * scale.astype(np.float32)
                large = ~np.isfinite(delta.astype(np.float16))
            if large.any():
                raise CheckpointError(
                    f"{where}: {_count_of(large)} groups have a middle, minimum + 8*scale, that overflows "
                    f"float16, the first at index {_first(large)}"
                )
        return notes


def _count_of(mask: NDArray[np.bool_]) -> str:
    return f"{int(mask.sum())} of {mask.size}"


def _first(mask: NDArray[np.bool_]) -> list[int]:
    return [int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape)]


def find(path: Path) -> Path | None:
    """Return the GGUF file that `path` is, or the one that a folder without safetensors files holds.

    Raises
    ------
    CheckpointError
        A folder with several, or with one that is a link out of the folder.
    """
    try:
        if not path.is_dir():
            return path if path.suffix.lower() == SUFFIX or _starts_like_one(path) else None
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    except (OSError, ValueError):
        return None  # that of safetensors says what is wrong
    found = [name for name in names if name.lower().endswith(SUFFIX)]
    if not found or any(name.endswith(".safetensors") for name in names):
        return None
    if len(found) > 1:
        what = f"{path}: {len(found)} GGUF files ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
        if all(_SPLIT.search(name) for name in found):
            raise CheckpointError(f"{what} of a split model; join them with `llama-gguf-split --merge`")
        raise CheckpointError(f"{what}; name the one that is meant")
    return confined(path, found[0])


def _starts_like_one(path: Path) -> bool:
    """Whether a file without the usual suffix (a blob of a download cache) is a GGUF file."""
    if not path.is_file():  # opening a pipe would block for ever
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def make_layers(files: GGUFFiles, options: ReadOptions) -> dict[str, SourceLayer]:
    """Return the 4-bit matrices of a GGUF file as layers, by tensor name without ``.weight``.

    Raises
    ------
    CheckpointError
        Tensors of types that are not packed, unless `options` asks to have them dequantized and the ``gguf``
        package can.
    """
    tensors = files.file.header.tensors.values()
    odd = [tensor for tensor in tensors if not is_layer(tensor) and not _is_dense(tensor)]
    if odd and not options.dequantize_others:
        raise CheckpointError(
            f"{files.path}: {_kinds(odd)} are not packed; --dequantize-others keeps them as dense F32"
        )
    stuck = [tensor for tensor in odd if not _can_dequantize(tensor)]
    if stuck:
        raise CheckpointError(f"{files.path}: {_kinds(stuck)} cannot be dequantized by the gguf package")
    return {
        name: GGUFLayer(files, name, files.file, options=options)
        for name in (tensor.name.removesuffix(_WEIGHT) for tensor in tensors if is_layer(tensor))
    }


def _kinds(tensors: list[GGUFTensor]) -> str:
    """Return in words how many tensors of which types these are."""
    counts = Counter(
        tensor.kind + (" that are no weight matrices" if tensor.kind in BLOCK_FORMATS else "")
        for tensor in tensors
    )
    return "tensors of type " + ", ".join(f"{kind} ({count})" for kind, count in counts.most_common())


def _can_dequantize(tensor: GGUFTensor) -> bool:
    package = gguf_package()
    block = np.zeros((1, tensor.block_nbytes), np.uint8)
    try:
        package.quants.dequantize(block, package.GGMLQuantizationType[tensor.kind])
    except NotImplementedError:
        return False
    return True
