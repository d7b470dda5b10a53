"""``marlin-jit quantize`` and the reader behind it: what is quantized, by what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_maker import gptq_config, gptq_layer, write_model, write_shards
from cli_runner import run
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from marlin_jit.formats import calibration, load, to_marlin
from marlin_jit.formats.dense import Settings, open_dense
from marlin_jit.gptq_quantize import gptq, hessian
from marlin_jit.pack import dequantize, pack, unpack
from marlin_jit.quantize import quantize
from marlin_jit.weight import MarlinWeight

BF16 = ml_dtypes.bfloat16
Q, UP, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def correlated(rng: np.random.Generator, T: int, K: int) -> np.ndarray:
    x = rng.standard_normal((T, K // 4)) @ rng.standard_normal((K // 4, K)) / np.sqrt(K / 4)
    return (x + 0.3 * rng.standard_normal((T, K))).astype(np.float16)


@pytest.fixture
def tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A model of one block, with a weight of each dtype that is read and one of each kind that is left."""

    def normal(*shape: int) -> np.ndarray:
        return (0.02 * rng.standard_normal(shape)).astype(np.float32)

    return {
        f"{Q}.weight": normal(96, 128).astype(np.float16),
        f"{Q}.bias": normal(96).astype(np.float16),
        f"{UP}.weight": normal(256, 128).astype(BF16),
        f"{DOWN}.weight": normal(128, 256),
        "model.layers.0.mlp.gate.weight": normal(4, 128).astype(np.float16),
        "model.layers.0.input_layernorm.weight": normal(128).astype(np.float16),
        "model.embed_tokens.weight": normal(50, 128).astype(np.float16),
        "model.conv.weight": normal(8, 8, 3).astype(np.float16),
        "model.scaled.weight": normal(8, 32).astype(ml_dtypes.float8_e4m3fn),
        "lm_head.weight": normal(50, 128).astype(np.float16),
    }


LEFT = {
    f"{Q}.bias": "not called *.weight",
    "model.layers.0.mlp.gate.weight": "router",
    "model.layers.0.input_layernorm.weight": "no matrix",
    "model.embed_tokens.weight": "embedding",
    "model.conv.weight": "no matrix",
    "model.scaled.weight": "dtype F8_E4M3",
    "lm_head.weight": "output head",
}


