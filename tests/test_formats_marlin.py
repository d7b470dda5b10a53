"""Files that hold Marlin bytes already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_maker import write_model
from helpers import Case, assert_same_bits, case_id, cases

from marlin_jit.errors import CheckpointError
from marlin_jit.formats import compare, load, open_checkpoint, pack_checkpoint, plan_pack
from marlin_jit.pack import dequantize, unpack
from marlin_jit.weight import MarlinWeight

AUTOGPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "is_marlin_format": True}


@pytest.mark.parametrize("case", cases("marlin/*"), ids=case_id)
def test_files_of_the_tools_are_taken_as_they_are(case: Case) -> None:
    (layer,) = open_checkpoint(case.path).layers.values()
    weight = layer.read()
    assert isinstance(weight, MarlinWeight)
    tensors = case.tensors
    B, s = ("B", "s") if "B" in tensors else ("qweight", "scales")
    np.testing.assert_array_equal(weight.B, tensors[B])
    assert_same_bits(weight.scales, tensors[s])
    assert weight.symmetric
    # AutoAWQ's decoder gives -0 where the code is 8.
    assert_same_bits(dequantize(weight), case.expected["W"], zero_sign=False)


def some_layer(**changes: Any) -> dict[str, np.ndarray]:
    tensors = {"B": np.zeros((16, 512), np.int32), "s": np.ones((2, 256), np.float16)} | changes
    return {name: array for name, array in tensors.items() if array is not None}


@pytest.mark.parametrize(
    "config",
    [
        AUTOGPTQ,
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        {"quant_method": "marlin", "group_size": 128},
        None,
    ],
)
def test_every_way_to_say_marlin(tmp_path: Path, config: dict[str, Any] | None) -> None:
    layer = open_checkpoint(write_model(tmp_path, config, {"layer": some_layer()})).layers["layer"]
    assert (layer.format, layer.parameters().group_size) == ("marlin", 128)


@pytest.mark.parametrize(
    ("layer", "config", "message"),
    [
        (some_layer(B=np.zeros((16, 1024), np.int32)), AUTOGPTQ, "1024 words a row for N = 256 .* take 512"),
        (some_layer(B=np.zeros((16, 512), np.int64)), AUTOGPTQ, "layer.B has dtype I64; expected I32"),
        (
            some_layer(s=np.ones((2, 256), np.float32)),
            AUTOGPTQ,
            "layer.s has dtype F32; expected F16 or BF16",
        ),
        (
            some_layer(s=np.ones((4, 256), np.float16)),
            AUTOGPTQ,
            "4 groups for K = 256, but group_size is 128",
        ),
        (some_layer(s=np.ones((3, 256), np.float16)), None, "3 groups for K = 256; group sizes are"),
        (some_layer(s=np.ones(256, np.float16)), AUTOGPTQ, r"layer.s has shape \[256\]; expected a matrix"),
        (some_layer(s=None), AUTOGPTQ, "layer layer has no s"),
        (
            some_layer(B=np.zeros((15, 512), np.int32), s=np.ones((1, 256), np.float16)),
            None,
            "K = 240 or N = 256 is no",
        ),
        (some_layer(), AUTOGPTQ | {"bits": 8}, "bits is 8"),
    ],
)
def test_shapes_and_bits_are_checked(
    tmp_path: Path, layer: dict[str, np.ndarray], config: dict[str, Any] | None, message: str
) -> None:
    model = write_model(tmp_path / "m", config, {"layer": layer})
    with pytest.raises(CheckpointError, match=message):
        plan_pack(model, tmp_path / "out")


VLLM = cases("vllm_marlin/*")


@pytest.mark.parametrize("case", VLLM, ids=case_id)
def test_files_of_vllm(case: Case) -> None:
    """Codes, scales, zero points and groups are those that vLLM packed, and so are the weights."""
    weight = open_checkpoint(case.path).layers["layer"].read()
    assert isinstance(weight, MarlinWeight)
    tensors, expected = case.tensors, case.expected
    assert_same_bits(weight.B, tensors["B"])
    assert_same_bits(weight.scales, tensors["s"])
    assert (weight.shape, weight.group_size) == (expected["W"].shape, case.info["group_size"])
    assert weight.symmetric == ("zp" not in tensors)
    np.testing.assert_array_equal(weight.perm, tensors.get("sort_indices"))
    plain = unpack(weight)
    assert_same_bits(plain.q, expected["codes"])
    assert_same_bits(plain.scale, expected["scales"])
    np.testing.assert_array_equal(plain.g_idx, expected.get("g_idx"))
    if not weight.symmetric:
        zero = -expected["zeros"].astype(np.float64) * expected["scales"].astype(np.float64)
        np.testing.assert_array_equal(plain.zero, zero)
    assert_same_bits(dequantize(weight), expected["W"])


@pytest.mark.parametrize("case", VLLM, ids=case_id)
def test_files_of_vllm_packed_and_loaded(tmp_path: Path, case: Case) -> None:
    plan = pack_checkpoint(case.path, tmp_path / "out")
    model = load(tmp_path / "out")
    assert list(model) == ["layer"]
    assert not set(plan.checkpoint.others) & {f"layer.{name}" for name in ("B", "s", "zp", "sort_indices")}
    assert_same_bits(model["layer"].B, case.tensors["B"])
    assert_same_bits(model["layer"].scales, case.tensors["s"])
    np.testing.assert_array_equal(model["layer"].perm, case.tensors.get("sort_indices"))
    assert_same_bits(dequantize(model["layer"]), case.expected["W"])
    assert compare(case.path, tmp_path / "out").differences == ()


ZEROS_OF_8 = np.full((2, 32), 0x88888888 - (1 << 32), np.int32)
SORTED = (np.arange(256) // 128).astype(np.int32)
REVERSED = np.arange(256, dtype=np.int32)[::-1].copy()


@pytest.mark.parametrize(
    "more",
    [
        {"zp": ZEROS_OF_8},
        {"g_idx_sorted": SORTED, "sort_indices": np.arange(256, dtype=np.int32)},
        {name: np.zeros(0, np.int32) for name in ("zp", "g_idx_sorted", "sort_indices")},
    ],
    ids=["all 8", "in order", "empty"],
)
def test_tensors_of_vllm_that_say_nothing(tmp_path: Path, more: dict[str, np.ndarray]) -> None:
    model = write_model(tmp_path / "m", None, {"layer": some_layer(**more)})
    pack_checkpoint(model, tmp_path / "out")
    packed = load(tmp_path / "out")
    assert list(packed.tensors) == []
    assert packed["layer"].symmetric
    assert packed["layer"].perm is None


@pytest.mark.parametrize("zero_point", [0, 1, 7, 9, 15])
@pytest.mark.parametrize("groups", [1, 2])
def test_zero_points_of_vllm(tmp_path: Path, groups: int, zero_point: int) -> None:
    """B of zeros is code 0 everywhere, so every weight is minus the zero point; one column has another."""
    stored = np.full((groups, 32), zero_point * 0x11111111, np.int64)
    # Column 6 of the first 64 is at place 8*6 = 48, so in word 6; nibble 0 is the first column of a word.
    stored[-1, 6] += 3 - zero_point
    zp = stored.astype(np.uint32).view(np.int32)
    layer = some_layer(s=np.ones((groups, 256), np.float16), zp=zp)
    weight = open_checkpoint(write_model(tmp_path, None, {"layer": layer})).layers["layer"].read()
    expected = np.full((256, 256), -float(zero_point), np.float32)
    expected[-256 // groups :, 6] = -3
    np.testing.assert_array_equal(dequantize(weight, np.float32), expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_activation_order_of_vllm(tmp_path: Path, rng: np.random.Generator, groups: int) -> None:
    """Packed row i is source row sort_indices[i], also where all rows are in one group."""
    B = rng.integers(-(2**31), 2**31, (16, 512), dtype=np.int32)
    s = rng.random((groups, 256)).astype(np.float16)
    perm = rng.permutation(256).astype(np.int32)
    order = {"sort_indices": perm, "g_idx_sorted": (np.arange(256) // (256 // groups)).astype(np.int32)}
    layers = {"sorted": some_layer(B=B, s=s), "layer": some_layer(B=B, s=s, **order)}
    pack_checkpoint(write_model(tmp_path / "m", None, layers), tmp_path / "out")
    packed = load(tmp_path / "out")
    np.testing.assert_array_equal(packed["layer"].perm, perm)
    assert_same_bits(dequantize(packed["layer"])[perm], dequantize(packed["sorted"]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"zp": np.zeros((2, 32), np.int64)}, "layer.zp has dtype I64; expected I32"),
        ({"zp": np.zeros((2, 256), np.float16)}, "layer.zp has dtype F16; expected I32"),
        ({"zp": np.zeros((1, 32), np.int32)}, r"layer.zp has shape \[1, 32\]; expected \[2, 32\]"),
        ({"zp": np.zeros((2, 64), np.int32)}, r"layer.zp has shape \[2, 64\]; expected \[2, 32\]"),
        ({"zp": np.zeros(64, np.int32)}, r"layer.zp has shape \[64\]; expected a matrix"),
        (
            {"zp": np.zeros((2, 32), np.int32), "s": np.full((2, 256), 1e4, np.float16)},
            r"layer.s: 512 scales are so large that \(8 - zero point\)\*scale overflows float16",
        ),
        ({"sort_indices": REVERSED}, "layer layer has no g_idx_sorted; sort_indices and g_idx_sorted go tog"),
        ({"g_idx_sorted": SORTED}, "layer layer has no sort_indices; sort_indices and g_idx_sorted go toget"),
        (
            {"sort_indices": REVERSED, "g_idx_sorted": np.zeros(0, np.int32)},
            "layer layer has no g_idx_sorted",
        ),
        (
            {"sort_indices": REVERSED.astype(np.int64), "g_idx_sorted": SORTED},
            r"layer.sort_indices is I64 \[256\]; expected I32 \[256\]",
        ),
        (
            {"sort_indices": REVERSED, "g_idx_sorted": SORTED[:128]},
            r"layer.g_idx_sorted is I32 \[128\]; expected I32 \[256\]",
        ),
        (
            {"sort_indices": np.where(REVERSED == 9, 8, REVERSED), "g_idx_sorted": SORTED},
            r"layer.sort_indices is no permutation of 0..255",
        ),
        (
            {"sort_indices": REVERSED - 1, "g_idx_sorted": SORTED},
            r"layer.sort_indices is no permutation of 0..255",
        ),
        (
            {"sort_indices": REVERSED, "g_idx_sorted": SORTED[::-1].copy()},
            r"layer.g_idx_sorted: 256 of 256 rows are not in groups of 128 .* first \(1\) at index 0",
        ),
        (
            {"sort_indices": REVERSED, "g_idx_sorted": np.where(np.arange(256) == 128, 0, SORTED)},
            r"layer.g_idx_sorted: 1 of 256 rows are not in groups of 128 .* first \(0\) at index 128",
        ),
    ],
)
def test_tensors_of_vllm_are_checked(tmp_path: Path, more: dict[str, np.ndarray], message: str) -> None:
    model = write_model(tmp_path / "m", None, {"layer": some_layer(**more)})
    with pytest.raises(CheckpointError, match=message) as caught:
        plan_pack(model, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_delta_that_overflows_is_no_other_exception(tmp_path: Path) -> None:
    layer = some_layer(zp=np.zeros((2, 32), np.int32), s=np.full((2, 256), 1e4, np.float16))
    source = open_checkpoint(write_model(tmp_path, None, {"layer": layer})).layers["layer"]
    with pytest.raises(CheckpointError, match=r"layer layer: delta .*too large for float16"):
        source.read()
