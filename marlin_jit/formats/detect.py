"""From a path to its layers: which reader a checkpoint needs, decided by its config, or refused by name.

The config is looked for beside the weights: ``quantization_config`` in config.json, or the files of older
tools (quantize_config.json of AutoGPTQ, quant_config.json of AutoAWQ). Where several are there they must
agree on everything that changes the meaning of bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlin_jit.errors import CheckpointError
from marlin_jit.formats import compressed_tensors, gguf_files, gptq
from marlin_jit.formats.awq import AWQLayer
from marlin_jit.formats.gptq import GPTQLayer
from marlin_jit.formats.layer import ReadOptions, SourceLayer
from marlin_jit.formats.marlin_files import MarlinLayer
from marlin_jit.formats.model_files import ModelFiles
from marlin_jit.formats.packed import FORMAT, PackedLayer, is_packed, read_layer_table
from marlin_jit.formats.safetensors_io import load_json, shown

__all__ = ["Checkpoint", "QuantizationConfig", "open_checkpoint"]

CONFIG_FILES = ("config.json", "quantize_config.json", "quant_config.json")
ACCEPTED = "gptq (also Marlin files), awq, marlin, compressed-tensors"
_METHOD_OF_FILE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Older names, by which AutoAWQ's quant_config.json says the same.
_SYNONYMS = {"w_bit": "bits", "q_group_size": "group_size"}
# What decides the meaning of the bits: two configs of one model may not differ in these.
_DECISIVE = (
    "quant_method",
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "checkpoint_format",
    "is_marlin_format",
    "version",
)


@dataclass(frozen=True)
class QuantizationConfig:
    """The quantization settings of a checkpoint.

    Attributes
    ----------
    values : dict
        As in the file, older key names replaced by today's.
    where : str
        File (and key) that they come from, for messages.
    """

    values: dict[str, Any]
    where: str

    @property
    def method(self) -> str:
        return str(self.values.get("quant_method", "")).lower()

    def group_size(self) -> int:
        """Return the group size: -1, or at least 1."""
        size = self.values.get("group_size")
        if not isinstance(size, int) or isinstance(size, bool) or not (size == -1 or 1 <= size < 1 << 31):
            raise CheckpointError(
                f"{self.where}: group_size is {shown(size)}; expected -1 or a positive integer"
            )
        return size

    def check_bits(self) -> None:
        bits = self.values.get("bits")
        if isinstance(bits, bool) or bits != 4:
            raise CheckpointError(f"{self.where}: bits is {shown(bits)}; only 4-bit weights are packed")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its quantized layers; nothing but headers and configs is read yet.

    Attributes
    ----------
    files : ModelFiles
    config : QuantizationConfig or None
    layers : dict of str to SourceLayer
        By module name, in order of the files.
    others : tuple of str
        Names of the tensors that belong to no quantized layer (biases among them).
    """

    files: ModelFiles
    config: QuantizationConfig | None
    layers: dict[str, SourceLayer]
    others: tuple[str, ...]

    @property
    def format(self) -> str:
        """Formats of the layers, or ``"unquantized"``."""
        return ", ".join(sorted({layer.format for layer in self.layers.values()})) or "unquantized"


