"""`unpack`: the config of the GPTQ models it writes, what it refuses, options; `verify` of dense layers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_maker import gptq_config, gptq_layer, write_model
from cli_runner import run
from helpers import FIXTURES, assert_same_bits, random_codes, random_scales
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import marlin_jit as mj
from marlin_jit.errors import CheckpointError
from marlin_jit.formats import ReadOptions, compare, open_checkpoint, plan_pack, run_pack
from marlin_jit.formats.gptq_target import integer_zero_points
from marlin_jit.formats.unpack import plan_unpack

LLAMA = FIXTURES / "checkpoints/llama_gptqmodel_asym_g128"


def weight(
    rng: np.random.Generator, K: int = 64, N: int = 64, group_size: int = 32, zero_point: int = 8
) -> mj.MarlinWeight:
    groups = 1 if group_size == -1 else K // group_size
    scale = np.abs(random_scales(rng, groups, N)) + np.float16(0.001)
    zeros = np.full((groups, N), zero_point, np.uint8)
    return mj.pack(mj.QuantWeight.from_zero_points(random_codes(rng, K, N), scale, zeros, group_size))


def packed_file(folder: Path, **weights: mj.MarlinWeight) -> Path:
    path = folder / "packed.safetensors"
    mj.save(path, {name.replace("__", "."): w for name, w in weights.items()})
    return path


def unpack(source: Path, destination: Path, to: str = "gptq", **options: Any) -> Path:
    run_pack(plan_unpack(source, destination, to, **options))
    return destination


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "quantize_config.json").read_text())


def header(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as file:
        return dict(file.metadata())


# ---- the config -------------------------------------------------------------------------------------------


def test_config_of_one_file(tmp_path: Path, rng: np.random.Generator) -> None:
    out = unpack(packed_file(tmp_path, up=weight(rng)), tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "quantize_config.json"]
    assert config_of(out) == {
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "method": "gptq",
        "quant_method": "gptq",
        "format": "gptq_v2",
        "checkpoint_format": "gptq_v2",
        "pack_dtype": "int32",
    }
    assert header(out / "model.safetensors") == {"format": "pt"}
    np.testing.assert_array_equal(
        load_file(out / "model.safetensors")["up.qzeros"].view(np.uint32), 0x88888888
    )


def test_keys_are_those_that_gptqmodel_writes(tmp_path: Path, rng: np.random.Generator) -> None:
    ours = config_of(unpack(packed_file(tmp_path, up=weight(rng)), tmp_path / "out"))
    theirs = json.loads((FIXTURES / "gptq/gm_v2_sym_g32_k256_n192/quantize_config.json").read_text())
    assert ours == {key: value for key, value in theirs.items() if key != "meta"}


def test_config_of_a_model(tmp_path: Path) -> None:
    plan = plan_pack(LLAMA, tmp_path / "packed")
    run_pack(plan)
    out = unpack(tmp_path / "packed", tmp_path / "out")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (LLAMA, out))
    assert after.pop("quantization_config") == config_of(out)
    before.pop("quantization_config")
    assert after == before
    for shard in out.glob("*.safetensors"):
        assert header(shard) == {"format": "pt"}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        a.nbytes for shard in out.glob("*.safetensors") for a in load_file(shard).values()
    )
    places = json.loads((LLAMA / "model.safetensors.index.json").read_text())["weight_map"]
    for tensor in places:  # a layer lies where its codes were, also one that was spread over two files
        module, _, suffix = tensor.rpartition(".")
        if suffix in ("qzeros", "scales", "g_idx"):
            places[tensor] = places[f"{module}.qweight"]
    assert index["weight_map"] == places


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"a": (64, 64, 32, 8), "b": (64, 64, 32, 7)}, {"sym": False}),
        ({"lm_head": (64, 64, 32, 8)}, {"lm_head": True}),
        ({"model__lm_head": (64, 64, 32, 8)}, {"lm_head": True}),
        # One group of K rows is a group size of K too.
        ({"a": (128, 64, 128, 8), "b": (256, 64, 128, 8)}, {"group_size": 128}),
        ({"a": (128, 64, -1, 8), "b": (256, 64, -1, 8)}, {"group_size": -1}),
        (
            {"a": (128, 64, 64, 8), "b": (128, 64, 64, 8), "c": (128, 64, 32, 8)},
            {"group_size": 64, "dynamic": {"+:^c$": {"group_size": 32}}},
        ),
        (
            {f"h__{i}__{n}": (128, 64, size, 8) for i in range(3) for n, size in (("up", 64), ("down", 32))}
            | {"head": (128, 64, 64, 8)},
            {"group_size": 64, "dynamic": {r"+:^h\.\d+\.down$": {"group_size": 32}}},
        ),
        (
            {"h__0__up": (256, 64, 64, 8), "h__1__up": (256, 64, 64, 8), "h__2__up": (256, 64, -1, 8)},
            {"group_size": 64, "dynamic": {r"+:^h\.2\.up$": {"group_size": -1}}},
        ),
    ],
)
def test_settings_that_layers_decide(
    tmp_path: Path, rng: np.random.Generator, weights: dict[str, Any], expected: dict[str, Any]
) -> None:
    source = packed_file(tmp_path, **{name: weight(rng, *args) for name, args in weights.items()})
    out = unpack(source, tmp_path / "out")
    plain = {"group_size": 32, "sym": True, "lm_head": False, "dynamic": None}
    found = config_of(out)
    assert {key: found.get(key) for key in plain} == plain | expected
    assert not compare(source, out).differences  # so our own reader understands `dynamic`


def test_names_in_dynamic_mean_themselves(tmp_path: Path, rng: np.random.Generator) -> None:
    source = tmp_path / "packed.safetensors"
    names = {"a": 64, "b": 64, "odd+name(1).x-y": 32, "oddname1zx-y": 64}
    mj.save(source, {name: weight(rng, 128, 64, size) for name, size in names.items()})
    out = unpack(source, tmp_path / "out")
    (pattern,) = config_of(out)["dynamic"]
    regex = re.compile(pattern.removeprefix("+:"))
    assert [name for name in names if regex.match(name)] == ["odd+name(1).x-y"]
    assert not compare(source, out).differences


def test_activation_order_is_told(tmp_path: Path) -> None:
    source = FIXTURES / "gptq/v1_asym_g128_k512_n256_descact"
    run_pack(plan_pack(source, tmp_path / "packed"))
    assert config_of(unpack(tmp_path / "packed", tmp_path / "out"))["desc_act"] is True
    # Here the config of the source says so, but rows are in order.
    static = FIXTURES / "gptq/v1_sym_g128_k512_n192_descact_static"
    assert config_of(unpack(static, tmp_path / "static"))["desc_act"] is False


def test_modules_that_stay_dense_are_named(tmp_path: Path, rng: np.random.Generator) -> None:
    """Loaders would look for quantized tensors of a router or of a layer left out; not of an embedding."""
    layers = {f"model.layers.{i}.up": gptq_layer(*_codes(rng)) for i in range(2)}
    others = {f"model.layers.{i}.mlp.gate.weight": np.ones((4, 64), np.float16) for i in range(2)}
    others |= {"model.embed.weight": np.ones((8, 64), np.float16), "model.layers.0.norm.weight": np.ones(64)}
    source = write_model(tmp_path / "m", gptq_config(checkpoint_format="gptq_v2"), layers, others)
    out = unpack(source, tmp_path / "out", exclude=["*.1.up"])
    assert config_of(out)["dynamic"] == {
        r"-:^model\.layers\.1\.up$": {},
        r"-:^model\.layers\.\d+\.mlp\.gate$": {},
    }
    assert list(open_checkpoint(out).layers) == ["model.layers.0.up"]
    assert not compare(source, out).differences
    assert not compare(out, source).differences


def _codes(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return random_codes(rng, 64, 64), random_scales(rng, 2, 64), rng.integers(0, 16, (2, 64), dtype=np.uint8)


# ---- zero points ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_zero_point_of_every_scale(dtype: Any) -> None:
    """All finite scales but 0, times all zero points: the deltas are exact in float64, so z is as given."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    scale = every[np.isfinite(every.astype(np.float32)) & (every.astype(np.float32) != 0)]
    scale = scale[np.abs(scale.astype(np.float64)) < 3e37]  # float32 holds eight times that
    for z in range(16):
        delta = ((8 - z) * scale.astype(np.float64)).astype(np.float32)
        found, bad = integer_zero_points(scale, delta)
        assert not bad.any()
        assert (found == z).all()


