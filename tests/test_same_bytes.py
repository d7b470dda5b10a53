"""One weight, written in the order of every tool, packs to the same bytes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_maker import (
    awq_config,
    awq_layer,
    ct_config,
    ct_group,
    ct_layer,
    gptq_config,
    gptq_layer,
    write_model,
)
from helpers import assert_same_bits, random_codes, random_scales
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from marlin_jit.formats import CheckpointWarning, pack_checkpoint
from marlin_jit.pack import dequantize
from marlin_jit.weight import MarlinWeight

Layer = dict[str, np.ndarray]


def lossless_by_autogptq(zeros: np.ndarray) -> bool:
    """Whether no zero point other than 0 lies above a 0 in its word, where AutoGPTQ overwrites it."""
    nibbles = zeros.reshape(len(zeros), -1, 8)
    above = np.maximum.accumulate(nibbles == 0, axis=2)
    return not nibbles[above].any()


def written(
    q: np.ndarray, scale: np.ndarray, zeros: np.ndarray, group_size: int, symmetric: bool
) -> dict[str, tuple[dict[str, Any], Layer]]:
    """Config and tensors of one weight by writer."""
    common: dict[str, Any] = {"group_size": group_size, "sym": symmetric}
    writers = {"v2": "gptq_v2", "gptqmodel": "gptq"}
    if lossless_by_autogptq(zeros):
        writers["autogptq"] = ...  # type: ignore[assignment]  # it names no checkpoint_format
    models = {
        f"gptq {writer}": (
            gptq_config(checkpoint_format=name, **common),
            gptq_layer(q, scale, zeros, writer),
        )
        for writer, name in writers.items()
    }
    models["awq"] = awq_config(group_size=group_size), awq_layer(q, scale, zeros)
    strategy = {"strategy": "channel", "group_size": None} if group_size == -1 else {"group_size": group_size}
    config = ct_config(ct_group(symmetric=symmetric, **strategy))
    models["compressed-tensors"] = config, ct_layer(q, scale, None if symmetric else zeros)
    if not symmetric:
        models["compressed-tensors 0.8"] = config, ct_layer(q, scale, zeros, packed_zeros=False)
    return models


def packed(folder: Path, config: dict[str, Any], layer: Layer) -> Layer:
    """The tensors of the packed file of a model with this one layer."""
    model = write_model(folder / "model", config, {"layer": layer})
    with warnings.catch_warnings():
        # Notes on borrows in v1 that are undone, and on zero points that no real quantizer spreads like this.
        warnings.simplefilter("ignore", CheckpointWarning)
        pack_checkpoint(model, folder / "out")
    return load_file(folder / "out" / "model.safetensors")


def assert_same_tensors(models: dict[str, Layer]) -> Layer:
    """Same names, dtypes, shapes and bytes in all of them; returns them."""
    first, *others = models.values()
    for other in others:
        assert sorted(other) == sorted(first)
        for name, array in first.items():
            assert_same_bits(other[name], array)
    return first


@settings(max_examples=30, deadline=None)
@given(
    group_size=st.sampled_from([32, 64, 128, -1]),
    groups=st.integers(1, 4),
    words=st.integers(1, 20),
    symmetric=st.booleans(),
    least=st.sampled_from([0, 1]),
    dtype=st.sampled_from([np.float16, ml_dtypes.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_writer_gives_the_same_packed_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    group_size: int,
    groups: int,
    words: int,
    symmetric: bool,
    least: int,
    dtype: Any,
    seed: int,
) -> None:
    """For K in whole groups (or whole words of GPTQ), N in whole words, and zero points from 0 to 15."""
    rng = np.random.default_rng(seed)
    K, N = (8 * words if group_size == -1 else groups * group_size), 8 * int(rng.integers(1, 21))
    groups = 1 if group_size == -1 else groups
    q, scale = random_codes(rng, K, N), random_scales(rng, groups, N, dtype)
    zeros = rng.integers(least, 16, (groups, N), dtype=np.uint8)
    zeros[0, 0], zeros[-1, 7] = 15, 0  # the 0 on top of its word, where no writer loses anything
    if symmetric:
        zeros[:] = 8
    folder = tmp_path_factory.mktemp("same")
    models = written(q, scale, zeros, group_size, symmetric)
    assert ("gptq autogptq" in models) or least == 0
    tensors = assert_same_tensors({name: packed(folder / name, *model) for name, model in models.items()})
    assert sorted(tensors) == ["layer.B", *([] if symmetric else ["layer.delta"]), "layer.s"]
    delta = None if symmetric else tensors["layer.delta"]
    weight = MarlinWeight(tensors["layer.B"], tensors["layer.s"], delta, (K, N), group_size)
    group = np.arange(K) // (K // groups)
    exact = (q.astype(np.float64) - zeros[group]) * scale.astype(np.float64)[group]
    np.testing.assert_array_equal(dequantize(weight, np.float32), exact.astype(np.float32))


def test_a_pattern_that_shows_every_wrong_axis(tmp_path: Path) -> None:
    """Codes (3k + n) % 16 and zero points (g + n) % 16 differ along every axis that could be mixed up."""
    k, n, g = np.arange(128)[:, None], np.arange(192)[None], np.arange(4)[:, None]
    q, zeros = ((3 * k + n) % 16).astype(np.uint8), ((g + n) % 16).astype(np.uint8)
    scale = (2.0 ** -(1 + (g + n) % 5)).astype(np.float16)
    models = written(q, scale, zeros, 32, symmetric=False)
    assert list(models) == [
        "gptq v2",
        "gptq gptqmodel",
        "awq",
        "compressed-tensors",
        "compressed-tensors 0.8",
    ]
    tensors = assert_same_tensors({name: packed(tmp_path / name, *model) for name, model in models.items()})
    weight = MarlinWeight(
        tensors["layer.B"], tensors["layer.s"], tensors["layer.delta"], shape=(128, 192), group_size=32
    )
    group = np.arange(128) // 32
    exact = (q.astype(np.float32) - zeros[group]) * scale.astype(np.float32)[group]
    np.testing.assert_array_equal(dequantize(weight, np.float32), exact)


@pytest.mark.parametrize("symmetric", [True, False])
def test_activation_order_in_gptq_and_compressed_tensors(
    tmp_path: Path, rng: np.random.Generator, symmetric: bool
) -> None:
    q, scale = random_codes(rng, 256, 96), random_scales(rng, 4, 96)
    zeros = np.full((4, 96), 8, np.uint8) if symmetric else rng.integers(0, 16, (4, 96), dtype=np.uint8)
    g_idx = rng.permutation(np.repeat(np.arange(4), 64))
    gptq = gptq_config(checkpoint_format="gptq_v2", desc_act=True, sym=symmetric, group_size=64)
    config = ct_config(ct_group(actorder="group", symmetric=symmetric, group_size=64))
    tensors = assert_same_tensors(
        {
            "gptq": packed(tmp_path / "g", gptq, gptq_layer(q, scale, zeros, "v2", g_idx)),
            "ct": packed(tmp_path / "c", config, ct_layer(q, scale, None if symmetric else zeros, g_idx)),
        }
    )
    np.testing.assert_array_equal(g_idx[tensors["layer.perm"]], np.repeat(np.arange(4), 64))
