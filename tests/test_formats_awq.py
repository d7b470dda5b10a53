"""AWQ checkpoints in the GEMM layout."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_maker import awq_config, awq_layer, write_model
from helpers import Case, assert_same_bits, case_id, cases, random_codes, random_scales

from marlin_jit.errors import CheckpointError
from marlin_jit.formats import open_checkpoint, plan_pack, to_marlin
from marlin_jit.formats.awq import unpack_columns
from marlin_jit.pack import dequantize, pack
from marlin_jit.weight import QuantWeight


@pytest.mark.parametrize("case", cases("awq/*"), ids=case_id)
def test_files_of_the_tool_decode_to_its_weights(case: Case) -> None:
    (layer,) = open_checkpoint(case.path).layers.values()
    weight = layer.read()
    assert isinstance(weight, QuantWeight)
    assert_same_bits(dequantize(weight), case.expected["W"])
    assert_same_bits(dequantize(pack(weight)), case.expected["W"])


@pytest.mark.parametrize("case", cases("vllm_marlin/zp_*"), ids=case_id)
def test_codes_and_packed_bytes_are_those_of_vllm(case: Case) -> None:
    tensors, expected = case.tensors, case.expected
    q, zero_point = unpack_columns(tensors["awq_qweight"]), unpack_columns(tensors["awq_qzeros"])
    np.testing.assert_array_equal(q, expected["codes"])
    np.testing.assert_array_equal(zero_point, expected["zeros"])
    packed = pack(QuantWeight.from_zero_points(q, expected["scales"], zero_point, case.info["group_size"]))
    np.testing.assert_array_equal(packed.B, tensors["B"])
    assert_same_bits(packed.scales, tensors["s"])
    assert_same_bits(dequantize(packed), expected["W"])


@pytest.mark.parametrize("zero_point", [0, 1, 7, 8, 15])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_zero_points_are_stored_as_they_are(
    tmp_path: Path, rng: np.random.Generator, zero_point: int, dtype: type
) -> None:
    q, scale = random_codes(rng, 64, 96), random_scales(rng, 2, 96, dtype)
    zeros = np.full((2, 96), zero_point, np.uint8)
    model = write_model(tmp_path, awq_config(), {"layer": awq_layer(q, scale, zeros)})
    packed = to_marlin(open_checkpoint(model).layers["layer"])
    exact = (q.astype(np.float64) - zero_point) * np.repeat(scale.astype(np.float64), 32, axis=0)
    np.testing.assert_array_equal(dequantize(packed, np.float32), exact.astype(np.float32))
    assert packed.symmetric == (zero_point == 8)
    assert packed.dtype == dtype


@pytest.mark.parametrize(
    ("group_size", "packed_as"), [(192, 64), (256, 128), (96, 32), (32, 32), (-1, -1), (768, -1), (24, None)]
)
def test_group_sizes(
    tmp_path: Path, rng: np.random.Generator, group_size: int, packed_as: int | None
) -> None:
    """Groups that the Marlin format does not have are split, which changes no weight, or refused."""
    K, N = 768, 64
    groups = 1 if group_size == -1 else K // group_size
    q, scale = random_codes(rng, K, N), random_scales(rng, groups, N)
    zeros = rng.integers(0, 16, (groups, N), dtype=np.uint8)
    model = write_model(
        tmp_path / "m", awq_config(group_size=group_size), {"layer": awq_layer(q, scale, zeros)}
    )
    if packed_as is None:
        with pytest.raises(CheckpointError, match="layer: group size 24 is no multiple of 32"):
            plan_pack(model, tmp_path / "out")
        return
    plan = plan_pack(model, tmp_path / "out")
    packed = to_marlin(plan.checkpoint.layers["layer"])
    assert packed.group_size == plan.layers["layer"].group_size == packed_as
    group = np.arange(K) // (K // groups)
    exact = (q.astype(np.float64) - zeros[group]) * scale.astype(np.float64)[group]
    np.testing.assert_array_equal(dequantize(packed, np.float32), exact.astype(np.float32))


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "GEMV", "llm-awq", "exllama"])
def test_other_layouts_are_refused_by_name(tmp_path: Path, rng: np.random.Generator, version: str) -> None:
    layer = awq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 8, np.uint8))
    model = write_model(tmp_path, awq_config(version=version), {"layer": layer})
    with pytest.raises(
        CheckpointError, match=f"AWQ version '{version.lower()}' is not read; accepted: 'gemm'"
    ):
        open_checkpoint(model)


def test_other_backends_are_refused_by_name(tmp_path: Path, rng: np.random.Generator) -> None:
    layer = awq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 8, np.uint8))
    model = write_model(tmp_path, awq_config(backend="llm-awq"), {"layer": layer})
    with pytest.raises(CheckpointError, match="AWQ backend 'llm-awq' is not read"):
        open_checkpoint(model)


def test_config_of_old_autoawq(tmp_path: Path, rng: np.random.Generator) -> None:
    q, scale, zeros = random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 5, np.uint8)
    model = write_model(tmp_path, None, {"layer": awq_layer(q, scale, zeros)})
    text = '{"zero_point": true, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}'
    (model / "quant_config.json").write_text(text)
    assert open_checkpoint(model).layers["layer"].format == "awq"


def test_delta_that_overflows_is_found_before_writing(tmp_path: Path, rng: np.random.Generator) -> None:
    """8*scale may overflow float16 where the scale does not; bfloat16 has room for it."""
    q, zeros = random_codes(rng, 64, 64), np.zeros((2, 64), np.uint8)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        scale = np.ones((2, 64), dtype)
        scale[1, 7] = 10_000
        model = write_model(tmp_path / "m", awq_config(), {"layer": awq_layer(q, scale, zeros)})
        if dtype == np.float16:
            with pytest.raises(
                CheckpointError,
                match=r"layer.scales: 1 scales .* overflows float16, the first at index \[1, 7\]",
            ):
                plan_pack(model, tmp_path / "out")
        else:
            plan_pack(model, tmp_path / "out")