def open_checkpoint(path: str | Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open a checkpoint of any format that is read: a folder or one safetensors file.

    Parameters
    ----------
    path : str or Path
        GPTQ, AWQ, compressed-tensors, GGUF, Marlin or packed by this package.
    options : ReadOptions, optional

    Raises
    ------
    CheckpointError
        Damaged files, contradicting configs, formats that are not read.
    """
    path, options = Path(path), options or ReadOptions()
    gguf = gguf_files.find(path)
    if gguf is not None:
        gguf_model = gguf_files.GGUFFiles(gguf)
        return _assemble(gguf_model, None, gguf_files.make_layers(gguf_model, options))
    files = ModelFiles(path)
    if is_packed(files):
        names = read_layer_table(files)
        return _assemble(
            files,
            None,
            {name: PackedLayer(files, name, entry, options=options) for name, entry in names.items()},
        )
    config = find_config(files)
    layers: dict[str, SourceLayer]
    if config is None:
        if any(name.endswith((".qweight", ".weight_packed")) for name in files):
            raise CheckpointError(
                f"{path}: quantized, but neither {' nor '.join(CONFIG_FILES)} is beside it; without it the "
                "bits can mean several things"
            )
        layers = {
            name: MarlinLayer(files, name, None, options=options) for name in _prefixes(files, ".B", ".s")
        }
    elif config.method == "compressed-tensors":
        layers = compressed_tensors.make_layers(files, config.values, config.where, options)
    else:
        suffix, make = _reader(config, options)
        layers = {name: make(files, name) for name in _prefixes(files, *suffix)}
    return _assemble(files, config, layers)


def _assemble(
    files: ModelFiles, config: QuantizationConfig | None, layers: dict[str, SourceLayer]
) -> Checkpoint:
    taken = {tensor for layer in layers.values() for tensor in layer.tensors}
    others = tuple(name for name in files if name not in taken)
    orphans = [name for name in others if name.endswith((".qweight", ".qzeros"))]
    if orphans:
        raise CheckpointError(f"{files.path}: tensor {orphans[0]} belongs to no layer that is complete")
    return Checkpoint(files, config, layers, others)


def _prefixes(files: ModelFiles, suffix: str, partner: str = "") -> list[str]:
    """Return the module names of all tensors with the suffix (and one with the partner suffix, if given)."""
    names = [name[: -len(suffix)] for name in files if name.endswith(suffix) and name != suffix]
    return [name for name in names if not partner or name + partner in files]


def _reader(
    config: QuantizationConfig, options: ReadOptions
) -> tuple[tuple[str, ...], Callable[[ModelFiles, str], SourceLayer]]:
    """Return the suffix that marks a layer, and the reader that the config asks for."""
    values, where = config.values, config.where
    if config.method == FORMAT:
        raise CheckpointError(
            f"{where}: quant_method is {FORMAT}, but the safetensors files were not written by {FORMAT}"
        )
    if config.method not in ("gptq", "awq", "marlin"):
        raise CheckpointError(
            f"{where}: quant_method {shown(values.get('quant_method'))} is not read; accepted: {ACCEPTED}"
        )
    if config.method != "marlin" or "bits" in values:  # the oldest Marlin configs hold the group size alone
        config.check_bits()
    size = config.group_size()
    if config.method == "marlin":
        return (".B",), lambda files, name: MarlinLayer(files, name, size, options=options)
    if config.method == "awq":
        return _awq_reader(config, size, options)
    checkpoint_format = _gptq_format(config)
    if checkpoint_format == "marlin":
        return (".B",), lambda files, name: MarlinLayer(files, name, size, options=options)
    settings = gptq.read_config(values, size, checkpoint_format, where)
    return (".qweight",), lambda files, name: GPTQLayer(files, name, settings, options=options)


def _awq_reader(
    config: QuantizationConfig, size: int, options: ReadOptions
) -> tuple[tuple[str, ...], Callable[[ModelFiles, str], SourceLayer]]:
    version = str(config.values.get("version") or "gemm").lower()
    backend = str(config.values.get("backend") or "autoawq").lower()
    if backend != "autoawq":
        raise CheckpointError(
            f"{config.where}: AWQ backend {shown(backend)} is not read; accepted: 'autoawq'"
        )
    if version == "marlin":
        return (".qweight",), lambda files, name: MarlinLayer(
            files, name, size, ("qweight", "scales"), options=options
        )
    if version != "gemm":
        raise CheckpointError(
            f"{config.where}: AWQ version {shown(version)} is not read; accepted: 'gemm', 'marlin'"
        )
    return (".qweight",), lambda files, name: AWQLayer(files, name, size, options=options)


def _gptq_format(config: QuantizationConfig) -> str | None:
    """Return the checkpoint format of a GPTQ config; None where the file names none (version 1)."""
    named = config.values.get("checkpoint_format")
    also = config.values.get("format")  # GPTQModel writes both
    if named is not None and also is not None and named != also:
        raise CheckpointError(
            f"{config.where}: checkpoint_format is {shown(named)}, but format is {shown(also)}"
        )
    named = also if named is None else named
    if gptq.true_or_false(config.values, "is_marlin_format", config.where):
        if named not in (None, "marlin"):
            raise CheckpointError(
                f"{config.where}: is_marlin_format is true, but checkpoint_format is {shown(named)}"
            )
        return "marlin"
    if named not in (None, "gptq", "gptq_v2", "marlin"):
        raise CheckpointError(
            f"{config.where}: checkpoint_format {shown(named)} is not read; accepted: 'gptq', 'gptq_v2', "
            "'marlin'"
        )
    return named


def find_config(files: ModelFiles) -> QuantizationConfig | None:
    """Return the quantization config beside the weights, or None where there is none.

    Raises
    ------
    CheckpointError
        A config that cannot be read, or two that contradict each other.
    """
    found: list[QuantizationConfig] = []
    for name in CONFIG_FILES:
        path = files.folder / name
        if not (path.exists() or path.is_symlink()):
            continue
        values: Any = load_json(files.confined(name))
        where = str(path)
        if name == "config.json":
            values = values.get("quantization_config")
            where += ": quantization_config"
            if values is None:
                continue
            if not isinstance(values, dict):
                raise CheckpointError(f"{where} is not a JSON object")
        found.append(QuantizationConfig(_with_todays_names(values, where), where))
    if not found:
        return None
    first, *others = found
    for other in others:
        _check_agreement(first, other)
        # What the first leaves open the others may say: older tools put checkpoint_format in one file only.
        first = QuantizationConfig({**other.values, **first.values}, first.where)
    # Before 2024 the files of the two tools did not say which method they belong to.
    method = _METHOD_OF_FILE.get(Path(found[-1].where).name)
    if method is not None:
        first.values.setdefault("quant_method", method)
    return first


def _with_todays_names(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the settings with older key names replaced, refusing an old and a new one that differ."""
    for old, new in _SYNONYMS.items():
        if old in values and new in values and values[old] != values[new]:
            raise CheckpointError(
                f"{where}: {old} is {shown(values[old])}, but {new} is {shown(values[new])}"
            )
    return {_SYNONYMS.get(key, key): value for key, value in values.items()}


def _check_agreement(one: QuantizationConfig, other: QuantizationConfig) -> None:
    for key in _DECISIVE:
        if key not in one.values or key not in other.values:
            continue
        mine, theirs = one.values[key], other.values[key]
        if isinstance(mine, str) and isinstance(theirs, str):
            mine, theirs = mine.lower(), theirs.lower()
        if mine != theirs:
            raise CheckpointError(
                f"{one.where} has {key} {shown(mine)}, but {other.where} has {shown(theirs)}"
            )
