"""The commands as a shell sees them: output, exit codes, what --json promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_maker import awq_config, awq_layer, gptq_config, gptq_layer, write_model
from cli_runner import run
from click.testing import CliRunner
from helpers import FIXTURES, Case, case_id, cases, random_codes, random_scales

from marlin_jit import __version__
from marlin_jit.cli.main import COMMANDS, UNEXPECTED, main
from marlin_jit.formats.safetensors_io import SafetensorsFile

MODEL = FIXTURES / "checkpoints" / "llama_gptqmodel_asym_g128"


@pytest.mark.parametrize("case", [*cases("gptq/*"), *cases("awq/*"), *cases("marlin/*")], ids=case_id)
def test_pack_and_verify_every_file_of_the_tools(tmp_path: Path, case: Case) -> None:
    packed = run("pack", case.path, tmp_path / "out", "--json")
    assert packed.code == 0, packed.err
    summary = packed.json
    (layer,) = summary["layers"]
    assert (layer["K"], layer["N"]) == case.expected["W"].shape
    assert layer["symmetric"] == case.info.get("sym", case.path.parent.name == "marlin")
    assert summary["written"]
    verified = run("verify", case.path, tmp_path / "out", "--json")
    assert verified.code == 0, verified.err
    assert verified.json["equal"]
    assert verified.json["weights"] == case.expected["W"].size
    single = run("pack", case.path / "model.safetensors", tmp_path / "one.safetensors")
    assert single.code == 0, single.err
    assert run("verify", case.path, tmp_path / "one.safetensors").code == 0


@pytest.mark.parametrize("case", cases("checkpoints/*"), ids=case_id)
def test_whole_models(tmp_path: Path, case: Case) -> None:
    packed = run("pack", case.path, tmp_path / "out")
    assert (packed.code, packed.err) == (0, "")
    assert "256 x 384" in packed.out
    assert f"{case.path} -> {tmp_path / 'out'}: 1." in packed.out
    verified = run("verify", case.path, tmp_path / "out")
    assert (verified.code, verified.err) == (0, "")
    assert verified.out.startswith("equal: 14 layers (983,040 weights) and ")


def test_pack_summary_adds_up(tmp_path: Path) -> None:
    summary = run("pack", MODEL, tmp_path / "out", "--json").json
    assert len(summary["layers"]) == 14
    assert summary["other_tensors"] == 7
    assert "tokenizer.json" in summary["copied_files"]
    assert "quantize_config.json" in summary["left_out_files"]
    stored = [SafetensorsFile(p) for p in (tmp_path / "out").glob("*.safetensors")]
    assert summary["bytes_after"] == sum(i.nbytes for file in stored for i in file.tensors.values())
    packed = sum(
        i.nbytes for file in stored for n, i in file.tensors.items() if n.endswith((".B", ".s", ".delta"))
    )
    assert packed == sum(layer["bytes_after"] for layer in summary["layers"])
    assert set(summary) == {
        *("source", "destination", "written", "layers", "other_tensors", "copied_files", "left_out_files"),
        *("notes", "bytes_before", "bytes_after", "seconds", "files_taken_over"),
    }


def test_dry_run_writes_nothing_and_tells_the_truth(tmp_path: Path) -> None:
    dry = run("pack", MODEL, tmp_path / "out", "--dry-run", "--json").json
    assert list(tmp_path.iterdir()) == []
    wet = run("pack", MODEL, tmp_path / "out", "--json").json
    assert (dry.pop("written"), wet.pop("written")) == (False, True)
    for summary in (dry, wet):
        summary.pop("seconds")
    assert dry == wet
    assert "would be packed" in run("pack", MODEL, tmp_path / "other", "--dry-run").out


def test_quiet_says_nothing(tmp_path: Path) -> None:
    assert run("pack", MODEL, tmp_path / "out", "--quiet") == run("pack", MODEL, tmp_path / "two", "--quiet")
    done = run("pack", MODEL, tmp_path / "three", "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_existing_destination(tmp_path: Path) -> None:
    assert run("pack", MODEL, tmp_path / "out").code == 0
    again = run("pack", MODEL, tmp_path / "out")
    assert (again.code, again.out) == (2, "")
    assert again.err.startswith(f"error: {tmp_path / 'out'}: exists already; ")
    assert run("pack", MODEL, tmp_path / "out", "--force").code == 0


def test_warnings_are_one_line_on_stderr(tmp_path: Path) -> None:
    done = run("pack", FIXTURES / "gptq" / "v1_asym_g64_k256_n256_zero0", tmp_path / "out", "--json")
    assert done.code == 0
    (line,) = done.err.splitlines()
    assert line.startswith("warning: ")
    assert "q_proj.qzeros: 44 of 1024 zero points were overwritten by a 0 below them; read as 0" in line
    assert done.json["notes"] == [line.removeprefix("warning: ")]


def test_verify_tells_the_first_difference(tmp_path: Path, rng: np.random.Generator) -> None:
    q = random_codes(rng, 64, 64)
    layer = gptq_layer(q, np.ones((2, 64), np.float16), np.full((2, 64), 8, np.uint8))
    source = write_model(tmp_path / "m", gptq_config(checkpoint_format="gptq_v2"), {"layer": layer})
    assert run("pack", source, tmp_path / "out").code == 0
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = SafetensorsFile(path).tensors["layer.B"].start
    # By the closed form of the format, code (k, n) = (1, 8) is nibble 6 of word 0, and (17, 8) that of word
    # 128.
    for word in (0, 128):
        data[start + 4 * word + 3] ^= 0x01
    path.write_bytes(data)
    done = run("verify", source, path)
    assert (done.code, done.err) == (1, "")
    first, last = done.out.splitlines()
    values = f"{float(q[1, 8]) - 8} and {float(q[1, 8] ^ 1) - 8}"
    assert first == f"layer: 2 of 4096 weights differ, the first at [1, 8]: {values}"
    assert last.startswith("different: 1 difference between ")
    done = run("verify", source, path, "--json")
    assert done.code == 1
    (difference,) = done.json["differences"]
    assert (difference["name"], difference["count"], difference["index"]) == ("layer", 2, [1, 8])


def test_inspect_sources_and_packed(tmp_path: Path) -> None:
    run("pack", MODEL, tmp_path / "out")
    before, after = run("inspect", MODEL, "--json").json, run("inspect", tmp_path / "out", "--json").json
    assert (before["format"], after["format"]) == ("gptq", "marlin-jit")
    same = ("K", "N", "group_size", "symmetric", "activation_order", "dtype", "scales")
    layers = {layer["name"]: layer for layer in after["layers"]}
    assert len(layers) == 14
    for layer in before["layers"]:
        assert {key: layer[key] for key in same} == {key: layers[layer["name"]][key] for key in same}
    assert before["other_tensors"] == after["other_tensors"]
    text = run("inspect", MODEL).out
    assert "model.layers.1.mlp.down_proj" in text
    assert "14 layers (983,040 weights" in text


def test_inspect_health_of_scales(tmp_path: Path, rng: np.random.Generator) -> None:
    """Also of scales that `pack` would refuse."""
    scale = np.full((2, 64), 0.5, np.float16)
    scale[0, :5] = [np.nan, np.inf, -np.inf, -2, 0]
    layer = awq_layer(random_codes(rng, 64, 64), scale, np.full((2, 64), 5, np.uint8))
    model = write_model(tmp_path / "m", awq_config(), {"layer": layer})
    (found,) = run("inspect", model, "--json").json["layers"]
    assert found["scales"] == {"min": -2.0, "max": 0.5, "nan": 1, "inf": 2, "zero": 1, "negative": 2}
    done = run("pack", model, tmp_path / "out")
    assert done.code == 2
    assert "layer.scales has 3 NaN or infinite of 128 scales, the first (nan) at index [0, 0]" in done.err


def test_one_of_a_kind_is_singular(tmp_path: Path, rng: np.random.Generator) -> None:
    layer = awq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 5, np.uint8))
    model = write_model(
        tmp_path / "m", awq_config(), {"layer": layer}, {"norm.weight": np.ones(4, np.float16)}
    )
    (tmp_path / "m" / "notes.txt").write_text("")
    assert "1 layer (4,096 weights, " in run("inspect", model).out
    assert "1 other tensor (8 B), 1 file\n" in run("inspect", model).out
    assert "unchanged: 1 other tensor (8 B), 1 other file\n" in run("pack", model, tmp_path / "out").out
    assert "equal: 1 layer (4,096 weights) and 1 other tensor, " in run("verify", model, tmp_path / "out").out


def test_inspect_of_an_unquantized_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", None, {}, {"norm.weight": np.ones(4, np.float16)})
    done = run("inspect", model)
    assert (done.code, done.err) == (0, "")
    assert "unquantized, 0 layers" in done.out
    done = run("pack", model, tmp_path / "out")
    assert (done.code, done.err) == (
        2,
        f"error: {model}: holds no 4-bit layer to pack (`marlin-jit quantize` takes unquantized models)\n",
    )


def test_names_cannot_steer_the_terminal(tmp_path: Path, rng: np.random.Generator) -> None:
    """Names in a file are a stranger's text: no markup, no escape sequence, no second line."""
    name = "[red]a\x1b[31m\nb"
    layer = awq_layer(random_codes(rng, 64, 64), random_scales(rng, 2, 64), np.full((2, 64), 5, np.uint8))
    model = write_model(tmp_path / "m", awq_config(), {name: layer})
    shown = run("inspect", model).out
    assert r"[red]a\x1b[31m\nb" in shown
    assert "\x1b" not in shown
    layer.pop("qzeros")
    done = run("pack", write_model(tmp_path / "n", awq_config(), {name: layer}), tmp_path / "out")
    assert done.code == 2
    assert done.err.splitlines() == [rf"error: {tmp_path / 'n'}: layer [red]a\x1b[31m\nb has no qzeros"]


