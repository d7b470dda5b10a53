"""Calibration files: what the inputs of layers look like, for GPTQ.

A safetensors file that holds, for each layer ``X`` it knows, one of

=============  ======  ===============================================================
tensor         shape   content
=============  ======  ===============================================================
X.hessian      [K, K]  float32 or float64: ``2 X^T X`` or a positive multiple of it
X.activations  [T, K]  float16, bfloat16, float32 or float64: T inputs of the layer
=============  ======  ===============================================================

The layout is this package's own. ``marlin_jit.hessian`` makes such a Hessian from activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit._array import BFLOAT16
from marlin_jit.errors import CheckpointError
from marlin_jit.formats.safetensors_io import SafetensorsFile
from marlin_jit.gptq_quantize import hessian

__all__ = ["Calibration"]

_ACTIVATIONS = {
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
# GPTQ takes 24 K^2 bytes. The largest known layers have K near 60,000 (Falcon-180B: 59,392).
_MAX_K = 1 << 16
_BLOCK_BYTES = 64 << 20


class Calibration:
    """A file that tells what the inputs of layers look like.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        self.file = SafetensorsFile(path)

    def tensor(self, layer: str) -> str | None:
        """Return the name of the tensor for a layer, if there is one."""
        names = [f"{layer}.{suffix}" for suffix in ("hessian", "activations")]
        found = [name for name in names if name in self.file.tensors]
        if len(found) == 2:
            raise CheckpointError(f"{self.file.path}: holds both {found[0]} and {found[1]}; keep one of them")
        return found[0] if found else None

    def unused(self, layers: Sequence[str]) -> tuple[str, ...]:
        """Return the tensors that calibrate no layer; raise if none does."""
        used = {self.tensor(name) for name in layers}
        unused = tuple(name for name in self.file.tensors if name not in used)
        if used == {None}:
            raise CheckpointError(
                f"{self.file.path}: has nothing for any layer; expected tensors like "
                f"{layers[0]}.hessian or {layers[0]}.activations"
            )
        return unused

    def where(self, tensor: str) -> str:
        """Return ``file: tensor NAME`` for messages."""
        return f"{self.file.path}: tensor {tensor}"

    def check(self, tensor: str, K: int) -> None:
        """Raise unless the tensor is of a dtype and shape that a layer with K inputs needs."""
        info = self.file.tensors[tensor]
        whole = tensor.endswith(".hessian")
        dtypes = ("F32", "F64") if whole else tuple(_ACTIVATIONS)
        if info.dtype not in dtypes:
            raise CheckpointError(
                f"{self.where(tensor)} has dtype {info.dtype}; expected {' or '.join(dtypes)}"
            )
        rows, columns = info.shape if len(info.shape) == 2 else (0, 0)
        if columns != K or rows < 1 or (whole and rows != K):
            expected = f"[{K}, {K}]" if whole else f"[T, {K}]"
            raise CheckpointError(
                f"{self.where(tensor)} has shape {list(info.shape)}; expected {expected}, K = {K} being the "
                "inputs of the layer"
            )
        if K > _MAX_K:
            raise CheckpointError(f"{self.where(tensor)}: K = {K} is too large for GPTQ; at most {_MAX_K}")

    def hessian(self, tensor: str) -> NDArray[Any]:
        """Return ``2 X^T X`` [K, K] of a checked tensor; of activations a part is in memory at a time."""
        if tensor.endswith(".hessian"):
            return self.file.read(tensor)
        total: NDArray[Any] | None = None
        for rows in self._rows(tensor):
            total = hessian(rows, total)
        assert total is not None  # a checked tensor has rows
        return total

    def _rows(self, tensor: str) -> Iterator[NDArray[Any]]:
        info = self.file.tensors[tensor]
        dtype, K = _ACTIVATIONS[info.dtype], info.shape[1]
        row = dtype.itemsize * K
        pending = bytearray()
        for chunk in self.file.chunks(tensor):
            pending += chunk
            if len(pending) >= max(_BLOCK_BYTES, row):
                whole = len(pending) // row * row
                yield np.frombuffer(bytes(pending[:whole]), dtype).reshape(-1, K)
                del pending[:whole]
        if pending:
            yield np.frombuffer(bytes(pending), dtype).reshape(-1, K)
