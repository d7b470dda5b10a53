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
and not used.

A config may name the wrong version. `ReadOptions.zero_format` overrides it; without that a note says when
zero points look like those of the other version (`GPTQLayer._doubts`).

Settings by layer
-----------------
GPTQModel's ``dynamic`` maps patterns of layer names (``re.match``; a leading ``+:`` changes nothing) to
settings that differ from the model's; the first pattern that matches counts. ``-:`` patterns,
``modules_to_not_convert`` and ``lm_head`` say which modules the tool left alone. Here the tensors say so: a
module is quantized if it has a qweight, and one that has although ``-:`` leaves it out is refused.

Sources: AutoGPTQ 0.7.1 ``nn_modules/qlinear``, GPTQModel 7.7.0 ``utils/model.py`` (v1 <-> v2 conversion) and
``quantization/config.py`` (``dynamic_get``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.layer import Parameters, SourceLayer
from marlin_jit.formats.module_patterns import ModuleTable, PatternError
from marlin_jit.formats.safetensors_io import shortened, shown
from marlin_jit.weight import QuantWeight

__all__ = ["GPTQConfig", "GPTQLayer"]

_NIBBLES = 4 * np.arange(8, dtype=np.uint32)
_ONE_EACH = np.uint32(0x11111111)
_UNPACKED_WORDS = 1 << 17  # at a time: they stay near the core
_VERSIONS = {"v1": 1, "v2": 2}
# How much of a layer is looked at for zero points of the wrong version; the first limits what is read.
_SAMPLE_WORDS = 1 << 18
_SAMPLE_ROWS = 256
_SAMPLE_COLUMNS = 1024


@dataclass(frozen=True)
class Dynamic:
    """GPTQModel's ``dynamic``: settings of the layers whose names match a pattern.

    Attributes
    ----------
    table : ModuleTable
        Each pattern with its settings; None for those that are not quantized.
    model : mapping
        The settings of all other layers.
    where : str
        For messages.
    """

    table: ModuleTable[tuple[str, dict[str, Any] | None]]
    model: Mapping[str, Any]
    where: str

    def settings(self, layer: str) -> tuple[str, dict[str, Any]]:
        """Return where the settings of a layer are, and those that are its own.

        Raises
        ------
        CheckpointError
            A layer that is not to be quantized, or in a way that is not read.
        """
        try:
            matches = self.table.find(layer)
        except PatternError as error:
            raise CheckpointError(f"{self.where}: dynamic: layer {shortened(layer)}: {error}") from None
        if not matches:
            return self.where, {}
        pattern, settings = matches[0]
        where = f"{self.where}: dynamic {shown(pattern)}"
        if settings is None:
            raise CheckpointError(f"{where} leaves layer {layer} unquantized, but it has a qweight")
        if "bits" in settings and (isinstance(settings["bits"], bool) or settings["bits"] != 4):
            raise CheckpointError(
                f"{where} gives layer {layer} {shown(settings['bits'])} bits; only 4-bit weights are packed"
            )
        for key in ("quant_method", "method", "checkpoint_format", "format", "pack_dtype"):
            if key in settings and settings[key] != self.model.get(key):
                raise CheckpointError(
                    f"{where} gives layer {layer} {key} {shown(settings[key])}; accepted: that of the model"
                )
        return where, settings


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
    dynamic : Dynamic or None
        Where layers differ.
    """

    group_size: int
    sym: bool
    desc_act: bool
    version: int
    smeared_zeros: bool
    dynamic: Dynamic | None = None

    def of_layer(self, name: str) -> GPTQConfig:
        """Return the settings of one layer."""
        if self.dynamic is None:
            return self
        where, settings = self.dynamic.settings(name)
        size = settings.get("group_size", self.group_size)
        if not isinstance(size, int) or isinstance(size, bool) or not (size == -1 or 1 <= size < 1 << 31):
            raise CheckpointError(f"{where}: group_size is {shown(size)}; expected -1 or a positive integer")
        switches = {
            key: true_or_false(settings, key, where) for key in ("sym", "desc_act") if key in settings
        }
        return replace(self, group_size=size, dynamic=None, **switches)


@dataclass(frozen=True)
class GPTQLayer(SourceLayer):
    """A layer of a GPTQ checkpoint.

    Attributes
    ----------
    config : GPTQConfig
        Given for the model; kept as `GPTQConfig.of_layer` says.
    """

    config: GPTQConfig

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", self.config.of_layer(self.name))

    @property
    def version(self) -> int:
        """How zero points are stored: as the user says, else as the config does."""
        return _VERSIONS.get(self.options.zero_format, self.config.version)

    @property
    def format(self) -> str:
        return "gptq" if self.version == 1 else "gptq_v2"

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.present("qweight", "qzeros", "scales", "g_idx")

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
        g_idx = self._g_idx(K, groups)
        zero_point, notes = self._zero_points(qzeros, g_idx)
        return Parameters(
            K=K,
            N=N,
            group_size=self.config.group_size,
            scale=self.files.read(scales),
            zero_point=zero_point,
            g_idx=g_idx,
            symmetric=zero_point is None,
            notes=notes,
        )

    def read(self) -> QuantWeight:
        found = self.checked_parameters()
        q = unpack_rows(self.files.read(f"{self.name}.qweight"))
        zero_point = np.full(found.scale.shape, 8, np.uint8) if found.zero_point is None else found.zero_point
        return QuantWeight.from_zero_points(q, found.scale, zero_point, found.group_size, found.g_idx)

    def _zero_points(
        self, tensor: str, g_idx: NDArray[np.int32] | None
    ) -> tuple[NDArray[np.uint8] | None, tuple[str, ...]]:
        words = self.files.read(tensor).view(np.uint32)
        zero_point, doubtful = decode_zero_points(words, self.version, self.config.smeared_zeros)
        other = int(np.count_nonzero(zero_point != 8))
        doubts = self._doubts(zero_point, g_idx)
        if self.config.sym and other and not doubts:
            doubts = (
                f"{self.where(tensor)}: sym is true, but {other} of {zero_point.size} zero points are not 8; "
                "all are taken as 8",
            )
        if other == 0 or self.config.sym:
            return None, doubts
        if not doubtful:
            return zero_point, doubts
        if self.config.smeared_zeros:
            what = "were overwritten by a 0 below them; read as 0"
        else:
            what = "lie above a 0, whose borrow is undone in them"
        note = f"{self.where(tensor)}: {doubtful} of {zero_point.size} zero points {what}"
        return zero_point, (*doubts, note)

    def _doubts(self, zero_point: NDArray[np.uint8], g_idx: NDArray[np.int32] | None) -> tuple[str, ...]:
        """Return a note if zero points look like those of the other version, unless the user has decided.

        What v2 reads is one less than what v1 reads. Symmetric zero points are then all 7 or all 9.

        Asymmetric ones are told by how far codes lie above them, a mean for each column: weights scatter
        around 0, so codes scatter around their zero point. In the asymmetric files of the tools under
        tests/fixtures the median column is within 0.06 of 0 under the right reading, and so within 0.06 of 1
        or -1 under the wrong one. Reported is what would be within 0.2 under the other reading: three times
        what was seen, and still 0.8 steps off under this one, which takes weights that lean to the same side
        in most columns. Half the columns must also be within 0.6 of 0 under the other reading (0.35 in those
        files): codes that have nothing to do with their zero points can have any median, by chance.

        The note is the same for each layer, so that it is shown once a model.
        """
        if self.options.zero_format in _VERSIONS:
            return ()
        step, other = (1, 1) if self.version == 2 else (-1, 2)
        start = f"{self.files.path}: by its config a GPTQ v{self.version} model, but its zero points"
        if self.config.sym:
            if (zero_point == 8 - step).all():
                return (
                    f"{start} are those of v{other}; sym is true, so all are taken as 8 (--zero-format "
                    f"v{other} agrees)",
                )
            return ()
        distance = self._distances(zero_point, g_idx) - step  # under the other reading
        if abs(np.median(distance)) < 0.2 and np.median(np.abs(distance)) < 0.6:
            return (f"{start} look like those of v{other}; read them so with --zero-format v{other}",)
        return ()

    def _distances(self, zero_point: NDArray[np.uint8], g_idx: NDArray[np.int32] | None) -> NDArray[Any]:
        """Return how far the codes of a column lie above their zero points on average, for the first columns.

        Only the first rows are read.
        """
        tensor = f"{self.name}.qweight"
        info, path = self.files.info(tensor), self.files.shards[self.files.shard_of(tensor)].path
        words, N = info.shape
        words = min(words, _SAMPLE_ROWS // 8, max(1, _SAMPLE_WORDS // N))
        try:
            first = np.fromfile(path, np.int32, words * N, offset=info.start)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        if first.size < words * N:
            raise CheckpointError(f"{path}: became shorter while being read")
        q = unpack_rows(first.reshape(words, N)[:, :_SAMPLE_COLUMNS])
        rows = 8 * info.shape[0] // len(zero_point)  # in a group
        group = np.arange(len(q)) // rows if g_idx is None else g_idx[: len(q)]
        distance: NDArray[Any] = q.astype(np.int16) - zero_point[group, :_SAMPLE_COLUMNS]
        return np.asarray(distance.mean(axis=0))

    def _g_idx(self, K: int, groups: int) -> NDArray[np.int32] | None:
        tensor = f"{self.name}.g_idx"
        if tensor not in self.files:
            if self.config.desc_act:
                raise CheckpointError(f"{self.label} has no g_idx, but desc_act is true")
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
    q = np.empty((words, 4, 2, N), np.uint8)
    step = max(1, _UNPACKED_WORDS // N)
    for start in range(0, words, step):
        rows = slice(start, start + step)
        for b in range(4):
            # Byte b of a word holds rows 2b (low nibble) and 2b + 1. Narrowing is what NumPy does fastest.
            pair = (qweight[rows].view(np.uint32) >> np.uint32(8 * b)).astype(np.uint8)
            np.bitwise_and(pair, 15, out=q[rows, b, 0])
            np.right_shift(pair, 4, out=q[rows, b, 1])
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
        raise CheckpointError(f"{where}: {key} is {shown(value)}; expected true or false")
    return value


def read_config(
    config: dict[str, Any], group_size: int, checkpoint_format: str | None, where: str
) -> GPTQConfig:
    """Return the settings that matter; bits and group size are checked already."""
    pack_dtype = config.get("pack_dtype", "int32")
    if pack_dtype != "int32":
        raise CheckpointError(f"{where}: pack_dtype {shown(pack_dtype)} is not read; accepted: 'int32'")
    return GPTQConfig(
        group_size=group_size,
        sym=true_or_false(config, "sym", where),
        desc_act=true_or_false(config, "desc_act", where),
        version=2 if checkpoint_format == "gptq_v2" else 1,
        smeared_zeros=checkpoint_format is None,
        dynamic=_read_dynamic(config, where),
    )


def _read_dynamic(config: dict[str, Any], where: str) -> Dynamic | None:
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{where}: dynamic is not a JSON object")
    table: ModuleTable[tuple[str, dict[str, Any] | None]] = ModuleTable()
    for pattern, settings in dynamic.items():
        skipped = pattern.startswith("-:")
        if not skipped and not isinstance(settings, dict):
            raise CheckpointError(
                f"{where}: dynamic {shown(pattern)} is {shown(settings)}; expected an object"
            )
        regex = pattern.removeprefix("-:" if skipped else "+:")
        try:
            table.add("re:" + regex, (pattern, None if skipped else settings))
        except PatternError as error:
            raise CheckpointError(f"{where}: dynamic {shown(pattern)} {error}") from None
    return Dynamic(table, config, where) if dynamic else None
