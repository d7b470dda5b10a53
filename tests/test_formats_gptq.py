"""GPTQ checkpoints: the tools' own files decode to the tools' own weights; zero points of both versions."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from checkpoint_maker import awq_config, awq_layer, gptq_config, gptq_layer, gptq_qzeros, write_model
from helpers import Case, assert_same_bits, case_id, cases, random_codes, random_scales
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from marlin_jit.errors import CheckpointError
from marlin_jit.formats import CheckpointWarning, open_checkpoint, plan_pack, to_marlin
from marlin_jit.formats.gptq import decode_zero_points, unpack_rows
from marlin_jit.pack import dequantize, pack
from marlin_jit.weight import MarlinWeight, QuantWeight

# Files in which a zero point 0 lies below others of its word, so that the reading depends on who wrote it.
DOUBTFUL = {"gptq/gm_v1_asym_g64_k128_n128_zero0_borrow": 8, "gptq/v1_asym_g64_k256_n256_zero0": 44}


@pytest.mark.parametrize("case", cases("gptq/*"), ids=case_id)
def test_files_of_the_tools_decode_to_their_weights(case: Case) -> None:
    checkpoint = open_checkpoint(case.path)
    (layer,) = checkpoint.layers.values()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weight = layer.read()
    expected = case.expected["W"]
    assert isinstance(weight, QuantWeight)
    assert_same_bits(dequantize(weight), expected)
    assert_same_bits(dequantize(pack(weight)), expected)
    doubtful = DOUBTFUL.get(case.name)
    assert len(caught) == (doubtful is not None)
    if doubtful:
        assert f"{layer.name}.qzeros: {doubtful} of" in str(caught[0].message)


@pytest.mark.parametrize("case", [*cases("gptq/*_sym_*"), *cases("gptq/v1_sym_*")], ids=case_id)
def test_symmetric_files_need_no_zero(case: Case) -> None:
    (layer,) = open_checkpoint(case.path).layers.values()
    weight = layer.read()
    assert isinstance(weight, QuantWeight)
    assert weight.symmetric


VLLM = [*cases("vllm_marlin/*sym*"), *cases("vllm_marlin/actorder*")]


@pytest.mark.parametrize("case", VLLM, ids=case_id)
def test_codes_and_packed_bytes_are_those_of_vllm(case: Case) -> None:
    tensors, expected = case.tensors, case.expected
    q = unpack_rows(tensors["gptq_qweight"])
    np.testing.assert_array_equal(q, expected["codes"])
    # With activation order vLLM packs rows sorted by group, in an order of its own among equals.
    rows = tensors.get("sort_indices", slice(None))
    weight = QuantWeight(q[rows], expected["scales"], None, case.info["group_size"])
    packed = pack(weight)
    np.testing.assert_array_equal(packed.B, tensors["B"])
    assert_same_bits(packed.scales, tensors["s"])


@pytest.mark.parametrize("writer", ["v2", "gptqmodel", "autogptq"])
@pytest.mark.parametrize("zero_point", [0, 1, 7, 8, 15])
def test_zero_points_survive_each_writer(
    tmp_path: Path, rng: np.random.Generator, zero_point: int, writer: str
) -> None:
    """One column in eight has the zero point, in the top nibble, where no writer loses anything."""
    q, scale = random_codes(rng, 64, 64), random_scales(rng, 2, 64)
    zeros = np.full((2, 64), 8, np.uint8)
    zeros[:, 7::8] = zero_point
    checkpoint_format = {"v2": "gptq_v2", "gptqmodel": "gptq", "autogptq": ...}[writer]
    config = gptq_config(checkpoint_format=checkpoint_format)
    model = write_model(tmp_path / "m", config, {"layer": gptq_layer(q, scale, zeros, writer)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = open_checkpoint(model).layers["layer"].read()
    group = np.arange(64) // 32
    exact = (q.astype(np.float64) - zeros[group]) * scale.astype(np.float64)[group]
    np.testing.assert_array_equal(dequantize(weight, np.float32), exact.astype(np.float32))


ZERO_POINTS = arrays(np.uint8, (3, 16), elements=st.integers(0, 15))


@given(ZERO_POINTS)
def test_any_zero_points_survive_version_2_and_gptqmodel(zeros: np.ndarray) -> None:
    stored = gptq_qzeros(zeros, "v2").view(np.uint32)
    np.testing.assert_array_equal(decode_zero_points(stored, 2, False)[0], zeros)
    stored = gptq_qzeros(zeros, "gptqmodel").view(np.uint32)
    np.testing.assert_array_equal(decode_zero_points(stored, 1, False)[0], zeros)


@given(ZERO_POINTS)
def test_autogptq_loses_only_what_lies_above_a_zero(zeros: np.ndarray) -> None:
    found, doubtful = decode_zero_points(gptq_qzeros(zeros, "autogptq").view(np.uint32), 1, True)
    smeared = np.maximum.accumulate((zeros == 0).reshape(3, 2, 8), axis=2).reshape(3, 16)
    np.testing.assert_array_equal(found, np.where(smeared, 0, zeros))
    first = np.diff(smeared.reshape(3, 2, 8).astype(int), axis=2, prepend=0).sum()  # the zeros that are real
    assert doubtful == smeared.sum() - first


def test_both_versions_of_one_weight_pack_to_the_same_bytes(tmp_path: Path, rng: np.random.Generator) -> None:
    q, scale = random_codes(rng, 96, 72), random_scales(rng, 3, 72)
    zeros = rng.integers(1, 16, (3, 72), dtype=np.uint8)
    packed: list[MarlinWeight] = []
    for writer, name in (("v2", "gptq_v2"), ("gptqmodel", "gptq"), ("autogptq", ...)):
        layer = gptq_layer(q, scale, zeros, writer)
        model = write_model(tmp_path / writer, gptq_config(checkpoint_format=name), {"layer": layer})
        packed.append(to_marlin(open_checkpoint(model).layers["layer"]))
    for other in packed[1:]:
        np.testing.assert_array_equal(packed[0].B, other.B)
        assert_same_bits(packed[0].scales, other.scales)
        assert packed[0].delta is not None
        assert_same_bits(packed[0].delta, other.delta)


@pytest.mark.parametrize(
    ("stored", "why"), [(7, "v1 taken for v2"), (9, "v2 taken for v1"), (0, "left empty")]
)
def test_symmetric_config_overrules_zero_points(
    tmp_path: Path, rng: np.random.Generator, stored: int, why: str
) -> None:
    q, scale = random_codes(rng, 64, 64), random_scales(rng, 2, 64)
    layer = gptq_layer(q, scale, np.full((2, 64), stored, np.uint8))
    model = write_model(tmp_path, gptq_config(checkpoint_format="gptq_v2", sym=True), {"layer": layer})
    with pytest.warns(
        CheckpointWarning, match=r"layer.qzeros: sym is true, but 128 of 128 zero points are not 8"
    ):
        weight = open_checkpoint(model).layers["layer"].read()
    assert isinstance(weight, QuantWeight)
    assert weight.symmetric


def test_any_balanced_g_idx(tmp_path: Path, rng: np.random.Generator) -> None:
    q, scale = random_codes(rng, 128, 64), random_scales(rng, 4, 64)
    zeros = rng.integers(0, 16, (4, 64), dtype=np.uint8)
    g_idx = rng.permutation(np.repeat(np.arange(4), 32))
    layer = gptq_layer(q, scale, zeros, "v2", g_idx)
    config = gptq_config(checkpoint_format="gptq_v2", desc_act=True)
    checkpoint = open_checkpoint(write_model(tmp_path, config, {"layer": layer}))
    packed = to_marlin(checkpoint.layers["layer"])
    exact = (q.astype(np.float64) - zeros[g_idx]) * scale.astype(np.float64)[g_idx]
    np.testing.assert_array_equal(dequantize(packed, np.float32), exact.astype(np.float32))
    assert packed.perm is not None


def test_g_idx_in_order_is_no_permutation(tmp_path: Path, rng: np.random.Generator) -> None:
    q, scale, zeros = random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 3, np.uint8)
    layer = gptq_layer(q, scale, zeros, "v2", np.arange(64) // 32)
    config = gptq_config(checkpoint_format="gptq_v2", desc_act=True)
    checkpoint = open_checkpoint(write_model(tmp_path, config, {"layer": layer}))
    assert to_marlin(checkpoint.layers["layer"]).perm is None


def test_uneven_groups_are_refused_before_writing(tmp_path: Path, rng: np.random.Generator) -> None:
    q, scale, zeros = random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 3, np.uint8)
    layer = gptq_layer(q, scale, zeros, "v2", np.r_[np.zeros(40), np.ones(24)])
    model = write_model(
        tmp_path / "m", gptq_config(checkpoint_format="gptq_v2", desc_act=True), {"layer": layer}
    )
    with pytest.raises(CheckpointError, match="layer: g_idx puts 40 rows in group 0; the group size is 32"):
        plan_pack(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "bits is 8; only 4-bit"),
        ({"bits": 2}, "bits is 2; only 4-bit"),
        ({"bits": True}, "bits is True"),
        ({"bits": ...}, "bits is None"),
        ({"group_size": ...}, "group_size is None"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": "32"}, "group_size is '32'"),
        ({"group_size": 40}, "group size 40 does not divide K = 64"),
        ({"group_size": 64}, r"scales has shape \[2, 64\]; expected \[1, 64\]"),
        ({"sym": "yes"}, "sym is 'yes'; expected true or false"),
        ({"checkpoint_format": "bitblas"}, "checkpoint_format 'bitblas' is not read; accepted: 'gptq'"),
        (
            {"checkpoint_format": "gptq", "format": "gptq_v2"},
            "checkpoint_format is 'gptq', but format is 'gptq_v2'",
        ),
        ({"checkpoint_format": "gptq", "is_marlin_format": True}, "is_marlin_format is true, but"),
        ({"pack_dtype": "int8"}, "pack_dtype 'int8' is not read"),
        ({"dynamic": {"+:.*up.*": {"bits": 8}}}, "dynamic gives layers '[+]:.*up.*' another bits"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors checkpoints are not read yet"),
        ({"quant_method": "gguf"}, "gguf.* is not read; accepted"),
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not read; accepted: gptq"),
        ({"quant_method": ...}, "quant_method None is not read"),
        ({"quant_method": "marlin-jit"}, "the safetensors files were not written by marlin-jit"),
    ],
)
def test_configs_that_are_refused(
    tmp_path: Path, rng: np.random.Generator, changes: dict[str, object], message: str
) -> None:
    layer = gptq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 7, np.uint8))
    model = write_model(tmp_path / "m", gptq_config(**changes), {"layer": layer})
    with pytest.raises(CheckpointError, match=message):
        plan_pack(model, tmp_path / "out")


def test_layers_that_dynamic_skips_stay_as_they_are(tmp_path: Path, rng: np.random.Generator) -> None:
    layer = gptq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 7, np.uint8))
    plain = {"mlp.up.weight": np.ones((64, 64), np.float16)}
    config = gptq_config(checkpoint_format="gptq_v2", dynamic={"-:.*up.*": {}, "+:.*": {"bits": 4}})
    checkpoint = open_checkpoint(write_model(tmp_path, config, {"layer": layer}, plain))
    assert list(checkpoint.layers) == ["layer"]
    assert checkpoint.others == ("mlp.up.weight",)


def test_scrambled_order_shows_every_wrong_axis(tmp_path: Path) -> None:
    """Codes (3k + n) % 16 and zero points (g + n) % 16 differ along every axis that could be mixed up."""
    k, n, g = np.arange(128)[:, None], np.arange(128)[None], np.arange(4)[:, None]
    q, zeros = ((3 * k + n) % 16).astype(np.uint8), ((g + n) % 16).astype(np.uint8)
    scale = (2.0 ** -(1 + (g + n) % 5)).astype(np.float16)
    gptq = write_model(
        tmp_path / "g", gptq_config(checkpoint_format="gptq_v2"), {"layer": gptq_layer(q, scale, zeros)}
    )
    awq = write_model(tmp_path / "a", awq_config(), {"layer": awq_layer(q, scale, zeros)})
    one, two = (to_marlin(open_checkpoint(model).layers["layer"]) for model in (gptq, awq))
    np.testing.assert_array_equal(one.B, two.B)
    assert_same_bits(one.scales, two.scales)
    assert one.delta is not None
    assert_same_bits(one.delta, two.delta)
    exact = (q.astype(np.float32) - zeros[k[:, 0] // 32]) * scale.astype(np.float32)[k[:, 0] // 32]
    np.testing.assert_array_equal(dequantize(one, np.float32), exact)


def test_two_configs_of_one_model(tmp_path: Path, rng: np.random.Generator) -> None:
    """They may complete each other; they may not contradict each other."""
    layer = gptq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 7, np.uint8))
    model = write_model(tmp_path, gptq_config(), {"layer": layer})
    (model / "quantize_config.json").write_text('{"bits": 4, "checkpoint_format": "gptq_v2"}')
    assert open_checkpoint(model).layers["layer"].format == "gptq_v2"
    (model / "quantize_config.json").write_text('{"bits": 4, "group_size": 64}')
    with pytest.raises(CheckpointError, match=r"has group_size 32, but .*quantize_config.json has 64"):
        open_checkpoint(model)


def test_config_of_old_autogptq(tmp_path: Path, rng: np.random.Generator) -> None:
    """quantize_config.json alone, without quant_method."""
    layer = gptq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 7, np.uint8))
    model = write_model(tmp_path, None, {"layer": layer})
    (model / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "sym": false}')
    assert open_checkpoint(model).layers["layer"].format == "gptq"


def test_no_config_at_all(tmp_path: Path, rng: np.random.Generator) -> None:
    layer = gptq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 7, np.uint8))
    with pytest.raises(CheckpointError, match="without it the bits can mean several things"):
        open_checkpoint(write_model(tmp_path, None, {"layer": layer}))
