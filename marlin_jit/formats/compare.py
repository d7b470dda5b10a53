"""Whether a packed model means the same as its source.

Both are dequantized layer by layer and compared by value; every other tensor is compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from marlin_jit.errors import CheckpointError, MarlinJitError
from marlin_jit.formats.detect import open_checkpoint
from marlin_jit.formats.layer import SourceLayer
from marlin_jit.formats.model_files import ModelFiles
from marlin_jit.pack import dequantize

__all__ = ["Comparison", "Difference", "compare"]


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
    source: str | Path, destination: str | Path, progress: Callable[[int], None] | None = None
) -> Comparison:
    """Compare two models of any format that is read.

    Parameters
    ----------
    source, destination : str or Path
    progress : callable, optional
        Called with the source bytes done since the last call.

    Raises
    ------
    CheckpointError
        One of the two cannot be read.
    """
    advance = progress or (lambda count: None)
    first, second = open_checkpoint(source), open_checkpoint(destination)
    differences: list[Difference] = []
    weights = 0
    for name, layer in first.layers.items():
        other = second.layers.get(name)
        if other is None:
            differences.append(Difference(name, "no such layer in the second model"))
        else:
            count, difference = _compare_layer(layer, other)
            weights += count
            if difference is not None:
                differences.append(difference)
        advance(layer.nbytes)
    differences += [
        Difference(name, "no such layer in the first model")
        for name in second.layers
        if name not in first.layers
    ]
    ours, theirs = dict.fromkeys(first.others), dict.fromkeys(second.others)
    for name in ours:
        if name not in theirs:
            differences.append(Difference(name, "no such tensor in the second model"))
        elif not _same_bytes(first.files, second.files, name):
            differences.append(Difference(name, "tensor differs in dtype, shape or bytes"))
        advance(first.files.info(name).nbytes)
    differences += [
        Difference(name, "no such tensor in the first model") for name in theirs if name not in ours
    ]
    return Comparison(len(first.layers), len(ours), weights, tuple(differences))


def _compare_layer(layer: SourceLayer, other: SourceLayer) -> tuple[int, Difference | None]:
    """Return how many weights the layer has, and how the two differ."""
    try:
        mine, theirs = dequantize(layer.read()), dequantize(other.read())
    except CheckpointError:
        raise
    except MarlinJitError as error:
        raise CheckpointError(f"{layer.files.path}: layer {layer.name}: {error}") from None
    total = int(mine.size)
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        kinds = (
            f"{w.dtype} {list(w.shape)} in the {which} model"
            for w, which in ((mine, "first"), (theirs, "second"))
        )
        return total, Difference(layer.name, ", ".join(kinds))
    unequal = mine != theirs
    count = int(np.count_nonzero(unequal))
    if not count:
        return total, None
    k, n = (int(i) for i in np.unravel_index(int(unequal.argmax()), unequal.shape))
    values = f"{float(mine[k, n])} and {float(theirs[k, n])}"
    what = f"{count} of {total} weights differ, the first at [{k}, {n}]: {values}"
    return total, Difference(layer.name, what, count, (k, n))


def _same_bytes(first: ModelFiles, second: ModelFiles, name: str) -> bool:
    mine, theirs = first.info(name), second.info(name)
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return False
    return all(a == b for a, b in zip(first.chunks(name), second.chunks(name), strict=True))
