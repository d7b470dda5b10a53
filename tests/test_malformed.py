"""Files of strangers: whatever is in them, one clear line, exit code 2, and nothing written."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from cli_runner import run
from helpers import FIXTURES, assert_same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marlin_jit.errors import MarlinJitError
from marlin_jit.formats import load, open_checkpoint, pack_checkpoint
from marlin_jit.pack import dequantize

MALFORMED = sorted(p for p in (FIXTURES / "malformed").iterdir() if p.name != "valid_base")
BASE = FIXTURES / "malformed" / "valid_base"

# What the line must name: the thing that is wrong, in words that a user can act on.
NAMES = {
    "autogptq_n1000_short_qzeros": "q_proj.qzeros has shape [2, 124]; expected [2, 125]",
    "bits3_config": "config.json: quantization_config: bits is 3; only 4-bit weights are packed",
    "config_not_json": "config.json: is not valid JSON",
    "duplicate_tensor_two_shards": "q_proj.scales is in two files, model-00001-of-00002.safetensors and "
    "model-00002",
    "empty_file": "model.safetensors: is empty",
    "g_idx_too_large": "q_proj.g_idx: 1 of 64 group numbers are outside 0..1, the first (2) at index 17",
    "gguf_bad_magic": "model.gguf: is no GGUF file: it starts with b'GGUX' instead of b'GGUF'",
    "gguf_truncated": "model.gguf: damaged GGUF file: cut short, it has 9000 of the ",
    "group_size_48": "q_proj: group size 48 does not divide K = 64",
    "header_length_huge": "header too large",
    "header_not_json": "invalid UTF-8 in header",
    "index_missing_shard": "model-00002-of-00002.safetensors: no such file",
    "index_path_traversal": "file name '../outside.safetensors' leads out of the folder",
    "index_tensor_not_in_shard": "q_proj.g_idx is not in it, but model.safetensors.index.json says so",
    "missing_g_idx_desc_act": "q_proj has no g_idx, but desc_act is true",
    "missing_qzeros": "q_proj has no qzeros",
    "missing_scales": "q_proj has no scales",
    "offset_past_end": "cut short, it has 3096 of the 3160 bytes that its header announces",
    "quant_method_unknown": "quant_method 'bitsandbytes' is not read; accepted: gptq",
    "qweight_int64": "q_proj.qweight has dtype I64; expected I32",
    "scales_half_as_wide": "q_proj.scales has shape [2, 32]; expected [2, 64]",
    "scales_nan": "q_proj.scales has 1 NaN or infinite of 128 scales, the first (nan) at index [1, 5]",
    "shape_bytes_mismatch": "invalid shape, data type, or offset for tensor",
    "truncated_data": "cut short, it has 2396 of the 3096 bytes that its header announces",
}


def test_the_sound_file_is_read(tmp_path: Path) -> None:
    pack_checkpoint(BASE, tmp_path / "out")
    (weight,) = load(tmp_path / "out").values()
    with np.load(BASE / "expected.npz") as expected:
        assert_same_bits(dequantize(weight), expected["W"])


@pytest.mark.parametrize("folder", MALFORMED, ids=lambda p: p.name)
@pytest.mark.parametrize("flag", ["--json", "--dry-run", "--force"])
def test_one_line_exit_code_2_no_output(tmp_path: Path, folder: Path, flag: str) -> None:
    expect = json.loads((folder / "expect.json").read_text())
    assert expect["expect"].startswith("error")
    done = run("pack", folder / expect["model_dir"], tmp_path / "out", flag)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("error: ")
    assert NAMES[folder.name] in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", MALFORMED, ids=lambda p: p.name)
def test_an_existing_destination_survives(tmp_path: Path, folder: Path) -> None:
    pack_checkpoint(BASE, tmp_path / "out")
    before = {p: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    expect = json.loads((folder / "expect.json").read_text())
    assert run("pack", folder / expect["model_dir"], tmp_path / "out", "--force").code == 2
    assert {p: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_other_commands_give_one_line_too(tmp_path: Path, command: str) -> None:
    for folder in MALFORMED:
        expect = json.loads((folder / "expect.json").read_text())
        arguments = [folder / expect["model_dir"], *([BASE] if command == "verify" else [])]
        done = run(command, *arguments)
        if command == "inspect" and folder.name == "scales_nan":
            assert done.code == 0  # showing them is what it is for
            continue
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1), folder.name


@pytest.fixture(scope="module")
def specimens(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Small models of every format, packed ones among them."""
    root = tmp_path_factory.mktemp("specimens")
    packed = root / "packed"
    pack_checkpoint(FIXTURES / "awq" / "g128_k384_n64_zp_0_15", packed)
    sharded = root / "sharded"
    shutil.copytree(FIXTURES / "malformed" / "duplicate_tensor_two_shards", sharded)
    return [
        BASE,
        FIXTURES / "awq" / "g128_k384_n64_zp_0_15",
        FIXTURES / "marlin" / "orig_gm1_k64_n192_smalltile",
        FIXTURES / "marlin" / "awqmarlin_g128_k256_n256",
        sharded,
        packed,
    ]


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[str, float, bytes]]:
    """Changes to a file: what to do, where (as a fraction, or within the header), with which bytes."""
    kinds = st.sampled_from(["replace", "insert", "delete", "cut"])
    places = st.one_of(st.floats(0, 1), st.floats(0, 0.05))
    json_bytes = st.lists(st.sampled_from(list(b'[]{},:"0123456789-.eE\\u')), max_size=6).map(bytes)
    return draw(
        st.lists(
            st.tuples(kinds, places, st.one_of(json_bytes, st.binary(max_size=6))), min_size=1, max_size=4
        )
    )


