"""What layers can be written as: `PackedTarget` is what the kernels read, `DenseTarget` what everybody reads.

A target knows, from a layer's outline, every tensor that the layer will be (`tensors`), makes them once the
layer is read (`arrays`), and says what the files around them have to tell (`metadata`, `config`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit._array import BFLOAT16, to_host
from marlin_jit.errors import CheckpointError
from marlin_jit.formats.layer import Outline, SourceLayer, naming
from marlin_jit.formats.packed import (
    FORMAT,
    FORMAT_VERSION,
    LayerEntry,
    file_metadata,
    layer_arrays,
    layer_tensors,
    reserved_names,
)
from marlin_jit.formats.safetensors_io import TensorInfo, array_info
from marlin_jit.layout import GROUP_SIZES
from marlin_jit.pack import dequantize, pack
from marlin_jit.weight import MarlinWeight, QuantWeight

if TYPE_CHECKING:
    from marlin_jit.formats.convert import LayerPlan

__all__ = ["DenseTarget", "PackedTarget", "Target", "to_marlin"]


class Target(ABC):
    """A format that layers are written in. Two targets with the same ``repr`` write the same bytes."""

    @abstractmethod
    def tensors(
        self, name: str, source_format: str, outline: Outline, where: str
    ) -> tuple[int, dict[str, TensorInfo]]:
        """Return the group size that is written, and the tensors of a layer.

        Raises
        ------
        CheckpointError
            The format cannot hold the layer; `where` names it.
        """

    @abstractmethod
    def arrays(self, layer: SourceLayer, device: bool) -> dict[str, NDArray[Any]]:
        """Read a layer and return its tensors; work on the current GPU if `device`."""

    @abstractmethod
    def metadata(self, layers: Mapping[str, LayerPlan]) -> dict[str, str]:
        """Return what the header of a file with these layers says."""

    @abstractmethod
    def config(self, originals: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return config.json, given the config files of the source by name."""

    def reserved_names(self, name: str) -> tuple[str, ...]:
        """Return the names that no tensor but the layer's own may have."""
        return ()

    def check(self, outlines: Mapping[str, Outline], where: str) -> None:
        """Raise if the format cannot hold these layers together."""
        return


@dataclass(frozen=True)
class PackedTarget(Target):
    """The packed format: `marlin_jit.formats.packed`."""

    def tensors(
        self, name: str, source_format: str, outline: Outline, where: str
    ) -> tuple[int, dict[str, TensorInfo]]:
        entry = self._entry(source_format, outline)
        if entry is None:
            raise CheckpointError(
                f"{where}: group size {outline.group_size} is no multiple of 32; the Marlin format holds "
                f"{GROUP_SIZES}"
            )
        if outline.uneven:
            raise CheckpointError(
                f"{where}: {outline.uneven}, and packed groups are full; leave the layer dense with "
                f"--exclude {name}"
            )
        if outline.permuted and entry.group_size not in (outline.group_size, -1):
            raise CheckpointError(
                f"{where}: group size {outline.group_size} with activation order; packed are {GROUP_SIZES}"
            )
        return entry.group_size, layer_tensors(name, entry, outline.symmetric, outline.permuted)

    def arrays(self, layer: SourceLayer, device: bool) -> dict[str, NDArray[Any]]:
        return layer_arrays(layer.name, to_marlin(layer, device))

    def metadata(self, layers: Mapping[str, LayerPlan]) -> dict[str, str]:
        table = {}
        for name, plan in layers.items():
            entry = self._entry(plan.source.format, plan.outline)
            if entry is not None and isinstance(plan.target, PackedTarget):
                table[name] = entry
        return file_metadata(table)

    def config(self, originals: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return config.json with this package's quantization config; the source's are kept inside it."""
        config = dict(originals.get("config.json", {}))
        kept = {name: content for name, content in originals.items() if name != "config.json"}
        if "quantization_config" in config:
            kept["config.json"] = config["quantization_config"]
        config["quantization_config"] = {
            "quant_method": FORMAT,
            "format_version": FORMAT_VERSION,
            "bits": 4,
            "original": kept,
        }
        return config

    def reserved_names(self, name: str) -> tuple[str, ...]:
        return reserved_names(name)

    @staticmethod
    def _entry(source_format: str, outline: Outline) -> LayerEntry | None:
        size = packed_group_size(outline.K, outline.group_size)
        return None if size is None else LayerEntry(outline.K, outline.N, size, outline.dtype, source_format)


@dataclass(frozen=True)
class DenseTarget(Target):
    """Dequantized weights, ``X.weight`` [N, K], as linear layers are stored everywhere.

    Attributes
    ----------
    dtype : str or None
        ``"float16"`` or ``"bfloat16"``; None is that of the layer's scales, to which dequantizing rounds.
    """

    dtype: str | None

    def tensors(
        self, name: str, source_format: str, outline: Outline, where: str
    ) -> tuple[int, dict[str, TensorInfo]]:
        info = array_info(_dtype(self.dtype or outline.dtype), (outline.N, outline.K))
        return outline.group_size, {f"{name}.weight": info}

    def arrays(self, layer: SourceLayer, device: bool) -> dict[str, NDArray[Any]]:
        with naming(layer.label):
            weight = _read(layer, device)
            dense = dequantize(weight, self.dtype or weight.dtype)
        host: NDArray[Any] = np.ascontiguousarray(to_host(dense).T)
        beyond = int(np.count_nonzero(~np.isfinite(host)))
        if beyond:
            raise CheckpointError(f"{layer.label}: {beyond} weights are beyond the range of {host.dtype}")
        return {f"{layer.name}.weight": host}

    def metadata(self, layers: Mapping[str, LayerPlan]) -> dict[str, str]:
        return {"format": "pt"}

    def config(self, originals: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {k: v for k, v in originals.get("config.json", {}).items() if k != "quantization_config"}

    def reserved_names(self, name: str) -> tuple[str, ...]:
        return (f"{name}.weight",)


def to_marlin(layer: SourceLayer, device: bool = False) -> MarlinWeight:
    """Read a layer of any format as a packed weight; pack it on the current GPU if `device`."""
    with naming(layer.label):
        weight = _read(layer, device)
        return weight if isinstance(weight, MarlinWeight) else pack(_split_groups(weight))


def packed_group_size(K: int, group_size: int) -> int | None:
    """Return the largest group size of the format that divides the weight's own, or None."""
    if group_size in (-1, K):
        return -1
    return next(
        (size for size in sorted(GROUP_SIZES, reverse=True) if size > 0 and group_size % size == 0), None
    )


def _read(layer: SourceLayer, device: bool) -> QuantWeight | MarlinWeight:
    weight = layer.read()
    return weight.to_device() if device else weight


def _split_groups(weight: QuantWeight) -> QuantWeight:
    """Split groups into equal ones of a size that the format holds, with the same scale and zero."""
    size = packed_group_size(weight.K, weight.group_size)
    if size is None or size == weight.group_size:
        return weight
    parts = weight.group_size // size
    zero = None if weight.zero is None else weight.zero.repeat(parts, axis=0)
    return QuantWeight(weight.q, weight.scale.repeat(parts, axis=0), zero, size, weight.g_idx)


def _dtype(name: str) -> np.dtype[Any]:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)
