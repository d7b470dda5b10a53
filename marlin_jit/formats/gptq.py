"""GPTQ checkpoints, as AutoGPTQ (v1) and GPTQModel (v1 and v2) write them.

=========  =============  =========================================================================
tensor     shape          content
=========  =============  =========================================================================
qweight    int32 [K/8, N] eight rows of a column in a word, the lowest nibble first
qzeros     int32 [G, N/8] eight columns in a word, the lowest nibble first
scales     [G, N]         float16 or bfloat16
g_idx      int32 [K]      group of each row; written always, a true permutation only with desc_act
=========  =============  =========================================================================

W[k, n] = (q - zero point) * scale, groups by g_idx.

Zero points
-----------
``checkpoint_format: gptq_v2`` stores the zero point itself. v1 (``gptq``, or no such key) stores it minus
one, and the two families of writers disagree on what happens to zero point 0:

- Writers that name the format (GPTQModel, late AutoGPTQ) subtract 0x11111111 from whole words, so that a 0
  borrows from the next nibble. Adding 0x11111111 to whole words restores every zero point.
- AutoGPTQ up to 0.7 writes no ``checkpoint_format`` and ORs the -1 of a zero point 0 into the word: its
  nibble *and all above it* become 15, and the zero points of those other columns are lost. Where two or more
  nibbles up to the top of a word are 15, they are read nibble by nibble as 0, as AutoGPTQ's own Python
  decoder does: right for the column that really had 0, as good as any reading for the others. (Its CUDA
  decoders read 16 in the same place; no reading recovers the loss.)

Both readings agree wherever no nibble below another is 15. Where they do not, a note says how many zero
points depend on the choice.

With ``sym: true`` the zero point is 8 by definition, and qzeros only confirm it: values that do not are noted
and not used. (A symmetric file whose qzeros are 9 or 7 throughout has v1 and v2 mixed up.)

Sources: AutoGPTQ 0.7.1 ``nn_modules/qlinear``, GPTQModel 7.7.0 ``utils/model.py`` (v1 <-> v2 conversion).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.layer import Parameters, SourceLayer
from marlin_jit.weight import QuantWeight

__all__ = ["GPTQConfig", "GPTQLayer"]

_NIBBLES = 4 * np.arange(8, dtype=np.uint32)
_ONE_EACH = np.uint32(0x11111111)


@dataclass(frozen=True)
class GPTQConfig:
    """The settings of a GPTQ checkpoint that decide what its bits mean.

    Attributes
    ----------
    group_size : int
        -1 is one group a column.
    sym, desc_act : bool
    version : int
        1 stores zero points minus one, 2 as they are.
    smeared_zeros : bool
        Version 1 by a writer that loses zero points above a 0.
    """

    group_size: int
    sym: bool
    desc_act: bool
    version: int
    smeared_zeros: bool


@dataclass(frozen=True)
class GPTQLayer(SourceLayer):
    config: GPTQConfig

    @property
    def format(self) -> str:
        return "gptq" if self.config.version == 1 else "gptq_v2"

    @property
    def tensors(self) -> tuple[str, ...]:
        names = [f"{self.name}.{suffix}" for suffix in ("qweight", "qzeros", "scales", "g_idx")]
        return tuple(name for name in names if name in self.files)

    @property
    def scale_name(self) -> str:
        return f"{self.name}.scales"

    def parameters(self) -> Parameters:
        qweight = self.require("qweight", ("I32",))
        qzeros = self.require("qzeros", ("I32",))
        scales = self.require("scales", ("F16", "BF16"))
        words, N = self.files.info(qweight).shape
        K = 8 * words
        groups = self.groups(K, self.config.group_size)
        if N % 8:
            raise CheckpointError(f"{self.where(qweight)}: N = {N} is not a multiple of 8")
        self.expect_shape(
            scales, (groups, N), f"for K = {K}, N = {N} and group size {self.config.group_size}"
        )
        self.expect_shape(qzeros, (groups, N // 8), f"one word for 8 of {N} columns, {groups} groups")
        zero_point, notes = self._zero_points(qzeros)
        return Parameters(
            K=K,
            N=N,
            group_size=self.config.group_size,
            scale=self.files.read(scales),
            zero_point=zero_point,
            g_idx=self._g_idx(K, groups),
            symmetric=zero_point is None,
            notes=notes,
        )

    def read(self) -> QuantWeight:
        found = self.checked_parameters()
        q = unpack_rows(self.files.read(f"{self.name}.qweight"))
        zero_point = np.full(found.scale.shape, 8, np.uint8) if found.zero_point is None else found.zero_point
        return QuantWeight.from_zero_points(q, found.scale, zero_point, found.group_size, found.g_idx)

    def _zero_points(self, tensor: str) -> tuple[NDArray[np.uint8] | None, tuple[str, ...]]:
        words = self.files.read(tensor).view(np.uint32)
        zero_point, doubtful = decode_zero_points(words, self.config.version, self.config.smeared_zeros)
        other = int(np.count_nonzero(zero_point != 8))
        if other == 0:
            return None, ()
        where, count = self.where(tensor), zero_point.size
        if self.config.sym:
            note = f"{where}: sym is true, but {other} of {count} zero points are not 8; all are taken as 8"
            return None, (note,)
        if not doubtful:
            return zero_point, ()
        if self.config.smeared_zeros:
            note = f"{where}: {doubtful} of {count} zero points were overwritten by a 0 below them; read as 0"
        else:
            note = f"{where}: {doubtful} of {count} zero points lie above a 0, whose borrow is undone in them"
        return zero_point, (note,)

    def _g_idx(self, K: int, groups: int) -> NDArray[np.int32] | None:
        tensor = f"{self.name}.g_idx"
        if tensor not in self.files:
            if self.config.desc_act:
                raise CheckpointError(
                    f"{self.files.path}: layer {self.name} has no g_idx, but desc_act is true"
                )
            return None
        info = self.files.info(tensor)
        if info.dtype != "I32" or info.shape != (K,):
            raise CheckpointError(
                f"{self.where(tensor)} is {info.dtype} {list(info.shape)}; expected I32 [{K}]"
            )
        g_idx: NDArray[np.int32] = self.files.read(tensor)
        bad = np.flatnonzero((g_idx < 0) | (g_idx >= groups))
        if bad.size:
            raise CheckpointError(
                f"{self.where(tensor)}: {bad.size} of {K} group numbers are outside 0..{groups - 1}, "
                f"the first ({int(g_idx[bad[0]])}) at index {int(bad[0])}"
            )
        in_order = np.arange(K, dtype=np.int32) // np.int32(K // groups)
        return None if np.array_equal(g_idx, in_order) else g_idx


def unpack_rows(qweight: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the codes, uint8 [K, N], of qweight, int32 [K/8, N]."""
    words, N = qweight.shape
    pairs = (
        np.ascontiguousarray(qweight).view(np.uint8).reshape(words, N, 4)
    )  # byte b holds rows 2b (low nibble), 2b + 1
    q = np.empty((words, 4, 2, N), np.uint8)
    for b in range(4):
        np.bitwise_and(pairs[:, :, b], 15, out=q[:, b, 0])
        np.right_shift(pairs[:, :, b], 4, out=q[:, b, 1])
    return q.reshape(8 * words, N)


