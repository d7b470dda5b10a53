"""Packed and unpacked again, a model is what it was: codes, scales, zero points and groups, in any format."""

from __future__ import annotations

import json
import tempfile
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
    gptq_qweight,
    gptq_qzeros,
    write_model,
)
from helpers import FIXTURES, Case, assert_same_bits, case_id, cases, random_codes, random_scales
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from marlin_jit.formats import compare, open_checkpoint, pack_checkpoint, run_pack
from marlin_jit.formats.unpack import plan_unpack
from marlin_jit.pack import dequantize


def unpacked(source: Path, destination: Path, to: str = "gptq") -> Path:
    """Pack a model and unpack it again."""
    packed = destination.with_name(destination.name + "-packed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zero points 0 of version 1 have notes
        pack_checkpoint(source, packed)
        run_pack(plan_unpack(packed, destination, to))
    return destination


def written(folder: Path) -> dict[str, np.ndarray]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


FORMATS = ("gptq", "gptq_v2", "awq", "compressed-tensors")


def source_model(
    folder: Path,
    kind: str,
    group_size: int,
    q: np.ndarray,
    scale: np.ndarray,
    zeros: np.ndarray,
    g_idx: np.ndarray | None,
) -> Path:
    sym = bool((zeros == 8).all())
    if kind == "awq":
        return write_model(folder, awq_config(group_size=group_size), {"layer": awq_layer(q, scale, zeros)})
    if kind == "compressed-tensors":
        changes: dict[str, Any] = {"symmetric": sym, "group_size": group_size}
        if group_size == -1:
            changes |= {"strategy": "channel", "group_size": None}
        if g_idx is not None:
            changes["actorder"] = "group"
        layer = ct_layer(q, scale, None if sym else zeros, g_idx)
        return write_model(folder, ct_config(ct_group(**changes)), {"layer": layer})
    writer = {"gptq": "gptqmodel", "gptq_v2": "v2"}[kind]
    config = gptq_config(checkpoint_format=kind, group_size=group_size, sym=sym, desc_act=g_idx is not None)
    return write_model(folder, config, {"layer": gptq_layer(q, scale, zeros, writer, g_idx)})


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(FORMATS),
    group_size=st.sampled_from([32, 64, 128, -1]),
    groups=st.integers(1, 4),
    N=st.integers(1, 24).map(lambda n: 8 * n),
    sym=st.booleans(),
    ordered=st.booleans(),
    dtype=st.sampled_from([np.float16, ml_dtypes.bfloat16]),
)
def test_pack_then_unpack_is_the_identity(
    seed: int, kind: str, group_size: int, groups: int, N: int, sym: bool, ordered: bool, dtype: Any
) -> None:
    rng = np.random.default_rng(seed)
    rows = 32 * groups if group_size == -1 else group_size
    K, G = (rows, 1) if group_size == -1 else (rows * groups, groups)
    q, scale = random_codes(rng, K, N), random_scales(rng, G, N, dtype)
    zeros = np.full((G, N), 8, np.uint8) if sym else rng.integers(0, 16, (G, N), dtype=np.uint8)
    g_idx = np.arange(K, dtype=np.int32) // rows
    if ordered and kind != "awq":
        g_idx = rng.permutation(g_idx)
    with tempfile.TemporaryDirectory() as folder:
        source = source_model(
            Path(folder) / "m",
            kind,
            group_size,
            q,
            scale,
            zeros,
            g_idx if ordered and kind != "awq" else None,
        )
        found = written(unpacked(source, Path(folder) / "u"))
    zeros = np.where(scale == 0, np.uint8(8), zeros)  # any zero point times 0 is the same
    expected = {
        "layer.qweight": gptq_qweight(q),
        "layer.qzeros": gptq_qzeros(zeros, "v2"),
        "layer.scales": scale,
        "layer.g_idx": g_idx,
    }
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert_same_bits(found[name], array)


@pytest.mark.parametrize("packed_first", [False, True], ids=["as it is", "packed"])
@pytest.mark.parametrize("case", cases("gptq/*_v2_*"), ids=case_id)
def test_files_of_gptqmodel_come_back_byte_for_byte(tmp_path: Path, case: Case, packed_first: bool) -> None:
    if packed_first:
        unpacked(case.path, tmp_path / "u")
    else:
        run_pack(plan_unpack(case.path, tmp_path / "u"))
    expected = load_file(case.path / "model.safetensors")
    found = written(tmp_path / "u")
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert_same_bits(found[name], array)


READ = [c for kind in ("gptq", "awq", "marlin", "compressed_tensors") for c in cases(f"{kind}/*")]
HELD = [c for c in READ if c.info["N"] % 8 == 0]  # by GPTQ


def zero_sign(case: Case) -> bool:
    """Whether W was decoded: of one case it is the weight before packing, with -0 where codes give 0."""
    return case.path.name != "awqmarlin_g128_k256_n256"


@pytest.mark.parametrize("case", HELD, ids=case_id)
def test_gptq_of_every_file_means_its_weights(tmp_path: Path, case: Case) -> None:
    (layer,) = open_checkpoint(unpacked(case.path, tmp_path / "u")).layers.values()
    assert layer.format == "gptq_v2"
    expected = case.expected["W"]
    assert_same_bits(dequantize(layer.read()).astype(expected.dtype), expected, zero_sign(case))


@pytest.mark.parametrize("case", READ, ids=case_id)
def test_dense_weights_of_every_file_are_those_of_its_tool(tmp_path: Path, case: Case) -> None:
    """As linear layers are stored, [N, K]; widened where the tool's bfloat16 is float32 in expected.npz."""
    found = written(unpacked(case.path, tmp_path / "u", "dense"))
    expected = case.expected["W"]
    (name,) = (name for name in found if name.endswith(".weight"))
    assert_same_bits(found[name].T.astype(expected.dtype), expected, zero_sign(case))
    if (case.path / "config.json").exists():
        assert "quantization_config" not in json.loads((tmp_path / "u/config.json").read_text())


@pytest.mark.parametrize("to", ["gptq", "float16"])
@pytest.mark.parametrize("name", ["llama_gptqmodel_asym_g128", "llama_autoawq_g128"])
def test_whole_models(tmp_path: Path, name: str, to: str) -> None:
    source = FIXTURES / "checkpoints" / name
    result = unpacked(source, tmp_path / "u", to)
    layers = open_checkpoint(source).layers
    before, after = written(source), written(result)
    others = {k for k in before if k.rpartition(".")[0] not in layers}
    assert others == {k for k in after if k.rpartition(".")[0] not in layers}
    for tensor in others:
        assert_same_bits(after[tensor], before[tensor])
    with np.load(source / "expected/expected.npz") as expected:
        weights = {k.removeprefix("W."): expected[k] for k in expected if k.startswith("W.")}
    assert weights
    reopened = open_checkpoint(result)
    assert set(reopened.layers) == (set(layers) if to == "gptq" else set())
    for module, W in weights.items():
        if to == "float16":
            assert_same_bits(after[f"{module}.weight"].T, W)
        elif module in layers:
            assert_same_bits(dequantize(reopened.layers[module].read()), W)
    assert not compare(source, result).differences
    assert not compare(tmp_path / "u-packed", result).differences
