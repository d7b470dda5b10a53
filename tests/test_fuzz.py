"""Hostile files: packing and inspecting them ends in a sound model or in one line, and touches nothing else.

Four attacks: bytes of good files are changed; safetensors headers, indexes and configs are made up; folders
hold what is no file; files announce more than there is. Every example starts from a fixed seed, so that a
failure comes again. ``MARLIN_JIT_FUZZ=50 pytest tests/test_fuzz.py`` tries 50 times as many.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_maker import gptq_config
from cli_runner import run
from helpers import FIXTURES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marlin_jit.errors import CheckpointError, MarlinJitError
from marlin_jit.formats import compare, load, pack_checkpoint
from marlin_jit.formats.safetensors_io import MAX_HEADER_BYTES, SafetensorsFile, load_json

TIMES = int(os.environ.get("MARLIN_JIT_FUZZ", "1"))
"""How many times the default number of examples are tried."""
SECONDS = 10
"""No example takes longer, though most take a hundredth of one second: a busy machine is no bug."""
LINE = 4000
"""No message is longer: a path, a name of at most 1024 characters (escaped), and what is wrong."""

CHECKPOINTS = sorted(path for path in (FIXTURES / "checkpoints").iterdir() if path.is_dir())
KINDS = ("gptq", "awq", "marlin", "vllm_marlin", "compressed_tensors", "gguf")
SMALL = sorted(path for kind in KINDS for path in (FIXTURES / kind).iterdir() if path.is_dir())


def repeatable(examples: int) -> settings:
    return settings(
        max_examples=examples * TIMES,
        deadline=None,  # `outcome` measures
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# --- the property -----------------------------------------------------------------------------------------


@dataclass
class Place:
    """A folder with a model in it, another one to pack into, and files that are nobody's business."""

    root: Path
    model: Path = field(init=False)
    output: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model, self.output = self.root / "model", self.root / "output"
        self.output.mkdir()
        (self.root / "outside").mkdir()
        (self.root / "outside" / "secret.json").write_text("{}")
        shutil.copy(FIXTURES / "malformed" / "valid_base" / "model.safetensors", self.root / "outside")

    def snapshot(self) -> dict[str, bytes | str]:
        """Everything below the root but the output: contents of files, targets of links, kinds of others."""
        found: dict[str, bytes | str] = {}
        for folder, folders, names in os.walk(self.root):
            if folder == str(self.root):
                folders.remove("output")
            for name in (*folders, *names):
                path = os.path.join(folder, name)
                if os.path.islink(path):
                    found[path] = os.readlink(path)
                elif os.path.isfile(path) and os.path.getsize(path) < 1 << 24:
                    with open(path, "rb") as file:
                        found[path] = file.read()
                else:
                    found[path] = "folder" if os.path.isdir(path) else "other"
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """For hypothesis, whose examples write over each other's model."""
    return Place(tmp_path_factory.mktemp("fuzz"))


def outcome(place: Place, *, decode: bool = True) -> str:
    """Pack and inspect the model; return the error line, or "" if it was packed. Fails on anything else.

    With `decode`, a model that could be packed is also compared with its source, weight by weight.
    """
    before = place.snapshot()
    target = place.output / "out"
    start = time.perf_counter()
    line = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pack_checkpoint(place.model, target)
        except MarlinJitError as error:
            line = checked_line(str(error))
            assert list(place.output.iterdir()) == []
        else:
            packed = load(target)
            if decode:
                assert compare(place.model, target).differences == ()
            else:
                assert [packed[name].shape for name in packed]
        inspected = run("inspect", place.model, "--json")
    assert time.perf_counter() - start < SECONDS
    *notes, last = inspected.err.splitlines() or [""]
    assert all(note.startswith("warning: ") and note.isprintable() for note in notes)
    if inspected.code == 0:
        assert isinstance(inspected.json["layers"], list)
    else:
        assert (inspected.code, inspected.out) == (2, "")
        assert checked_line(last.removeprefix("error: "))
    assert inspected.code == 0 or line, "packed, but inspect refuses it"
    assert place.snapshot() == before, "something outside the destination changed"
    shutil.rmtree(target, ignore_errors=True)
    return line


def checked_line(message: str) -> str:
    """Return a message after checking that it is one line, of a length that can be read."""
    assert message.strip()
    assert message.isprintable()
    assert len(message) < LINE
    return message


# --- bytes that are changed --------------------------------------------------------------------------------

