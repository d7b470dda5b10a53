"""compressed-tensors checkpoints: the tool's files decode to its weights; which settings a module has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_maker import ct_config, ct_group, ct_layer, write_model
from helpers import Case, assert_same_bits, case_id, cases, random_codes, random_scales
from hypothesis import given, settings
from hypothesis import strategies as st

from marlin_jit.errors import CheckpointError
from marlin_jit.formats import (
    CheckpointWarning,
    compare,
    load,
    open_checkpoint,
    pack_checkpoint,
    plan_pack,
    to_marlin,
)
from marlin_jit.formats.layer import ReadOptions
from marlin_jit.pack import dequantize, pack
from marlin_jit.weight import QuantWeight

Change = Callable[[dict[str, Any]], object]


def values(words: np.ndarray, count: int, axis: int) -> np.ndarray:
    """The first `count` values 0..15 along an axis of int32 words, read one by one."""
    i = np.arange(count)
    word = np.take(words.view(np.uint32).astype(np.int64), i // 8, axis)
    shift = 4 * (i % 8)
    return word >> (shift if axis == 1 else shift[:, None]) & 15


@pytest.mark.parametrize("case", cases("compressed_tensors/*"), ids=case_id)
def test_files_of_the_tool_decode_to_its_weights(case: Case) -> None:
    (layer,) = open_checkpoint(case.path).layers.values()
    weight = layer.read()
    assert isinstance(weight, QuantWeight)
    assert weight.shape == (case.info["K"], case.info["N"])
    assert (weight.group_size, weight.symmetric) == (case.info["group_size"], case.info["sym"])
    # The tool's bfloat16 weights are in expected.npz as float32: the same values, so widening changes none.
    expected = case.expected["W"]
    assert weight.dtype == (np.float16 if expected.dtype == np.float16 else ml_dtypes.bfloat16)
    assert_same_bits(dequantize(weight).astype(expected.dtype), expected)
    assert_same_bits(dequantize(pack(weight)).astype(expected.dtype), expected)


@pytest.mark.parametrize("case", cases("compressed_tensors/*"), ids=case_id)
def test_codes_scales_and_zero_points_of_the_tool(case: Case) -> None:
    """Read one by one, and the codes once more from the tool's own weights: W/scale + zero point."""
    tensors = case.tensors
    weight = open_checkpoint(case.path).layers[case.info["prefix"]].read()
    assert isinstance(weight, QuantWeight)
    np.testing.assert_array_equal(weight.q, values(tensors["weight_packed"], weight.K, 1).T)
    assert_same_bits(weight.scale, np.ascontiguousarray(tensors["weight_scale"].T))
    zeros = np.full(weight.scale.shape, 8)
    if not weight.symmetric:
        zeros = values(tensors["weight_zero_point"], weight.N, 0).T
        np.testing.assert_array_equal(weight.zero, -zeros * weight.scale.astype(np.float64))
    group = tensors.get("weight_g_idx", np.arange(weight.K) // (weight.K // len(weight.scale)))
    np.testing.assert_array_equal(weight.g_idx, tensors.get("weight_g_idx"))
    steps = case.expected["W"].astype(np.float64) / weight.scale.astype(np.float64)[group]
    np.testing.assert_array_equal(weight.q, np.rint(steps) + zeros[group])


@pytest.mark.parametrize("case", cases("compressed_tensors/*"), ids=case_id)
def test_pack_and_compare(tmp_path: Path, case: Case) -> None:
    pack_checkpoint(case.path, tmp_path / "out")
    model, prefix = load(tmp_path / "out"), case.info["prefix"]
    assert (list(model), model.entries[prefix].source_format) == ([prefix], "compressed-tensors")
    assert list(model.tensors) == ([f"{prefix}.bias"] if case.info["bias"] else [])
    expected = case.expected["W"]
    assert_same_bits(dequantize(model[prefix]).astype(expected.dtype), expected)
    assert compare(case.path, tmp_path / "out").differences == ()


def parts(
    rng: np.random.Generator, K: int = 64, N: int = 40, groups: int = 2, dtype: Any = np.float16
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    zeros = rng.integers(0, 16, (groups, N), dtype=np.uint8)
    return random_codes(rng, K, N), random_scales(rng, groups, N, dtype), zeros


def exact(q: np.ndarray, scale: np.ndarray, zeros: np.ndarray, group: np.ndarray) -> np.ndarray:
    return ((q.astype(np.float64) - zeros[group]) * scale.astype(np.float64)[group]).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    K=st.integers(1, 80),
    N=st.integers(1, 24),
    dtype=st.sampled_from([np.float16, ml_dtypes.bfloat16]),
    packed_zeros=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_k_and_n_with_one_group_a_column(
    tmp_path_factory: pytest.TempPathFactory, K: int, N: int, dtype: Any, packed_zeros: bool, seed: int
) -> None:
    """The last word of a row of codes, and of a column of zero points, need not be full."""
    q, scale, zeros = parts(np.random.default_rng(seed), K, N, 1, dtype)
    config = ct_config(ct_group(strategy="channel", group_size=None))
    layer = ct_layer(q, scale, zeros, packed_zeros=packed_zeros)
    model = write_model(tmp_path_factory.mktemp("model"), config, {"layer": layer})
    packed = to_marlin(open_checkpoint(model).layers["layer"])
    assert packed.shape == (K, N)
    np.testing.assert_array_equal(
        dequantize(packed, np.float32), exact(q, scale, zeros, np.zeros(K, np.int64))
    )


def test_what_fills_up_a_word_is_not_looked_at(tmp_path: Path, rng: np.random.Generator) -> None:
    q, scale, zeros = parts(rng, K=100, N=36, groups=1)
    layer = ct_layer(q, scale, zeros)
    layer["weight_packed"][:, -1] |= np.int32(-1 << 16)
    layer["weight_zero_point"][-1] |= np.int32(-1 << 16)
    config = ct_config(ct_group(strategy="channel", group_size=-1))
    weight = open_checkpoint(write_model(tmp_path, config, {"layer": layer})).layers["layer"].read()
    np.testing.assert_array_equal(
        dequantize(weight, np.float32), exact(q, scale, zeros, np.zeros(100, np.int64))
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("actorder", [..., None, False, "weight", "static", "Static"])
def test_orders_that_leave_rows_where_they_are(
    tmp_path: Path, rng: np.random.Generator, actorder: Any, symmetric: bool
) -> None:
    """The group size is that of the config, whatever the order of activations did to the codes."""
    q, scale, zeros = parts(rng)
    zeros = np.full_like(zeros, 8) if symmetric else zeros
    config = ct_config(ct_group(actorder=actorder, symmetric=symmetric))
    layer = ct_layer(q, scale, None if symmetric else zeros)
    weight = open_checkpoint(write_model(tmp_path, config, {"layer": layer})).layers["layer"].read()
    assert (weight.group_size, weight.symmetric) == (32, symmetric)
    np.testing.assert_array_equal(dequantize(weight, np.float32), exact(q, scale, zeros, np.arange(64) // 32))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("actorder", [True, "group", "dynamic", "GROUP"])
def test_rows_in_groups_by_g_idx(
    tmp_path: Path, rng: np.random.Generator, actorder: Any, symmetric: bool
) -> None:
    q, scale, zeros = parts(rng, K=128, groups=4)
    zeros = np.full_like(zeros, 8) if symmetric else zeros
    g_idx = rng.permutation(np.repeat(np.arange(4), 32))
    config = ct_config(ct_group(actorder=actorder, symmetric=symmetric))
    layer = ct_layer(q, scale, None if symmetric else zeros, g_idx)
    packed = to_marlin(open_checkpoint(write_model(tmp_path, config, {"layer": layer})).layers["layer"])
    assert packed.perm is not None
    np.testing.assert_array_equal(dequantize(packed, np.float32), exact(q, scale, zeros, g_idx))


@pytest.mark.parametrize("actorder", [None, "weight", "group"])
@pytest.mark.parametrize("g_idx", [np.arange(64) // 32, np.full(64, -1)], ids=["in order", "never set"])
def test_g_idx_that_reorders_nothing(
    tmp_path: Path, rng: np.random.Generator, g_idx: np.ndarray, actorder: Any
) -> None:
    q, scale, zeros = parts(rng)
    layer = ct_layer(q, scale, zeros, g_idx)
    model = write_model(tmp_path, ct_config(ct_group(actorder=actorder)), {"layer": layer})
    checkpoint = open_checkpoint(model)
    assert checkpoint.others == ()
    assert to_marlin(checkpoint.layers["layer"]).perm is None


@pytest.mark.parametrize("packed_zeros", [True, False])
@pytest.mark.parametrize("zero_point", [0, 1, 7, 8, 15])
def test_zero_points_of_old_and_new_files(
    tmp_path: Path, rng: np.random.Generator, zero_point: int, packed_zeros: bool
) -> None:
    q, scale, _ = parts(rng, N=44)
    zeros = np.full((2, 44), zero_point, np.uint8)
    layer = ct_layer(q, scale, zeros, packed_zeros=packed_zeros)
    weight = open_checkpoint(write_model(tmp_path, ct_config(), {"layer": layer})).layers["layer"].read()
    assert weight.symmetric == (zero_point == 8)
    np.testing.assert_array_equal(dequantize(weight, np.float32), exact(q, scale, zeros, np.arange(64) // 32))


@pytest.mark.parametrize("packed_zeros", [True, False])
def test_symmetric_config_overrules_zero_points(
    tmp_path: Path, rng: np.random.Generator, packed_zeros: bool
) -> None:
    q, scale, zeros = parts(rng)
    zeros[:] = 8
    config = ct_config(ct_group(symmetric=True))
    layer = ct_layer(q, scale, zeros, packed_zeros=packed_zeros)
    assert open_checkpoint(write_model(tmp_path, config, {"layer": layer})).layers["layer"].read().symmetric
    zeros[1, 5:7] = 3
    layer = ct_layer(q, scale, zeros, packed_zeros=packed_zeros)
    with pytest.warns(
        CheckpointWarning, match="zero_point: symmetric is true, but 2 of 80 zero points are not 0"
    ):
        weight = open_checkpoint(write_model(tmp_path, config, {"layer": layer})).layers["layer"].read()
    assert weight.symmetric


@pytest.mark.parametrize(("K", "group_size", "packed_as"), [(768, 192, 64), (256, 256, -1), (64, 64, -1)])
def test_group_sizes(
    tmp_path: Path, rng: np.random.Generator, K: int, group_size: int, packed_as: int
) -> None:
    q, scale, zeros = parts(rng, K, 24, K // group_size)
    config = ct_config(ct_group(group_size=group_size))
    model = write_model(tmp_path / "m", config, {"layer": ct_layer(q, scale, zeros)})
    pack_checkpoint(model, tmp_path / "out")
    packed = load(tmp_path / "out")["layer"]
    assert packed.group_size == packed_as
    np.testing.assert_array_equal(
        dequantize(packed, np.float32), exact(q, scale, zeros, np.arange(K) // group_size)
    )


@pytest.mark.parametrize(
    ("strategy", "group_size", "expected"),
    [("group", 32, 32), (..., 32, 32), ("Group", 32, 32), ("channel", ..., -1), (..., -1, -1)],
)
def test_strategy_may_be_left_to_the_group_size(
    tmp_path: Path, rng: np.random.Generator, strategy: Any, group_size: Any, expected: int
) -> None:
    q, scale, zeros = parts(rng, groups=2 if expected == 32 else 1)
    config = ct_config(ct_group(strategy=strategy, group_size=group_size))
    model = write_model(tmp_path, config, {"layer": ct_layer(q, scale, zeros)})
    assert open_checkpoint(model).layers["layer"].read().group_size == expected


NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj")


def group_sizes_of(tmp_path: Path, config: dict[str, Any]) -> list[int]:
    """Open a model of `NAMES` whose shapes fit every group size, and return which each layer was given."""
    layer = ct_layer(np.full((64, 8), 3, np.uint8), np.ones((2, 8), np.float16))
    checkpoint = open_checkpoint(write_model(tmp_path, config, dict.fromkeys(NAMES, layer)))
    assert sorted(checkpoint.layers) == sorted(NAMES)
    return [checkpoint.layers[name].settings.group_size for name in NAMES]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([("Linear",)], [32, 32, 32]),
        ([NAMES[:1], NAMES[1:]], [32, 64, 64]),
        ([(r"re:.*self_attn\..*",), (r"re:.*mlp",)], [32, 64, 64]),
        ([("Linear",), (r"re:.*layers\.1\d\.",)], [32, 32, 64]),
        ([(r"re:.*\.(q|k)_proj$", NAMES[1]), ("Linear",)], [32, 32, 64]),
        ([("re:.*",), (NAMES[1],), ("Linear",)], [32, 64, 32]),
        ([("Linear", "re:model"), ("Linear",)], [32, 32, 32]),
        ([("Linear", "Conv2d", "re:.*vision.*", "model.nothing"), ("re:.*not_there",)], [32, 32, 32]),
        ([("re:.*q_proj", "re:.*q_p", NAMES[0], NAMES[0]), ("Linear",)], [32, 64, 64]),
    ],
)
def test_a_name_counts_more_than_a_pattern_and_that_more_than_all(
    tmp_path: Path, groups: list[tuple[str, ...]], expected: list[int]
) -> None:
    sizes = [32, 64, 128]
    made = [
        ct_group(targets, group_size=size, symmetric=True)
        for targets, size in zip(groups, sizes, strict=False)
    ]
    assert group_sizes_of(tmp_path, ct_config(*made)) == expected


def test_groups_that_agree_may_overlap(tmp_path: Path) -> None:
    config = ct_config(ct_group(("re:.*up",)), ct_group(("re:.*mlp",), actorder="weight"), ct_group())
    assert group_sizes_of(tmp_path, config) == [32, 32, 32]


@pytest.mark.parametrize("ignore", [None, [], ["lm_head", "Embedding", "re:.*gate$", "re:vision.*"]])
def test_ignored_modules_that_are_not_quantized(tmp_path: Path, ignore: Any) -> None:
    assert group_sizes_of(tmp_path, ct_config(ignore=ignore)) == [32, 32, 32]


def test_modules_without_packed_weights_stay_as_they_are(tmp_path: Path, rng: np.random.Generator) -> None:
    plain = {"lm_head.weight": np.ones((8, 64), np.float16), "a.bias": np.ones(40, np.float16)}
    config = ct_config(ct_group(("a", "lm_head", "absent")), ignore=[])
    model = write_model(tmp_path / "m", config, {"a": ct_layer(*parts(rng))}, plain)
    pack_checkpoint(model, tmp_path / "out")
    packed = load(tmp_path / "out")
    assert list(packed) == ["a"]
    assert sorted(packed.tensors) == sorted(plain)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ct_config(ct_group(("a", "re:.*up")), ct_group(("re:.*mlp",), group_size=64)),
            "layer b.mlp.up, which has a weight_packed, is the target of two config groups that differ: "
            "'group_0', 'group_1'",
        ),
        (
            ct_config(ct_group(), ct_group(symmetric=True)),
            "layer a, which .* two config groups that differ: 'group_0', 'group_1'",
        ),
        (
            ct_config(ct_group(("a",)), ct_group(("a",), actorder="group")),
            "layer a, which .* is the target of two config groups that differ",
        ),
        (ct_config(ct_group(("a",))), "layer b.mlp.up, which .*, is the target of no config group"),
        (ct_config(ct_group(("re:.*up$", "Conv2d"))), "layer a, which .*, is the target of no config group"),
        (ct_config(ct_group(("re:mlp",))), "layer a, which .*, is the target of no config group"),
        (ct_config(ignore=["a"]), "layer a, which has a weight_packed, is one that ignore names: 'a'"),
        (ct_config(ignore=["re:b"]), "layer b.mlp.up, which .* is one that ignore names: 're:b'"),
        (ct_config(ignore=["Linear"]), "layer a, which .* is one that ignore names: 'Linear'"),
        (ct_config(ct_group(("re:(a+",))), r"config group 'group_0': target 're:\(a\+' has a \( without"),
        (ct_config(ignore=["re:(?i)LM_HEAD"]), r"ignore 're:\(\?i\)LM_HEAD' has \(\?i, which is not read"),
        (
            ct_config(ct_group(("re:((a?){1000}){1000}",))),
            "layer a, which .* is not to be matched with the patterns: takes more than 10000 steps",
        ),
    ],
)
def test_modules_whose_settings_are_not_clear(
    tmp_path: Path, rng: np.random.Generator, config: dict[str, Any], message: str
) -> None:
    layer = ct_layer(*parts(rng))
    model = write_model(tmp_path / "m", config, {"a": layer, "b.mlp.up": layer})
    with pytest.raises(CheckpointError, match=f"config.json: quantization_config: {message}") as caught:
        plan_pack(model, tmp_path / "out")
    assert "\n" not in str(caught.value)


def in_group(**changes: Any) -> dict[str, Any]:
    return ct_config(ct_group() | changes)


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        (ct_config(format=name), f"group 'group_0': format '{name}' is not read; accepted: 'pack-quantized'")
        for name in (
            "naive-quantized",
            "int-quantized",
            "float-quantized",
            "marlin-24",
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "mixed-precision",
            "dense",
        )
    ),
    (ct_config(format=...), "format None is not read; accepted: 'pack-quantized'"),
    (in_group(format="float-quantized"), "group 'group_0': format 'float-quantized' is not read"),
    (
        ct_config(ct_group(), ct_group(("re:nothing",)) | {"format": "int-quantized"}),
        "config group 'group_1': format 'int-quantized' is not read",
    ),
    (
        in_group(input_activations={"num_bits": 8, "dynamic": True, "strategy": "token"}),
        r"group_0': input_activations are quantized; only weights may be \(null is accepted\)",
    ),
    (in_group(output_activations={"num_bits": 8}), "group_0': output_activations are quantized"),
    (in_group(weights=None), "group_0': weights is None; expected a JSON object"),
    (in_group(weights=[4]), r"weights is \[4\]; expected a JSON object"),
    (in_group(targets="Linear"), "group_0': targets is 'Linear'; expected a list of strings"),
    (in_group(targets=["a", 3]), r"targets is \['a', 3\]; expected a list of strings"),
    (in_group(targets=None), "targets is None; expected a list of strings"),
    (ct_config(ignore="lm_head"), "ignore is 'lm_head'; expected a list of strings"),
    (ct_config(config_groups=...), "config_groups is None; expected a JSON object of groups"),
    (ct_config(config_groups={}), "config_groups is {}; expected a JSON object of groups"),
    (ct_config(config_groups=[ct_group()]), r"config_groups is \[.*; expected a JSON object of groups"),
    (
        ct_config(config_groups={"W4A16": ["Linear"]}),
        r"config group 'W4A16' is \['Linear'\], not a JSON object; presets are not read",
    ),
    (ct_config(ct_group(num_bits=8)), "group_0': num_bits is 8; only 4-bit weights are packed"),
    (ct_config(ct_group(num_bits=...)), "num_bits is None; only 4-bit"),
    (ct_config(ct_group(num_bits=True)), "num_bits is True; only 4-bit"),
    (ct_config(ct_group(type="float")), "type is 'float'; only 'int' is read"),
    (ct_config(ct_group(dynamic=True)), "dynamic is True; weights are read with false"),
    (ct_config(ct_group(dynamic="local")), "dynamic is 'local'; weights are read with false"),
    (ct_config(ct_group(symmetric="yes")), "symmetric is 'yes'; expected true or false"),
    (ct_config(ct_group(symmetric=None)), "symmetric is None; expected true or false"),
    (
        ct_config(ct_group(actorder="random")),
        "actorder 'random' is not read; accepted: null, 'weight', 'static', 'group', 'dynamic', true, false",
    ),
    *(
        (
            ct_config(ct_group(strategy=name)),
            f"strategy '{name}' is not read; accepted: 'group', 'channel'",
        )
        for name in ("tensor", "block", "token", "tensor_group", "attn_head")
    ),
    (ct_config(ct_group(strategy=None, group_size=None)), "strategy None is not read"),
    (ct_config(ct_group(strategy=None, group_size=0)), "strategy None is not read"),
    *(
        (
            ct_config(ct_group(group_size=size)),
            f"group_size is {size!r}; strategy 'group' takes a positive integer",
        )
        for size in (None, 0, -1, "32", True, 32.0, 2**31)
    ),
    (ct_config(ct_group(strategy="channel")), "group_size is 32; strategy 'channel' takes null or -1"),
    (
        ct_config(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config of format 'sparse-24-bitmask' is not read; accepted: 'dense'",
    ),
    (ct_config(sparsity_config="2:4"), "sparsity_config of format '2:4' is not read"),
    (
        ct_config(transform_config={"config_groups": {"R1": {}}}),
        "transform_config is not read: its weights go with activations that are transformed",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_configs_that_are_refused(
    tmp_path: Path, rng: np.random.Generator, config: dict[str, Any], message: str
) -> None:
    model = write_model(tmp_path / "m", config, {"layer": ct_layer(*parts(rng))})
    with pytest.raises(CheckpointError, match=f"config.json: quantization_config: .*{message}") as caught:
        plan_pack(model, tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sparsity_config": {}},
        {"sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}},
        {"transform_config": {}},
        {"transform_config": {"config_groups": {}}},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quantization_status": "frozen", "global_compression_ratio": 1.5, "moe_sparsity_config": None},
        {"format": "mixed-precision", "config_groups": {"g": ct_group() | {"format": "pack-quantized"}}},
    ],
)
def test_settings_that_change_no_weight(
    tmp_path: Path, rng: np.random.Generator, changes: dict[str, Any]
) -> None:
    q, scale, zeros = parts(rng)
    model = write_model(tmp_path, ct_config(**changes), {"layer": ct_layer(q, scale, zeros)})
    weight = open_checkpoint(model).layers["layer"].read()
    np.testing.assert_array_equal(dequantize(weight, np.float32), exact(q, scale, zeros, np.arange(64) // 32))


def put(name: str, array: np.ndarray | None) -> Change:
    """A change to a layer: another tensor, or (None) one left out."""
    return lambda layer: layer.pop(name) if array is None else layer.update({name: array})


ORDER = np.arange(64) // 32


@pytest.mark.parametrize(
    ("change", "group", "message"),
    [
        (put("weight_scale", None), {}, "layer layer has no weight_scale"),
        (put("weight_shape", None), {}, "layer layer has no weight_shape"),
        (put("weight_zero_point", None), {}, "layer layer has no weight_zero_point"),
        (put("weight_packed", None), {}, "layer.weight_s.* belongs to no layer with a weight_packed"),
        (put("weight_packed", np.zeros((40, 8), np.int64)), {}, "weight_packed has dtype I64; expected I32"),
        (
            put("weight_packed", np.zeros((2, 40, 8), np.int32)),
            {},
            r"weight_packed has shape \[2, 40, 8\]; expected a matrix",
        ),
        (put("weight_packed", np.zeros((0, 8), np.int32)), {}, "expected a matrix that is not empty"),
        (
            put("weight_packed", np.zeros((40, 16), np.int32)),
            {},
            r"weight_shape is \[40, 64\]; weight_packed of shape \[40, 16\] holds N = 40 and K = 121 to 128",
        ),
        (
            put("weight_packed", np.zeros((80, 8), np.int32)),
            {},
            r"weight_shape is \[40, 64\]; weight_packed of shape \[80, 8\] holds N = 80",
        ),
        (put("weight_shape", np.array([40, 56])), {}, r"weight_shape is \[40, 56\]; .* K = 57 to 64"),
        (put("weight_shape", np.array([40, 65])), {}, r"weight_shape is \[40, 65\]; .* K = 57 to 64"),
        (put("weight_shape", np.array([64, 40])), {}, r"weight_shape is \[64, 40\]; .* holds N = 40"),
        (put("weight_shape", np.array([40, -64])), {}, r"weight_shape is \[40, -64\]"),
        (put("weight_shape", np.array([40, 2**62])), {}, r"weight_shape is \[40, 4611686018427387904\]"),
        (put("weight_shape", np.array([40, 63])), {}, "group size 32 does not divide K = 63"),
        (
            put("weight_shape", np.array([40, 64, 1])),
            {},
            r"weight_shape is I64 \[3\]; expected I64 or I32 \[2\]",
        ),
        (put("weight_shape", np.array([40.0, 64.0])), {}, r"weight_shape is F64 \[2\]; expected I64 or I32"),
        (
            put("weight_scale", np.ones((40, 2), np.float32)),
            {},
            "weight_scale has dtype F32; expected F16 or",
        ),
        (
            put("weight_scale", np.ones((40, 4), np.float16)),
            {},
            r"weight_scale has shape \[40, 4\]; expected \[40, 2\] \(for K = 64, N = 40 and group size 32\)",
        ),
        (
            put("weight_scale", np.ones((2, 40), np.float16)),
            {},
            r"weight_scale has shape \[2, 40\]; expected \[40, 2\]",
        ),
        (
            put("weight_scale", np.ones(40, np.float16)),
            {},
            r"weight_scale has shape \[40\]; expected a matrix",
        ),
        (lambda layer: None, {"group_size": 64}, r"\[40, 2\]; expected \[40, 1\] .* group size 64"),
        (lambda layer: None, {"group_size": 16}, r"\[40, 2\]; expected \[40, 4\] .* group size 16"),
        (lambda layer: None, {"group_size": 48}, "group size 48 does not divide K = 64"),
        (
            lambda layer: None,
            {"strategy": "channel", "group_size": None},
            r"\[40, 2\]; expected \[40, 1\] .* group size -1",
        ),
        (
            put("weight_zero_point", np.zeros((40, 2), np.int32)),
            {},
            r"weight_zero_point has shape \[40, 2\]; expected \[5, 2\] \(one word for 8 of 40",
        ),
        (
            put("weight_zero_point", np.zeros((5, 2), np.int8)),
            {},
            r"weight_zero_point has shape \[5, 2\]; expected \[40, 2\] \(for 40 columns and 2 groups\)",
        ),
        (
            put("weight_zero_point", np.zeros((5, 2), np.float16)),
            {},
            "weight_zero_point has dtype F16; expected I32 or I8",
        ),
        (
            put("weight_zero_point", np.where(np.arange(80).reshape(40, 2) == 13, 8, -8).astype(np.int8)),
            {},
            r"weight_zero_point: 1 of 80 zero points are outside -8..7, the first \(8\) at index \[6, 1\]",
        ),
        (lambda layer: None, {"actorder": "group"}, "layer has no weight_g_idx, but actorder is 'group'"),
        (
            put("weight_g_idx", ORDER[::-1].astype(np.int32)),
            {},
            "weight_g_idx reorders rows, but actorder is not 'group'",
        ),
        (
            put("weight_g_idx", ORDER[::-1].astype(np.int32)),
            {"actorder": "weight"},
            "weight_g_idx reorders rows, but actorder is not 'group'",
        ),
        (
            put("weight_g_idx", ORDER[::-1].astype(np.int64)),
            {"actorder": "group"},
            r"weight_g_idx is I64 \[64\]; expected I32 \[64\]",
        ),
        (
            put("weight_g_idx", ORDER[:32].astype(np.int32)),
            {"actorder": "group"},
            r"weight_g_idx is I32 \[32\]; expected I32 \[64\]",
        ),
        (
            put("weight_g_idx", np.where(np.arange(64) == 9, 2, ORDER).astype(np.int32)),
            {"actorder": "group"},
            r"weight_g_idx: 1 of 64 group numbers are outside 0..1, the first \(2\) at index 9",
        ),
        (
            put("weight_g_idx", np.where(np.arange(64) == 9, -1, ORDER).astype(np.int32)),
            {"actorder": "group"},
            r"weight_g_idx: 1 of 64 group numbers are outside 0..1, the first \(-1\) at index 9",
        ),
        (
            put("weight_g_idx", np.where(np.arange(64) == 9, 1, ORDER).astype(np.int32)),
            {"actorder": "group"},
            "layer layer: g_idx puts 31 rows in group 0; the group size is 32",
        ),
    ],
)
def test_tensors_that_contradict_each_other(
    tmp_path: Path, rng: np.random.Generator, change: Change, group: dict[str, Any], message: str
) -> None:
    layer = ct_layer(*parts(rng))
    change(layer)
    model = write_model(tmp_path / "m", ct_config(ct_group(**group)), {"layer": layer})
    with pytest.raises(CheckpointError, match=message) as caught:
        plan_pack(model, tmp_path / "out")
    assert str(caught.value).startswith(str(model))
    assert "\n" not in str(caught.value)


def test_weight_shape_may_be_int32(tmp_path: Path, rng: np.random.Generator) -> None:
    layer = ct_layer(*parts(rng))
    layer["weight_shape"] = layer["weight_shape"].astype(np.int32)
    model = write_model(tmp_path, ct_config(), {"layer": layer})
    assert open_checkpoint(model).layers["layer"].read().shape == (64, 40)


def test_scales_that_are_no_numbers(tmp_path: Path, rng: np.random.Generator) -> None:
    """Named by the index that they have in the file, [N, G]; taken as 0 when that is asked for."""
    q, scale, zeros = parts(rng)
    scale[1, 7] = np.nan
    scale[0, 30] = np.inf
    model = write_model(tmp_path / "m", ct_config(), {"layer": ct_layer(q, scale, zeros)})
    message = r"layer.weight_scale has 2 NaN or infinite of 80 scales, the first \(nan\) at index \[7, 1\]"
    with pytest.raises(CheckpointError, match=message):
        plan_pack(model, tmp_path / "out")
    layer = open_checkpoint(model, ReadOptions(fix_nan_scales=True)).layers["layer"]
    with pytest.warns(CheckpointWarning, match="layer.weight_scale: 2 NaN or infinite of 80 scales"):
        weight = layer.read()
    scale[~np.isfinite(scale)] = 0
    np.testing.assert_array_equal(dequantize(weight, np.float32), exact(q, scale, zeros, np.arange(64) // 32))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
PLACES = st.sampled_from(
    (
        *(("config_groups", "group_0", "weights", key) for key in ct_group()["weights"]),
        *(("config_groups", "group_0", key) for key in ct_group()),
        *((key,) for key in ct_config()),
        ("sparsity_config",),
        ("transform_config",),
    )
)


@settings(max_examples=100, deadline=5000)
@given(st.lists(st.tuples(PLACES, JSON), min_size=1, max_size=3))
def test_any_config_value_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[tuple[str, ...], Any]]
) -> None:
    config = json.loads(json.dumps(ct_config()))
    for (*path, key), value in changes:
        place = config
        for step in path:
            place = place[step] if isinstance(place, dict) and step in place else {}
        if isinstance(place, dict):
            place[key] = value
    layer = ct_layer(np.zeros((64, 8), np.uint8), np.ones((2, 8), np.float16), np.ones((2, 8), np.uint8))
    model = write_model(tmp_path_factory.mktemp("config"), config, {"layer": layer})
    try:
        for found in open_checkpoint(model).layers.values():
            found.read()
    except CheckpointError as error:
        assert "\n" not in str(error)
