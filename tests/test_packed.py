"""The packed file and folder: whole models end to end, nothing half-written, nothing harmed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_maker import awq_config, awq_layer, gptq_config, gptq_layer, write_model, write_shards
from helpers import FIXTURES, Case, assert_same_bits, case_id, cases, random_codes, random_scales
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from marlin_jit.errors import CheckpointError, DTypeError
from marlin_jit.formats import (
    compare,
    load,
    open_checkpoint,
    pack_checkpoint,
    plan_pack,
    run_pack,
    save,
    targets,
)
from marlin_jit.formats.packed import file_metadata
from marlin_jit.formats.publish import check_destination
from marlin_jit.formats.safetensors_io import SafetensorsFile
from marlin_jit.pack import dequantize, pack, unpack
from marlin_jit.weight import MarlinWeight, QuantWeight

ONE_LAYER = [*cases("gptq/*"), *cases("awq/*"), *cases("marlin/*")]
MODELS = cases("checkpoints/*")


def hashes(folder: Path) -> dict[str, str]:
    """Of every file below a folder (or of one file)."""
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def random_model(folder: Path, rng: np.random.Generator, names: tuple[str, ...] = ("a", "b")) -> Path:
    layers = {
        name: awq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 5, np.uint8))
        for name in names
    }
    return write_model(folder, awq_config(), layers, {"norm.weight": np.ones(64, np.float16)})


@pytest.mark.filterwarnings("ignore::marlin_jit.formats.CheckpointWarning")
@pytest.mark.parametrize("case", ONE_LAYER, ids=case_id)
def test_every_file_of_the_tools(tmp_path: Path, case: Case) -> None:
    before = hashes(case.path)
    pack_checkpoint(case.path, tmp_path / "out")
    assert hashes(case.path) == before
    model = load(tmp_path / "out")
    ((name, weight),) = model.items()
    expected = case.expected
    assert weight.shape == expected["W"].shape
    assert_same_bits(dequantize(weight), expected["W"], zero_sign=False)
    assert list(model.tensors) == ([f"{name}.bias"] if "bias" in expected else [])
    for tensor, array in model.tensors.items():
        assert_same_bits(array, case.tensors[tensor.removeprefix(name + ".")])
    assert not compare(case.path, tmp_path / "out").differences


@pytest.mark.parametrize("case", MODELS, ids=case_id)
def test_whole_models(tmp_path: Path, case: Case) -> None:
    before = hashes(case.path)
    plan = pack_checkpoint(case.path, tmp_path / "out")
    assert hashes(case.path) == before
    model = load(tmp_path / "out")
    with np.load(case.path / "expected" / "expected.npz") as arrays:
        expected = {name[2:]: arrays[name] for name in arrays.files if name.startswith("W.")}
    assert len(expected) >= 5
    for name, W in expected.items():
        assert_same_bits(dequantize(model[name]), W)
    assert len(model) == 14
    source = {k: v for f in case.path.glob("*.safetensors") for k, v in load_file(f).items()}
    kept = {k for k in source if not k.endswith(("qweight", "qzeros", "scales", "g_idx"))}
    assert set(model.tensors) == kept
    for name in kept:
        assert_same_bits(model.tensors[name], source[name])
    # A whole model: the same shards, an index that is right, the config rewritten, the rest carried along.
    out = tmp_path / "out"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = {name: SafetensorsFile(out / name) for name in sorted(set(index["weight_map"].values()))}
    assert set(shards) == {p.name for p in case.path.glob("*.safetensors")}
    assert index["weight_map"] == {t: name for name, file in shards.items() for t in file.tensors}
    assert index["metadata"]["total_size"] == plan.bytes_after
    assert plan.bytes_after == sum(i.nbytes for f in shards.values() for i in f.tensors.values())
    old_index = json.loads((case.path / "model.safetensors.index.json").read_text())
    assert {**old_index["metadata"], "total_size": 0} == {**index["metadata"], "total_size": 0}
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (case.path, out))
    quantization = new.pop("quantization_config")
    assert quantization["quant_method"] == "marlin-jit"
    assert quantization["original"]["config.json"] == old.pop("quantization_config")
    assert old == new
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (case.path / name).read_bytes()
    assert not (out / "quantize_config.json").exists()
    if (case.path / "quantize_config.json").exists():
        kept_config = json.loads((case.path / "quantize_config.json").read_text())
        assert quantization["original"]["quantize_config.json"] == kept_config


def test_metadata_of_a_file(tmp_path: Path, rng: np.random.Generator) -> None:
    source = random_model(tmp_path / "m", rng)
    pack_checkpoint(source / "model.safetensors", tmp_path / "out.safetensors")
    metadata = SafetensorsFile(tmp_path / "out.safetensors").metadata
    assert (metadata["format"], metadata["format_version"]) == ("marlin-jit", "1")
    entry = {"K": 64, "N": 64, "group_size": 32, "dtype": "float16", "source_format": "awq"}
    assert json.loads(metadata["layers"]) == {"a": entry, "b": entry}


def test_symmetric_layers_are_what_the_original_tool_writes(tmp_path: Path) -> None:
    """A symmetric layer has B and s alone, and packing a Marlin file leaves both as they were."""
    for case in cases("marlin/orig_*"):
        out = tmp_path / case.path.name
        pack_checkpoint(case.path, out)
        assert hashes_of_tensors(out) == hashes_of_tensors(case.path)


def hashes_of_tensors(folder: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(folder / "model.safetensors").items()}


def test_zero_bias_and_odd_dtypes_are_kept(tmp_path: Path, rng: np.random.Generator) -> None:
    others = {
        "a.bias": np.zeros(64, np.float16),
        "norm": np.ones(3, ml_dtypes.bfloat16),
        "fp8": np.ones(5, ml_dtypes.float8_e4m3fn),
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 2), np.float32),
    }
    q, scale, zeros = random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 5, np.uint8)
    raw = {name: array.view(np.uint8) if name == "fp8" else array for name, array in others.items()}
    source = write_model(tmp_path / "m", awq_config(), {"a": awq_layer(q, scale, zeros)}, raw)
    data = (
        (source / "model.safetensors")
        .read_bytes()
        .replace(b'"fp8":{"dtype":"U8"', b'"fp8":{"dtype":"F8_E4M3"')
    )
    length = int.from_bytes(data[:8], "little") + len("F8_E4M3") - len("U8")
    (source / "model.safetensors").write_bytes(length.to_bytes(8, "little") + data[8:])
    pack_checkpoint(source, tmp_path / "out")
    model = load(tmp_path / "out")
    assert set(model.tensors) == set(others)
    for name, array in others.items():
        assert (model.tensors[name].dtype, model.tensors[name].shape) == (array.dtype, array.shape)
        assert model.tensors[name].tobytes() == array.tobytes()


def test_layer_spread_over_shards_goes_where_its_codes_are(tmp_path: Path, rng: np.random.Generator) -> None:
    q, scale, zeros = random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 5, np.uint8)
    layer = {f"a.{key}": array for key, array in awq_layer(q, scale, zeros).items()}
    source = write_model(tmp_path / "m", awq_config(), {})
    (source / "model.safetensors").unlink()
    first, second = "x-1-of-2.safetensors", "x-2-of-2.safetensors"
    write_shards(source, {first: {"a.scales": layer.pop("a.scales")}, second: layer})
    pack_checkpoint(source, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == [second]
    assert not compare(source, tmp_path / "out").differences


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_save_and_load_are_inverse(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    group_size = data.draw(st.sampled_from([32, 64, 128, -1]))
    groups = data.draw(st.integers(1, 3))
    K = groups * group_size if group_size > 0 else data.draw(st.integers(1, 200))
    N = data.draw(st.integers(1, 130))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    dtype = data.draw(st.sampled_from([np.float16, ml_dtypes.bfloat16]))
    scale = random_scales(rng, groups if group_size > 0 else 1, N, dtype)
    zero_point = rng.integers(0, 17, scale.shape) if data.draw(st.booleans()) else np.full(scale.shape, 8)
    g_idx = None
    if group_size > 0 and data.draw(st.booleans()):
        g_idx = rng.permutation(np.repeat(np.arange(groups, dtype=np.int32), group_size))
    weight = pack(QuantWeight.from_zero_points(random_codes(rng, K, N), scale, zero_point, group_size, g_idx))
    path = tmp_path_factory.mktemp("saved") / "x.safetensors"
    bias = rng.standard_normal(N).astype(np.float32)
    save(path, {"layer": weight}, {"layer.bias": bias})
    model = load(path)
    again = model["layer"]
    assert (again.shape, again.group_size, again.dtype) == (weight.shape, weight.group_size, weight.dtype)
    for one, two in ((weight.B, again.B), (weight.scales, again.scales), (weight.delta, again.delta)):
        assert (one is None) == (two is None)
        if one is not None:
            assert_same_bits(two, one)
    assert (weight.perm is None) == (again.perm is None)
    np.testing.assert_array_equal(weight.perm, again.perm)
    np.testing.assert_array_equal(model.tensors["layer.bias"], bias)


def test_model_is_read_when_asked_for(tmp_path: Path, rng: np.random.Generator) -> None:
    pack_checkpoint(random_model(tmp_path / "m", rng), tmp_path / "out")
    model = load(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    assert "a" in model
    assert "c" not in model
    assert "norm.weight" in model.tensors
    assert (list(model), len(model), model.entries["a"].K) == (["a", "b"], 2, 64)
    with pytest.raises(CheckpointError, match="cannot be read"):
        model["a"]
    with pytest.raises(KeyError):
        model["c"]
    with pytest.raises(KeyError):
        model.tensors["a.B"]


def test_load_of_something_else_says_what_to_do(tmp_path: Path, rng: np.random.Generator) -> None:
    source = random_model(tmp_path / "m", rng)
    with pytest.raises(
        CheckpointError, match="was not written by marlin-jit; convert it with `marlin-jit pack"
    ):
        load(source)
    pack_checkpoint(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is packed already"):
        plan_pack(tmp_path / "out", tmp_path / "again")


ENTRY = {"K": 64, "N": 64, "group_size": 32, "dtype": "float16", "source_format": "awq"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("no json", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"a": 3}', "is not of the form K, N"),
        (json.dumps({"a": ENTRY | {"K": "64"}}), "is not of the form"),
        (json.dumps({"a": ENTRY | {"K": True}}), "is not of the form"),
        (json.dumps({"a": ENTRY | {"K": -64}}), "out of range"),
        (json.dumps({"a": ENTRY | {"K": 10**30}}), "out of range"),
        (json.dumps({"a": ENTRY | {"group_size": 48}}), "out of range"),
        (json.dumps({"a": ENTRY | {"dtype": "float32"}}), "out of range"),
        (json.dumps({"a": ENTRY | {"dtype": "bfloat16"}}), r"tensor a.s is F16 \[2, 64\]; expected BF16"),
        (json.dumps({"a": ENTRY | {"N": 65}}), r"tensor a.B is I32 \[4, 128\]; expected I32 \[4, 256\]"),
        (json.dumps({"zz": ENTRY}), "tensor zz.B is missing"),
    ],
)
def test_tampered_metadata(tmp_path: Path, rng: np.random.Generator, table: str, message: str) -> None:
    pack_checkpoint(random_model(tmp_path / "m", rng), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    rewrite_metadata(path, {"format": "marlin-jit", "format_version": "1", "layers": table})
    with pytest.raises(CheckpointError, match=message):
        load(path)


def rewrite_metadata(path: Path, metadata: dict[str, str]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]) | {"__metadata__": metadata}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_other_versions_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    pack_checkpoint(random_model(tmp_path / "m", rng), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    rewrite_metadata(path, file_metadata({}) | {"format_version": "2"})
    with pytest.raises(CheckpointError, match="format version 2; this release reads version 1"):
        load(path)


def test_values_are_checked_when_a_layer_is_read(tmp_path: Path, rng: np.random.Generator) -> None:
    pack_checkpoint(random_model(tmp_path / "m", rng), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    start = SafetensorsFile(path).tensors["a.s"].start
    data = bytearray(path.read_bytes())
    data[start : start + 2] = b"\xff\x7f"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor a\.s has 1 NaN or infinite of 128 scales"):
        load(path)["a"]


# Nothing half-written, nothing harmed


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError, CheckpointError])
def test_failure_in_the_middle_leaves_nothing(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, error: type, single: bool
) -> None:
    source = random_model(tmp_path / "m", rng)
    source = source / "model.safetensors" if single else source
    before = hashes(tmp_path)
    real = targets.to_marlin

    def fail(layer: Any, device: bool) -> Any:
        if layer.name == "b":
            raise error("in the middle")
        return real(layer)

    monkeypatch.setattr(targets, "to_marlin", fail)
    with pytest.raises(CheckpointError if error is OSError else error, match="in the middle"):
        pack_checkpoint(source, tmp_path / "out")
    assert hashes(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_failure_leaves_the_old_output_with_force(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_model(tmp_path / "m", rng)
    pack_checkpoint(source, tmp_path / "out")
    before = hashes(tmp_path)
    monkeypatch.setattr(targets, "to_marlin", lambda layer, device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack_checkpoint(source, tmp_path / "out", force=True)
    assert hashes(tmp_path) == before


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_terminated_in_the_middle_leaves_nothing(
    tmp_path: Path, rng: np.random.Generator, name: str, code: int
) -> None:
    # Tests that are run under nohup would pass on that a hangup is ignored.
    before = f"signal.signal(signal.{name}, signal.SIG_DFL)"
    done = pack_that_gets(name, tmp_path, rng, before)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_hangup_is_ignored_where_it_was(tmp_path: Path, rng: np.random.Generator) -> None:
    """As under nohup."""
    done = pack_that_gets("SIGHUP", tmp_path, rng, before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(load(tmp_path / "out")) == ["a", "b"]


def pack_that_gets(
    name: str, tmp_path: Path, rng: np.random.Generator, before: str
) -> subprocess.CompletedProcess[str]:
    """Run `pack` in a process that sends itself signals (twice, as a closing terminal may) at each layer."""
    source = random_model(tmp_path / "m", rng)
    code = (
        "import os, signal\n"
        "from marlin_jit.formats import targets\n"
        f"{before}\n"
        "real = targets.to_marlin\n"
        "def struck(layer, device):\n"
        "    try:\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "    finally:\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "    return real(layer)\n"
        "targets.to_marlin = struck\n"
        "from marlin_jit.cli.main import main\n"
        f"main(['pack', {str(source)!r}, {str(tmp_path / 'out')!r}])\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_existing_destination_is_not_touched(tmp_path: Path, rng: np.random.Generator) -> None:
    source = random_model(tmp_path / "m", rng)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    before = hashes(tmp_path)
    with pytest.raises(CheckpointError, match=r"out: exists already; remove it or choose another name$"):
        pack_checkpoint(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"exists already; .* --force"):
        pack_checkpoint(source / "model.safetensors", tmp_path / "file")
    # --force replaces its own output, never a folder of something else.
    with pytest.raises(CheckpointError, match="holds no packed model, so --force does not replace it"):
        pack_checkpoint(source, tmp_path / "out", force=True)
    with pytest.raises(CheckpointError, match="exists and is not a folder"):
        pack_checkpoint(source, tmp_path / "file", force=True)
    assert hashes(tmp_path) == before


def test_force_replaces_own_output(tmp_path: Path, rng: np.random.Generator) -> None:
    old, new = random_model(tmp_path / "m", rng), random_model(tmp_path / "n", rng, ("c",))
    pack_checkpoint(old, tmp_path / "out")
    (tmp_path / "out" / "stale.txt").write_text("x")
    pack_checkpoint(new, tmp_path / "out", force=True)
    assert list(load(tmp_path / "out")) == ["c"]
    assert not (tmp_path / "out" / "stale.txt").exists()
    pack_checkpoint(old / "model.safetensors", tmp_path / "x.safetensors")
    pack_checkpoint(new / "model.safetensors", tmp_path / "x.safetensors", force=True)
    assert list(load(tmp_path / "x.safetensors")) == ["c"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "n", "out", "x.safetensors"]


def test_source_and_destination_out_of_each_others_way(tmp_path: Path, rng: np.random.Generator) -> None:
    source = random_model(tmp_path / "deep" / "m", rng)
    (tmp_path / "link").symlink_to(source)
    before = hashes(tmp_path)
    for force in (False, True):
        for destination, message in (
            (source, "is the source itself"),
            (source / ".." / "m", "is the source itself"),
            (source / "out", "lies inside the source folder"),
            (tmp_path / "link" / "out", "lies inside the source folder"),
            (tmp_path / "deep", "holds the source"),
            (tmp_path / "nowhere" / "out", "the folder .*nowhere does not exist"),
        ):
            with pytest.raises(CheckpointError, match=message):
                pack_checkpoint(source, destination, force=force)
    file = source / "model.safetensors"
    with pytest.raises(CheckpointError, match="is the source itself"):
        pack_checkpoint(file, file, force=True)
    assert hashes(tmp_path) == before


def test_destination_that_appears_meanwhile_is_not_touched(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_model(tmp_path / "m", rng)
    real = targets.to_marlin

    def slow(layer: Any, device: bool) -> Any:
        (tmp_path / "out").write_text("somebody else's")
        return real(layer)

    monkeypatch.setattr(targets, "to_marlin", slow)
    with pytest.raises(CheckpointError, match="appeared while this was being written"):
        pack_checkpoint(source / "model.safetensors", tmp_path / "out")
    with pytest.raises(CheckpointError):
        pack_checkpoint(source, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "somebody else's"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]


def test_folder_exchanged_meanwhile_is_not_touched(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--force asks again who owns what it replaces, when the output is complete."""
    source = random_model(tmp_path / "m", rng)
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    real = targets.to_marlin

    def during(action: Callable[[], object]) -> None:
        def exchange(layer: Any, device: bool) -> Any:
            if layer.name == "a":
                action()
            return real(layer)

        monkeypatch.setattr(targets, "to_marlin", exchange)

    def appear() -> None:
        out.mkdir()
        (out / "thesis").write_text("x")

    during(appear)
    with pytest.raises(CheckpointError, match="holds no packed model"):
        pack_checkpoint(source, out, force=True)
    assert (out / "thesis").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]

    out.rename(elsewhere)
    during(lambda: out.symlink_to(elsewhere))
    for place in (source, source / "model.safetensors"):
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            pack_checkpoint(place, out, force=True)
        assert out.is_symlink()
        out.unlink()
    assert [p.name for p in elsewhere.iterdir()] == ["thesis"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "m"]


