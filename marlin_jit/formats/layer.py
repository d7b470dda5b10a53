"""What every reader of quantized layers shares: the view of one layer, and the checks that all formats need.

A reader turns the tensors of one layer into a `QuantWeight` (or, where the file holds Marlin bytes already, a
`MarlinWeight`). It does so in two steps: `parameters` reads everything but the codes (a few percent of the
bytes), so that a whole model can be checked before anything is written; `read` reads the layer.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit._array import BFLOAT16
from marlin_jit.errors import CheckpointError, MarlinJitError
from marlin_jit.formats.model_files import ModelFiles
from marlin_jit.weight import MarlinWeight, QuantWeight

__all__ = [
    "CheckpointWarning",
    "Outline",
    "Parameters",
    "ReadOptions",
    "SourceLayer",
    "check_finite",
    "naming",
]


class CheckpointWarning(UserWarning):
    """A checkpoint that can be read, but says something that deserves a look."""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Make what the package says of a weight an error that says where the weight lies."""
    try:
        yield
    except CheckpointError:  # knows already
        raise
    except MarlinJitError as error:
        raise CheckpointError(f"{where}: {error}") from None


@dataclass(frozen=True)
class ReadOptions:
    """What the user decided about reading, where a checkpoint leaves it open.

    Attributes
    ----------
    zero_format : str
        How GPTQ zero points are stored: ``"auto"`` as the config says, ``"v1"`` minus one, ``"v2"`` as they
        are.
    fix_nan_scales : bool
        Take NaN and infinite scales as 0, with a note, instead of refusing them.
    dequantize_others : bool
        Keep tensors of types that are not packed (GGUF) as dense ones instead of refusing them.
    """

    zero_format: str = "auto"
    fix_nan_scales: bool = False
    dequantize_others: bool = False

    def __post_init__(self) -> None:
        if self.zero_format not in ("auto", "v1", "v2"):
            raise CheckpointError(f"zero_format is {self.zero_format!r}; expected 'auto', 'v1' or 'v2'")


@dataclass(frozen=True)
class Outline:
    """What is known of a layer before its codes are read: enough to lay out the packed file.

    Attributes
    ----------
    K, N, group_size : int
        As in the source; -1 is one group a column.
    dtype : str
        Of the scales: ``"float16"`` or ``"bfloat16"``.
    symmetric, permuted : bool
        Whether the packed layer has no delta; whether it has a permutation.
    notes : tuple of str
    uneven : str
        Where activation order gives groups other numbers of rows than the group size: which, in words.
    """

    K: int
    N: int
    group_size: int
    dtype: str
    symmetric: bool
    permuted: bool
    notes: tuple[str, ...] = ()
    uneven: str = ""