@pytest.mark.parametrize(
    ("scale", "delta"),
    [
        (1, -8),
        (1, 9),
        (1, 0.5),
        (0, 1),
        (1, np.nan),
        (1, np.inf),
        (2.0**-24, 1e30),
        (0.1, 0.1),
        (1, -(2.0**40)),
    ],
)
def test_deltas_without_a_zero_point(scale: float, delta: float) -> None:
    """16, -1, halves, what a scale 0 cannot give, what is no number; 0.1 is not the same in float16."""
    found, bad = integer_zero_points(np.full((2, 2), scale, np.float16), np.full((2, 2), delta, np.float32))
    assert bad.all()
    assert (found == 8).all()


def test_a_scale_of_zero_has_zero_point_8() -> None:
    found, bad = integer_zero_points(np.zeros(3, np.float16), np.zeros(3, np.float32))
    assert not bad.any()
    assert (found == 8).all()


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((100, 64, -1, 8), "layer up: K = 100; GPTQ holds multiples of 8; .*--to float16"),
        ((64, 100, 32, 8), "layer up: N = 100; GPTQ holds multiples of 8; .*--to float16"),
        (
            (64, 64, 32, 16),
            r"layer up: 128 of 128 zero points are no integers 0..15, which GPTQ needs, the first at index "
            r"\[0, 0\]; write dense weights instead, with --to float16",
        ),
    ],
)
def test_what_gptq_cannot_hold(
    tmp_path: Path, rng: np.random.Generator, args: tuple[int, int, int, int], message: str
) -> None:
    source = packed_file(tmp_path, up=weight(rng, *args))
    with pytest.raises(CheckpointError, match=message):
        plan_unpack(source, tmp_path / "out")
    dense = unpack(source, tmp_path / "dense.safetensors", "float16")
    (w,) = load_file(dense).values()
    assert_same_bits(w.T, mj.dequantize(mj.load(source)["up"]))


