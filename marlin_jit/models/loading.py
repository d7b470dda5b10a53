"""From a folder that ``marlin-jit pack`` wrote to a `Model`, under the names of Hugging Face or of GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

import marlin_jit as mj

from .config import LlamaConfig
from .linear import GateUp, Linear, SideBySide
from .llama import Layer, Model
from .packing import pack_model

__all__ = ["load", "resolve_device"]

Device = Literal["auto", "cpu", "gpu"]

HF_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.{}.",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
GGUF_NAMES = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "layer": "blk.{}.",
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "output": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
# Older checkpoints keep the rotary frequencies, which follow from the config.
_IGNORED = (".rotary_emb.inv_freq",)


def load(path: str | Path, *, device: Device = "auto", pack: bool = True, fuse: bool = True) -> Model:
    """Load a model.

    Parameters
    ----------
    path : str or Path
        A folder written by ``marlin-jit pack`` or ``marlin-jit quantize``, from a Hugging Face checkpoint
        (``config.json``) or from a GGUF file (``gguf.json``).
    device : "auto", "cpu", "gpu"
        Where to. ``auto``: the current GPU if there is one, else NumPy.
    pack : bool
        Pack layers that are dense, above all the head, as :func:`marlin_jit.models.pack_model` does with its
        defaults. Dense layers on a GPU need cuBLAS.
    fuse : bool
        Join q, k and v, and gate and up, as :meth:`Model.fuse` does.

    Returns
    -------
    Model

    Raises
    ------
    CheckpointError
        Damaged or incomplete files, or a model that the forward does not run.
    DeviceError
        ``gpu``, and there is none.
    """
    path = Path(path)
    place = _placer(resolve_device(device))
    config, names = read_config(path)
    weights = _Weights(mj.load(path), path, names, place)
    layers = [_layer(weights, config, i) for i in range(config.layers)]
    norm = weights.norm("norm", config.hidden)
    dtype = weights.dtype or np.dtype(np.float16)
    table = weights.dense("embedding", (config.vocab, config.hidden))
    if config.tied and not weights.has_linear("head"):
        head = Linear(names["embedding"], table.T)
    elif names is GGUF_NAMES or not config.tied:
        head = weights.linear("head", config.hidden, config.vocab)
        config = replace(config, tied=False)
    else:
        head = Linear(names["embedding"], table.T)
        weights.ignore("head")
    weights.check_all_used()
    model = Model(config, table.astype(dtype), layers, norm, head)
    if pack:
        pack_model(model)
    if fuse:
        model.fuse()
    return model


def resolve_device(device: Device) -> Literal["cpu", "gpu"]:
    """Return where ``auto`` means; raise `DeviceError` for ``gpu`` where there is none."""
    if device not in ("auto", "cpu", "gpu"):
        raise mj.DeviceError(f"device is 'auto', 'cpu' or 'gpu', got {device!r}")
    if device == "cpu":
        return "cpu"
    try:
        import cupy

        there = bool(cupy.cuda.is_available())
    except ImportError:
        there = False
    if not there and device == "gpu":
        raise mj.DeviceError("no CUDA device can be used; device='cpu' runs in NumPy")
    return "gpu" if there else "cpu"


def read_config(path: Path) -> tuple[LlamaConfig, dict[str, str]]:
    """Return the config of a model folder, and how its tensors are named."""
    for name, names in (("gguf.json", GGUF_NAMES), ("config.json", HF_NAMES)):
        if (path / name).is_file():
            values = read_json(path / name)
            read = LlamaConfig.from_gguf if names is GGUF_NAMES else LlamaConfig.from_hf
            return read(values, str(path / name)), names
    if not path.exists():
        raise mj.CheckpointError(f"{path}: no such file or folder")
    raise mj.CheckpointError(
        f"{path}: has neither config.json nor gguf.json; name a folder that `marlin-jit pack SRC DST` wrote"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    CheckpointError
        It cannot be read, or is no object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise mj.CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise mj.CheckpointError(f"{path}: is not JSON") from None
    if not isinstance(values, dict):
        raise mj.CheckpointError(f"{path}: is not a JSON object")
    return values


def _placer(device: Literal["cpu", "gpu"]) -> Callable[[Any], Any]:
    """Return what moves an array or a weight to the device."""
    if device == "cpu":
        return lambda value: value
    import cupy

    return lambda value: value.to_device() if isinstance(value, mj.MarlinWeight) else cupy.asarray(value)


def _layer(weights: _Weights, config: LlamaConfig, i: int) -> Layer:
    queries, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return Layer(
        attention_norm=weights.norm("attention_norm", config.hidden, i),
        qkv=SideBySide(
            weights.linear("q", config.hidden, queries, i),
            weights.linear("k", config.hidden, shared, i),
            weights.linear("v", config.hidden, shared, i),
        ),
        output=weights.linear("output", queries, config.hidden, i),
        mlp_norm=weights.norm("mlp_norm", config.hidden, i),
        gate_up=GateUp(
            weights.linear("gate", config.hidden, config.intermediate, i),
            weights.linear("up", config.hidden, config.intermediate, i),
        ),
        down=weights.linear("down", config.intermediate, config.hidden, i),
    )


class _Weights:
    """Weights by their role, checked against the sizes of the config and moved to the device."""

    def __init__(
        self, packed: Any, path: Path, names: Mapping[str, str], place: Callable[[Any], Any]
    ) -> None:
        self._packed, self._path, self._names, self._place = packed, path, names, place
        self._unused = {*packed, *packed.tensors}
        self.dtype: np.dtype[Any] | None = None  # of the packed weights read so far

    def has_linear(self, role: str) -> bool:
        name = self._name(role)
        return name in self._packed or f"{name}.weight" in self._packed.tensors

    def ignore(self, role: str) -> None:
        self._unused -= {self._name(role), f"{self._name(role)}.weight"}

    def linear(self, role: str, K: int, N: int, layer: int | None = None) -> Linear:
        name = self._name(role, layer)
        bias = self._bias(name, N)
        bias = None if bias is None else self._place(bias)
        if name not in self._packed:
            return Linear(name, self.dense(role, (N, K), layer).T, bias)
        self._unused.discard(name)
        weight = self._packed[name]
        if weight.shape != (K, N):
            raise mj.CheckpointError(
                f"{self._path}: layer {name} is {weight.K} x {weight.N}; the config says {K} x {N}"
            )
        if self.dtype is None:
            self.dtype = weight.dtype
        elif weight.dtype != self.dtype:
            raise mj.CheckpointError(
                f"{self._path}: layer {name} is {weight.dtype}, those before it {self.dtype}; a "
                "model is of one dtype"
            )
        return Linear(name, self._place(weight), None if bias is None else bias.astype(self.dtype))

    def dense(self, role: str, shape: tuple[int, ...], layer: int | None = None) -> Any:
        return self._place(self._tensor(f"{self._name(role, layer)}.weight", shape))

    def norm(self, role: str, size: int, layer: int | None = None) -> Any:
        return self._place(self._tensor(f"{self._name(role, layer)}.weight", (size,)).astype(np.float32))

    def check_all_used(self) -> None:
        left = sorted(name for name in self._unused if not name.endswith(_IGNORED))
        if left:
            what = f"{', '.join(left[:3])}{', ...' if len(left) > 3 else ''}"
            raise mj.CheckpointError(
                f"{self._path}: holds {len(left)} tensors that a Llama has no use for ({what}): another "
                "architecture, or rope scaling (rope_freqs)"
            )

    def _bias(self, name: str, N: int) -> Any:
        return self._tensor(f"{name}.bias", (N,)) if f"{name}.bias" in self._packed.tensors else None

    def _name(self, role: str, layer: int | None = None) -> str:
        return self._names[role] if layer is None else self._names["layer"].format(layer) + self._names[role]

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Any:
        if name not in self._packed.tensors:
            raise mj.CheckpointError(f"{self._path}: tensor {name} is missing")
        array = self._packed.tensors[name]
        if array.shape != shape:
            raise mj.CheckpointError(
                f"{self._path}: tensor {name} is {list(array.shape)}; the config says {list(shape)}"
            )
        if array.dtype.name not in ("float16", "bfloat16", "float32"):
            raise mj.CheckpointError(
                f"{self._path}: tensor {name} is {array.dtype}, not float16, bfloat16 or float32"
            )
        self._unused.discard(name)
        return array
