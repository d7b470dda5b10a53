"""compressed-tensors checkpoints in the format ``pack-quantized``.

=================  =======================  ==============================================================
tensor             shape                    content
=================  =======================  ==============================================================
weight_packed      int32 [N, ceil(K/8)]     a row is a column of W; eight codes along K in a word, the lowest
                                            nibble first
weight_scale       [N, G]                   float16 or bfloat16
weight_zero_point  int32 [ceil(N/8), G]     asymmetric only; eight along N in a word, plus 8 like the codes
                   or int8 [N, G]           (by version 0.8 and older) the zero points themselves, -8..7
weight_shape       int64 [2]                N, K: where one is no multiple of 8, the last word is not full
weight_g_idx       int32 [K]                group of each row; with ``actorder: group`` only
=================  =======================  ==============================================================

W[k, n] = (q - zero point) * scale, groups by weight_g_idx where there is one. The tool's values are -8..7; a
code is the value plus 8. So weight_packed, transposed, is packed like the qweight of GPTQ, and
weight_zero_point is as it stands.

Which modules are quantized, and how, is in the config: :mod:`marlin_jit.formats.compressed_tensors_config`.

Sources: compressed-tensors 0.8.1, 0.10.2 and 0.20.1, ``pack_quantized`` and ``lifecycle/forward.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.compressed_tensors_config import ModuleSettings, WeightSettings
from marlin_jit.formats.gptq import unpack_rows
from marlin_jit.formats.layer import Parameters, ReadOptions, SourceLayer, check_finite
from marlin_jit.formats.model_files import ModelFiles
from marlin_jit.weight import QuantWeight

__all__ = ["CompressedTensorsLayer", "make_layers"]

_SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


@dataclass(frozen=True)
class CompressedTensorsLayer(SourceLayer):
    settings: WeightSettings

    @property
    def format(self) -> str:
        return "compressed-tensors"

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.present(*_SUFFIXES)

    @property
    def scale_name(self) -> str:
        return f"{self.name}.weight_scale"

    def parameters(self) -> Parameters:
        packed = self.require("weight_packed", ("I32",))
        scale = self.require("weight_scale", ("F16", "BF16"))
        N, words = self.files.info(packed).shape
        K = self._rows(N, words)
        size = self.settings.group_size
        groups = self.groups(K, size)
        self.expect_shape(scale, (N, groups), f"for K = {K}, N = {N} and group size {size}")
        zero_point, notes = self._zero_points(N, groups)
        return Parameters(
            K=K,
            N=N,
            group_size=size,
            scale=np.ascontiguousarray(self.files.read(scale).T),
            zero_point=zero_point,
            g_idx=self._g_idx(K, groups),
            symmetric=zero_point is None,
            notes=notes,
        )

    def checked_parameters(self) -> Parameters:
        if not self.options.fix_nan_scales:
            # In the order of the file, [N, G], so that the index is one that its reader can look up.
            scale = self.require("weight_scale", ("F16", "BF16"))
            check_finite(self.where(scale), self.files.read(scale))
        return super().checked_parameters()

    def read(self) -> QuantWeight:
        found = self.checked_parameters()
        words = self.files.read(f"{self.name}.weight_packed")
        q = unpack_rows(np.ascontiguousarray(words.T))[: found.K]
        zero_point = np.full(found.scale.shape, 8, np.uint8) if found.zero_point is None else found.zero_point
        return QuantWeight.from_zero_points(q, found.scale, zero_point, found.group_size, found.g_idx)

    def _rows(self, N: int, words: int) -> int:
        """Return K, which weight_shape gives and the words of weight_packed leave open by up to seven."""
        tensor = self._require_vector("weight_shape", ("I64", "I32"), 2)
        rows, K = (int(length) for length in self.files.read(tensor))
        if rows != N or not 8 * (words - 1) < K <= 8 * words:
            raise CheckpointError(
                f"{self.where(tensor)} is [{rows}, {K}]; weight_packed of shape [{N}, {words}] holds N = {N} "
                f"and K = {8 * words - 7} to {8 * words}"
            )
        return K

    def _zero_points(self, N: int, groups: int) -> tuple[NDArray[np.uint8] | None, tuple[str, ...]]:
        """Return zero points [G, N], None where all are 8, and notes."""
        if self.settings.symmetric and f"{self.name}.weight_zero_point" not in self.files:
            return None, ()
        tensor = self.require("weight_zero_point", ("I32", "I8"))
        if self.files.info(tensor).dtype == "I8":
            self.expect_shape(tensor, (N, groups), f"for {N} columns and {groups} groups")
            value = self.files.read(tensor).T
            bad = np.argwhere((value < -8) | (value > 7))
            if bad.size:
                g, n = (int(i) for i in bad[0])
                raise CheckpointError(
                    f"{self.where(tensor)}: {len(bad)} of {value.size} zero points are outside -8..7, the "
                    f"first ({int(value[g, n])}) at index {[n, g]}"
                )
            zero_point = (value + np.int8(8)).astype(np.uint8)
        else:
            self.expect_shape(tensor, (-(-N // 8), groups), f"one word for 8 of {N} columns, {groups} groups")
            zero_point = np.ascontiguousarray(unpack_rows(self.files.read(tensor))[:N].T)
        other = int(np.count_nonzero(zero_point != 8))
        if other == 0:
            return None, ()
        if self.settings.symmetric:
            note = (
                f"{self.where(tensor)}: symmetric is true, but {other} of {zero_point.size} zero points are "
                "not 0; all are taken as 0"
            )
            return None, (note,)
        return zero_point, ()

    def _g_idx(self, K: int, groups: int) -> NDArray[np.int32] | None:
        """Return the group of each row, None where rows are in order of groups."""
        if f"{self.name}.weight_g_idx" not in self.files:
            if self.settings.reordered:
                raise CheckpointError(f"{self.label} has no weight_g_idx, but actorder is 'group'")
            return None
        tensor = self._require_vector("weight_g_idx", ("I32",), K)
        g_idx: NDArray[np.int32] = self.files.read(tensor)
        if (g_idx == -1).all() or np.array_equal(
            g_idx, np.arange(K, dtype=np.int32) // np.int32(K // groups)
        ):
            return None  # -1 is what the tool begins with, and reads as rows in order
        bad = np.flatnonzero((g_idx < 0) | (g_idx >= groups))
        if bad.size:
            raise CheckpointError(
                f"{self.where(tensor)}: {bad.size} of {K} group numbers are outside 0..{groups - 1}, "
                f"the first ({int(g_idx[bad[0]])}) at index {int(bad[0])}"
            )
        if not self.settings.reordered:
            raise CheckpointError(f"{self.where(tensor)} reorders rows, but actorder is not 'group'")
        return g_idx

    def _require_vector(self, suffix: str, dtypes: tuple[str, ...], length: int) -> str:
        """Return the full name of the layer's tensor `suffix`, a vector of one of the dtypes."""
        tensor = f"{self.name}.{suffix}"
        if tensor not in self.files:
            raise CheckpointError(f"{self.label} has no {suffix}")
        info = self.files.info(tensor)
        if info.dtype not in dtypes or info.shape != (length,):
            raise CheckpointError(
                f"{self.where(tensor)} is {info.dtype} {list(info.shape)}; expected {' or '.join(dtypes)} "
                f"[{length}]"
            )
        return tensor


def make_layers(
    files: ModelFiles, config: dict[str, Any], where: str, options: ReadOptions
) -> dict[str, SourceLayer]:
    """Return the quantized layers of a checkpoint by module name: those with a weight_packed.

    Parameters
    ----------
    files : ModelFiles
    config : dict
        The quantization_config.
    where : str
        File (and key) that it comes from, for messages.
    options : ReadOptions

    Raises
    ------
    CheckpointError
        Settings that are not read, or do not settle what a module is; tensors of no module.
    """
    settings = ModuleSettings(config, where)
    layers: dict[str, SourceLayer] = {}
    for tensor in files:
        module, _, suffix = tensor.rpartition(".")
        if suffix == "weight_packed" and module:
            layers[module] = CompressedTensorsLayer(files, module, settings.of(module), options=options)
    for tensor in files:
        module, _, suffix = tensor.rpartition(".")
        if suffix in _SUFFIXES and module not in layers:
            raise CheckpointError(f"{files.path}: tensor {tensor} belongs to no layer with a weight_packed")
    return layers