HOSTILE_NUMBERS = (
    *("-1", "0", "1", "3", "7", "1e3", "0.5", "-0", "1e999", "NaN", "-Infinity", "null", "true", '"4"'),
    *("[]", "{}"),
    *("2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "18446744073709551615"),
    *("18446744073709551616", "9" * 400, "9" * 4299, "9" * 5000),
)
HOSTILE_VALUES = (
    *HOSTILE_NUMBERS,
    *('""', '"x"', '"\\u0000"', '"\\ud800"', '"re:(a+)+$"', '"re:("', '"' + "x" * 5000 + '"', "false"),
    *("[[]]", '{"a":[]}'),
    *("[" * 60 + "]" * 60, "[" * 500 + "]" * 500, '{"":' * 200 + "1" + "}" * 200),
)
VALUE = re.compile(rb'(?<=[:\[,])\s*("[^"]*"|-?[\d.]+|true|false|null)')
TOKENS = (
    *(b'"', b"\\", b"\\u0000", b"\\ud800", b"\\n", b"{", b"}", b"[", b"]", b",", b":", b"-", b"e", b"."),
    *(b"null", b"[" * 300, b'{"a":' * 300, b"\xff", b"\xef\xbb\xbf", b"\0", b"../", b"../outside/"),
    *(b"\x1b[31m",),
)


def header_end(data: bytes, name: str) -> int:
    """Where the data of a safetensors file begin, about where those of a GGUF file do, or the end."""
    if name.endswith(".safetensors"):
        return 8 + int.from_bytes(data[:8], "little")
    return 800 if name.endswith(".gguf") else len(data)


def damaged(data: bytes, name: str, rng: np.random.Generator) -> bytes:
    """Change a good file in one to three places, mostly in its header."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        head = min(header_end(data, name), len(out))
        stop = head if rng.random() < 0.8 else len(out)
        at, length = int(rng.integers(0, stop + 1)), int(rng.integers(1, 9))
        kind = rng.choice(["flip", "set", "cut", "insert", "delete", "splice", "token", "value"])
        if kind == "flip" and at < len(out):
            out[at] ^= 1 << int(rng.integers(8))
        elif kind == "set":
            out[at : at + length] = rng.bytes(length)
        elif kind == "cut":
            del out[at:]
        elif kind == "insert":
            out[at:at] = rng.bytes(length)
        elif kind == "delete":
            del out[at : at + length]
        elif kind == "splice":
            start = int(rng.integers(0, len(out) + 1))
            out[at:at] = out[start : start + 16 * length]
        elif kind == "token":
            out[at:at] = TOKENS[rng.integers(len(TOKENS))]
        elif values := list(VALUE.finditer(out, 0, head)):
            value = values[rng.integers(len(values))]
            out[slice(*value.span(1))] = HOSTILE_VALUES[rng.integers(len(HOSTILE_VALUES))].encode()
    # Half of the changed headers announce their length rightly, so that what is behind that check is reached.
    if name.endswith(".safetensors") and rng.random() < 0.5:
        grown = len(out) - len(data) + header_end(data, name) - 8
        out[:8] = max(grown, 0).to_bytes(8, "little")
    return bytes(out)


@pytest.mark.parametrize("source", SMALL, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_changed_bytes_of_single_files(place: Place, source: Path) -> None:
    place.model.mkdir()
    times = {"model.safetensors": 12, "model.gguf": 12, "config.json": 4}
    victims = [name for name in times if (source / name).exists()]
    for name in victims:
        shutil.copyfile(source / name, place.model / name)
    assert outcome(place) == ""
    refused = sum(attack(place, place.model / name, range(times[name] * TIMES)) for name in victims)
    assert refused > 0, "no change was noticed"


@pytest.mark.parametrize("source", CHECKPOINTS, ids=lambda path: path.name)
def test_changed_bytes_of_indexes_and_configs(place: Place, source: Path) -> None:
    shutil.copytree(source, place.model, ignore=shutil.ignore_patterns("expected", "tokenizer*"))
    for path in sorted(place.model.glob("*.json")):
        if path.name.endswith(("config.json", ".index.json")):
            attack(place, path, range(12 * TIMES), decode=False)


def attack(place: Place, victim: Path, seeds: range, *, decode: bool = True) -> int:
    """Try many changes of one file; return how many were refused. The file is as before in the end."""
    good = victim.read_bytes()
    refused = 0
    for seed in seeds:
        victim.write_bytes(damaged(good, victim.name, np.random.default_rng([seed, len(good)])))
        try:
            refused += bool(outcome(place, decode=decode))
        except Exception as error:
            raise AssertionError(f"{victim.name}, seed [{seed}, {len(good)}]: {error!r}") from error
    victim.write_bytes(good)
    return refused


# --- headers that are made up ------------------------------------------------------------------------------

K = N = 64
GOOD_TENSORS = {
    "l.qweight": ("I32", [K // 8, N]),
    "l.qzeros": ("I32", [2, N // 8]),
    "l.scales": ("F16", [2, N]),
    "l.bias": ("F16", [N]),
    "empty": ("F32", [0, 3]),
}
WIDTHS = {"I32": 4, "F16": 2, "F32": 4}
NAMES = st.sampled_from(
    (
        *("", ".", "..", "/", "../../outside/x", "/etc/passwd", "C:\\x", "a/b.qweight", ".qweight", "l"),
        *("l.B", "l.perm"),
        *("l.delta", "x.B", "x.s", "__metadata__", "\0", "a\nb", "\x1b[31m", "\u202e.qweight", "\ufeff"),
        *("\U0001f600",),
        *("e\u0301.scales", "\u00e9.scales", "l\u2024qweight", "$x^2$", "[red]", "a" * 300),
        *("\u4e2d" * 1024, "n" * 100_000),
    )
) | st.text(max_size=8)
NUMBERS = st.sampled_from(HOSTILE_NUMBERS) | st.integers(-3, 9000).map(str)
RAW_VALUES = NUMBERS | st.sampled_from(
    (
        '"x"',
        '"\\ud800"',
        "[" * 200 + "]" * 200,
        '{"a":' * 500 + "1" + "}" * 500,
        "[" * 100_000,
        "[[1]]",
        '{"a":1,"a":2}',
    )
)
DTYPES = st.sampled_from(
    (
        '"F16"',
        '"BF16"',
        '"F64"',
        '"I64"',
        '"BOOL"',
        '"F4"',
        '"F6_E2M3"',
        '"F8_E4M3"',
        '"C64"',
        '"Q4"',
        '""',
        "4",
        "null",
    )
)


@dataclass
class Header:
    """A safetensors file in pieces: raw JSON text for every field of every entry, in any order."""

    entries: list[dict[str, str]]
    metadata: str | None = '{"format":"pt"}'
    extra: str = ""
    length: int | None = None
    data: bytes = b""

    @classmethod
    def good(cls) -> Header:
        header, position = cls([]), 0
        for name, (dtype, shape) in GOOD_TENSORS.items():
            end = position + WIDTHS[dtype] * int(np.prod(shape))
            header.entries.append(
                {
                    "name": json.dumps(name),
                    "dtype": json.dumps(dtype),
                    "shape": json.dumps(shape),
                    "data_offsets": json.dumps([position, end]),
                }
            )
            position = end
        header.data = bytes(i % 60 for i in range(position))  # no 16-bit number of these is NaN or infinite
        return header

    def write(self, path: Path) -> None:
        parts = [] if self.metadata is None else [f'"__metadata__":{self.metadata}']
        for entry in self.entries:
            fields = ",".join(f'"{key}":{value}' for key, value in entry.items() if key != "name")
            parts.append(f"{entry['name']}:{{{fields}}}")
        text = ("{" + ",".join(parts) + self.extra + "}").encode()
        length = len(text) if self.length is None else self.length
        path.write_bytes(length.to_bytes(8, "little") + text + self.data)


@st.composite
def hostile_headers(draw: st.DrawFn) -> Header:
    header = Header.good()
    header.entries = draw(st.permutations(header.entries))
    for _ in range(draw(st.integers(1, 3))):
        entry = draw(st.sampled_from(header.entries))
        match draw(st.integers(0, 11)):
            case 0:
                header.length = draw(
                    st.sampled_from(
                        [0, 1, 2, 7, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1]
                    )
                    | st.integers(0, 1000)
                )
            case 1:
                header.entries.append(dict(entry))
            case 2:
                entry["name"] = json.dumps(draw(NAMES))
            case 3:
                entry["dtype"] = draw(DTYPES)
            case 4:
                shape = draw(
                    st.lists(NUMBERS, max_size=4)
                    | st.just(["1"] * 100)
                    | st.just(["0", "4611686018427387904"])
                )
                entry["shape"] = f"[{','.join(shape)}]"
            case 5:
                entry["data_offsets"] = f"[{','.join(draw(st.lists(NUMBERS, max_size=3)))}]"
            case 6:
                begin, end = (
                    json.loads(GOOD_OFFSETS[entry["name"]]) if entry["name"] in GOOD_OFFSETS else (0, 0)
                )
                by = draw(st.sampled_from([-64, -8, -1, 1, 8, 64, 1 << 40]))
                entry["data_offsets"] = json.dumps(
                    draw(st.sampled_from([[begin + by, end + by], [begin, end + by]]))
                )
            case 7:
                entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(RAW_VALUES)
            case 8:
                entry.pop(draw(st.sampled_from(["dtype", "shape", "data_offsets"])), None)
            case 9:
                header.metadata = draw(
                    RAW_VALUES
                    | st.just('{"format":"marlin-jit"}')
                    | st.just('{"format":"marlin-jit","format_version":"1","layers":"' + "[" * 5000 + '"}')
                    | RAW_VALUES.map(lambda value: f'{{"format":{value}}}')
                )
            case 10:
                header.extra = draw(st.sampled_from([",", "}", '," x":1', '{"a":' * 1000, " " * 1000, "\0"]))
            case 11:
                header.data = header.data[: draw(st.integers(0, 900))] + draw(st.binary(max_size=9))
    return header


GOOD_OFFSETS = {entry["name"]: entry["data_offsets"] for entry in Header.good().entries}


def test_the_good_header_is_packed(place: Place) -> None:
    write_config(place.model, gptq_config(sym=False, checkpoint_format="gptq_v2"))
    Header.good().write(place.model / "model.safetensors")
    assert outcome(place) == ""


@repeatable(300)
@given(header=hostile_headers())
def test_made_up_headers(shared_place: Place, header: Header) -> None:
    write_config(shared_place.model, gptq_config(checkpoint_format="gptq_v2"))
    header.write(shared_place.model / "model.safetensors")
    outcome(shared_place)


def write_config(folder: Path, quantization: Any) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))


# --- packed files that are made up -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("packed") / "model.safetensors"
    pack_checkpoint(FIXTURES / "awq" / "g128_k384_n64_zp_0_15" / "model.safetensors", target)
    return target


def read_all(path: Path) -> str:
    """Load and inspect a packed file; return the error line, or "" where every layer could be read."""
    line = ""
    try:
        model = load(path)
        for name in model:
            model[name]
        for name in model.tensors:
            model.tensors[name]
    except MarlinJitError as error:
        line = checked_line(str(error))
    inspected = run("inspect", path, "--json")
    assert inspected.code == 0 or (inspected.code, inspected.out, bool(line)) == (2, "", True)
    return line


def test_changed_bytes_of_a_packed_file(packed_model: Path) -> None:
    good = packed_model.read_bytes()
    assert read_all(packed_model) == ""
    refused = 0
    for seed in range(150 * TIMES):
        packed_model.write_bytes(damaged(good, packed_model.name, np.random.default_rng(seed)))
        refused += bool(read_all(packed_model))
    packed_model.write_bytes(good)
    assert refused > 0


@repeatable(100)
@given(
    changes=st.dictionaries(
        st.sampled_from(["K", "N", "group_size", "dtype", "source_format", "more"]), RAW_VALUES, max_size=2
    ),
    whole=st.none() | RAW_VALUES,
    version=st.sampled_from(["1", "1", "1", "0", "2", "x" * 5000, "\n"]),
)
def test_made_up_tables_of_layers(
    packed_model: Path, changes: dict[str, str], whole: str | None, version: str
) -> None:
    good = packed_model.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    ((name, entry),) = json.loads(header["__metadata__"]["layers"]).items()
    fields = {key: json.dumps(value) for key, value in entry.items()} | changes
    table = "{" + ",".join(f'"{key}":{value}' for key, value in fields.items()) + "}"
    header["__metadata__"]["layers"] = whole or f"{{{json.dumps(name)}:{table}}}"
    header["__metadata__"]["format_version"] = version
    text = json.dumps(header).encode()
    path = packed_model.with_name("changed.safetensors")
    path.write_bytes(len(text).to_bytes(8, "little") + text + good[8 + length :])
    read_all(path)


# --- configs that are made up ------------------------------------------------------------------------------

CONFIG_KEYS = (
    *("quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format"),
    *("is_marlin_format",),
    *("version", "backend", "dynamic", "pack_dtype", "w_bit", "q_group_size", "zero_point"),
    *("modules_to_not_convert",),
    *("config_groups", "ignore", "meta", "lm_head", "unknown"),
)
RAW_SETTINGS = RAW_VALUES | st.sampled_from(
    (
        *("4", "4.0", "-1", "32", "false", '"gptq"', '"awq"', '"marlin"', '"gptq_v2"', '"GEMM"', '"gemv"'),
        *('"\\u0000"',),
        *('{"-:x":{"bits":8}}', '{"+:.*":{"bits":8}}', '{"+:.*":null}', '{"":[]}', json.dumps("x" * 100_000)),
        *('{"-:(a+)+$":{}}', '{"+:(.*)*(.*)*(.*)*x":{"bits":4}}', '{"+:(":{"bits":8}}'),
        *('{"+:a{999}{999}":{}}',),
    )
)


@repeatable(150)
@given(
    method=st.sampled_from(["gptq", "awq", "marlin"]),
    changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), RAW_SETTINGS, max_size=3),
    outer=st.none() | RAW_VALUES,
    second=st.none() | st.dictionaries(st.sampled_from(CONFIG_KEYS), RAW_SETTINGS, max_size=2),
)
def test_made_up_configs(
    shared_place: Place,
    method: str,
    changes: dict[str, str],
    outer: str | None,
    second: dict[str, str] | None,
) -> None:
    """As raw JSON text, with what Python's writer would not write."""

    def text(values: dict[str, str]) -> str:
        return "{" + ",".join(f"{json.dumps(key)}:{value}" for key, value in values.items()) + "}"

    model = shared_place.model
    write_config(model, {})
    Header.good().write(model / "model.safetensors")
    inner = text({"quant_method": json.dumps(method), "bits": "4", "group_size": "32", **changes})
    more = {} if outer is None else {"rope_scaling": outer}
    (model / "config.json").write_text(text({"quantization_config": inner, **more}))
    if second is not None:
        (model / "quantize_config.json").write_text(text(second))
    outcome(shared_place)


# --- indexes that are made up ------------------------------------------------------------------------------

SHARD = "model-00001-of-00001.safetensors"
SHARD_NAMES = st.sampled_from(
    (
        *(SHARD, "config.json", "", ".", "..", ".safetensors", "../outside/model.safetensors"),
        *("/etc/passwd", "~/.ssh"),
        *("./" + SHARD, "sub/" + SHARD, "..\\outside\\model.safetensors", "C:\\model.safetensors"),
        *(SHARD + "\0",),
        *("a\0.safetensors", "\ud800.safetensors", "\u2024\u2024\u2215model.safetensors"),
        *("\uff0e\uff0e\uff0fx.safetensors",),
        *("x" * 300 + ".safetensors", "\u4e2d" * 200 + ".safetensors", "y" * 100_000),
        *("%2e%2e%2fx.safetensors", "a\nb"),
    )
)


@repeatable(100)
@given(
    weight_map=st.dictionaries(st.sampled_from([*GOOD_TENSORS, "other"]) | NAMES, SHARD_NAMES, max_size=3),
    complete=st.booleans(),
    raw=st.none() | st.tuples(st.sampled_from(["weight_map", "metadata", "unknown"]), RAW_VALUES),
)
def test_made_up_indexes(
    shared_place: Place, weight_map: dict[str, str], complete: bool, raw: tuple[str, str] | None
) -> None:
    model = shared_place.model
    write_config(model, gptq_config(checkpoint_format="gptq_v2"))
    Header.good().write(model / SHARD)
    if complete:
        weight_map = dict.fromkeys(GOOD_TENSORS, SHARD) | weight_map
    fields = {"metadata": "{}", "weight_map": json.dumps(weight_map)} | ({} if raw is None else dict([raw]))
    text = ",".join(f'"{key}":{value}' for key, value in fields.items())
    (model / "model.safetensors.index.json").write_text("{" + text + "}")
    outcome(shared_place)


def test_an_index_of_very_many_tensors(place: Place) -> None:
    write_config(place.model, gptq_config(checkpoint_format="gptq_v2"))
    Header.good().write(place.model / SHARD)
    weight_map = {f"tensor.{i}": SHARD for i in range(200_000)}
    (place.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "tensor.0 is not in it" in outcome(place)


# --- folders that hold what is no file ---------------------------------------------------------------------


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def two_links_in_a_circle(path: Path) -> None:
    path.symlink_to("other")
    path.with_name("other").symlink_to(path.name)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "link out": link("../outside/model.safetensors"),
    "link out, absolute": link("/etc/passwd"),
    "link to a folder": link("../outside"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "links in a circle": two_links_in_a_circle,
    "link to nothing": link("nothing"),
    "link to a device": link("/dev/zero"),
    "FIFO": lambda path: os.mkfifo(path),
    "folder": lambda path: path.mkdir(),
    "empty file": lambda path: path.touch(),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize(
    "name",
    [
        SHARD,
        "model.safetensors.index.json",
        "config.json",
        "quantize_config.json",
        "model-00002-of-00002.safetensors",
    ],
)
def test_what_is_no_file(place: Place, name: str, kind: str) -> None:
    """In the place of each file that is read, also of a shard that the index forgot."""
    write_config(place.model, gptq_config(checkpoint_format="gptq_v2"))
    Header.good().write(place.model / SHARD)
    index = {"weight_map": dict.fromkeys(GOOD_TENSORS, SHARD)}
    (place.model / "model.safetensors.index.json").write_text(json.dumps(index))
    (place.model / name).unlink(missing_ok=True)
    NO_FILES[kind](place.model / name)
    line = outcome(place)
    assert name in line, line


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_beside_a_model(place: Place, kind: str) -> None:
    """A companion that would go along, such as a tokenizer."""
    write_config(place.model, gptq_config(checkpoint_format="gptq_v2"))
    Header.good().write(place.model / "model.safetensors")
    NO_FILES[kind](place.model / "tokenizer.json")
    line = outcome(place)
    assert not line or "tokenizer.json: a symbolic link out of the folder" in line


def test_file_names_that_are_not_utf8(place: Place) -> None:
    write_config(place.model, gptq_config(checkpoint_format="gptq_v2"))
    Header.good().write(place.model / os.fsdecode(b"\xff\xfe.safetensors"))
    (place.model / os.fsdecode(b"\xc3\x28 notes\n.txt")).write_text("")
    assert outcome(place) == ""


# --- files that announce more than there is ----------------------------------------------------------------


def entry(dtype: str, shape: list[int], nbytes: int) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}


def announcing(header: dict[str, Any], *, length: int | None = None, size: int = 0) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        text = json.dumps(header).encode()
        path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text)
        if size:
            os.truncate(path, 8 + len(text) + size)  # a hole, which takes no room on the disk

    return write


def packed_table(K: int, N: int) -> dict[str, Any]:
    layers = {"l": {"K": K, "N": N, "group_size": 32, "dtype": "float16", "source_format": "gptq"}}
    metadata = {"format": "marlin-jit", "format_version": "1", "layers": json.dumps(layers)}
    return {"__metadata__": metadata, "l.B": entry("I32", [4, 128], 2048)["x"]}


TERABYTE = 1 << 40
ANNOUNCING = {
    "header of 2^63 bytes": announcing({}, length=1 << 63),
    "header of the largest size": announcing({}, length=MAX_HEADER_BYTES),
    "terabytes of data": announcing(entry("U8", [TERABYTE], TERABYTE)),
    "a shape of terabytes": announcing(entry("U8", [TERABYTE], 16), size=16),
    "a shape that overflows": announcing(entry("F16", [1 << 32, 1 << 32], 0)),
    "a packed layer of exabytes": announcing(packed_table((1 << 31) - 1, (1 << 31) - 1), size=2048),
    "a hole of terabytes": announcing(entry("U8", [TERABYTE], TERABYTE), size=TERABYTE),
}
LIMITED = """
    import resource, sys
    from marlin_jit.errors import MarlinJitError
    from marlin_jit.formats import load, pack_checkpoint

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), used + (48 << 20)))
    for path in sys.argv[1:]:
        for read in (load, lambda path: pack_checkpoint(path, path + ".out")):
            try:
                read(path)
            except MarlinJitError as error:
                print(str(error).removeprefix(path))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is limited as Linux does it")
def test_announced_sizes_are_not_allocated(tmp_path: Path) -> None:
    """In a process that may take 48 MB more than its imports did."""
    paths = []
    for i, (kind, write) in enumerate(ANNOUNCING.items()):
        path = tmp_path / f"{i}.safetensors"
        try:
            write(path)
        except OSError:
            assert kind == "a hole of terabytes", kind  # not on every file system
            continue
        paths.append(path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2 * len(paths)
    assert sorted(tmp_path.iterdir()) == paths


# --- what was found ----------------------------------------------------------------------------------------


def test_a_header_length_allocates_no_more_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    announcing({}, length=MAX_HEADER_BYTES)(path)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_file_names_with_too_many_bytes(place: Place) -> None:
    """255 characters, but the file system counts bytes."""
    write_config(place.model, gptq_config())
    index = {"weight_map": {"l.qweight": "\u4e2d" * 200 + ".safetensors"}}
    (place.model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ".safetensors: cannot be read: File name too long" in outcome(place)


def test_tensor_names_of_any_length_are_not_repeated(place: Place) -> None:
    write_config(place.model, gptq_config())
    header = Header.good()
    header.entries[0]["name"] = json.dumps("n" * 1_000_000 + ".qweight")
    header.write(place.model / "model.safetensors")
    assert "a tensor name has 1000008 characters; at most 1024 are read" in outcome(place)


@pytest.mark.parametrize("number", ["9" * 4300, "1e999", "1.5", "true"])
def test_offsets_that_cannot_be_printed_or_are_no_integers(place: Place, number: str) -> None:
    """Python refuses to print integers of more than 4300 digits, which adding to one gives."""
    write_config(place.model, gptq_config())
    header = Header.good()
    header.entries = header.entries[:1]
    header.entries[0]["data_offsets"] = f"[0,{number}]"
    header.write(place.model / "model.safetensors")
    assert "model.safetensors: damaged safetensors file: " in outcome(place)


@pytest.mark.parametrize("file", ["config.json", "quantize_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("where", ["quant_method", "metadata", "unknown"])
@pytest.mark.parametrize("depth", [65, 300, 900, 5000])
def test_deep_nesting_is_refused_where_it_is_read(tmp_path: Path, file: str, where: str, depth: int) -> None:
    """What Python reads it may still not compare, print or write: those recurse by themselves."""
    path = tmp_path / file
    path.write_text(f'{{"{where}":' + "[" * depth + "]" * depth + "}")
    with pytest.raises(CheckpointError, match=r"is not valid JSON: (nested more than 64|maximum recursion)"):
        load_json(path)


@pytest.mark.parametrize("text", ["", "0", "null", "[]", '"x"', "NaN", "[[]]", "\ufeff1", "\0"])
@pytest.mark.parametrize("file", ["config.json", "quantize_config.json", "model.safetensors.index.json"])
def test_json_that_is_no_object(place: Place, file: str, text: str) -> None:
    write_config(place.model, gptq_config())
    Header.good().write(place.model / SHARD)
    (place.model / file).write_text(text)
    assert f"{file}: " in outcome(place)


def test_nesting_of_the_allowed_depth_goes_along(place: Place) -> None:
    write_config(place.model, gptq_config(checkpoint_format="gptq_v2"))
    Header.good().write(place.model / "model.safetensors")
    config = json.loads((place.model / "config.json").read_text())
    nested = json.loads("[" * 63 + "]" * 63)
    (place.model / "config.json").write_text(json.dumps(config | {"nested": nested}))
    assert outcome(place) == ""


def test_long_values_are_cut_in_messages(place: Place) -> None:
    write_config(place.model, gptq_config(quant_method="x" * 1_000_000))
    Header.good().write(place.model / "model.safetensors")
    assert "quant_method 'xxx" in outcome(place)
    assert "characters) is not read; accepted: gptq" in outcome(place)


@pytest.mark.parametrize(
    ("shape", "message"), [([1] * 65, "65 dimensions"), ([0, 1 << 62], "larger than memory")]
)
def test_arrays_that_numpy_cannot_make(tmp_path: Path, shape: list[int], message: str) -> None:
    """The container allows both; packing copies the second, and only reading it as an array fails."""
    path = tmp_path / "model.safetensors"
    announcing(entry("F64", shape, 0 if 0 in shape else 8), size=0 if 0 in shape else 8)(path)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path).read("x")


def test_old_and_new_names_of_a_setting_may_not_differ(place: Place) -> None:
    write_config(place.model, gptq_config(w_bit=3, checkpoint_format="gptq_v2"))
    Header.good().write(place.model / "model.safetensors")
    assert "quantization_config: w_bit is 3, but bits is 4" in outcome(place)