def test_the_first_real_zero_is_named(tmp_path: Path, rng: np.random.Generator) -> None:
    """In plain order, though packed scales are permuted."""
    q, scale = random_codes(rng, 128, 96), np.ones((4, 96), np.float16)
    zero = np.full((4, 96), -3, np.float32)
    zero[2, 70] = -3.25
    source = packed_file(tmp_path, up=mj.pack(mj.QuantWeight(q, scale, zero, 32)))
    with pytest.raises(CheckpointError, match=r"1 of 384 zero points .* at index \[2, 70\]"):
        plan_unpack(source, tmp_path / "out")


def test_gguf_to_gptq(tmp_path: Path) -> None:
    """Q4_0 has zero point 8; the real zeros of Q4_1 are refused, unless they are left out."""
    pytest.importorskip("gguf")
    source = FIXTURES / "gguf/q40_q41_q80_k256/model.gguf"
    options = ReadOptions(dequantize_others=True)
    with pytest.raises(CheckpointError, match=r"layer blk.0.attn_k: .* are no integers 0..15"):
        plan_unpack(source, tmp_path / "out", options=options)
    out = unpack(source, tmp_path / "out", options=options, include=["*attn_q"])
    (layer,) = open_checkpoint(out).layers.values()
    with np.load(source.parent / "expected.npz") as expected:
        W = expected["W.blk.0.attn_q.weight"]
    np.testing.assert_array_equal(mj.dequantize(layer.read(), np.float32), W)