@pytest.mark.parametrize(
    "arguments",
    [("pack",), ("pack", "a"), ("frobnicate",), ("pack", "a", "b", "--nonsense"), ("verify", "a")],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Usage: ")


@pytest.mark.parametrize("command", ["pack", "verify", "inspect"])
def test_missing_source(tmp_path: Path, command: str) -> None:
    done = run(command, tmp_path / "no", *([] if command == "inspect" else [tmp_path / "out"]))
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {tmp_path / 'no'}: no such file or folder\n"


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help(command: str) -> None:
    done = run(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: marlin-jit {command} ")


def test_top_level_help_and_version_import_no_command() -> None:
    code = (
        "import sys\n"
        "from marlin_jit.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print(*(m for m in sys.modules if m.startswith(('marlin_jit.cli.', 'rich', 'cupy'))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *text, loaded = done.stdout.splitlines()
    assert loaded == "marlin_jit.cli.main"
    for command in COMMANDS:
        assert any(line.startswith(f"  {command} ") for line in text)
    assert run("--version").out == f"marlin-jit, version {__version__}\n"


def test_module_in_a_checkout_that_is_not_installed() -> None:
    code = (
        "import runpy, sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'marlin_jit.cli':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "runpy.run_module('marlin_jit', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "are not installed: run `pip install -e .` there" in line


def test_installed_command_and_module(tmp_path: Path) -> None:
    source = FIXTURES / "malformed" / "valid_base"
    command = [sys.executable, "-m", "marlin_jit", "pack", str(source), str(tmp_path / "out"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["written"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_exceptions_that_nobody_expects_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own exit code would be 1: "verify found a difference"."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("a bug\nof two lines")

    monkeypatch.setattr("marlin_jit.cli.verify.open_checkpoint", fail)
    done = CliRunner().invoke(main, ["verify", "a", "b"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == rf"error: {UNEXPECTED}, RuntimeError: a bug\nof two lines; please report it" + "\n"


def test_names_that_the_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    source = FIXTURES / "malformed" / "valid_base"
    command = [sys.executable, "-m", "marlin_jit", "pack", str(source), str(tmp_path / "o\u4e2d")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert r"o\u4e2d" in done.stdout


def test_a_reader_that_leaves_is_no_difference() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "marlin_jit", "inspect", str(FIXTURES / "malformed" / "valid_base")]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