@pytest.fixture
def model(tmp_path: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 128}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def assert_same_weight(found: MarlinWeight, expected: MarlinWeight) -> None:
    assert (found.shape, found.group_size) == (expected.shape, expected.group_size)
    for name in ("B", "scales", "delta", "perm"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert_same_bits(mine, theirs)


# ---- min-max ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_layers_are_the_transposed_weights_by_min_max(tmp_path, model, tensors, group, symmetric):
    flags = ["--symmetric"] if symmetric else []
    done = run("quantize", model, tmp_path / "out", "--group", group, *flags, "--json")
    assert (done.code, done.err) == (0, "")
    packed = load(tmp_path / "out")
    assert list(packed) == [DOWN, UP, Q]
    for name, dtype in ((Q, np.float16), (UP, BF16), (DOWN, np.float16)):
        w = np.ascontiguousarray(tensors[f"{name}.weight"].T)
        assert_same_weight(packed[name], pack(quantize(w, group, symmetric, dtype)))
        assert packed.entries[name].source_format == "dense-minmax"
    for name in LEFT:
        assert_same_bits(packed.tensors[name].view(np.uint8), tensors[name].view(np.uint8))
    assert done.json["left"] == LEFT
    assert [layer["symmetric"] for layer in done.json["layers"]] == [symmetric] * 3
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == 128
    assert config["quantization_config"]["quant_method"] == "marlin-jit"
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_the_summary_says_what_is_left_and_why(tmp_path, model):
    done = run("quantize", model, tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    rows = [line.split() for line in done.out.splitlines()]
    assert ["dense-minmax", "128", "x", "96", "column", "asymmetric", "1", "24.6", "kB", "8.96", "kB"] in rows
    assert "left, router: 1 tensor (model.layers.0.mlp.gate.weight)\n" in done.out
    assert "left, output head: 1 tensor (lm_head.weight)\n" in done.out
    assert "left, no matrix: 2 tensors (" in done.out


@pytest.mark.parametrize(("option", "expected"), [("float16", np.float16), ("bfloat16", BF16)])
def test_one_dtype_for_all(tmp_path, model, option, expected):
    assert run("quantize", model, tmp_path / "out", "--dtype", option).code == 0
    assert {w.dtype for w in load(tmp_path / "out").values()} == {np.dtype(expected)}


def test_a_file_becomes_a_file_and_shards_stay_shards(tmp_path, model, tensors):
    done = run("quantize", model / "model.safetensors", tmp_path / "out.safetensors")
    assert (done.code, done.err) == (0, "")
    names = sorted(tensors)
    shards = {"a-1-of-2.safetensors": names[:6], "a-2-of-2.safetensors": names[6:]}
    write_shards(tmp_path / "two", {s: {n: tensors[n] for n in part} for s, part in shards.items()})
    assert run("quantize", tmp_path / "two", tmp_path / "out").code == 0
    one, two = load(tmp_path / "out.safetensors"), load(tmp_path / "out")
    for name in (Q, UP, DOWN):
        assert_same_weight(one[name], two[name])


def test_dry_run_quiet_and_an_existing_destination(tmp_path, model):
    dry = run("quantize", model, tmp_path / "out", "--dry-run", "--json").json
    assert not (tmp_path / "out").exists()
    assert "would be packed" in run("quantize", model, tmp_path / "out", "--dry-run").out
    wet = run("quantize", model, tmp_path / "out", "--json").json
    for summary in (dry, wet):
        summary.pop("seconds")
        summary.pop("written")
    assert dry == wet
    again = run("quantize", model, tmp_path / "out")
    assert (again.code, again.out) == (2, "")
    assert "exists already" in again.err
    done = run("quantize", model, tmp_path / "out", "--force", "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")


# ---- which weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["--include", "*_proj"], {Q, UP, DOWN}),
        (["--include", "*.mlp.*"], {UP, DOWN}),  # the router is left all the same
        (["--exclude", "*.mlp.*"], {Q}),
        (["--include", "*.q_*", "--include", "*.up_*", "--exclude", UP], {Q}),
        (["--include", "*", "--include", "lm_head"], {Q, UP, DOWN, "lm_head"}),
        (["--include", "lm_head"], {"lm_head"}),
        (["--include", "model.layers.0.mlp.gate"], {"model.layers.0.mlp.gate"}),
    ],
)
def test_patterns(tmp_path, model, patterns, expected):
    done = run("quantize", model, tmp_path / "out", *patterns, "--json")
    assert (done.code, done.err) == (0, "")
    assert {layer["name"] for layer in done.json["layers"]} == expected
    assert set(load(tmp_path / "out")) == expected
    whys = {name: done.json["left"].get(f"{name}.weight") for name in (Q, UP, DOWN)}
    assert all((why is None) == (name in expected) for name, why in whys.items())
    assert set(whys.values()) <= {None, "excluded", "not included"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.embed_tokens", "embedding"),
        ("transformer.wte", "embedding"),
        ("transformer.word_embeddings", "embedding"),
        ("shared", "embedding"),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "embedding"),
        ("lm_head", "output head"),
        ("language_model.lm_head", "output head"),
        ("embed_out", "embedding"),
        ("output", "output head"),
        ("score", "output head"),
        ("model.layers.0.adaln_norm.linear", "norm"),
        ("model.layers.0.block_sparse_moe.gate", "router"),
        ("model.layers.0.mlp.router", "router"),
        ("model.layers.0.mlp.shared_expert_gate", "router"),
        ("model.layers.0.mlp.gate_proj", None),
        ("model.layers.0.mlp.experts.3.gate_up_proj", None),
        ("model.layers.0.mlp.shared_expert.gate_proj", None),
        ("encoder.layer.0.output.dense", None),
        ("encoder.layer.0.attention.output.dense", None),
        ("multi_modal_projector.linear_1", None),
    ],
)
def test_what_is_left_by_default(tmp_path, name, why):
    path = tmp_path / "m.safetensors"
    save_file(
        {f"{name}.weight": np.ones((8, 32), np.float16), "z.weight": np.ones((8, 32), np.float16)}, path
    )
    found = open_dense(path, Settings(group_size=32))
    assert found.left == ({} if why is None else {f"{name}.weight": why})
    assert set(found.layers) == ({"z", name} if why is None else {"z"})


