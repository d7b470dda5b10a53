"""Safetensors files and model folders: what is read, what is refused, what is written."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_maker import write_shards
from safetensors.numpy import save_file

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.model_files import ModelFiles
from marlin_jit.formats.safetensors_io import (
    SafetensorsFile,
    SafetensorsWriter,
    TensorInfo,
    array_info,
    load_json,
)

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


def write_raw(
    path: Path, header: bytes | dict[str, object], data: bytes = b"", length: int | None = None
) -> Path:
    """A file with any header at all, which no library would write."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start: int, stop: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def test_reads_what_the_library_wrote(tmp_path: Path, rng: np.random.Generator) -> None:
    dtypes = (np.int32, np.float16, ml_dtypes.bfloat16, np.float32, np.int64, np.uint8, np.bool_)
    tensors = {f"t{i}": rng.integers(0, 2, (3, 5)).astype(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"scalar": np.array(7, np.int64), "empty": np.zeros((0, 4), np.float16)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "pt"}
    assert set(file.tensors) == set(tensors)
    for name, expected in tensors.items():
        found = file.read(name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found, expected)
        assert b"".join(file.chunks(name)) == expected.tobytes()


def test_writes_what_the_library_would(tmp_path: Path, rng: np.random.Generator) -> None:
    """Byte for byte the same file, whatever the order of writing."""
    tensors = {
        "b": rng.integers(0, 9, (4, 2), dtype=np.int32),
        "a": rng.standard_normal(3).astype(np.float16),
        "c": rng.standard_normal((2, 2)).astype(np.float32),
        "é": np.zeros((0,), np.uint8),
    }
    save_file(tensors, tmp_path / "library.safetensors", {"k": "v"})
    infos = {name: array_info(array.dtype, array.shape) for name, array in tensors.items()}
    with SafetensorsWriter(tmp_path / "ours.safetensors", infos, {"k": "v"}) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    assert (tmp_path / "ours.safetensors").stat().st_size == writer.size
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()


def test_types_that_numpy_lacks_pass_through(tmp_path: Path) -> None:
    header = {"f4": entry(0, 4, "F4", [8]), "f8": entry(4, 8, "F8_E4M3")}
    file = SafetensorsFile(write_raw(tmp_path / "x.safetensors", header, b"abcdefgh"))
    assert file.read("f8").dtype == FLOAT8
    with pytest.raises(CheckpointError, match="tensor f4 has dtype F4, for which NumPy has no type"):
        file.read("f4")
    infos = dict(file.tensors)
    with SafetensorsWriter(tmp_path / "y.safetensors", infos, {}) as writer:
        for name in infos:
            writer.write(name, file.chunks(name))
    copy = SafetensorsFile(tmp_path / "y.safetensors")
    assert {name: b"".join(copy.chunks(name)) for name in infos} == {"f4": b"abcd", "f8": b"efgh"}


def test_writer_keeps_its_word(tmp_path: Path) -> None:
    infos = {"a": TensorInfo("I32", (2,), 8)}
    writer = SafetensorsWriter(tmp_path / "1", infos, {})
    with pytest.raises(CheckpointError, match=r"a was announced as I32 \(2,\), not I32 \(3,\)"), writer:
        writer.write("a", np.zeros(3, np.int32))
    writer = SafetensorsWriter(tmp_path / "2", infos, {})
    with pytest.raises(CheckpointError, match="a was announced with 8 bytes, not 5"), writer:
        writer.write("a", [b"12345"])
    writer = SafetensorsWriter(tmp_path / "3", infos, {})
    with pytest.raises(CheckpointError, match="a was announced and never written"), writer:
        pass


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", "invalid offset"),
        ({"a": entry(0, 4), "b": entry(6, 8)}, b"12345678", "invalid offset"),
        ({"a": entry(0, 4)}, b"123456", "2 bytes follow the last tensor"),
        ({"a": entry(0, 4)}, b"123", "cut short, it has .* bytes that its header announces"),
        ({"a": entry(-2, 2)}, b"1234", "invalid"),
        ({"a": entry(4, 0)}, b"1234", "invalid"),
        ({"a": entry(0, 4, "Q4")}, b"1234", "unknown variant `Q4`"),
        ({"a": entry(0, 4, "F16", [3])}, b"1234", "invalid shape, data type, or offset"),
        ({"a": entry(0, 4, "U8", [1 << 40, 1 << 40])}, b"1234", "overflow"),
        ({"a": {"dtype": "U8"}}, b"", "missing field"),
        ({"__metadata__": {"a": 1}}, b"", "expected a string"),
        (
            b'{"a":' + json.dumps(entry(0, 1)).encode() + b',"a":' + json.dumps(entry(0, 1)).encode() + b"}",
            b"1",
            "twice",
        ),
        (b"[]", b"", "invalid"),
        (b"[" * 200_000, b"", "invalid"),
        (b"\xff\xfe", b"", "UTF-8"),
        (b"", b"", "damaged safetensors file"),
    ],
)
def test_damaged_headers(
    tmp_path: Path, header: bytes | dict[str, object], data: bytes, message: str
) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 1 << 27, 1 << 60, (1 << 64) - 1])
def test_header_lengths(tmp_path: Path, length: int) -> None:
    with pytest.raises(CheckpointError, match="damaged safetensors file"):
        SafetensorsFile(write_raw(tmp_path / "x.safetensors", {"a": entry(0, 4)}, b"1234", length))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"1234", "damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"GGUF\x03\0\0\0" + bytes(50), "is a GGUF file inside a safetensors model"),
    ],
)
def test_stand_ins_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(tmp_path / "x.safetensors")


