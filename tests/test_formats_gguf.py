"""GGUF files: against the gguf package's own decoders, float64, and files built here from the description."""

from __future__ import annotations

import json
import math
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_maker import write_model
from helpers import FIXTURES, Case, assert_same_bits, case_id, cases

from marlin_jit.errors import CheckpointError
from marlin_jit.formats import CheckpointWarning, compare, load, open_checkpoint, pack_checkpoint, plan_pack
from marlin_jit.formats.gguf_container import read_header
from marlin_jit.formats.layer import ReadOptions
from marlin_jit.formats.safetensors_io import COPY_CHUNK
from marlin_jit.pack import dequantize, pack
from marlin_jit.weight import QuantWeight

gguf = pytest.importorskip("gguf", reason="needs the gguf package: pip install gguf")

GOOD = cases("gguf/*")
# Numbers of value types and tensor types, as the format's description has them.
UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
F32, F16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K, Q8_K, I32, BF16 = 0, 1, 2, 3, 6, 8, 12, 14, 15, 26, 30
BLOCKS = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q5_0: (32, 22), Q8_0: (32, 34)}
BLOCKS |= {Q4_K: (256, 144), Q6_K: (256, 210), Q8_K: (256, 292), I32: (1, 4), BF16: (1, 2)}

Value = tuple[str, int, bytes]  # key, type, bytes
Tensor = tuple[str, int, tuple[int, ...], bytes]  # name, type, dimensions (the fastest first), data


# ---- files made here --------------------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_bytes(
    values: list[Value],
    tensors: list[Tensor],
    *,
    alignment: int = 32,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    offsets: list[int] | None = None,
) -> bytes:
    """A GGUF file from its parts; `counts` (tensors, values) and `offsets` may lie."""
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(values))))
    for key, kind, data in values:
        head += text(key) + struct.pack("<I", kind) + data
    body = b""
    for i, (name, kind, dimensions, data) in enumerate(tensors):
        head += text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        head += struct.pack("<IQ", kind, offsets[i] if offsets else len(body))
        body += data + bytes(-len(data) % alignment)
    return head + bytes(-len(head) % alignment) + body


def random_blocks(rng: np.random.Generator, kind: int, K: int, N: int) -> np.ndarray:
    """Blocks of a 4-bit type, uint8 [N, blocks, bytes], of random bytes but with scales as in `scales16`."""
    elements, nbytes = BLOCKS[kind]
    blocks = rng.integers(0, 256, (N, K // elements, nbytes), dtype=np.uint8)
    for i in range({Q4_0: 1, Q4_1: 2, Q4_K: 2}[kind]):
        blocks[:, :, 2 * i : 2 * i + 2] = scales16(rng, blocks.shape[:2])[:, :, None].view(np.uint8)
    return blocks


def scales16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """float16 of both signs and sizes from subnormal ones to 2^-7, with zeros."""
    scale = rng.standard_normal(shape) * 2.0 ** rng.integers(-22, -8, shape)
    scale[rng.random(shape) < 0.05] = 0
    return scale.astype(np.float16)


def matrix(name: str, kind: int, blocks: np.ndarray) -> Tensor:
    return name, kind, (blocks.shape[1] * BLOCKS[kind][0], blocks.shape[0]), blocks.tobytes()


def layer_file(path: Path, *tensors: Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf_bytes([("general.architecture", STRING, text("llama"))], list(tensors)))
    return path


def decoded(kind: int, blocks: np.ndarray) -> np.ndarray:
    """float32 [K, N], by the gguf package."""
    rows = blocks.reshape(blocks.shape[0], -1)
    with np.errstate(invalid="ignore"):
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind)).T


def layer_weight(path: Path, name: str) -> QuantWeight:
    weight = open_checkpoint(path).layers[name].read()
    assert isinstance(weight, QuantWeight)
    return weight