# ---- calibration ------------------------------------------------------------------------------------------


def test_calibrated_layers_are_quantized_by_gptq(tmp_path, model, tensors, rng):
    x, y = correlated(rng, 300, 128), correlated(rng, 500, 256)
    inputs = {f"{Q}.activations": x, f"{DOWN}.hessian": hessian(y), "other.activations": x}
    save_file(inputs, tmp_path / "c.safetensors")
    flags = ["--calibration", tmp_path / "c.safetensors", "--damp", "0.05"]
    done = run("quantize", model, tmp_path / "out", *flags)
    assert (done.code, done.err) == (0, "")
    assert f"not in the calibration file, by min-max: 1 layer ({UP})\n" in done.out
    assert "in the calibration file, not used: 1 tensor (other.activations)\n" in done.out
    packed = load(tmp_path / "out")
    for name, H, kind in ((Q, hessian(x), "dense-gptq"), (DOWN, hessian(y), "dense-gptq")):
        assert_same_weight(packed[name], pack(gptq(tensors[f"{name}.weight"].T, H, damp=0.05)))
        assert packed.entries[name].source_format == kind
    assert_same_weight(packed[UP], pack(quantize(tensors[f"{UP}.weight"].T, dtype=BF16)))
    summary = run("quantize", model, tmp_path / "two", *flags, "--json").json
    assert summary["unused_calibration"] == ["other.activations"]
    where = tmp_path / "c.safetensors"
    assert summary["notes"] == [f"{where}: has nothing for layer {UP}, which is quantized by min-max"]


@pytest.mark.parametrize(
    "flags", [[], ["--symmetric"], ["--act-order"], ["--group", "32"], ["--group", "-1"]]
)
def test_calibration_lowers_the_error_of_outputs(tmp_path, rng, flags):
    """On inputs that were not in the calibration file."""
    w = (0.02 * rng.standard_normal((96, 256))).astype(np.float16)
    save_file({"layer.weight": w}, tmp_path / "m.safetensors")
    x = correlated(rng, 1500, 256)
    save_file({"layer.activations": x[:1000]}, tmp_path / "c.safetensors")
    unseen = x[1000:].astype(np.float64)
    errors = []
    for name, inputs in (("a", []), ("b", ["--calibration", tmp_path / "c.safetensors"])):
        options = [*flags, *inputs] if inputs else [f for f in flags if f != "--act-order"]
        out = tmp_path / f"{name}.safetensors"
        assert run("quantize", tmp_path / "m.safetensors", out, *options).code == 0
        found = dequantize(load(out)["layer"], np.float32).astype(np.float64)
        errors.append(np.linalg.norm(unseen @ (found - w.T.astype(np.float64))))
    assert errors[1] < 0.67 * errors[0]