def decode_zero_points(
    words: NDArray[np.uint32], version: int, smeared: bool
) -> tuple[NDArray[np.uint8], int]:
    """Return integer zero points, uint8 [G, N], of uint32 words [G, N/8].

    Parameters
    ----------
    words : uint32 [G, N/8]
    version : int
        1 or 2.
    smeared : bool
        Version 1 by a writer that loses what lies above a zero point 0 in its word.

    Returns
    -------
    zero_point : uint8 [G, N]
    doubtful : int
        How many of them depend on which of the two families wrote the file.
    """
    stored = (words[:, :, None] >> _NIBBLES) & np.uint32(15)
    shape = (words.shape[0], -1)
    if version == 2:
        return stored.astype(np.uint8).reshape(shape), 0
    by_nibble = (stored + np.uint32(1)) & np.uint32(15)
    zero_point = ((words + _ONE_EACH)[:, :, None] >> _NIBBLES) & np.uint32(15)
    doubtful = int(np.count_nonzero(zero_point != by_nibble))
    if smeared:
        # Nibbles from which on, up to the top of the word, all are 15. (In a run of one both readings agree.)
        run = np.logical_and.accumulate((stored == 15)[:, :, ::-1], axis=2)[:, :, ::-1]
        zero_point[run] = by_nibble[run]
    return zero_point.astype(np.uint8).reshape(shape), doubtful


def true_or_false(config: dict[str, Any], key: str, where: str) -> bool:
    """Return a switch of the config; absent or null is false."""
    value = config.get(key, False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} is {value!r}; expected true or false")
    return value


def read_config(
    config: dict[str, Any], group_size: int, checkpoint_format: str | None, where: str
) -> GPTQConfig:
    """Return the settings that matter; bits and group size are checked already."""
    _refuse_settings_by_layer(config, where)
    pack_dtype = config.get("pack_dtype", "int32")
    if pack_dtype != "int32":
        raise CheckpointError(f"{where}: pack_dtype {pack_dtype!r} is not read; accepted: 'int32'")
    return GPTQConfig(
        group_size=group_size,
        sym=true_or_false(config, "sym", where),
        desc_act=true_or_false(config, "desc_act", where),
        version=2 if checkpoint_format == "gptq_v2" else 1,
        smeared_zeros=checkpoint_format is None,
    )


def _refuse_settings_by_layer(config: dict[str, Any], where: str) -> None:
    """Refuse GPTQModel's `dynamic` where it gives layers other settings; those it skips are not quantized."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{where}: dynamic is not a JSON object")
    for pattern, settings in dynamic.items():
        if pattern.startswith("-:") or not isinstance(settings, dict):
            continue
        for key in ("bits", "group_size", "sym", "desc_act"):
            if key in settings and settings[key] != config.get(key):
                raise CheckpointError(
                    f"{where}: dynamic gives layers {pattern!r} another {key}; that is not read yet"
                )