def test_gptq_layers_have_names(tmp_path: Path, rng: np.random.Generator) -> None:
    """The dense weight of a layer without a name is ``.weight``; a ``.qweight`` would be no layer's."""
    mj.save(tmp_path / "p.safetensors", {"": weight(rng)})
    with pytest.raises(CheckpointError, match="a GPTQ layer needs a name"):
        unpack(tmp_path / "p.safetensors", tmp_path / "out")
    unpack(tmp_path / "p.safetensors", tmp_path / "d.safetensors", "dense")
    assert compare(tmp_path / "p.safetensors", tmp_path / "d.safetensors").differences == ()


@pytest.mark.filterwarnings("ignore::marlin_jit.formats.CheckpointWarning")
@pytest.mark.parametrize("to", ["gptq", "float16"])
def test_scales_of_packed_files_that_are_taken_as_zero(
    tmp_path: Path, rng: np.random.Generator, to: str
) -> None:
    w = weight(rng)
    path = packed_file(tmp_path, up=w)
    tensors = load_file(path)
    tensors["up.s"][1, 5] = np.nan
    save_file(tensors, path, header(path))
    with pytest.raises(CheckpointError, match=r"tensor up.s has 1 NaN or infinite of 128 scales"):
        unpack(path, tmp_path / "out", to)
    run_pack(plan_unpack(path, tmp_path / "out", to, options=ReadOptions(fix_nan_scales=True)))
    scales = w.scales.copy()
    scales[1, 5] = 0
    expected = mj.dequantize(replace(w, scales=scales))
    out = tmp_path / "out"
    if to == "gptq":
        assert_same_bits(mj.dequantize(open_checkpoint(out).layers["up"].read()), expected, zero_sign=False)
    else:
        assert_same_bits(load_file(out)["up.weight"].T, expected)


def test_gptq_is_a_folder(tmp_path: Path, rng: np.random.Generator) -> None:
    source = packed_file(tmp_path, up=weight(rng))
    with pytest.raises(CheckpointError, match=r"out.safetensors: .* name a folder"):
        plan_unpack(source, tmp_path / "out.safetensors")