# ---- layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOOD, ids=case_id)
@pytest.mark.parametrize("output", ["folder", "file.safetensors"])
def test_files_of_the_tool_decode_to_its_weights(tmp_path: Path, case: Case, output: str) -> None:
    source, expected = case.path / "model.gguf", case.expected
    packed = tmp_path / output
    pack_checkpoint(source, packed)
    model = load(packed)
    layers = open_checkpoint(source).layers
    assert set(model) == set(layers)
    for tensor in case.info["tensors"]:
        name, kind = tensor["name"], tensor["type"]
        if kind in ("Q4_0", "Q4_1"):
            module, W = name.removesuffix(".weight"), expected[f"W.{name}"]
            weight = layers[module].read()
            assert weight.shape == (tensor["K"], tensor["N"])
            assert layers[module].format == f"gguf-{kind.lower()}"
            assert_same_bits(layers[module].parameters().scale, weight.scale)
            assert weight.symmetric == model[module].symmetric == (kind == "Q4_0")
            for read in (weight, model[module]):
                assert_same_bits(dequantize(read, np.float32), W, zero_sign=False)
                assert_same_bits(dequantize(read), W.astype(np.float16), zero_sign=False)
        elif kind == "Q8_0":
            assert_same_bits(model.tensors[name], np.ascontiguousarray(expected[f"W.{name}"].T))
    assert compare(source, packed).differences == ()


def test_edge_values_are_there(rng: np.random.Generator) -> None:
    """So that the tests above and below mean what they say."""
    scale = layer_weight(FIXTURES / "gguf" / "q40_q41_edge_k64_n1000" / "model.gguf", "output").scale
    assert scale.shape == (2, 1000)
    for scales in (scale, scales16(rng, (1000,))):
        assert (scales < 0).any()
        assert (scales == 0).any()
    assert ((scales != 0) & (np.abs(scales) < 2.0**-14)).any()  # subnormal ones


SHAPES = [(256, 1000), (256, 1), (512, 8000)]  # the last takes several reads


@pytest.mark.parametrize("kind", [Q4_0, Q4_1])
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_random_blocks(tmp_path: Path, rng: np.random.Generator, kind: int, K: int, N: int) -> None:
    blocks = random_blocks(rng, kind, K, N)
    path = layer_file(tmp_path / "m.gguf", matrix("blk.0.ffn_up.weight", kind, blocks))
    weight = layer_weight(path, "blk.0.ffn_up")
    for read in (weight, pack(weight)):
        assert_same_bits(dequantize(read, np.float32), decoded(kind, blocks), zero_sign=False)


@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_q4_k_is_within_its_bound(tmp_path: Path, rng: np.random.Generator, K: int, N: int) -> None:
    """|W' - W| <= 8*max(2^-11*|d*sc|, 2^-25) + 2^-24*M, and code 8 stays where it was."""
    blocks = random_blocks(rng, Q4_K, K, N)
    path = layer_file(tmp_path / "m.gguf", matrix("a.weight", Q4_K, blocks))
    weight = layer_weight(path, "a")
    assert weight.zero is not None
    step, minimum = (np.repeat(array, 32, axis=0) for array in exact_scales_q4_k(blocks))
    exact = step * weight.q - minimum
    np.testing.assert_array_equal(exact.astype(np.float32), decoded(Q4_K, blocks))  # the codes are right
    M = np.repeat(np.abs(weight.zero) + 16 * np.abs(weight.scale.astype(np.float64)), 32, axis=0)
    scale_error = 8 * np.maximum(2.0**-11 * np.abs(step), 2.0**-25)
    for read in (weight, pack(weight)):
        error = np.abs(dequantize(read, np.float32) - exact)
        in_float32 = np.where(2**13 * np.abs(step) < M, 3, 1) * 2.0**-24 * M
        assert (error <= scale_error + in_float32).all()
        assert (error[weight.q == 8] <= in_float32[weight.q == 8]).all()
        assert N == 1 or (error > scale_error / 2).any()  # the bound is not much too wide


def exact_scales_q4_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps d*sc and minima dmin*mn, float64 [G, N], with the gguf package's reading of the 6-bit numbers."""
    n, count = blocks.shape[:2]
    d, dmin = (blocks[:, :, 2 * i : 2 * i + 2].copy().view(np.float16).astype(np.float64) for i in (0, 1))
    sc, mn = gguf.quants.Q4_K.get_scale_min(blocks[:, :, 4:16].reshape(-1, 12))
    return (d * sc.reshape(n, count, 8)).reshape(n, -1).T, (dmin * mn.reshape(n, count, 8)).reshape(n, -1).T


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q4_K])
def test_packed_blocks_are_verified_to_the_bit(tmp_path: Path, rng: np.random.Generator, kind: int) -> None:
    """Sums of zeros and scales are exact in float32, so codes around 0 and around 8 give the same weights."""
    blocks = random_blocks(rng, kind, 512, 600)
    path = layer_file(tmp_path / "m.gguf", matrix("a.weight", kind, blocks))
    pack_checkpoint(path, tmp_path / "out")
    done = compare(path, tmp_path / "out")
    assert (done.layers, done.weights, done.differences) == (1, 512 * 600, ())