@pytest.mark.timeout(20)
def test_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would wait for ever
    with pytest.raises(CheckpointError, match="not a regular file"):
        SafetensorsFile(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is a folder"):
        SafetensorsFile(tmp_path / "folder.safetensors")
    (tmp_path / "link.safetensors").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="a symbolic link to nothing"):
        SafetensorsFile(tmp_path / "link.safetensors")
    with pytest.raises(CheckpointError, match="no such file"):
        SafetensorsFile(tmp_path / "missing.safetensors")


def test_file_that_shrinks_while_open(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1000, np.int32)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    os.truncate(tmp_path / "x.safetensors", 500)
    with pytest.raises(CheckpointError, match="became shorter"):
        file.read("a")
    with pytest.raises(CheckpointError, match="became shorter"):
        list(file.chunks("a"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("[1]", "a JSON list where an object is expected"),
        ("{", "not valid JSON"),
        ('{"a": ' * 100_000, "not valid JSON"),
        ("\xff", "not valid JSON"),
        ('{"a": ' + "9" * 10_000 + "}", "not valid JSON"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_json_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message):
        load_json(tmp_path / "x.json")


A, B = {"a": np.zeros(4, np.int8)}, {"b": np.ones(4, np.int8)}


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, {"model-1-of-2.safetensors": A, "model-2-of-2.safetensors": B})
    files = ModelFiles(tmp_path)
    assert (set(files), files.shard_of("b"), files.nbytes) == ({"a", "b"}, "model-2-of-2.safetensors", 8)
    np.testing.assert_array_equal(files.read("b"), B["b"])


@pytest.mark.parametrize(
    "shard", ["../out.safetensors", "/etc/passwd.safetensors", "a/b.safetensors", "..", "", "x\0.safetensors"]
)
def test_shard_names_stay_in_the_folder(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    write_shards(folder, {"model.safetensors": A})
    save_file(B, tmp_path / "out.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"leads out of the folder|is not a safetensors file"):
        ModelFiles(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": {"a": 3}}, "has no weight_map"),
        ({"weight_map": {}}, "lists no tensor"),
        ({"weight_map": {"a": "x.safetensors"}, "metadata": 3}, "metadata is not a JSON object"),
        ({"weight_map": {"a": "x.bin"}}, "is not a safetensors file"),
        ({"weight_map": {"a": "y.safetensors"}}, "y.safetensors: no such file"),
        ({"weight_map": {"zz": "x.safetensors"}}, "tensor zz is not in it"),
    ],
)
def test_indexes(tmp_path: Path, index: dict[str, object], message: str) -> None:
    save_file(A, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        ModelFiles(tmp_path)


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, {"m-1-of-2.safetensors": A | B, "m-2-of-2.safetensors": A})
    with pytest.raises(
        CheckpointError, match=r"tensor a is in two files, m-\d-of-2.safetensors and m-\d-of-2"
    ):
        ModelFiles(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.safetensors", "b.safetensors"], "2 safetensors files and no index; name one"),
        (["pytorch_model.bin"], "no [*].safetensors file"),
        ([], "no [*].safetensors file"),
    ],
)
def test_folders_without_an_answer(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        save_file(A, tmp_path / name)
    with pytest.raises(CheckpointError, match=message):
        ModelFiles(tmp_path)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file(A, tmp_path / "elsewhere")
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a symbolic link out of the folder"):
        ModelFiles(tmp_path / "model")
    # Named by the user themself, a link may lead anywhere.
    assert "a" in ModelFiles(tmp_path / "model" / "model.safetensors")


def test_the_download_cache_of_the_hub_is_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file(A, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert "a" in ModelFiles(snapshot)