@dataclass(frozen=True)
class Parameters:
    """Everything about a quantized layer except its codes.

    Attributes
    ----------
    K, N : int
        Logical shape of the weight (in, out).
    group_size : int
        -1 is one group a column.
    scale : float16 or bfloat16 [G, N]
        For Marlin files in the order of the file.
    zero_point : uint8 [G, N] or None
        Integer zero points; None is 8 everywhere.
    g_idx : int32 [K] or None
        Group of each row where rows are not in order of groups.
    symmetric : bool
    notes : tuple of str
        What deserves a look; each names the tensor.
    """

    K: int
    N: int
    group_size: int
    scale: NDArray[Any]
    zero_point: NDArray[np.uint8] | None
    g_idx: NDArray[np.int32] | None
    symmetric: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceLayer(ABC):
    """One quantized layer in a checkpoint.

    Attributes
    ----------
    files : ModelFiles
    name : str
        Module name: what stands before ``.qweight`` or ``.B``.
    options : ReadOptions
    """

    files: ModelFiles
    name: str
    options: ReadOptions = field(default=ReadOptions(), kw_only=True)

    @property
    @abstractmethod
    def format(self) -> str:
        """Short name of the format, e.g. ``"gptq"``."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[str, ...]:
        """Full names of the tensors that the layer is made of; the first is the one with the codes."""

    @property
    @abstractmethod
    def scale_name(self) -> str:
        """Full name of the tensor with the scales."""

    @abstractmethod
    def parameters(self) -> Parameters:
        """Read and check everything but the codes. Scales may still be NaN: see `check_finite`."""

    @abstractmethod
    def read(self) -> QuantWeight | MarlinWeight:
        """Read the layer. Notes are issued as `CheckpointWarning`.

        Raises
        ------
        CheckpointError
            Tensors that are missing or contradict each other or the config; NaN or infinite scales.
        """

    def outline(self) -> Outline:
        """Check everything but the codes, and return what the packed layer will be.

        Raises
        ------
        CheckpointError
            As `read`, as far as it can be known without the codes.
        """
        found = self.checked_parameters()
        check_delta(self.where(self.scale_name), found)
        return Outline(
            found.K,
            found.N,
            found.group_size,
            found.scale.dtype.name,
            found.symmetric,
            found.g_idx is not None,
            found.notes,
            "" if found.g_idx is None else self._uneven_groups(found.g_idx, found.K, found.group_size),
        )

    def _uneven_groups(self, g_idx: NDArray[np.int32], K: int, group_size: int) -> str:
        """Return, in words, which group is the first with more or fewer rows than the group size."""
        size = K if group_size == -1 else group_size
        rows = np.bincount(g_idx, minlength=K // size)
        uneven = np.flatnonzero(rows != size)
        if not uneven.size:
            return ""
        g = int(uneven[0])
        return f"g_idx puts {int(rows[g])} rows in group {g}; the group size is {size}"

    @property
    def decided_by(self) -> str:
        """What decides, beside the source files and the outline, what is read."""
        return repr(self.options)

    @property
    def label(self) -> str:
        """What messages call the layer as a whole: ``path: layer NAME``."""
        return f"{self.files.path}: layer {self.name}"

    @property
    def nbytes(self) -> int:
        return sum(self.files.info(name).nbytes for name in self.tensors)

    def checked_parameters(self) -> Parameters:
        """Return `parameters` after checking the scales, issuing its notes as warnings."""
        found = self.parameters()
        if self.options.fix_nan_scales:
            found = _without_bad_scales(self.where(self.scale_name), found)
        check_finite(self.where(self.scale_name), found.scale)
        for note in found.notes:
            warnings.warn(note, CheckpointWarning, stacklevel=3)
        return found

    def present(self, *suffixes: str) -> tuple[str, ...]:
        """Return the full names of those tensors of the layer that the file has."""
        names = (f"{self.name}.{suffix}" for suffix in suffixes)
        return tuple(name for name in names if name in self.files)

    def where(self, tensor: str) -> str:
        """Return ``file: tensor NAME`` for messages."""
        return f"{self.files.shards[self.files.shard_of(tensor)].path}: tensor {tensor}"

    def require(self, suffix: str, dtypes: tuple[str, ...]) -> str:
        """Return the full name of the layer's tensor `suffix`, a matrix of one of the dtypes."""
        tensor = f"{self.name}.{suffix}"
        if tensor not in self.files:
            raise CheckpointError(f"{self.label} has no {suffix}")
        info = self.files.info(tensor)
        if info.dtype not in dtypes:
            raise CheckpointError(
                f"{self.where(tensor)} has dtype {info.dtype}; expected {' or '.join(dtypes)}"
            )
        if len(info.shape) != 2 or 0 in info.shape:
            raise CheckpointError(
                f"{self.where(tensor)} has shape {list(info.shape)}; expected a matrix that is not empty"
            )
        return tensor

    def groups(self, K: int, group_size: int) -> int:
        """Return how many groups a column of K rows has."""
        if group_size == -1:
            return 1
        if K % group_size:
            raise CheckpointError(f"{self.label}: group size {group_size} does not divide K = {K}")
        return K // group_size

    def expect_shape(self, tensor: str, shape: tuple[int, int], why: str) -> None:
        """Raise unless the tensor has the shape that the others imply."""
        found = self.files.info(tensor).shape
        if found != shape:
            raise CheckpointError(
                f"{self.where(tensor)} has shape {list(found)}; expected {list(shape)} ({why})"
            )


def _not_finite(scale: NDArray[Any]) -> NDArray[np.bool_]:
    # Both 16-bit types are finite unless all exponent bits are set: integer work, which is fast and warns
    # about nothing.
    exponent = np.uint16(0x7F80 if scale.dtype == BFLOAT16 else 0x7C00)
    bad: NDArray[np.bool_] = (scale.view(np.uint16) & exponent) == exponent
    return bad


def _without_bad_scales(where: str, found: Parameters) -> Parameters:
    """Return parameters whose NaN and infinite scales are 0, which makes their groups' weights 0."""
    bad = _not_finite(found.scale)
    if not bad.any():
        return found
    scale = found.scale.copy()
    scale[bad] = 0
    first = [int(i) for i in np.argwhere(bad)[0]]
    note = (
        f"{where}: {int(bad.sum())} NaN or infinite of {scale.size} scales are taken as 0, the first at "
        f"index {first}"
    )
    return replace(found, scale=scale, notes=(*found.notes, note))


def check_finite(where: str, scale: NDArray[Any]) -> None:
    """Raise, with count and first index, if a scale is NaN or infinite: whatever it touches becomes NaN."""
    bad = _not_finite(scale)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        value = float(scale[first])
        raise CheckpointError(
            f"{where} has {int(bad.sum())} NaN or infinite of {scale.size} scales, the first ({value}) at "
            f"index {list(first)}"
        )


def check_delta(where: str, found: Parameters) -> None:
    """Raise if a delta, (8 - zero point)*scale, overflows the dtype of the scales: kernels read it so."""
    if found.zero_point is None:
        return
    with np.errstate(over="ignore"):
        delta = (np.float32(8) - found.zero_point) * found.scale.astype(np.float32)
        bad = ~np.isfinite(delta.astype(found.scale.dtype))
    if bad.any():
        first = [int(i) for i in np.argwhere(bad)[0]]
        raise CheckpointError(
            f"{where}: {int(bad.sum())} scales are so large that (8 - zero point)*scale overflows "
            f"{found.scale.dtype}, the first at index {first}"
        )