def exchange_at_the_rename(out: Path, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something in the moment between the last look at `out` and moving it aside."""
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self == out:
            monkeypatch.setattr(Path, "rename", real)
            action()
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


def test_folder_exchanged_at_the_last_moment_is_moved_back(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = random_model(tmp_path / "m", rng), tmp_path / "out"
    pack_checkpoint(source, out)

    def exchange() -> None:
        shutil.rmtree(out)
        out.mkdir()
        (out / "thesis").write_text("x")

    exchange_at_the_rename(out, monkeypatch, exchange)
    with pytest.raises(CheckpointError, match="holds no packed model"):
        pack_checkpoint(source, out, force=True)
    assert [p.name for p in out.iterdir()] == ["thesis"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]
    shutil.rmtree(out)
    pack_checkpoint(source, out)
    exchange_at_the_rename(out, monkeypatch, lambda: shutil.rmtree(out))  # gone: nothing to replace
    pack_checkpoint(source, out, force=True)
    assert list(load(out)) == ["a", "b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]


def test_packs_into_one_folder_at_once_leave_one_model(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = random_model(tmp_path / "m", rng), tmp_path / "out"
    pack_checkpoint(source, out)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        moved = real(self, target)
        if self == out:  # the other process is done while the name is free
            monkeypatch.setattr(Path, "rename", real)
            pack_checkpoint(source, out)
        return moved

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="appeared while this was being written"):
        pack_checkpoint(source, out, force=True)
    assert list(load(out)) == ["a", "b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]


def test_a_folder_that_goes_while_it_is_looked_at_is_not_called_foreign(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()

    def look(path: Path) -> bool:
        path.rmdir()  # another process has just moved it aside
        return False

    check_destination(folder, folder=True, force=True, may_replace=look)


def test_saving_never_replaces_more_than_a_file(tmp_path: Path, rng: np.random.Generator) -> None:
    weight = small_weight(rng)
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "folder" / "sub" / "precious").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "sub" / "precious")
    before = hashes(tmp_path)
    with pytest.raises(CheckpointError, match=r"exists and is not a file, .* remove it yourself"):
        save(tmp_path / "folder", {"a": weight}, force=True)
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        save(tmp_path / "link", {"a": weight}, force=True)
    assert hashes(tmp_path) == before
    assert (tmp_path / "link").is_symlink()


def test_a_replaced_file_is_there_at_every_moment(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, weight = tmp_path / "x.safetensors", small_weight(rng)
    save(path, {"old": weight})
    gone = []

    def watched(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("os.rename", "os.remove") and str(arguments[0]) == str(path):
            gone.append(event)

    watching = True
    sys.addaudithook(watched)
    save(path, {"new": weight}, force=True)
    watching = False
    assert gone == []
    assert list(load(path)) == ["new"]


def small_weight(rng: np.random.Generator) -> MarlinWeight:
    return pack(QuantWeight(random_codes(rng, 64, 64), random_scales(rng, 2, 64), None, 32))


@pytest.mark.parametrize("suffix", ["B", "s", "delta", "perm"])
def test_names_of_a_layer_are_its_own(tmp_path: Path, rng: np.random.Generator, suffix: str) -> None:
    """Also those that the layer does not use: read back, the stranger would be a part of it."""
    scale, zeros = random_scales(rng, 2, 64), np.full((2, 64), 8, np.uint8)
    foreign = {f"a.{suffix}": np.full((2, 64), 5, np.float32)}
    layer = awq_layer(random_codes(rng, 64, 64), scale, zeros)
    source = write_model(tmp_path / "m", awq_config(), {"a": layer}, foreign)
    with pytest.raises(CheckpointError, match=rf"tensor a\.{suffix} belongs to no layer"):
        pack_checkpoint(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match=rf"tensors\['a\.{suffix}'\]: this name is reserved"):
        save(tmp_path / "x.safetensors", {"a": small_weight(rng)}, foreign)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_wrong_arguments_of_save_and_load(tmp_path: Path, rng: np.random.Generator) -> None:
    path, weight = tmp_path / "x.safetensors", small_weight(rng)
    with pytest.raises(DTypeError, match=r"weights\['a'\] is a QuantWeight; expected a MarlinWeight"):
        save(path, {"a": unpack(weight)})  # type: ignore[dict-item]
    with pytest.raises(DTypeError, match=r"tensors\['b'\] is a list; expected a NumPy or CuPy array"):
        save(path, {"a": weight}, {"b": [1]})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=r"'__metadata__'\]: this name is reserved for the file format"):
        save(path, {"a": weight}, {"__metadata__": np.zeros(3)})
    with pytest.raises(CheckpointError, match="cannot be written as UTF-8"):
        save(path, {"\ud800": weight})
    for long in ("a" * 5000, tmp_path / ("a" * 300)):
        with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
            load(long)
        with pytest.raises(CheckpointError, match="cannot be written: File name too long"):
            save(long, {"a": weight})
    with pytest.raises(CheckpointError, match="cannot be read: embedded null byte"):
        load("a\0b")
    assert list(tmp_path.iterdir()) == []
    longest = tmp_path / ("中" * 85)  # 255 bytes
    save(longest, {"a": weight})
    assert list(load(longest)) == ["a"]


def test_a_file_of_the_source_that_fails_is_named(tmp_path: Path, rng: np.random.Generator) -> None:
    source = random_model(tmp_path / "m", rng)
    (source / "tokenizer.json").write_text("{}")
    plan = plan_pack(source, tmp_path / "out")
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"m/tokenizer\.json: cannot be read: No such file"):
        run_pack(plan)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_names_that_collide_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    layer = awq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 5, np.uint8))
    source = write_model(tmp_path / "m", awq_config(), {"a": layer}, {"a.s": np.ones(3, np.float16)})
    with pytest.raises(CheckpointError, match=r"tensor a\.s belongs to no layer, .* for layer a"):
        plan_pack(source, tmp_path / "out")


def test_other_files_of_a_folder(tmp_path: Path, rng: np.random.Generator) -> None:
    source = random_model(tmp_path / "m", rng)
    (source / "1_Pooling").mkdir()
    (source / ".git").mkdir()
    for name in (
        "README.md",
        "1_Pooling/config.json",
        ".git/HEAD",
        "pytorch_model.bin",
        "quantize_config.json",
    ):
        (source / name).write_text("{}")
    os.mkfifo(source / "pipe")
    plan = plan_pack(source, tmp_path / "out")
    assert plan.copied == ("1_Pooling/config.json", "README.md")
    assert plan.skipped == (".git", "pipe", "pytorch_model.bin", "quantize_config.json")
    (source / "secret").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="secret: a symbolic link out of the folder"):
        plan_pack(source, tmp_path / "out")


def test_config_with_text_that_is_no_unicode(tmp_path: Path, rng: np.random.Generator) -> None:
    source = random_model(tmp_path / "m", rng)
    text = (source / "config.json").read_text().replace('"llama"', '"\\ud800 é"')
    (source / "config.json").write_text(text)
    pack_checkpoint(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "\ud800 é"


def test_compare_finds_the_first_difference(tmp_path: Path, rng: np.random.Generator) -> None:
    """One nibble of B, one byte of another tensor, a layer and a tensor too many."""
    q = random_codes(rng, 64, 64)
    layer = gptq_layer(q, np.ones((2, 64), np.float16), np.full((2, 64), 8, np.uint8))
    source = write_model(
        tmp_path / "m", gptq_config(checkpoint_format="gptq_v2"), {"a": layer}, {"n": np.zeros(4)}
    )
    pack_checkpoint(source, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    file = SafetensorsFile(path)
    data = bytearray(path.read_bytes())
    data[file.tensors["a.B"].start] ^= 1  # the lowest bit of code (0, 0)
    data[file.tensors["n"].start + 3] ^= 1
    path.write_bytes(data)
    differences = {d.name: d for d in compare(source, path).differences}
    assert set(differences) == {"a", "n"}
    assert (differences["a"].count, differences["a"].index) == (1, (0, 0))
    assert f"{float(q[0, 0]) - 8} and {float(q[0, 0] ^ 1) - 8}" in differences["a"].what
    assert "dtype, shape or bytes" in differences["n"].what
    other = random_model(tmp_path / "o", rng)
    names = {(d.name, d.what.split(" in ")[0]) for d in compare(source, other).differences}
    assert names >= {("b", "no such layer"), ("n", "no such tensor"), ("norm.weight", "no such tensor")}


def test_every_example_packs(tmp_path: Path) -> None:
    examples = [p for p in (FIXTURES.parent.parent / "examples").iterdir() if (p / "config.json").exists()]
    assert examples
    for example in examples:
        pack_checkpoint(example, tmp_path / example.name)
        assert not compare(example, tmp_path / example.name).differences
        assert open_checkpoint(tmp_path / example.name).format == "marlin-jit"


@pytest.mark.parametrize(
    ("weights", "tensors", "more"),
    [(("l",), {}, {"source_format": 3}), ((1,), {}, {}), (("1", 1), {}, {}), (("l",), {3: 1}, {})],
)
def test_names_that_are_no_strings(
    tmp_path: Path, rng: np.random.Generator, weights: Any, tensors: Any, more: Any
) -> None:
    packed = pack(QuantWeight(random_codes(rng, 64, 64), np.ones((1, 64), np.float16), None, -1))
    arrays = {name: np.zeros(value) for name, value in tensors.items()}
    with pytest.raises(DTypeError, match="must be strings"):
        save(tmp_path / "f.safetensors", dict.fromkeys(weights, packed), arrays, **more)
    assert not any(tmp_path.iterdir())


def test_a_masked_tensor_is_refused(tmp_path: Path) -> None:
    masked: Any = np.ma.masked_equal(np.arange(3), 1)
    with pytest.raises(DTypeError, match="MaskedArray"):
        save(tmp_path / "f.safetensors", {}, {"a": masked})
    assert not any(tmp_path.iterdir())