def test_q4_1_with_minima_of_any_size(tmp_path: Path, rng: np.random.Generator) -> None:
    """Beyond 1 the stored m + 8*d rounds to float32, no worse."""
    blocks = random_blocks(rng, Q4_1, 64, 500)
    m = (rng.standard_normal((500, 2)) * 2.0 ** rng.integers(-24, 13, (500, 2))).astype(np.float16)
    blocks[:, :, 2:4] = m[:, :, None].view(np.uint8)
    weight = layer_weight(layer_file(tmp_path / "m.gguf", matrix("a.weight", Q4_1, blocks)), "a")
    assert weight.zero is not None
    assert_same_bits(weight.zero, np.ascontiguousarray(m.T))
    W = decoded(Q4_1, blocks)
    assert_same_bits(dequantize(weight, np.float32), W, zero_sign=False)
    error = np.abs(dequantize(pack(weight), np.float32) - W.astype(np.float64))
    middle = np.abs(np.repeat(weight.delta, 32, axis=0))
    assert (error <= 2.0**-24 * middle + 2.0**-23 * np.abs(W)).all()


def test_a_row_of_one_group_is_one_group_a_column(tmp_path: Path, rng: np.random.Generator) -> None:
    blocks = random_blocks(rng, Q4_1, 32, 70)
    path = layer_file(tmp_path / "m.gguf", matrix("a.weight", Q4_1, blocks))
    pack_checkpoint(path, tmp_path / "out")
    weight = load(tmp_path / "out")["a"]
    assert (weight.shape, weight.group_size) == ((32, 70), -1)
    assert_same_bits(dequantize(weight, np.float32), decoded(Q4_1, blocks), zero_sign=False)


# ---- other tensors ----------------------------------------------------------------------------------------


def test_embeddings_are_dense_and_heads_are_layers(tmp_path: Path, rng: np.random.Generator) -> None:
    blocks = random_blocks(rng, Q4_1, 64, 100)
    names = ["token_embd.weight", "output.weight", "position_embd.weight"]
    path = layer_file(tmp_path / "m.gguf", *(matrix(name, Q4_1, blocks) for name in names))
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.layers) == ["output"]
    assert checkpoint.others == ("token_embd.weight", "position_embd.weight")
    pack_checkpoint(path, tmp_path / "out")
    tensors = load(tmp_path / "out").tensors
    for name in checkpoint.others:
        assert_same_bits(tensors[name], np.ascontiguousarray(decoded(Q4_1, blocks).T))


def test_plain_tensors_keep_dtype_and_bytes(tmp_path: Path, rng: np.random.Generator) -> None:
    arrays = {
        "f16": (F16, rng.standard_normal((3, 5)).astype(np.float16)),
        "bf16": (BF16, rng.standard_normal((2, 3, 5)).astype(ml_dtypes.bfloat16)),
        "f32": (F32, np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)),
        "i32": (I32, rng.integers(-9, 9, 7).astype(np.int32)),
    }
    path = layer_file(
        tmp_path / "m.gguf",
        matrix("a.weight", Q4_0, random_blocks(rng, Q4_0, 64, 64)),
        *((name, kind, array.shape[::-1], array.tobytes()) for name, (kind, array) in arrays.items()),
    )
    checkpoint = open_checkpoint(path)
    for name, (_, array) in arrays.items():
        assert_same_bits(checkpoint.files.read(name), array)
    pack_checkpoint(path, tmp_path / "out")
    for name, (_, array) in arrays.items():
        assert_same_bits(load(tmp_path / "out").tensors[name], array)