def test_nothing_to_unpack(tmp_path: Path) -> None:
    save_file({"norm.weight": np.ones(4, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"m.safetensors: holds no quantized layer to unpack"):
        plan_unpack(tmp_path / "m.safetensors", tmp_path / "out")


def test_unknown_target(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="to 'awq'; accepted: gptq, float16, bfloat16, dense"):
        plan_unpack(LLAMA, tmp_path / "out", "awq")


def test_names_that_gptq_takes(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "p.safetensors"
    mj.save(path, {"up": weight(rng)}, {"up.g_idx": np.zeros(3, np.int32)})
    with pytest.raises(CheckpointError, match=r"tensor up.g_idx belongs to no layer"):
        plan_unpack(path, tmp_path / "out")


def _changed(source: Path, target: Path, change: Any) -> Path:
    tensors, metadata = load_file(source), header(source)
    change(tensors, metadata)
    save_file(tensors, target, metadata)
    return target


def test_packed_files_that_lie(tmp_path: Path, rng: np.random.Generator) -> None:
    """K that the group size does not divide fits the padded tensors; so does a perm that is none."""
    q, scale, g_idx = random_codes(rng, 128, 64), np.ones((2, 64), np.float16), rng.permutation(128) // 64
    ordered = mj.pack(mj.QuantWeight(q, scale, None, 64, g_idx.astype(np.int32)))
    source = packed_file(tmp_path, up=ordered)

    def shorter(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        metadata["layers"] = metadata["layers"].replace('"K":128', '"K":104')
        del tensors["up.perm"]

    def doubled(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        tensors["up.perm"][5] = tensors["up.perm"][6]

    def beyond(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        tensors["up.perm"][5] = 1 << 30

    for change, message in (
        (shorter, "layer up: group size 64 does not divide K = 104"),
        (doubled, "tensor up.perm: is no permutation of 0..127"),
        (beyond, "tensor up.perm: is no permutation of 0..127"),
    ):
        bad = _changed(source, tmp_path / "bad.safetensors", change)
        with pytest.raises(CheckpointError, match=message):
            plan_unpack(bad, tmp_path / "out")


# ---- the command ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "p"
    run_pack(plan_pack(LLAMA, folder))
    return folder


def test_command(packed: Path, tmp_path: Path) -> None:
    done = run("unpack", packed, tmp_path / "out", "--jobs", 2)
    assert (done.code, done.err) == (0, "")
    assert "marlin-jit  256 x 256" in done.out
    assert f"{packed} -> {tmp_path / 'out'}: 1.56 MB -> 1.55 MB, unpacked in" in done.out
    assert "left out" not in done.out  # quantize_config.json is written anew
    assert run("verify", LLAMA, tmp_path / "out").code == 0
    assert run("verify", packed, tmp_path / "out").code == 0


def test_left_out_is_what_has_no_successor(tmp_path: Path) -> None:
    done = run("unpack", LLAMA, tmp_path / "out", "--dry-run", "--json")
    assert done.json["left_out_files"] == ["expected/expected.npz"]
    assert not done.json["written"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["float16", "bfloat16", "dense"])
def test_dense_dtypes(packed: Path, tmp_path: Path, to: str) -> None:
    assert run("unpack", packed, tmp_path / "out", "--to", to, "--quiet").out == ""
    dtype = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}.get(to, np.dtype(np.float16))
    found = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    for name, w in mj.load(packed).items():
        assert_same_bits(found[f"{name}.weight"].T, mj.dequantize(w, dtype))
    verified = run("verify", LLAMA, tmp_path / "out")
    assert verified.out.startswith("equal: 14 layers (983,040 weights) and 7 other tensors")


def test_files_of_a_chosen_size(packed: Path, tmp_path: Path) -> None:
    done = run("unpack", packed, tmp_path / "out", "--shard-size", "600kB")
    assert done.code == 0
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [shard.name for shard in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all(header(shard) == {"format": "pt"} for shard in shards)
    assert run("verify", packed, tmp_path / "out").code == 0


def test_patterns_leave_layers_dense(packed: Path, tmp_path: Path) -> None:
    done = run("unpack", packed, tmp_path / "out", "--include", "*.mlp.*", "--exclude", "*down*", "--json")
    assert {layer["name"] for layer in done.json["layers"] if not layer["dense"]} == {
        f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("up", "gate")
    }
    assert run("verify", packed, tmp_path / "out").code == 0
    assert len(config_of(tmp_path / "out")["dynamic"]) == 5  # down and four of attention, for all blocks


def test_interrupted_runs_go_on(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from marlin_jit.formats.gptq_target import GPTQTarget

    arrays, made = GPTQTarget.arrays, []

    def count(self: GPTQTarget, layer: Any, device: bool) -> Any:
        made.append(layer.name)
        if len(made) == 9:
            raise KeyboardInterrupt
        return arrays(self, layer, device)

    monkeypatch.setattr(GPTQTarget, "arrays", count)
    assert run("unpack", packed, tmp_path / "out", "--resume", "--jobs", 1).code == 130
    assert not (tmp_path / "out").exists()
    assert run("unpack", packed, tmp_path / "out", "--resume", "--jobs", 1).code == 0
    assert len(made) < 9 + 14  # layers of the finished file are not made again
    assert run("verify", packed, tmp_path / "out").code == 0
    assert config_of(tmp_path / "out")["sym"] is False


def test_errors_are_one_line(tmp_path: Path, rng: np.random.Generator) -> None:
    source = packed_file(tmp_path, up=weight(rng, 64, 100))
    done = run("unpack", source, tmp_path / "out")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert done.err.startswith(f"error: {source}: layer up: N = 100")
    assert not (tmp_path / "out").exists()


# ---- verify -----------------------------------------------------------------------------------------------


def test_verify_of_layers_left_dense(tmp_path: Path) -> None:
    assert run("pack", LLAMA, tmp_path / "p", "--exclude", "*o_proj").code == 0
    for pair in ((LLAMA, tmp_path / "p"), (tmp_path / "p", LLAMA)):
        assert run("verify", *pair).out.startswith("equal: 14 layers (983,040 weights) and 7 other tensors")


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        (lambda w: w.astype(np.float16), None),
        (lambda w: w, None),
        (lambda w: w.astype(ml_dtypes.bfloat16), None),
        (lambda w: _with(w, 7, 3, 1.5), r"1 of 4096 weights differ, the first at [3, 7]: "),
        (lambda w: _with(w, 7, 3, np.nan), r"1 of 4096 weights differ, the first at [3, 7]: "),
        (lambda w: w[:63], "float32 [64, 64] in the first model, float32 [64, 63] in the second"),
        (lambda w: w.astype(np.int32), "no such layer in the second model"),
        (lambda w: w.reshape(-1), "no such layer in the second model"),
    ],
)
def test_compare_with_a_dense_layer(
    tmp_path: Path, rng: np.random.Generator, dense: Any, message: str | None
) -> None:
    """`dense` is given the weight [N, K] in float32, where it is exact."""
    w = weight(rng)
    source = packed_file(tmp_path, up=w)
    exact = mj.dequantize(w, np.float32).T
    save_file({"up.weight": np.ascontiguousarray(dense(exact))}, tmp_path / "d.safetensors")
    result = compare(source, tmp_path / "d.safetensors")
    if message is None:
        assert (result.differences, result.layers, result.weights) == ((), 1, 4096)
        return
    (difference,) = result.differences
    assert difference.name == "up"
    assert difference.what.startswith(message)
    (mirrored,) = compare(tmp_path / "d.safetensors", source).differences
    assert mirrored.name == "up"


def _with(w: np.ndarray, n: int, k: int, value: float) -> np.ndarray:
    w = w.copy()
    w[n, k] = value
    return w


def test_a_dense_layer_is_no_other_tensor(tmp_path: Path, rng: np.random.Generator) -> None:
    """It counts once; a stranger's X.weight beside a quantized X still counts."""
    w = weight(rng)
    extra = {"up.weight": np.ones((2, 2), np.float16)}
    mj.save(tmp_path / "a.safetensors", {"up": w}, extra)
    mj.save(tmp_path / "b.safetensors", {"up": w})
    (difference,) = compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors").differences
    assert (difference.name, difference.what) == ("up.weight", "no such tensor in the second model")


def test_verify_reads_as_pack_did(tmp_path: Path, rng: np.random.Generator) -> None:
    q, scale, zeros = random_codes(rng, 64, 64), np.ones((2, 64), np.float16), np.full((2, 64), 5, np.uint8)
    scale[1, 3] = np.nan
    model = write_model(tmp_path / "m", gptq_config(), {"layer": gptq_layer(q, scale, zeros)})
    options = ("--zero-format", "v2", "--fix-nan-scales")
    assert run("pack", model, tmp_path / "p", *options).code == 0
    assert run("verify", model, tmp_path / "p", *options).code == 0
    assert run("verify", model, tmp_path / "p").code == 2
    assert run("verify", model, tmp_path / "p", "--fix-nan-scales").code == 1


def test_tensors_that_would_become_a_layer_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    layer = gptq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 8, np.uint8))
    stray = {"Y.B": np.zeros((4, 128), np.int32), "Y.s": np.ones((1, 64), np.float16)}
    model = write_model(tmp_path / "m", gptq_config(checkpoint_format="gptq_v2"), {"a": layer}, stray)
    with pytest.raises(
        CheckpointError, match=r"tensors Y\.B and Y\.s belong to no layer, but dense models would"
    ):
        plan_unpack(model, tmp_path / "out", "float16")
    plan_unpack(model, tmp_path / "out", "gptq")
