"""Write small checkpoints in other tools' layouts, from their descriptions: no code of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy, and so safetensors, bfloat16)
import numpy as np
from safetensors.numpy import save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(nibbles: np.ndarray) -> np.ndarray:
    """int32 [...] of nibbles [..., 8], the first one lowest."""
    total = np.zeros(nibbles.shape[:-1], np.uint64)
    for i in range(8):
        total |= nibbles[..., i].astype(np.uint64) << np.uint64(4 * i)
    return total.astype(np.uint32).view(np.int32)


def gptq_qweight(q: np.ndarray) -> np.ndarray:
    K, N = q.shape
    return words(q.reshape(K // 8, 8, N).transpose(0, 2, 1))


def gptq_qzeros(zero_point: np.ndarray, writer: str) -> np.ndarray:
    """qzeros as ``v2``, or as v1 by ``gptqmodel`` (words minus 0x11111111) or ``autogptq`` (OR of -1)."""
    plain = words(zero_point.reshape(zero_point.shape[0], -1, 8))
    if writer == "v2":
        return plain
    if writer == "gptqmodel":
        return (plain.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    out = np.zeros(plain.shape, np.uint32)
    for i in range(8):
        minus_one = (zero_point[:, i::8].astype(np.int64) - 1).astype(np.uint32)  # 0 becomes 0xffffffff
        out |= minus_one << np.uint32(4 * i)
    return out.view(np.int32)


def awq_words(values: np.ndarray) -> np.ndarray:
    rows, N = values.shape
    return words(values.reshape(rows, N // 8, 8)[..., AWQ_ORDER])


def gptq_config(**changes: Any) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False} | changes
    return {key: value for key, value in config.items() if value is not ...}


def gptq_layer(
    q: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    writer: str = "v2",
    g_idx: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    tensors = {"qweight": gptq_qweight(q), "qzeros": gptq_qzeros(zero_point, writer), "scales": scale}
    return tensors if g_idx is None else tensors | {"g_idx": g_idx.astype(np.int32)}


def awq_config(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
    } | changes


def awq_layer(q: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> dict[str, np.ndarray]:
    return {"qweight": awq_words(q), "qzeros": awq_words(zero_point), "scales": scale}


def write_model(
    folder: Path,
    config: dict[str, Any] | None,
    layers: dict[str, dict[str, np.ndarray]],
    others: dict[str, np.ndarray] | None = None,
) -> Path:
    """A model folder of one safetensors file; `config` becomes the quantization_config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.{key}": array for name, layer in layers.items() for key, array in layer.items()}
    save_file(tensors | (others or {}), folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        content = {"model_type": "llama", "quantization_config": config}
        (folder / "config.json").write_text(json.dumps(content))
    return folder


def write_shards(folder: Path, shards: dict[str, dict[str, np.ndarray]]) -> None:
    """Safetensors files with the index that names all their tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        save_file(tensors, folder / name, {"format": "pt"})
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def ct_words(values: np.ndarray) -> np.ndarray:
    """int32 [R, ceil(C/8)] of 0..15 [R, C], eight along a row; the last word is filled up with 0."""
    rows, columns = values.shape
    padded = np.pad(values, ((0, 0), (0, -columns % 8)))
    return words(padded.reshape(rows, -1, 8))


def ct_group(targets: tuple[str, ...] = ("Linear",), **changes: Any) -> dict[str, Any]:
    """A config group of compressed-tensors; `changes` are those of its weights, ... leaves a key out."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "actorder": None,
    } | changes
    return {
        "targets": list(targets),
        "weights": {key: value for key, value in weights.items() if value is not ...},
        "input_activations": None,
        "output_activations": None,
        "format": None,
    }


def ct_config(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups or (ct_group(),))},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    } | changes
    return {key: value for key, value in config.items() if value is not ...}


def ct_layer(
    q: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray | None = None,
    g_idx: np.ndarray | None = None,
    packed_zeros: bool = True,
) -> dict[str, np.ndarray]:
    """Tensors of a compressed-tensors layer; without `packed_zeros`, zero points as version 0.8 writes."""
    tensors = {
        "weight_packed": ct_words(q.T),
        "weight_scale": np.ascontiguousarray(scale.T),
        "weight_shape": np.array(q.T.shape, np.int64),
    }
    if zero_point is not None:
        plain = np.ascontiguousarray((zero_point.astype(np.int8) - 8).T)
        tensors["weight_zero_point"] = np.ascontiguousarray(ct_words(zero_point).T) if packed_zeros else plain
    return tensors if g_idx is None else tensors | {"weight_g_idx": g_idx.astype(np.int32)}