def test_q8_0_in_several_pieces(tmp_path: Path, rng: np.random.Generator) -> None:
    """Pieces have the size in which safetensors are read: `compare` walks both at once."""
    rows, columns = 1100, 2048
    blocks = rng.integers(0, 256, (rows, columns // 32, 34), dtype=np.uint8)
    blocks[:, :, :2] = scales16(rng, blocks.shape[:2])[:, :, None].view(np.uint8)
    path = layer_file(
        tmp_path / "m.gguf",
        ("v.weight", Q8_0, (columns, rows), blocks.tobytes()),
        matrix("a.weight", Q4_0, random_blocks(rng, Q4_0, 64, 64)),
    )
    files = open_checkpoint(path).files
    d = blocks[:, :, :2].copy().view(np.float16).astype(np.float64)
    exact = (blocks[:, :, 2:].view(np.int8) * d).reshape(rows, columns)
    np.testing.assert_array_equal(files.read("v.weight").astype(np.float64), exact)
    pieces = [len(piece) for piece in files.chunks("v.weight")]
    assert pieces == [COPY_CHUNK, 4 * rows * columns - COPY_CHUNK]
    assert files.info("v.weight").nbytes == sum(pieces)
    assert files.nbytes == blocks.nbytes + 64 * 2 * 18


def other_types(rng: np.random.Generator) -> list[Tensor]:
    def data(kind: int, count: int) -> bytes:
        blocks = rng.integers(0, 256, (count, BLOCKS[kind][1]), dtype=np.uint8)
        blocks[:, [1, -1]] = 1  # small scales, wherever they are
        return blocks.tobytes()

    return [
        matrix("a.weight", Q4_0, random_blocks(rng, Q4_0, 64, 64)),
        ("b.weight", Q6_K, (256, 3), data(Q6_K, 3)),
        ("c.weight", Q5_0, (64, 3), data(Q5_0, 6)),
        ("d.weight", Q6_K, (512, 2), data(Q6_K, 4)),
        ("experts.weight", Q4_0, (64, 5, 2), random_blocks(rng, Q4_0, 64, 10).tobytes()),
        ("no_weight", Q4_0, (64, 5), random_blocks(rng, Q4_0, 64, 5).tobytes()),
    ]


def test_other_types_are_refused_with_their_counts(tmp_path: Path, rng: np.random.Generator) -> None:
    path = layer_file(tmp_path / "m.gguf", *other_types(rng))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(caught.value) == (
        f"{path}: tensors of type Q6_K (2), Q4_0 that are no weight matrices (2), Q5_0 (1) are not packed; "
        "--dequantize-others keeps them as dense F32"
    )


def test_other_types_are_dequantized_if_asked_for(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = other_types(rng)
    path = layer_file(tmp_path / "m.gguf", *tensors)
    checkpoint = open_checkpoint(path, ReadOptions(dequantize_others=True))
    assert list(checkpoint.layers) == ["a"]
    assert len(checkpoint.others) == 5
    for name, kind, dimensions, data in tensors[1:]:
        rows = np.frombuffer(data, np.uint8).reshape(math.prod(dimensions[1:]), -1)
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind)).reshape(dimensions[::-1])
        assert_same_bits(checkpoint.files.read(name), expected)
        assert checkpoint.files.info(name).shape == dimensions[::-1]


def test_types_that_nobody_dequantizes_are_refused(tmp_path: Path) -> None:
    path = layer_file(tmp_path / "m.gguf", ("a.weight", Q8_K, (256, 1), bytes(292)))
    with pytest.raises(CheckpointError, match=r"type Q8_K \(1\) cannot be dequantized by the gguf package"):
        open_checkpoint(path, ReadOptions(dequantize_others=True))


# ---- health -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("kind", "field"), [(Q4_0, 0), (Q4_1, 0), (Q4_1, 1), (Q4_K, 0), (Q4_K, 1)])
def test_numbers_that_are_not_finite(
    tmp_path: Path, rng: np.random.Generator, kind: int, bad: float, field: int
) -> None:
    blocks = random_blocks(rng, kind, 512, 40)
    blocks[:, :, 4:16] |= 0x11  # sub-scales and sub-minima of Q4_K that are not 0, which hides what is wrong
    for row, block in ((7, 1), (9, 0)):
        blocks[row, block, 2 * field : 2 * field + 2] = np.array([bad], np.float16).view(np.uint8)
    each = BLOCKS[kind][0] // 32  # groups of a block
    path = layer_file(tmp_path / "m.gguf", matrix("a.weight", kind, blocks))
    what = (
        rf"tensor a.weight: {2 * each} of {16 * 40} groups have a NaN or infinite scale or minimum"
        r"{}, the first at index \[0, 9\]"
    )
    with pytest.raises(CheckpointError, match=what.format("")):
        plan_pack(path, tmp_path / "out")
    with pytest.raises(CheckpointError, match=what.format("")):
        open_checkpoint(path).layers["a"].read()
    layer = open_checkpoint(path, ReadOptions(fix_nan_scales=True)).layers["a"]
    with pytest.warns(CheckpointWarning, match=what.format(" and are taken as 0")):
        (note,) = layer.outline().notes
    assert "taken as 0" in note
    with pytest.warns(CheckpointWarning):
        W = dequantize(layer.read(), np.float32)
    sound = np.ones(W.shape, bool)
    sound[32 * each : 64 * each, 7] = sound[: 32 * each, 9] = False
    assert (W[~sound] == 0).all()
    reference = decoded(kind, blocks)
    np.testing.assert_allclose(W[sound], reference[sound], rtol=0, atol=2e-3 if kind == Q4_K else 0)


@pytest.mark.parametrize(
    ("kind", "numbers", "message"),
    [
        (Q4_1, (10, 65500), "1 of 128 groups have a middle, minimum + 8*scale, that overflows float16"),
        (Q4_K, (2, 60000), "8 of 128 groups have a middle, minimum + 8*scale, that overflows float16"),
        (Q4_K, (60000, 2), "8 of 128 groups have a NaN or infinite scale or minimum"),  # d*sc in float16
    ],
)
def test_what_overflows_is_found_before_writing(
    tmp_path: Path, rng: np.random.Generator, kind: int, numbers: tuple[float, float], message: str
) -> None:
    elements = BLOCKS[kind][0]
    blocks = random_blocks(rng, kind, 2 * elements, 64 * 32 // elements)
    blocks[5, 1, 4:16] |= 0x22  # sub-scales and sub-minima of Q4_K are 2 at least
    blocks[5, 1, :4] = np.array(numbers, np.float16).view(np.uint8)
    path = layer_file(tmp_path / "m.gguf", matrix("a.weight", kind, blocks))
    with pytest.raises(CheckpointError) as caught:
        plan_pack(path, tmp_path / "out")
    assert f"tensor a.weight: {message}, the first at index [{elements // 32}, 5]" in str(caught.value)


# ---- the container ----------------------------------------------------------------------------------------


def reader_values(path: Path) -> dict[str, Any]:
    """The key-values as the gguf package reads them."""
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


@pytest.mark.parametrize("case", GOOD, ids=case_id)
def test_header_is_what_the_gguf_package_reads(case: Case) -> None:
    path = case.path / "model.gguf"
    header = read_header(path)
    assert header.values == reader_values(path)
    tensors = gguf.GGUFReader(path).tensors
    assert list(header.tensors) == [tensor.name for tensor in tensors]
    for theirs in tensors:
        ours = header.tensors[theirs.name]
        assert ours.shape == tuple(theirs.shape[::-1].tolist())
        assert (ours.kind, ours.start) == (theirs.tensor_type.name, theirs.data_offset)
        assert (ours.nbytes, ours.size) == (theirs.n_bytes, theirs.n_elements)


def test_every_type_of_value(tmp_path: Path) -> None:
    """Written and read by the gguf package."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in (
        ("uint8", 200),
        ("int8", -5),
        ("uint16", 60000),
        ("int16", -300),
        ("uint32", 1 << 31),
    ):
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    for kind, value in (("int32", -70000), ("uint64", 1 << 63), ("int64", -(1 << 40))):
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_float32("x.float32", 0.1)
    writer.add_float64("x.float64", 0.1)
    writer.add_bool("x.true", True)
    writer.add_string("x.string", "ein Grüßchen \n\0")
    writer.add_array("x.strings", ["", "a", "Ġthe", "\U0001f600"])
    writer.add_array("x.numbers", [1, 2, 3])
    writer.add_array("x.floats", [0.5, -1e30])
    writer.add_tensor("norm.weight", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = read_header(path).values
    assert values == reader_values(path)
    assert values["x.true"] is True
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_values_that_json_does_not_have(tmp_path: Path) -> None:
    numbers = np.array([np.nan, np.inf, -np.inf, 2.5], np.float32)
    nested = struct.pack("<IQ", ARRAY, 2) + 2 * (struct.pack("<IQ", UINT8, 2) + b"\1\2")
    values = [
        ("floats", ARRAY, struct.pack("<IQ", FLOAT32, 4) + numbers.tobytes()),
        ("tokens", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xe4\xb8")),  # half a character
        ("nested", ARRAY, nested),
        ("empty", ARRAY, struct.pack("<IQ", UINT32, 0)),
    ]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(values, []))
    found = json.loads(json.dumps(read_header(path).values, allow_nan=False))
    assert found["floats"] == ["NaN", "Infinity", "-Infinity", 2.5]
    assert found["tokens"][0].encode(errors="surrogateescape") == b"\xe4\xb8"
    assert found["nested"] == [[1, 2], [1, 2]]
    assert found["empty"] == []


def test_the_document_is_written_beside_the_weights(tmp_path: Path) -> None:
    source = GOOD[0].path / "model.gguf"
    pack_checkpoint(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "gguf.json").read_text()) == reader_values(source)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_versions_and_alignments(
    tmp_path: Path, rng: np.random.Generator, version: int, alignment: int
) -> None:
    blocks = random_blocks(rng, Q4_0, 32, 5)
    tensors = [matrix("a.weight", Q4_0, blocks), matrix("b.weight", Q4_0, blocks[:3])]
    values = [("general.alignment", UINT32, struct.pack("<I", alignment))]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(values, tensors, alignment=alignment, version=version))
    W = decoded(Q4_0, blocks)
    assert_same_bits(dequantize(layer_weight(path, "a"), np.float32), W, zero_sign=False)
    assert_same_bits(dequantize(layer_weight(path, "b"), np.float32), W[:, :3], zero_sign=False)


# ---- which file -------------------------------------------------------------------------------------------


def test_a_folder_or_a_file_without_the_suffix(tmp_path: Path) -> None:
    data = (GOOD[0].path / "model.gguf").read_bytes()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "any.GGUF").write_bytes(data)
    (tmp_path / "folder" / ".hidden.gguf").write_bytes(b"")
    (tmp_path / "sha256-0123").write_bytes(data)
    expected = set(open_checkpoint(GOOD[0].path).layers)
    assert set(open_checkpoint(tmp_path / "folder").layers) == expected
    assert set(open_checkpoint(tmp_path / "sha256-0123").layers) == expected


def test_safetensors_come_first(tmp_path: Path) -> None:
    write_model(tmp_path, None, {}, {"x": np.zeros(3, np.float32)})
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert list(open_checkpoint(tmp_path).files) == ["x"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], r"2 GGUF files \(a-Q4_0.gguf, a-Q8_0.gguf\); name the one that is"),
        (["m.gguf", "mmproj-m.gguf", "x.gguf", "y.gguf"], r"4 GGUF files .*, \.\.\.\); name the one"),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], "split model; join them with `llama-gguf-split"),
    ],
)
def test_several_files(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_part_of_a_split_model(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(gguf_bytes([("split.count", UINT16, struct.pack("<H", 3))], []))
    for source in (path, tmp_path):
        with pytest.raises(CheckpointError, match="is one of 3 parts of a model; join them"):
            open_checkpoint(source)


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "folder" / "m.gguf"
    link.symlink_to(GOOD[0].path / "model.gguf")
    with pytest.raises(CheckpointError, match="a symbolic link out of the folder"):
        open_checkpoint(tmp_path / "folder")
    assert open_checkpoint(link).layers  # the user's own word


def test_without_the_gguf_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"run pip install \"\.\[gguf\]\""):
        open_checkpoint(GOOD[0].path)


# ---- hostile files ----------------------------------------------------------------------------------------

U32 = struct.Struct("<I").pack
HUGE = 1 << 60
ROW = ("a.weight", F32, (4,), bytes(16))
TWO = [ROW, ("b.weight", F32, (4,), bytes(16))]

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    "magic": (b"GGUX" + bytes(60), "is no GGUF file: it starts with b'GGUX'"),
    "only magic": (b"GGUF", "version 0; versions 2 and 3 are read"),
    "version 1": (gguf_bytes([], [ROW], version=1), "version 1; versions 2 and 3 are read"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no counts": (b"GGUF" + U32(3), "it ends inside its header"),
    "tensor count": (gguf_bytes([], [ROW], counts=(HUGE, 0)), f"{HUGE} tensors are announced"),
    "value count": (gguf_bytes([], [ROW], counts=(1, HUGE)), f"{HUGE} key-values are announced"),
    "key length": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE) + bytes(64), "ends inside its header"),
    "key not UTF-8": (gguf_bytes([("k", UINT8, b"\0")], []).replace(b"k", b"\xff"), "key 0 is not UTF-8"),
    "key with line break": (gguf_bytes([("a\nb", UINT8, b"\0")], []), "has control characters: 'a\\nb'"),
    "key empty": (gguf_bytes([("", UINT8, bytes(9))], []), "key 0 is empty"),
    "key twice": (gguf_bytes(2 * [("k", UINT8, b"\0")], []), "key 'k' is given twice"),
    "long key twice": (gguf_bytes(2 * [("k" * 999, UINT8, b"\0")], []), f"key '{'k' * 128}' is given twice"),
    "value type": (gguf_bytes([("k", 13, bytes(9))], []), "'k' has type 13; types 0 to 12 are known"),
    "string length": (gguf_bytes([("k", STRING, struct.pack("<Q", HUGE))], []), "ends inside its header"),
    "array length": (gguf_bytes([("k", ARRAY, struct.pack("<IQ", UINT64, HUGE))], []), "values of 'k' are"),
    "strings": (gguf_bytes([("k", ARRAY, struct.pack("<IQ", STRING, HUGE))], []), "values of 'k' are"),
    "long string in array": (
        gguf_bytes([("k", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE))], []),
        "ends inside its header",
    ),
    "array type": (gguf_bytes([("k", ARRAY, struct.pack("<IQ", 77, 0))], []), "has type 77"),
    "nesting": (
        gguf_bytes([("k", ARRAY, 999 * struct.pack("<IQ", ARRAY, 1))], []),
        "nested more than 4 deep",
    ),
    "truth": (gguf_bytes([("k", BOOL, b"\2")], []), "a truth value that is neither 0 nor 1"),
    "alignment 0": (gguf_bytes([("general.alignment", UINT32, U32(0))], []), "alignment is 0; expected"),
    "alignment 24": (gguf_bytes([("general.alignment", UINT32, U32(24))], []), "alignment is 24; expected"),
    "alignment huge": (gguf_bytes([("general.alignment", UINT32, U32(1 << 31))], [ROW]), "cut short"),
    "alignment type": (gguf_bytes([("general.alignment", UINT8, b"\x20")], []), "alignment is 32; expected"),
    "alignment list": (
        gguf_bytes([("general.alignment", ARRAY, struct.pack("<IQ", UINT8, 2) + b"\1\2")], []),
        "alignment is list; expected a power of two",
    ),
    "name not UTF-8": (
        gguf_bytes([], [(b"\xff".decode("latin1"), *ROW[1:])]).replace(b"\xc3\xbf", b"\xff "),
        "the name of a tensor is not UTF-8",
    ),
    "name with escape": (gguf_bytes([], [("a\x1b[2J", *ROW[1:])]), "has control characters"),
    "name empty": (gguf_bytes([], [("", *ROW[1:])] * 2), "the name of a tensor is empty"),
    "name long": (gguf_bytes([], [("a" * 129, *ROW[1:])]), "a tensor cannot be called 'aaa"),
    "name reserved": (gguf_bytes([], [("__metadata__", *ROW[1:])]), "cannot be called '__metadata__'"),
    "name twice": (gguf_bytes([], [ROW, ROW]), "tensor a.weight is given twice"),
    "no dimensions": (gguf_bytes([], [("a", F32, (), bytes(16))] * 2), "a has 0 dimensions; expected 1 to 4"),
    "5 dimensions": (gguf_bytes([], [("a", F32, (1,) * 5, bytes(4))]), "a has 5 dimensions"),
    "dimension 0": (gguf_bytes([], [("a", F32, (4, 0), b"")]), r"a is empty: its dimensions are \[4, 0\]"),
    "product": (gguf_bytes([], [("a", F32, (1 << 32, 1 << 32, 4, 4), bytes(16))]), "cut short, it has"),
    "product wraps": (gguf_bytes([], [("a", F32, ((1 << 64) - 1,) * 4, bytes(16))]), "cut short, it has"),
    "type unknown": (gguf_bytes([], [("a", 31, (32,), bytes(18))]), "a has type 31, which the gguf package"),
    "type huge": (gguf_bytes([], [("a", 0xFFFFFFFF, (32,), bytes(18))]), "a has type 4294967295"),
    "half a block": (gguf_bytes([], [("a", Q4_0, (48,), bytes(27))]), "has rows of 48 elements; Q4_0 has"),
    "overlap": (gguf_bytes([], TWO, offsets=[0, 0]), "b.weight is at offset 0; expected 32"),
    "gap": (gguf_bytes([], TWO, offsets=[0, 64]), "b.weight is at offset 64; expected 32"),
    "swapped": (gguf_bytes([], TWO, offsets=[32, 0]), "a.weight is at offset 32; expected 0"),
    "unaligned": (gguf_bytes([], TWO, offsets=[0, 16]), "b.weight is at offset 16; expected 32"),
    "offset huge": (gguf_bytes([], [ROW], offsets=[(1 << 64) - 1]), "expected 0"),
    "trailing": (gguf_bytes([], [ROW]) + b"\0", "1 bytes follow the last tensor"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(tmp_path: Path, name: str) -> None:
    """One line that says what is wrong, at once, whatever sizes the file announces."""
    data, message = HOSTILE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    start = time.perf_counter()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - start < 2
    line = str(caught.value)
    assert line.isprintable()
    assert line.startswith(f"{path}: ")
    assert message.replace("\\[", "[").replace("\\]", "]") in line
    assert len(line) < len(str(path)) + 300


def test_a_header_without_end(tmp_path: Path) -> None:
    """A sparse file of a terabyte: only what a header may take is read."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 35))
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="its header is longer than 67108864 bytes"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("gguf_bad_magic", "model.gguf: is no GGUF file: it starts with b'GGUX' instead of b'GGUF'"),
        ("gguf_truncated", "model.gguf: damaged GGUF file: cut short, it has 9000 of the "),
    ],
)
def test_malformed_fixtures(case: str, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(FIXTURES / "malformed" / case)
    assert message in str(caught.value)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes((GOOD[0].path / "model.gguf").read_bytes())
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:1000])
    for layer in checkpoint.layers.values():
        with pytest.raises(CheckpointError, match="became shorter while being read"):
            layer.read()


