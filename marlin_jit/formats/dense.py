"""Unquantized checkpoints, quantized while they are read: by min-max, or by GPTQ where there is calibration.

A layer ``X`` is

========  ======  ====================================================================
tensor    shape   content
========  ======  ====================================================================
X.weight  [N, K]  float16, bfloat16 or float32: [out, in], as linear layers store it
========  ======  ====================================================================

and is calibrated where a calibration file (`marlin_jit.formats.calibration`) knows its inputs.

Which weights are quantized
---------------------------
All matrices named ``*.weight``, but not embeddings, output heads, norms and routers (`LEFT_BY_DEFAULT`), as
tools for GPTQ and AWQ do. A name that `Settings.include` gives in full is quantized all the same.

A config with a quantization, or tensors of another tool's quantized layers, are refused. So are models that
store weights as [in, out], told by a bias that is as long as a row (GPT-2 and its kin: ``Conv1D`` in
``pytorch_utils.py`` of transformers).
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit._array import BFLOAT16
from marlin_jit.errors import CheckpointError
from marlin_jit.formats.calibration import Calibration
from marlin_jit.formats.detect import Checkpoint, find_config
from marlin_jit.formats.layer import Outline, Parameters, SourceLayer, naming
from marlin_jit.formats.model_files import ModelFiles
from marlin_jit.formats.packed import is_packed
from marlin_jit.formats.safetensors_io import TensorInfo, shown
from marlin_jit.gptq_quantize import gptq
from marlin_jit.layout import GROUP_SIZES
from marlin_jit.pack import pack
from marlin_jit.quantize import quantize
from marlin_jit.weight import MarlinWeight, QuantWeight

__all__ = ["DenseCheckpoint", "DenseLayer", "Settings", "open_dense"]

LEFT_BY_DEFAULT = {
    "embedding": ("*embed*", "wte", "*.wte", "wpe", "*.wpe", "shared", "*relative_attention_bias"),
    "output head": ("lm_head", "*.lm_head", "output", "*output_layer", "score", "classifier", "*.classifier"),
    "norm": ("*norm*",),
    "router": ("*router*", "*.gate", "*shared_expert_gate"),
}
"""Shell patterns of the names of modules that are left as they are, by what they are."""

_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_QUANTIZED = (".qweight", ".qzeros", ".weight_packed")


@dataclass(frozen=True)
class Settings:
    """How to quantize.

    Attributes
    ----------
    group_size : int
        32, 64, 128 or -1.
    symmetric : bool
    dtype : str or None
        ``"float16"`` or ``"bfloat16"``; None is that of the weight, float16 for float32.
    calibration : Path or None
    damp : float
    act_order : bool
        The last two are for GPTQ: see :func:`marlin_jit.gptq_quantize.gptq`.
    include, exclude : tuple of str
        Shell patterns of module names. With `include` only what matches is quantized. What matches `exclude`
        is not.
    """

    group_size: int = 128
    symmetric: bool = False
    dtype: str | None = None
    calibration: Path | None = None
    damp: float = 0.01
    act_order: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise CheckpointError(f"group size {self.group_size} is not packed; accepted: {GROUP_SIZES}")
        if self.dtype not in (None, "float16", "bfloat16"):
            raise CheckpointError(f"dtype {self.dtype!r} is not packed; accepted: float16, bfloat16")
        if not 0 <= self.damp < float("inf"):
            raise CheckpointError(f"damp must be finite and not negative, got {self.damp}")


@dataclass(frozen=True)
class DenseCheckpoint(Checkpoint):
    """An unquantized checkpoint and what to quantize of it.

    Attributes
    ----------
    left : dict of str to str
        Why each of the other tensors is left as it is.
    unused : tuple of str
        Tensors of the calibration file that belong to no layer.
    """

    left: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class DenseLayer(SourceLayer):
    """A layer that is quantized when it is read.

    Attributes
    ----------
    settings : Settings
    calibration : Calibration or None
        Without it, or where it has nothing for the layer, min-max is used.
    """

    settings: Settings
    calibration: Calibration | None = None

    @property
    def format(self) -> str:
        return "dense-minmax" if self._inputs is None else "dense-gptq"

    @property
    def tensors(self) -> tuple[str, ...]:
        return (f"{self.name}.weight",)

    @property
    def scale_name(self) -> str:
        """The weight: scales follow from it."""
        return f"{self.name}.weight"

    @property
    def decided_by(self) -> str:
        calibrated = ""
        if self.calibration is not None:
            status = self.calibration.file.path.stat()
            calibrated = f"{status.st_size}, {status.st_mtime_ns}"
        return f"{self.settings!r}, {calibrated}"

    def outline(self) -> Outline:
        """Return what the packed layer will be, from names and shapes alone."""
        tensor = self.require("weight", tuple(_DTYPES))
        info = self.files.info(tensor)
        N, K = info.shape
        size = self.settings.group_size
        if size != -1 and K % size:
            raise CheckpointError(
                f"{self.where(tensor)}: group size {size} does not divide K = {K}; choose another, or leave "
                f"the layer with --exclude {self.name}"
            )
        notes: tuple[str, ...] = ()
        inputs = self._inputs
        if self.calibration is not None and inputs is None:
            where = self.calibration.file.path
            notes = (f"{where}: has nothing for layer {self.name}, which is quantized by min-max",)
        if self.calibration is not None and inputs is not None:
            self.calibration.check(inputs, K)
        permuted = inputs is not None and self.settings.act_order and size not in (-1, K)
        return Outline(K, N, size, self._dtype(info), self.settings.symmetric, permuted, notes)

    def parameters(self) -> Parameters:
        """Quantize the layer: before that a dense one has no scales. Zeros of min-max are no zero points."""
        weight, outline = self._quantized(), self.outline()
        return Parameters(
            K=outline.K,
            N=outline.N,
            group_size=weight.group_size,
            scale=weight.scale,
            zero_point=None,
            g_idx=weight.g_idx,
            symmetric=weight.symmetric,
            notes=outline.notes,
        )

    def read(self) -> QuantWeight | MarlinWeight:
        weight = self._quantized()
        if self.outline().permuted and (weight.g_idx is None or np.all(np.diff(weight.g_idx) >= 0)):
            # The rows happen to be in order, so packing would leave out the permutation that was announced.
            return replace(pack(weight), perm=np.arange(weight.K, dtype=np.int32))
        return weight

    @property
    def _inputs(self) -> str | None:
        return None if self.calibration is None else self.calibration.tensor(self.name)

    def _dtype(self, info: TensorInfo) -> str:
        own = _DTYPES[info.dtype]
        return self.settings.dtype or ("float16" if own == "float32" else own)

    def _quantized(self) -> QuantWeight:
        outline, settings, inputs = self.outline(), self.settings, self._inputs
        tensor = self.tensors[0]
        where = self.where(tensor)
        dense = self.files.read(tensor)
        _check_finite(where, dense)
        dtype = BFLOAT16 if outline.dtype == "bfloat16" else np.dtype(outline.dtype)
        if self.calibration is None or inputs is None:
            with naming(where):
                return quantize(dense.T, settings.group_size, settings.symmetric, dtype)
        with naming(f"{where}, calibrated by {self.calibration.where(inputs)}"):
            return gptq(
                dense.T,
                self.calibration.hessian(inputs),
                settings.group_size,
                settings.symmetric,
                dtype,
                settings.damp,
                settings.act_order,
            )


def open_dense(path: str | Path, settings: Settings | None = None) -> DenseCheckpoint:
    """Open an unquantized checkpoint, a folder or one safetensors file, to quantize it.

    Parameters
    ----------
    path : str or Path
    settings : Settings, optional

    Raises
    ------
    CheckpointError
        Damaged files, weights that are quantized already, patterns that match nothing, nothing to quantize, a
        calibration file that fits no layer.
    """
    files, settings = ModelFiles(Path(path)), settings or Settings()
    _refuse_quantized(files)
    _refuse_in_out(files)
    _check_patterns(files, settings)
    calibration = None if settings.calibration is None else Calibration(settings.calibration)
    left = {name: why for name in files if (why := _why_left(name, files.info(name), settings)) is not None}
    names = [name.removesuffix(".weight") for name in files if name not in left]
    if not names:
        whys = ", ".join(f"{count} ({why})" for why, count in Counter(left.values()).items())
        raise CheckpointError(
            f"{path}: holds no weight to quantize; tensors left as they are: {whys} (heads, embeddings, "
            "norms and routers are quantized if --include gives the name in full)"
        )
    layers: dict[str, SourceLayer] = {name: DenseLayer(files, name, settings, calibration) for name in names}
    unused = () if calibration is None else calibration.unused(names)
    return DenseCheckpoint(files, None, layers, tuple(left), left, unused)


def _why_left(name: str, info: TensorInfo, settings: Settings) -> str | None:
    """Return why a tensor is left as it is, or None if it is to be quantized."""
    why = _not_a_weight(name, info)
    if why is not None:
        return why
    module = name.removesuffix(".weight")
    if _matching(module, settings.exclude):
        return "excluded"
    if module in settings.include:
        return None
    if settings.include and not _matching(module, settings.include):
        return "not included"
    return next((kind for kind, patterns in LEFT_BY_DEFAULT.items() if _matching(module, patterns)), None)


def _not_a_weight(name: str, info: TensorInfo) -> str | None:
    if not name.endswith(".weight") or name == ".weight":
        return "not called *.weight"
    if len(info.shape) != 2 or 0 in info.shape:
        return "no matrix"
    return None if info.dtype in _DTYPES else f"dtype {info.dtype}"


def _matching(module: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


def _check_patterns(files: ModelFiles, settings: Settings) -> None:
    """Raise if a pattern matches no weight: it is a mistake."""
    modules = [n.removesuffix(".weight") for n in files if _not_a_weight(n, files.info(n)) is None]
    for pattern in (*settings.include, *settings.exclude):
        if not any(_matching(module, (pattern,)) for module in modules):
            raise CheckpointError(
                f"{files.path}: no weight that could be quantized is called like {pattern!r}"
            )


def _refuse_quantized(files: ModelFiles) -> None:
    if is_packed(files):
        raise CheckpointError(f"{files.path}: is packed already")
    config = find_config(files)
    if config is not None:
        raise CheckpointError(
            f"{config.where}: the weights are quantized already (quant_method "
            f"{shown(config.values.get('quant_method'))}); `marlin-jit pack` takes 4-bit ones as they are"
        )
    for name in files:
        if name.endswith(_QUANTIZED) or (name.endswith(".B") and f"{name[:-2]}.s" in files):
            raise CheckpointError(
                f"{files.path}: tensor {name} is of a quantized layer; `marlin-jit pack` takes 4-bit ones as "
                "they are"
            )


def _refuse_in_out(files: ModelFiles) -> None:
    for name in files:
        info, bias = files.info(name), f"{name.removesuffix('weight')}bias"
        if _not_a_weight(name, info) is not None or bias not in files:
            continue
        N, K = info.shape
        if K != N and files.info(bias).shape == (K,):
            raise CheckpointError(
                f"{files.path}: tensor {name} is {[N, K]} and its bias {[K]}, so weights are stored as "
                "[in, out]; only [out, in] is read"
            )


def _check_finite(where: str, dense: NDArray[Any]) -> None:
    bad = ~np.isfinite(dense)
    if bad.any():
        n, k = divmod(int(bad.argmax()), dense.shape[1])
        raise CheckpointError(
            f"{where} has {int(bad.sum())} NaN or infinite of {dense.size} weights, the first "
            f"({float(dense[n, k])}) at index [{n}, {k}]"
        )
