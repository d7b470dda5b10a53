"""GPTQ checkpoints: the tools' own files decode to the tools' own weights; zero points of both versions."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_maker import (
    awq_config,
    awq_layer,
    gptq_config,
    gptq_layer,
    gptq_qzeros,
    write_model,
    write_shards,
)
from cli_runner import run
from helpers import Case, assert_same_bits, case_id, cases, random_codes, random_scales
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from marlin_jit.errors import CheckpointError
from marlin_jit.formats import CheckpointWarning, ReadOptions, open_checkpoint, plan_pack, to_marlin
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


@pytest.mark.parametrize("stored", [6, 9, 0])
def test_symmetric_config_overrules_zero_points(
    tmp_path: Path, rng: np.random.Generator, stored: int
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
        ({"dynamic": ["-:.*"]}, "dynamic is not a JSON object"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None; expected a JSON object of groups"),
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


# ---- settings by layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "skipping",
    [
        {"dynamic": {"-:.*up.*": {}, "+:.*": {"bits": 4}}},
        {"dynamic": None},
        {"modules_to_not_convert": ["up"]},
        {"modules_to_not_convert": None, "lm_head": False},
    ],
)
def test_layers_that_are_skipped_stay_as_they_are(
    tmp_path: Path, rng: np.random.Generator, skipping: dict[str, Any]
) -> None:
    layer = gptq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 7, np.uint8))
    plain = {"mlp.up.weight": np.ones((64, 64), np.float16), "lm_head.weight": np.ones((8, 64), np.float16)}
    config = gptq_config(checkpoint_format="gptq_v2", **skipping)
    checkpoint = open_checkpoint(write_model(tmp_path, config, {"layer": layer}, plain))
    assert list(checkpoint.layers) == ["layer"]
    assert set(checkpoint.others) == set(plain)


def test_a_quantized_head(tmp_path: Path, rng: np.random.Generator) -> None:
    layer = gptq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 7, np.uint8))
    model = write_model(tmp_path, gptq_config(lm_head=True), {"lm_head": layer})
    assert list(open_checkpoint(model).layers) == ["lm_head"]


DYNAMIC = {
    # The first pattern that matches counts, from the beginning of the name; the sign may be left out.
    "+:.*\\.1\\..*up": {"group_size": 64, "sym": True},
    ".*\\.(2|3)\\.": {"group_size": -1, "desc_act": True},
    "+:.*up": {"group_size": 128},
    "h\\.9": {"bits": 8},
    "+:up": {"bits": 8},
    "-:.*\\.7\\.": {},
}


def test_layers_with_other_settings(tmp_path: Path, rng: np.random.Generator) -> None:
    """Each is decoded with its own; what they mean is computed here."""
    sizes = {"h.0.down": 32, "h.1.up": 64, "h.1.down": 32, "h.2.up": -1, "h.3.down": -1, "h.4.up": 128}
    layers, exact = {}, {}
    for name, size in sizes.items():
        rows = 256 if size == -1 else size
        q, scale = random_codes(rng, 256, 64), random_scales(rng, 256 // rows, 64)
        zeros = np.full(scale.shape, 8 if name == "h.1.up" else 5, np.uint8)
        group = np.arange(256) // rows
        layers[name] = gptq_layer(q, scale, zeros, g_idx=group)
        exact[name] = (q.astype(np.float64) - zeros[group]) * scale.astype(np.float64)[group]
    config = gptq_config(checkpoint_format="gptq_v2", dynamic=DYNAMIC)
    model = write_model(tmp_path / "m", config, layers)
    found = plan_pack(model, tmp_path / "out").layers
    assert {name: plan.outline.group_size for name, plan in found.items()} == sizes
    assert [name for name, plan in found.items() if plan.outline.symmetric] == ["h.1.up"]
    for name, plan in found.items():
        np.testing.assert_array_equal(
            dequantize(plan.source.read(), np.float32), exact[name].astype(np.float32)
        )


def test_desc_act_of_one_layer_needs_g_idx(tmp_path: Path, rng: np.random.Generator) -> None:
    layer = gptq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 7, np.uint8))
    model = write_model(tmp_path, gptq_config(dynamic={"b": {"desc_act": True}}), {"a": layer, "b": layer})
    layers = open_checkpoint(model).layers
    layers["a"].outline()
    with pytest.raises(CheckpointError, match="layer b has no g_idx, but desc_act is true"):
        layers["b"].outline()


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"+:.*up.*": {"bits": 8}}, r"dynamic '\+:.*up.*' gives layer h.1.up 8 bits; only 4-bit"),
        ({".*up.*": {"bits": "4"}}, "gives layer h.1.up '4' bits"),
        ({".*up.*": {"bits": True}}, "gives layer h.1.up True bits"),
        ({"-:.*up.*": {}}, "dynamic '-:.*up.*' leaves layer h.1.up unquantized, but it has a qweight"),
        ({".*up": {"group_size": 0}}, "dynamic '.*up': group_size is 0; expected -1 or a positive"),
        ({".*up": {"group_size": None}}, "dynamic '.*up': group_size is None"),
        ({".*up": {"group_size": True}}, "dynamic '.*up': group_size is True"),
        ({".*up": {"group_size": 64}}, r"h.1.up.scales has shape \[2, 64\]; expected \[1, 64\]"),
        ({".*up": {"sym": "yes"}}, "dynamic '.*up': sym is 'yes'; expected true or false"),
        ({".*up": {"format": "marlin"}}, "gives layer h.1.up format 'marlin'; accepted: that of the model"),
        ({".*up": {"pack_dtype": "int8"}}, "gives layer h.1.up pack_dtype 'int8'"),
        ({".*up": 4}, "dynamic '.*up' is 4; expected an object"),
        ({"(": {}}, r"dynamic '\(' has a \( without its \)"),
        ({"-:(?<=h)": {}}, r"dynamic '-:\(\?<=h\)' has \(\?<, which is not read"),
        ({"a" * 2000: {}}, "has 2000 characters; at most"),
        ({f"(((({i}.*)*)*)*)*x": {} for i in range(2000)}, "layer h.1.up: takes more than [0-9]+ steps"),
    ],
)
def test_dynamic_that_is_refused(
    tmp_path: Path, rng: np.random.Generator, dynamic: dict[str, Any], message: str
) -> None:
    layer = gptq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 7, np.uint8))
    model = write_model(tmp_path / "m", gptq_config(dynamic=dynamic), {"h.1.up": layer})
    with pytest.raises(CheckpointError, match=message) as caught:
        plan_pack(model, tmp_path / "out")
    assert "\n" not in str(caught.value)


# ---- zero points of the wrong version ---------------------------------------------------------------------

GPTQ_CASES = cases("gptq/*")
WHOLE = cases("checkpoints/llama_gptq*")


def relabelled(case: Case, folder: Path) -> Path:
    """The same files with the other version in their configs."""
    shutil.copytree(case.path, folder)
    for name in ("config.json", "quantize_config.json"):
        content = json.loads((folder / name).read_text())
        config = content.get("quantization_config", content)
        version = "gptq" if config.get("checkpoint_format") == "gptq_v2" else "gptq_v2"
        config |= {"checkpoint_format": version, "format": version}
        (folder / name).write_text(json.dumps(content))
    return folder


def doubts(model: Path, options: ReadOptions | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        for layer in open_checkpoint(model, options).layers.values():
            layer.outline()
    return [str(w.message) for w in caught if "zero-format" in str(w.message)]


@pytest.mark.parametrize("case", [*GPTQ_CASES, *WHOLE], ids=case_id)
def test_files_of_the_tools_raise_no_doubts(case: Case) -> None:
    assert doubts(case.path) == []


@pytest.mark.parametrize("case", [*GPTQ_CASES, *WHOLE], ids=case_id)
def test_files_with_the_wrong_version_do(tmp_path: Path, case: Case) -> None:
    model = relabelled(case, tmp_path / "m")
    version = open_checkpoint(case.path).format
    wrong, right = (2, 1) if version == "gptq" else (1, 2)
    found = doubts(model)
    assert len(found) == len(open_checkpoint(model).layers)  # no layer goes unnoticed
    (text,) = set(found)
    assert text.startswith(f"{model}: by its config a GPTQ v{wrong} model, but its zero points")
    assert f"those of v{right}" in text
    assert f"--zero-format v{right}" in text


@pytest.mark.parametrize("case", GPTQ_CASES, ids=case_id)
def test_zero_format_overrides_the_config(tmp_path: Path, case: Case) -> None:
    """With it, files under the wrong name decode to the weights of the tool."""
    version = open_checkpoint(case.path).format
    options = ReadOptions(zero_format="v1" if version == "gptq" else "v2")
    model = relabelled(case, tmp_path / "m")
    assert doubts(model, options) == []
    (layer,) = open_checkpoint(model, options).layers.values()
    assert layer.format == version
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The label said which writer it was, too: zero points above a 0 are as lost as they were.
        expected = case.expected.get("W_wordAdd", case.expected["W"])
        assert_same_bits(dequantize(layer.read()), expected)


@pytest.mark.parametrize("case", GPTQ_CASES, ids=case_id)
def test_who_decides_hears_no_doubts(case: Case) -> None:
    for version in ("v1", "v2"):
        assert doubts(case.path, ReadOptions(zero_format=version)) == []


def test_a_model_is_doubted_once(tmp_path: Path) -> None:
    model = relabelled(WHOLE[0], tmp_path / "m")
    done = run("pack", model, tmp_path / "out")
    assert done.code == 0
    (warning,) = done.err.splitlines()
    assert warning.startswith(f"warning: {model}: by its config a GPTQ v2 model")


def test_codes_that_went_away(tmp_path: Path, rng: np.random.Generator) -> None:
    """The look at the first codes fails like any other reading."""
    layer = gptq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 7, np.uint8))
    model = write_model(tmp_path, gptq_config(), {})
    (model / "model.safetensors").unlink()
    write_shards(model, {f"{k}.safetensors": {f"layer.{k}": v} for k, v in layer.items()})
    checkpoint = open_checkpoint(model)
    path = model / "qweight.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"qweight.safetensors: became shorter while being read"):
        checkpoint.layers["layer"].outline()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"qweight.safetensors: cannot be read: No such file"):
        checkpoint.layers["layer"].outline()


@given(seed=st.integers(0, 2**32 - 1), version=st.sampled_from([1, 2]), groups=st.sampled_from([1, 2, 8]))
def test_chance_raises_no_doubts(seed: int, version: int, groups: int) -> None:
    """Codes and zero points that have nothing to do with each other tell nothing, whatever their mean."""
    rng = np.random.default_rng(seed)
    q, scale = random_codes(rng, 128, 32), random_scales(rng, groups, 32)
    layer = gptq_layer(q, scale, rng.integers(0, 16, (groups, 32), dtype=np.uint8))
    name = {1: "gptq", 2: "gptq_v2"}[version]
    config = gptq_config(checkpoint_format=name, group_size=128 // groups)
    with tempfile.TemporaryDirectory() as folder:
        assert doubts(write_model(Path(folder), config, {"layer": layer})) == []


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