def damaged(data: bytes, header: int) -> Iterator[bytes]:
    """Every byte of the header, and some of the data, changed in two ways; cuts at some places of both."""
    places = [*range(header), *range(header, len(data), len(data) // 40)]
    for place in places:
        for flip in (0x01, 0x80):
            yield data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]
    for place in places[::3]:
        yield data[:place]


@pytest.mark.parametrize("case", GOOD, ids=case_id)
def test_damaged_files_are_read_or_refused(tmp_path: Path, case: Case) -> None:
    """Any change of a byte and any cut ends in a reading or an error of ours, soon."""
    data = (case.path / "model.gguf").read_bytes()
    header = min(tensor.start for tensor in read_header(case.path / "model.gguf").tensors.values())
    path = tmp_path / "m.gguf"
    read = refused = 0
    for changed in damaged(data, header):
        path.write_bytes(changed)
        start = time.perf_counter()
        try:
            checkpoint = open_checkpoint(path, ReadOptions(dequantize_others=True))
            for layer in checkpoint.layers.values():
                layer.outline()
                layer.read()
            for name in checkpoint.others:
                assert sum(map(len, checkpoint.files.chunks(name))) == checkpoint.files.info(name).nbytes
            json.dumps(checkpoint.files.documents, allow_nan=False)
            read += 1
        except CheckpointError as error:
            assert str(error).isprintable()
            refused += 1
        assert time.perf_counter() - start < 2
    assert read > 100
    assert refused > 400