def test_activations_are_read_in_parts(tmp_path, model, rng, monkeypatch):
    x = correlated(rng, 300, 128)
    path = tmp_path / "c.safetensors"
    save_file({f"{Q}.activations": x}, path)
    monkeypatch.setattr(calibration, "_BLOCK_BYTES", 1000)  # less than 4 rows
    monkeypatch.setattr("marlin_jit.formats.safetensors_io.COPY_CHUNK", 777)  # not a whole number of rows
    found = calibration.Calibration(path).hessian(f"{Q}.activations")
    expected = 2 * x.astype(np.float64).T @ x.astype(np.float64)
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("order", ["falling", "rising", "mixed"])
@pytest.mark.parametrize("group_size", [32, -1])
def test_activation_order(tmp_path, rng, order, group_size):
    """Also where the order is that of the file, and where one group makes it vanish."""
    w = (0.02 * rng.standard_normal((64, 128))).astype(np.float16)
    diagonal = {"falling": -np.arange(128), "rising": np.arange(128), "mixed": rng.permutation(128)}[order]
    H = np.diag(200.0 + diagonal)
    save_file({"layer.weight": w}, tmp_path / "m.safetensors")
    save_file({"layer.hessian": H}, tmp_path / "c.safetensors")
    arguments = ["--group", group_size, "--act-order", "--calibration", tmp_path / "c.safetensors"]
    done = run("quantize", tmp_path / "m.safetensors", tmp_path / "o.safetensors", *arguments, "--json")
    assert (done.code, done.err) == (0, "")
    (layer,) = done.json["layers"]
    assert layer["activation_order"] == (group_size == 32)
    found = load(tmp_path / "o.safetensors")["layer"]
    assert (found.perm is not None) == (group_size == 32)
    expected = gptq(w.T, H, group_size, act_order=True)
    assert_same_bits(unpack(found).q, expected.q)
    assert_same_bits(dequantize(found), dequantize(pack(expected)))


# ---- what is refused --------------------------------------------------------------------------------------


def refused(tmp_path: Path, source: Path, *arguments: object) -> str:
    """Run, and return the one line that an error is; nothing may be left behind."""
    before = sorted(p.name for p in tmp_path.iterdir())
    done = run("quantize", source, tmp_path / "out", *arguments)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    return line.removeprefix("error: ")


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_group_size_that_does_not_divide(tmp_path, flags):
    save_file({"a.weight": np.ones((8, 96), np.float16)}, tmp_path / "m.safetensors")
    assert refused(tmp_path, tmp_path / "m.safetensors", *flags) == (
        f"{tmp_path}/m.safetensors: tensor a.weight: group size 128 does not divide K = 96; choose another, "
        "or leave the layer with --exclude a"
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32])
def test_weights_that_are_not_finite(tmp_path, bad, dtype):
    w = np.ones((8, 128), dtype)
    w[3, 70] = w[5, 1] = bad
    save_file({"a.weight": w}, tmp_path / "m.safetensors")
    line = refused(tmp_path, tmp_path / "m.safetensors")
    assert (
        f"tensor a.weight has 2 NaN or infinite of 1024 weights, the first ({bad}) at index [3, 70]" in line
    )


def test_weights_that_overflow_the_scales(tmp_path):
    save_file({"a.weight": np.full((8, 128), 1e6, np.float32)}, tmp_path / "m.safetensors")
    assert "tensor a.weight: scale or zero of 8 groups overflows float16" in refused(
        tmp_path, tmp_path / "m.safetensors"
    )


def test_quantized_models(tmp_path, model, rng):
    q, scale = np.full((64, 64), 3, np.uint8), np.ones((2, 64), np.float16)
    layer = gptq_layer(q, scale, np.full((2, 64), 8, np.uint8))
    source = write_model(tmp_path / "gptq", gptq_config(), {"layer": layer})
    line = refused(tmp_path, source)
    assert line.startswith(
        f"{source / 'config.json'}: quantization_config: the weights are quantized already"
    )
    assert "(quant_method 'gptq'); `marlin-jit pack` takes 4-bit ones as they are" in line
    (source / "config.json").unlink()
    assert "is of a quantized layer; `marlin-jit pack`" in refused(tmp_path, source)
    assert run("quantize", model, tmp_path / "packed").code == 0
    assert refused(tmp_path, tmp_path / "packed") == f"{tmp_path / 'packed'}: is packed already"
    save_file({"a.B": np.ones((1, 2), np.int32), "a.s": scale}, tmp_path / "m.safetensors")
    assert "tensor a.B is of a quantized layer" in refused(tmp_path, tmp_path / "m.safetensors")