def edited(data: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for kind, place, new in changes:
        at = int(place * len(data))
        if kind == "replace":
            data = data[:at] + new + data[at + len(new) :]
        elif kind == "insert":
            data = data[:at] + new + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + len(new) :]
        else:
            data = data[:at]
    return data


@settings(max_examples=300, deadline=5000, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_files_never_crash(
    specimens: list[Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any edit ends in a packed model or an error of ours, never in another exception or a stray file."""
    specimen = data.draw(st.sampled_from(specimens))
    files = sorted(
        p
        for p in specimen.iterdir()
        if p.suffix in (".safetensors", ".json") and p.stem not in ("case", "expect")
    )
    victim = data.draw(st.sampled_from(files))
    changes = data.draw(edits())
    root = tmp_path_factory.mktemp("fuzz")
    model = root / "model"
    model.mkdir()
    for file in files:
        content = file.read_bytes()
        (model / file.name).write_bytes(edited(content, changes) if file == victim else content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if specimen.name == "packed":
                for layer in open_checkpoint(model).layers.values():
                    layer.read()
                return
            pack_checkpoint(model, root / "out")
    except MarlinJitError as error:
        assert "\n" not in str(error)
        assert [p.name for p in root.iterdir()] == ["model"]
    else:
        assert sorted(p.name for p in root.iterdir()) == ["model", "out"]
        load(root / "out")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = st.sampled_from(
    (
        *("bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "quant_method"),
        *("is_marlin_format", "version", "backend", "dynamic", "pack_dtype", "w_bit", "q_group_size"),
    )
)


@settings(max_examples=150, deadline=5000)
@given(
    changes=st.dictionaries(KEYS, JSON, min_size=1, max_size=3),
    method=st.sampled_from(["gptq", "awq", "marlin"]),
)
def test_any_config_value_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, object], method: str
) -> None:
    root = tmp_path_factory.mktemp("config")
    shutil.copy(BASE / "model.safetensors", root)
    config = {"quant_method": method, "bits": 4, "group_size": 32, "sym": True} | changes
    (root / "config.json").write_text(json.dumps({"quantization_config": config}))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for layer in open_checkpoint(root).layers.values():
                layer.read()
    except MarlinJitError as error:
        assert str(error)
