"""Files that hold Marlin bytes already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_maker import write_model
from helpers import Case, assert_same_bits, case_id, cases

from marlin_jit.errors import CheckpointError
from marlin_jit.formats import open_checkpoint, plan_pack
from marlin_jit.pack import dequantize
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