def test_models_that_store_weights_the_other_way_round(tmp_path):
    """As GPT-2 does: only the bias tells."""
    c_attn = {
        "h.0.c_attn.weight": np.ones((128, 384), np.float16),
        "h.0.c_attn.bias": np.ones(384, np.float16),
    }
    square = {
        "h.0.c_proj.weight": np.ones((128, 128), np.float16),
        "h.0.c_proj.bias": np.ones(128, np.float16),
    }
    path = tmp_path / "m.safetensors"
    save_file(square | c_attn, path)
    for flags in ([], ["--include", "*c_proj"]):
        assert refused(tmp_path, path, *flags) == (
            f"{path}: tensor h.0.c_attn.weight is [128, 384] and its bias [384], so weights are stored as "
            "[in, out]; only [out, in] is read"
        )
    save_file(square, path)
    assert run("quantize", path, tmp_path / "out.safetensors").code == 0


def test_nothing_to_quantize(tmp_path, model):
    save_file({"norm.weight": np.ones(4, np.float16)}, tmp_path / "m.safetensors")
    line = refused(tmp_path, tmp_path / "m.safetensors")
    assert (
        "m.safetensors: holds no weight to quantize; tensors left as they are: 1 (no matrix) (heads" in line
    )
    line = refused(tmp_path, model, "--include", "*k_proj")
    assert line == f"{model}: no weight that could be quantized is called like '*k_proj'"
    assert "is called like 'nothing'" in refused(tmp_path, model, "--exclude", "nothing")
    assert "tensors left as they are: 6 (excluded), 2 (no matrix), 1 (" in refused(
        tmp_path, model, "--exclude", "*"
    )


EYE = np.eye(128, dtype=np.float32)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"hessian": EYE, "activations": EYE},
            f"holds both {Q}.hessian and {Q}.activations; keep one of them",
        ),
        ({"hessian": EYE.astype(np.float16)}, f"{Q}.hessian has dtype F16; expected F32 or F64"),
        ({"hessian": np.ones((127, 128))}, "has shape [127, 128]; expected [128, 128]"),
        ({"hessian": np.ones((96, 96))}, "has shape [96, 96]; expected [128, 128]"),
        ({"hessian": np.ones(128)}, "has shape [128]; expected [128, 128]"),
        ({"activations": np.ones((5, 96), np.float16)}, "has shape [5, 96]; expected [T, 128]"),
        ({"activations": np.ones((2, 5, 128), np.float16)}, "has shape [2, 5, 128]; expected [T, 128]"),
        ({"activations": np.ones((0, 128), np.float16)}, "has shape [0, 128]; expected [T, 128]"),
        ({"activations": np.ones((5, 128), np.int8)}, "has dtype I8; expected F16 or BF16 or F32 or F64"),
        ({"inputs": EYE}, "c.safetensors: has nothing for any layer; expected tensors like "),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_calibration_that_does_not_fit_is_found_before_anything_is_written(
    tmp_path, model, inputs, message, flags
):
    path = tmp_path / "c.safetensors"
    save_file({f"{Q}.{suffix}": array for suffix, array in inputs.items()}, path)
    line = refused(tmp_path, model, "--calibration", path, *flags)
    assert line.startswith(f"{path}: ")
    assert message in line


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"hessian": -EYE}, "hessian has a negative diagonal: [0, 0] is -1"),
        ({"hessian": EYE - 1e-2}, "hessian is not positive definite after damping by 0.01"),
        ({"hessian": np.triu(EYE + 1)}, "hessian is not symmetric: [0, 1] and [1, 0] are 1 and 0"),
        ({"hessian": EYE * np.float32(np.nan)}, "hessian must be finite; hessian[0, 0] is nan"),
        ({"activations": np.full((2, 128), np.inf, np.float16)}, "x must be finite; x[0, 0] is inf"),
    ],
)
def test_calibration_with_impossible_values(tmp_path, model, inputs, message):
    path = tmp_path / "c.safetensors"
    save_file({f"{Q}.{suffix}": array for suffix, array in inputs.items()}, path)
    line = refused(tmp_path, model, "--calibration", path)
    (suffix,) = inputs
    assert f"tensor {Q}.weight, calibrated by {path}: tensor {Q}.{suffix}: {message}" in line


