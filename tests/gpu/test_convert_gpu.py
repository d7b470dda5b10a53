"""Checkpoints packed on the GPU are those packed on the CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from checkpoint_maker import awq_config, awq_layer, gptq_config, gptq_layer, write_model
from helpers import random_codes, random_scales

from marlin_jit.formats import plan_pack, run_pack


def gptq_model(folder, rng):
    order = rng.permutation(256).astype(np.int32)
    g_idx = np.empty(256, np.int32)
    g_idx[order] = np.arange(256) // 64
    layers = {
        name: gptq_layer(
            random_codes(rng, 256, 200),
            random_scales(rng, 4, 200),
            rng.integers(0, 16, (4, 200), dtype=np.uint8),
            g_idx=order_of_groups,
        )
        for name, order_of_groups in (("a", None), ("b", g_idx), ("c", None))
    }
    config = gptq_config(checkpoint_format="gptq_v2", group_size=64, desc_act=False)
    return write_model(folder, config, layers, {"norm": np.ones(5, np.float32)})


def awq_model(folder, rng):
    scale = random_scales(rng, 2, 64).astype(ml_dtypes.bfloat16)
    layer = awq_layer(random_codes(rng, 384, 64), scale, np.full((2, 64), 8, np.uint8))
    return write_model(folder, awq_config(group_size=192), {"a": layer})  # groups that are split


@pytest.mark.parametrize(("make", "exclude"), [(gptq_model, []), (gptq_model, ["a"]), (awq_model, [])])
@pytest.mark.parametrize("jobs", [1, 4])
def test_a_gpu_writes_the_same_bytes(tmp_path, rng, make, jobs, exclude):
    source = make(tmp_path / "m", rng)
    for name, device in (("cpu", False), ("gpu", True)):
        run_pack(plan_pack(source, tmp_path / name, exclude=exclude), jobs=jobs, device=device)
    for path in (tmp_path / "cpu").iterdir():
        assert path.read_bytes() == (tmp_path / "gpu" / path.name).read_bytes()
