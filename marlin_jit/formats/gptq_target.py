"""Layers written as GPTQ v2, in the way of GPTQModel: the way back for those who want other kernels.

=========  =============  ==================================================================
tensor     shape          content
=========  =============  ==================================================================
qweight    int32 [K/8, N] eight rows of a column in a word, the lowest nibble first
qzeros     int32 [G, N/8] eight columns in a word; the zero point itself, 8 where symmetric
scales     [G, N]         float16 or bfloat16
g_idx      int32 [K]      group of each row, also where rows are in order of groups
=========  =============  ==================================================================

W[k, n] = (q - zero point) * scale, as `marlin_jit.formats.gptq` reads it. A zero must therefore be an integer
0..15 times the scale: the real zeros of GGUF, and zero point 16, are refused. Where a scale is 0 its zero
point means nothing, packed layers do not keep it, and 8 is written.

Config
------
``quantization_config`` in config.json, and the same in quantize_config.json. One group size is the model's:
the one that fits most layers. Layers of another have a line in ``dynamic``. So have modules inside numbered
blocks that are not quantized (``-:``), which loaders would take for quantized ones. Each line matches whole
names; a block's number is left open where all blocks agree.

Source: files and ``quantization/config.py`` of GPTQModel 7.7.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit._array import BFLOAT16
from marlin_jit.errors import CheckpointError
from marlin_jit.formats.detect import Checkpoint
from marlin_jit.formats.layer import Outline, SourceLayer, naming
from marlin_jit.formats.packed import PackedLayer
from marlin_jit.formats.safetensors_io import TensorInfo, array_info
from marlin_jit.formats.targets import Target
from marlin_jit.layout import group_count, permute_scales
from marlin_jit.pack import unpack
from marlin_jit.weight import MarlinWeight, QuantWeight, zero_points_below_8

if TYPE_CHECKING:
    from marlin_jit.formats.convert import LayerPlan

__all__ = ["GPTQTarget", "integer_zero_points", "pack_columns", "pack_rows"]

_INT32 = np.dtype(np.int32)
_INSTEAD = "write dense weights instead, with --to float16"


@dataclass(eq=False)
class GPTQTarget(Target):
    """GPTQ v2.

    Attributes
    ----------
    checkpoint : Checkpoint
        What is converted.
    """

    checkpoint: Checkpoint = field(repr=False)
    _outlines: dict[str, Outline] = field(default_factory=dict, init=False, repr=False)

    def tensors(
        self, name: str, source_format: str, outline: Outline, where: str
    ) -> tuple[int, dict[str, TensorInfo]]:
        K, N, size = outline.K, outline.N, outline.group_size
        if not name:
            raise CheckpointError(f"{where}: a GPTQ layer needs a name, and this one's is empty")
        for letter, count in (("K", K), ("N", N)):
            if count % 8:
                raise CheckpointError(f"{where}: {letter} = {count}; GPTQ holds multiples of 8; {_INSTEAD}")
        if size != -1 and K % size:
            raise CheckpointError(f"{where}: group size {size} does not divide K = {K}")
        if not outline.symmetric:
            _check_zeros(self.checkpoint.layers[name], where)
        groups = group_count(K, size)
        scale_dtype = BFLOAT16 if outline.dtype == "bfloat16" else np.dtype(outline.dtype)
        return size, {
            f"{name}.qweight": array_info(_INT32, (K // 8, N)),
            f"{name}.qzeros": array_info(_INT32, (groups, N // 8)),
            f"{name}.scales": array_info(scale_dtype, (groups, N)),
            f"{name}.g_idx": array_info(_INT32, (K,)),
        }

    def arrays(self, layer: SourceLayer, device: bool) -> dict[str, NDArray[Any]]:
        weight = _plain(layer, device)
        g_idx = weight.g_idx
        if g_idx is None:
            g_idx = np.arange(weight.K, dtype=np.int32) // np.int32(weight.K // weight.groups)
        return {
            f"{layer.name}.qweight": pack_rows(weight.q),
            f"{layer.name}.qzeros": pack_columns(_zero_points(weight, layer.label)),
            f"{layer.name}.scales": weight.scale,
            f"{layer.name}.g_idx": g_idx,
        }

    def metadata(self, layers: Mapping[str, LayerPlan]) -> dict[str, str]:
        return {"format": "pt"}  # the loaders of Hugging Face insist on it

    def reserved_names(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}.{suffix}" for suffix in ("qweight", "qzeros", "scales", "g_idx"))

    def check(self, outlines: Mapping[str, Outline], where: str) -> None:
        """Take note of the layers, which the config is about. A model can mix all that a layer can be."""
        self._outlines = dict(outlines)

    def config(self, originals: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {**originals.get("config.json", {}), "quantization_config": self.settings()}

    def settings(self) -> dict[str, Any]:
        """Return the quantization config of the layers that `check` was given."""
        outlines = self._outlines
        size = _common_group_size(outlines)
        settings = {
            "bits": 4,
            "group_size": size,
            "desc_act": any(outline.permuted for outline in outlines.values()),
            "lm_head": any(name.split(".")[-1] == "lm_head" for name in outlines),
            "method": "gptq",
            "quant_method": "gptq",
            "format": "gptq_v2",
            "checkpoint_format": "gptq_v2",
            "pack_dtype": "int32",
            "sym": all(outline.symmetric for outline in outlines.values()),
        }
        differing: dict[str, int | None] = dict.fromkeys(_dense_modules(self.checkpoint, outlines))
        for name, outline in outlines.items():
            differing[name] = size if _fits(outline, size) else outline.group_size
        dynamic = _dynamic(differing, size)
        return settings | ({"dynamic": dynamic} if dynamic else {})


# ---- words ------------------------------------------------------------------------------------------------


def pack_rows(q: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return qweight, int32 [K/8, N], of codes, uint8 [K, N]."""
    K, N = q.shape
    rows = q.reshape(K // 8, 4, 2, N)
    words = np.empty((K // 8, N, 4), np.uint8)
    for b in range(4):  # byte b holds rows 2b (low nibble), 2b + 1
        np.left_shift(rows[:, b, 1], 4, out=words[:, :, b])
        words[:, :, b] |= rows[:, b, 0]
    return words.view(np.int32).reshape(K // 8, N)


def pack_columns(zero_point: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return qzeros, int32 [G, N/8], of zero points, uint8 [G, N]."""
    pairs = np.left_shift(zero_point[:, 1::2], np.uint8(4)) | zero_point[:, ::2]
    return np.ascontiguousarray(pairs).view(np.int32)


def integer_zero_points(
    scale: NDArray[Any], delta: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return z with ``delta = (8 - z)*scale``, and where there is no such integer 0..15 (z is 8 there).

    Parameters
    ----------
    scale : float16 or bfloat16
    delta : float32, of the same shape
    """
    from_8, holds = zero_points_below_8(scale, delta)
    bad = ~(holds & (from_8 >= -7) & (from_8 <= 8))
    from_8[bad] = 0
    return (np.float32(8) - from_8).astype(np.uint8), bad


# ---- layers -----------------------------------------------------------------------------------------------


def _plain(layer: SourceLayer, device: bool = False) -> QuantWeight:
    """Read a layer as plain codes on the host; unpack it on the current GPU if `device`."""
    with naming(layer.label):
        weight = layer.read()
        if isinstance(weight, MarlinWeight):
            weight = unpack(weight.to_device() if device else weight)
        return weight.to_host()


def _zero_points(weight: QuantWeight, where: str) -> NDArray[np.uint8]:
    if weight.delta is None:
        return np.full(weight.scale.shape, 8, np.uint8)
    zero_point, bad = integer_zero_points(weight.scale, weight.delta)
    _refuse(bad, where)
    return zero_point


def _check_zeros(layer: SourceLayer, where: str) -> None:
    """Raise if a layer has zeros that GPTQ cannot hold. Codes are read only where the file mixes all."""
    if isinstance(layer, PackedLayer):
        entry, files = layer.entry, layer.files
        groups = group_count(entry.K, entry.group_size)
        scale, delta = (
            permute_scales(files.read(f"{layer.name}.{suffix}"))[:groups, : entry.N]
            for suffix in ("s", "delta")
        )
        _refuse(integer_zero_points(scale, delta)[1], where)
        return
    zero_point = layer.parameters().zero_point
    if zero_point is not None:
        _refuse(zero_point > 15, where)
    else:
        _zero_points(_plain(layer), where)


def _refuse(bad: NDArray[np.bool_], where: str) -> None:
    if bad.any():
        first = [int(i) for i in np.argwhere(bad)[0]]
        raise CheckpointError(
            f"{where}: {int(bad.sum())} of {bad.size} zero points are no integers 0..15, which GPTQ needs, "
            f"the first at index {first}; {_INSTEAD}"
        )


# ---- config -----------------------------------------------------------------------------------------------


def _fits(outline: Outline, size: int) -> bool:
    """Whether a layer can be described with a group size: one group of K rows is -1 or K."""
    return outline.group_size == size or {outline.group_size, size} == {-1, outline.K}


def _common_group_size(outlines: Mapping[str, Outline]) -> int:
    """Return the group size that fits most layers; of equals the largest."""
    sizes = sorted({outline.group_size for outline in outlines.values()}, reverse=True)
    return max(sizes, key=lambda size: sum(_fits(outline, size) for outline in outlines.values()))


def _dense_modules(checkpoint: Checkpoint, outlines: Mapping[str, Outline]) -> list[str]:
    """Return modules that a loader could take for quantized: linear, in a numbered block or left out now."""
    left_out = [name for name in checkpoint.layers if name not in outlines]
    modules = [name.removesuffix(".weight") for name in checkpoint.others if name.endswith(".weight")]
    inside = [
        name
        for name in modules
        if any(part.isdecimal() for part in name.split("."))
        and len(checkpoint.files.info(f"{name}.weight").shape) == 2
    ]
    return left_out + inside


def _dynamic(sizes: Mapping[str, int | None], usual: int) -> dict[str, dict[str, int]]:
    """Return GPTQModel's ``dynamic`` for modules by group size, None being dense."""
    found: dict[str, set[int | None]] = {}
    for name, size in sizes.items():
        found.setdefault(_pattern(name, any_block=True), set()).add(size)
    dynamic: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        if size == usual:
            continue
        agreed = _pattern(name, any_block=True)
        regex = agreed if len(found[agreed]) == 1 else _pattern(name, any_block=False)
        if size is None:
            dynamic[f"-:{regex}"] = {}
        else:
            dynamic[f"+:{regex}"] = {"group_size": size}
    return dynamic


def _pattern(name: str, *, any_block: bool) -> str:
    parts = (r"\d+" if any_block and part.isdecimal() else re.escape(part) for part in name.split("."))
    return "^" + r"\.".join(parts) + "$"
