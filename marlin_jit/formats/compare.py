"""Whether two models mean the same: a packed one and its source, or what was unpacked again.

Both are dequantized layer by layer and compared by value; every other tensor is compared byte by byte. A
layer ``X`` of one may be dense in the other, ``X.weight`` [N, K]: then it is rounded to the dtype of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit.formats.detect import Checkpoint, open_checkpoint
from marlin_jit.formats.layer import ReadOptions, SourceLayer, naming
from marlin_jit.formats.model_files import ModelFiles
from marlin_jit.pack import dequantize

__all__ = ["Comparison", "Difference", "compare"]

_DENSE = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Difference:
    """One way in which two models differ.

    Attributes
    ----------
    name : str
        Layer or tensor.
    what : str
        In words, with count and first index where values differ.
    count : int
        Weights that differ; 0 where something else does.
    index : tuple of int or None
        First weight [k, n] that differs.
    """

    name: str
    what: str
    count: int = 0
    index: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`.

    Attributes
    ----------
    layers, tensors : int
        How many of each were compared.
    weights : int
        How many weights in the layers.
    differences : tuple of Difference
        Empty if the models mean the same.
    """

    layers: int
    tensors: int
    weights: int
    differences: tuple[Difference, ...]


def compare(
    source: str | Path,
    destination: str | Path,
    progress: Callable[[int], None] | None = None,
    options: ReadOptions | None = None,
) -> Comparison:
    """Compare two models of any format that is read.

    Parameters
    ----------
    source, destination : str or Path
    progress : callable, optional
        Called with the source bytes done since the last call.
    options : ReadOptions, optional
        For the source.

    Raises
    ------
    CheckpointError
        One of the two cannot be read.
    """
    advance = progress or (lambda count: None)
    first, second = open_checkpoint(source, options), open_checkpoint(destination)
    differences: list[Difference] = []
    weights = 0
    layers = dict.fromkeys([*first.layers, *second.layers])
    for name in layers:
        mine, theirs = _side(first, name), _side(second, name)
        if mine is None or theirs is None:
            which = "first" if mine is None else "second"
            differences.append(Difference(name, f"no such layer in the {which} model"))
        else:
            count, difference = _compare_layer(name, mine, theirs)
            weights += count
            differences += [difference] if difference is not None else []
        advance(_bytes(mine))
    ours, others = _other_tensors(first, layers), _other_tensors(second, layers)
    for name in ours:
        if name not in others:
            differences.append(Difference(name, "no such tensor in the second model"))
        elif not _same_bytes(first.files, second.files, name):
            differences.append(Difference(name, "tensor differs in dtype, shape or bytes"))
        advance(first.files.stored_nbytes(name))
    differences += [
        Difference(name, "no such tensor in the first model") for name in others if name not in ours
    ]
    return Comparison(len(layers), len(ours), weights, tuple(differences))


@dataclass(frozen=True)
class _Dense:
    """A linear layer that is not quantized."""

    files: ModelFiles
    tensor: str

    def read(self) -> NDArray[Any]:
        """Return the weight, [K, N]."""
        weight: NDArray[Any] = self.files.read(self.tensor).T
        return weight


def _side(model: Checkpoint, name: str) -> SourceLayer | _Dense | None:
    """Return a layer of a model as it is there: quantized, dense, or not at all."""
    if name in model.layers:
        return model.layers[name]
    tensor = f"{name}.weight"
    if tensor in model.files:
        info = model.files.info(tensor)
        if info.dtype in _DENSE and len(info.shape) == 2:
            return _Dense(model.files, tensor)
    return None


def _other_tensors(model: Checkpoint, layers: dict[str, None]) -> dict[str, None]:
    """Return the tensors of a model that are no layers, also not dense ones."""
    dense = {f"{name}.weight" for name in layers if name not in model.layers}
    return dict.fromkeys(name for name in model.others if name not in dense)


def _bytes(side: SourceLayer | _Dense | None) -> int:
    if isinstance(side, _Dense):
        return side.files.stored_nbytes(side.tensor)
    return side.nbytes if side is not None else 0


def _compare_layer(
    name: str, first: SourceLayer | _Dense, second: SourceLayer | _Dense
) -> tuple[int, Difference | None]:
    """Return how many weights the layer has, and how the two differ."""
    mine, theirs = _dequantized_alike(first, second)
    total = int(mine.size)
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        kinds = (
            f"{w.dtype} {list(w.shape)} in the {which} model"
            for w, which in ((mine, "first"), (theirs, "second"))
        )
        return total, Difference(name, ", ".join(kinds))
    unequal = np.asarray(mine != theirs)
    count = int(np.count_nonzero(unequal))
    if not count:
        return total, None
    k, n = (int(i) for i in np.unravel_index(int(unequal.argmax()), unequal.shape))
    values = f"{float(mine[k, n])} and {float(theirs[k, n])}"
    what = f"{count} of {total} weights differ, the first at [{k}, {n}]: {values}"
    return total, Difference(name, what, count, (k, n))


def _dequantized_alike(
    first: SourceLayer | _Dense, second: SourceLayer | _Dense
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return both weights, [K, N]; where one is dense, both in its dtype."""
    if isinstance(first, _Dense):
        mine = first.read()
        return mine, mine if isinstance(second, _Dense) else _dequantized(second, mine.dtype)
    if isinstance(second, _Dense):
        theirs = second.read()
        return _dequantized(first, theirs.dtype), theirs
    return _dequantized(first), _dequantized(second)


def _dequantized(layer: SourceLayer, dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    with naming(layer.label):
        weight: NDArray[Any] = dequantize(layer.read(), dtype)
    return weight


def _same_bytes(first: ModelFiles, second: ModelFiles, name: str) -> bool:
    mine, theirs = first.info(name), second.info(name)
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return False
    return all(a == b for a, b in zip(first.chunks(name), second.chunks(name), strict=True))