def test_a_layer_too_wide_for_gptq(tmp_path, model, monkeypatch):
    monkeypatch.setattr(calibration, "_MAX_K", 127)
    save_file({f"{Q}.hessian": EYE}, tmp_path / "c.safetensors")
    line = refused(tmp_path, model, "--calibration", tmp_path / "c.safetensors")
    assert "K = 128 is too large for GPTQ; at most 127" in line


def test_calibration_files_that_are_none(tmp_path, model):
    path = tmp_path / "c.safetensors"
    assert refused(tmp_path, model, "--calibration", path) == f"{path}: no such file"
    path.write_bytes(b"\x00" * 100)
    assert refused(tmp_path, model, "--calibration", path).startswith(f"{path}: damaged safetensors file")


@pytest.mark.parametrize(
    "arguments",
    [["--act-order"], ["--damp", "0.1"], ["--group", "48"], ["--dtype", "float32"], ["--nonsense"]],
)
def test_wrong_usage(tmp_path, model, arguments):
    done = run("quantize", model, tmp_path / "out", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Usage: ")


def test_a_damp_that_is_no_share(tmp_path, model):
    save_file({f"{Q}.hessian": EYE}, tmp_path / "c.safetensors")
    for damp in ("-1", "nan", "inf"):
        line = refused(tmp_path, model, "--calibration", tmp_path / "c.safetensors", "--damp", damp)
        assert line == f"damp must be finite and not negative, got {float(damp)}"


@settings(max_examples=120, deadline=5000)
@given(
    damaged=st.sampled_from(["model.safetensors", "c.safetensors"]),
    changes=st.lists(
        st.tuples(st.floats(0, 1), st.booleans(), st.binary(min_size=1, max_size=3)), max_size=3
    ),
)
def test_damaged_files_never_crash(tmp_path_factory, damaged, changes):
    """Any change, to the header or to the data, ends in a packed file or in an error of ours."""
    root = tmp_path_factory.mktemp("fuzz")
    x = np.random.default_rng(0).standard_normal((40, 32)).astype(np.float16)
    save_file({"a.weight": x[:8], "b.weight": x[:16]}, root / "model.safetensors")
    save_file({"a.hessian": hessian(x), "b.activations": x}, root / "c.safetensors")
    data = bytearray((root / damaged).read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for place, in_header, new in changes:
        at = int(place * ((header if in_header else len(data)) - len(new)))
        data[at : at + len(new)] = new
    (root / damaged).write_bytes(data)
    arguments = ["--group", "32", "--calibration", root / "c.safetensors"]
    done = run("quantize", root / "model.safetensors", root / "out.safetensors", *arguments)
    names = sorted(p.name for p in root.iterdir())
    if done.code == 0:
        assert names == ["c.safetensors", "model.safetensors", "out.safetensors"]
        assert all(np.isfinite(w.scales).all() for w in load(root / "out.safetensors").values())
    else:
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
        assert names == ["c.safetensors", "model.safetensors"]


# ---- the reader -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"group_size": 48}, {"dtype": "float32"}])
def test_settings_that_cannot_be_packed(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not packed; accepted: "):
        Settings(**change)


def test_a_layer_tells_what_it_will_be(tmp_path, model, tensors):
    layer = open_dense(model, Settings(symmetric=True, dtype="bfloat16")).layers[DOWN]
    outline, parameters = layer.outline(), layer.parameters()
    packed = to_marlin(layer)
    assert (outline.K, outline.N) == (parameters.K, parameters.N) == packed.shape == (256, 128)
    assert outline.dtype == packed.dtype.name == parameters.scale.dtype.name == "bfloat16"
    assert outline.symmetric and packed.symmetric and parameters.symmetric
    assert_same_weight(packed, pack(quantize(tensors[f"{DOWN}.weight"].T, 128, True, BF16)))


def test_the_source_is_not_changed(tmp_path, model):
    before = {p: p.read_bytes() for p in model.iterdir()}
    assert run("quantize", model, tmp_path / "out").code == 0
    assert {p: p.read_bytes() for p in model.iterdir()} == before
