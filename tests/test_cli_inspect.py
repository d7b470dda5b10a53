"""``marlin-jit inspect``: health, patterns and the picture; and that shells complete our commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_maker import awq_config, awq_layer, gptq_config, gptq_layer, write_model
from cli_runner import run
from click.testing import CliRunner
from helpers import FIXTURES, Case, case_id, cases, random_codes

import marlin_jit as mj
from marlin_jit.cli import plot
from marlin_jit.cli.main import COMMANDS, main
from marlin_jit.formats import open_checkpoint
from marlin_jit.formats.health import Distribution, Grid, distribution, findings, read_grid

MODEL = FIXTURES / "checkpoints" / "llama_autoawq_g128"
PNG = b"\x89PNG\r\n\x1a\n"


def model(
    folder: Path, scale: np.ndarray, zero_point: np.ndarray, name: str = "layer", **config: Any
) -> Path:
    groups, N = scale.shape
    q = random_codes(np.random.default_rng(0), 32 * groups, N)
    return write_model(folder, awq_config(**config), {name: awq_layer(q, scale, zero_point)})


def health(source: Path) -> list[dict[str, Any]]:
    done = run("inspect", source, "--json")
    assert (done.code, done.err) == (0, "")
    (layer,) = done.json["layers"]
    return layer["health"]


# --- health ------------------------------------------------------------------------------------------------


def test_every_kind_of_odd_scale_with_count_and_first_index(tmp_path: Path) -> None:
    scale = np.full((2, 64), 0.5, np.float16)
    zero_point = np.full((2, 64), 7, np.uint8)
    scale[0, 5], scale[1, 6] = np.nan, -np.nan
    scale[1, [2, 9]] = [np.inf, -np.inf]
    scale[0, [60, 61, 62]] = -0.25
    scale[1, 0] = -0.0
    scale[1, 40] = 9000
    zero_point[1, 40] = 0  # (8 - 0)*9000 is more than float16 holds; with 7 it would not be
    source = model(tmp_path / "m", scale, zero_point)
    expected = [
        {"tensor": "layer.scales", "problem": "nan", "count": 2, "size": 128, "first": [0, 5]},
        {"tensor": "layer.scales", "problem": "infinite", "count": 2, "size": 128, "first": [1, 2]},
        {"tensor": "layer.scales", "problem": "negative", "count": 4, "size": 128, "first": [0, 60]},
        {"tensor": "layer.scales", "problem": "zero", "count": 1, "size": 128, "first": [1, 0]},
        {"tensor": "layer.scales", "problem": "overflow", "count": 1, "size": 128, "first": [1, 40]},
    ]
    assert health(source) == expected
    done = run("inspect", source)
    assert (done.code, done.err) == (0, "")
    lines = [line for line in done.out.splitlines() if line.startswith("health: ")]
    assert lines == [
        "health: layer.scales: 2 of 128 values are NaN, the first at [0, 5]",
        "health: layer.scales: 2 of 128 values are infinite, the first at [1, 2]",
        "health: layer.scales: 4 of 128 values are negative, the first at [0, 60]",
        "health: layer.scales: 1 of 128 values are zero, the first at [1, 0]",
        "health: layer.scales: 1 of 128 values are so large that (8 - zero point)*scale overflows, the first "
        "at [1, 40]",
    ]
    assert run("pack", source, tmp_path / "out").code == 2


def test_bfloat16_holds_what_float16_does_not(tmp_path: Path) -> None:
    scale = np.full((2, 64), 9000, ml_dtypes.bfloat16)
    assert health(model(tmp_path / "m", scale, np.zeros((2, 64), np.uint8))) == []
    scale[0, 3] = 3e38
    (found,) = health(model(tmp_path / "n", scale, np.zeros((2, 64), np.uint8)))
    assert (found["problem"], found["count"], found["first"]) == ("overflow", 1, [0, 3])


@pytest.mark.parametrize(
    "case", ["awq/g128_k384_n64_zp_0_15", "marlin/orig_g128_k256_n256", "gptq/v1_sym_gm1_k384_n256"]
)
def test_files_of_the_tools_are_healthy(case: str) -> None:
    assert health(FIXTURES / case) == []
    assert "health:" not in run("inspect", FIXTURES / case).out


def test_integer_zero_points_outside_the_codes(tmp_path: Path) -> None:
    """No 4-bit file holds 16, but a packed one may: delta = -8*scale. Real zero points may be anywhere."""
    q = random_codes(np.random.default_rng(0), 64, 64)
    scale = np.full((2, 64), 0.5, np.float16)
    zero_point = np.full((2, 64), 3.0, np.float32)
    zero_point[1, 20:22] = 16
    mj.save(tmp_path / "m.safetensors", {"l": mj.pack(mj.QuantWeight(q, scale, -zero_point * scale, 32))})
    assert health(tmp_path / "m.safetensors") == [
        {"tensor": "l.delta", "problem": "out_of_range", "count": 2, "size": 128, "first": [1, 20]}
    ]
    zero_point[0, 0] = 16.25
    mj.save(tmp_path / "n.safetensors", {"l": mj.pack(mj.QuantWeight(q, scale, -zero_point * scale, 32))})
    assert health(tmp_path / "n.safetensors") == []


def test_packed_files_give_plain_indices_and_leave_out_the_pad(tmp_path: Path) -> None:
    """N = 40 and K = 96 are padded with scales of 0, and positions in the file are not columns."""
    rng = np.random.default_rng(1)
    scale = np.full((3, 40), 0.5, np.float16)
    scale[1, 33], scale[2, 1] = 0, -1
    source = write_model(
        tmp_path / "m",
        gptq_config(sym=True, checkpoint_format="gptq_v2"),
        {"layer": gptq_layer(random_codes(rng, 96, 40), scale, np.full((3, 40), 8, np.uint8))},
    )
    assert run("pack", source, tmp_path / "out").code == 0
    before, after = health(source), health(tmp_path / "out")
    assert [(f["problem"], f["count"], f["size"], f["first"]) for f in before] == [
        ("negative", 1, 120, [2, 1]),
        ("zero", 1, 120, [1, 33]),
    ]
    assert after == [finding | {"tensor": "layer.s"} for finding in before]


def test_a_delta_that_is_nan_is_told(tmp_path: Path) -> None:
    scale = np.full((1, 2), 0.5, np.float16)
    delta = np.array([[1, np.nan]], np.float32)
    (layer,) = open_checkpoint(FIXTURES / "awq" / "g128_k256_n256").layers.values()
    (found,) = findings(layer, Grid(scale, np.float32(8) - delta / scale, delta))
    assert (found.problem, found.count, found.first) == ("nan", 1, (0, 1))
    assert found.tensor.endswith(".qzeros")


# --- patterns ----------------------------------------------------------------------------------------------


def names(*arguments: object) -> list[str]:
    done = run("inspect", MODEL, "--json", *arguments)
    assert done.code == 0, done.err
    return [layer["name"] for layer in done.json["layers"]]


def test_include_and_exclude() -> None:
    everything = names()
    assert len(everything) == 14
    assert names("--include", "*.mlp.*") == [name for name in everything if ".mlp." in name]
    assert names("--exclude", "*.mlp.*") == [name for name in everything if ".mlp." not in name]
    assert names("--include", "*.0.*", "--include", "*.up_proj", "--exclude", "*.self_attn.[kv]_proj") == [
        name
        for name in everything
        if (".0." in name or name.endswith("up_proj")) and not name.endswith((".k_proj", ".v_proj"))
    ]
    shown = run("inspect", MODEL, "--include", "*.q_proj").out
    assert "awq, 2 of 14 layers (131,072 weights" in shown


def test_a_pattern_that_matches_nothing_is_a_mistake() -> None:
    done = run("inspect", MODEL, "--include", "*.typo")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {MODEL}: no layer is called like '*.typo'\n"


# --- the picture -------------------------------------------------------------------------------------------


def spread_of(source: Path) -> Distribution:
    (layer,) = open_checkpoint(source).layers.values()
    found = layer.parameters()
    return distribution(layer.name, read_grid(layer, found, codes=True), symmetric=found.symmetric)


def test_statistics_of_known_values(tmp_path: Path) -> None:
    scale = np.tile(np.float16([1, -2, 3, 4, -5, 6, 7, 0]), (2, 8))  # |scale| without the 0: 1 to 7, evenly
    zero_point = np.repeat(np.uint8([[0], [15]]), 64, axis=1)
    zero_point[0, :16] = 8
    found = spread_of(model(tmp_path / "m", scale, zero_point))
    assert found.scale == (1, 2, 4, 6, 7)
    expected = np.zeros(19)
    expected[1 + np.array([0, 8, 15])] = 48 / 128, 16 / 128, 64 / 128
    np.testing.assert_array_equal(found.zero_points, expected)


def test_statistics_of_symmetric_and_of_bad_layers(tmp_path: Path) -> None:
    scale = np.full((2, 64), np.nan, np.float16)
    found = spread_of(model(tmp_path / "m", scale, np.full((2, 64), 8, np.uint8)))
    assert found.scale is None
    assert np.flatnonzero(found.zero_points).tolist() == [1 + 8]
    assert found.zero_points[1 + 8] == 1


def test_statistics_of_real_zeros_are_those_of_the_nearest_integer(tmp_path: Path) -> None:
    q = random_codes(np.random.default_rng(0), 32, 64)
    scale = np.full((1, 64), 0.5, np.float16)
    points = np.repeat(np.float32([-7, -0.75, 3.25, 3.75, 16.25, 40, 15.75, 0.25]), 8)[None]
    mj.save(tmp_path / "m.safetensors", {"l": mj.pack(mj.QuantWeight(q, scale, -points * scale, 32))})
    shares = spread_of(tmp_path / "m.safetensors").zero_points
    rows = {0: 2, 1 + 0: 1, 1 + 3: 1, 1 + 4: 1, 1 + 16: 2, 1 + 17: 1}  # of 8; -7 and -0.75 are "< 0"
    np.testing.assert_array_equal(shares, [rows.get(i, 0) / 8 for i in range(19)])


@pytest.mark.parametrize("case", [*cases("awq/*"), *cases("vllm_marlin/zp_*")], ids=case_id)
def test_statistics_are_the_same_before_and_after_packing(tmp_path: Path, case: Case) -> None:
    assert run("pack", case.path, tmp_path / "out").code == 0
    before, after = spread_of(case.path), spread_of(tmp_path / "out")
    assert before.scale == after.scale
    np.testing.assert_array_equal(before.zero_points, after.zero_points)
    if "zeros" in case.expected:
        assert before.scale[0] == case.expected["scales"].min()
        assert before.scale[2] == np.median(case.expected["scales"].astype(np.float32))
        counts = np.bincount(case.expected["zeros"].astype(np.int64).ravel() + 1, minlength=19)
        np.testing.assert_array_equal(before.zero_points, counts / counts.sum())


def test_png_and_svg_appear(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("inspect", MODEL, "--plot", tmp_path / "a.png")
    assert (done.code, done.err) == (0, "")
    assert "14 layers" in done.out
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert run("inspect", MODEL, "--plot", tmp_path / "a.SVG", "--json").code == 0
    root = ElementTree.parse(tmp_path / "a.SVG").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.SVG", "a.png"]


@pytest.mark.parametrize("count", [0, 1, 2, 200, 3000])
def test_pictures_of_few_and_many_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Every layer has room for its name, up to 375 layers; the picture stays one that can be opened."""
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda self, path, **_: (drawn.append(self), path.touch())
    )
    layers = [Distribution(f"l.{i}", (1, 2, 3, 4, 5 + i), np.eye(19)[i % 19]) for i in range(count)]
    plot.draw(tmp_path / "a.png", "title", layers, force=False)
    (figure,) = drawn
    scales, points = figure.axes[:2]
    labels = [text.get_text() for text in scales.get_yticklabels()]
    assert labels == [layer.name for layer in layers][:: 1 if count < 376 else 8]
    assert figure.get_figheight() * figure.dpi < 1 << 16  # the most that a PNG writer takes
    assert figure.get_figheight() >= 2 + 0.16 * min(count, 375)
    assert scales.get_xscale() == "log"
    if count:
        np.testing.assert_array_equal(points.images[0].get_array(), np.array([x.zero_points for x in layers]))
        assert list(scales.lines[0].get_xdata()) == [3] * count
        whiskers = scales.collections[0].get_segments()
        assert [segment[:, 0].tolist() for segment in whiskers] == [[1, 5 + i] for i in range(count)]


def test_names_are_no_formulas(tmp_path: Path) -> None:
    """matplotlib would refuse an unfinished formula, and fonts lack most signs."""
    pytest.importorskip("matplotlib")
    name = "$\\frac{$\x1b[31m\n\u4e2d<&" + "x" * 200
    scale = np.ones((2, 64), np.float16)
    source = model(tmp_path / "$\\frac{", scale, np.full((2, 64), 5, np.uint8), name)
    for suffix in ("png", "svg"):
        done = run("inspect", source, "--plot", tmp_path / f"a.{suffix}")
        assert (done.code, done.err) == (0, "")
    ElementTree.parse(tmp_path / "a.svg")


def test_an_existing_picture_is_replaced_only_when_asked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.png"
    picture.write_text("mine")
    done = run("inspect", MODEL, "--plot", picture)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {picture}: exists already; ")
    assert picture.read_text() == "mine"
    assert run("inspect", MODEL, "--plot", picture, "--force").code == 0
    assert picture.read_bytes().startswith(PNG)
    picture.unlink()
    picture.symlink_to("elsewhere")
    assert "symbolic link" in run("inspect", MODEL, "--plot", picture, "--force").err


@pytest.mark.parametrize("name", ["a.pdf", "a", "no/such/folder/a.png"])
def test_wrong_pictures_are_refused_before_any_work(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    done = run("inspect", tmp_path / "no model", "--plot", tmp_path / name)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: {tmp_path / name}: ")
    assert list(tmp_path.iterdir()) == []


def test_force_without_a_picture_is_wrong_usage() -> None:
    done = run("inspect", MODEL, "--force")
    assert done.code == 2
    assert "also give --plot FILE" in done.err


def test_without_matplotlib_one_line_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "matplotlib.figure", None
    )  # importing it then fails as if it were not there
    done = run("inspect", MODEL, "--plot", tmp_path / "a.png")
    assert (done.code, done.out) == (2, "")
    assert (
        done.err == 'error: --plot needs matplotlib: in the folder of marlin-jit run pip install ".[plot]"\n'
    )
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_imported_only_for_a_picture() -> None:
    code = (
        "import sys\n"
        "from marlin_jit.cli.main import main\n"
        f"main(['inspect', {str(MODEL)!r}], standalone_mode=False)\n"
        "print('matplotlib' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_real_zeros_of_a_layer_that_cannot_be_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inspecting reports; a layer with bad scales is no error here."""
    path = next((FIXTURES / "gguf" / "q40_q41_q80_k256").glob("*.gguf"))
    pytest.importorskip("gguf")
    for layer in open_checkpoint(path).layers.values():
        found = layer.parameters()
        if not found.symmetric:
            break
    assert read_grid(layer, found).zero_point is None
    grid = read_grid(layer, found, codes=True)
    weight = layer.read()
    np.testing.assert_allclose(grid.zero_point, -weight.zero / weight.scale.astype(np.float32), rtol=1e-5)

    def refuse(self: object) -> None:
        raise mj.CheckpointError("bad scales")

    monkeypatch.setattr(type(layer), "read", refuse)
    assert read_grid(layer, found, codes=True).zero_point is None


# --- shell completion --------------------------------------------------------------------------------------


def complete(words: str, word: int) -> list[str]:
    """What click offers a shell for the word with that number."""
    variables = {
        "_MARLIN_JIT_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(word),
    }
    done = CliRunner().invoke(main, [], prog_name="marlin-jit", env=variables)
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_commands_and_options_are_completed() -> None:
    assert complete("marlin-jit ", 1) == list(COMMANDS)
    assert complete("marlin-jit in", 1) == ["inspect", "info"]
    assert {"--plot", "--include", "--exclude", "--force", "--json"} <= set(
        complete("marlin-jit inspect --", 2)
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_take_the_script(tmp_path: Path, shell: str) -> None:
    """As docs/cli.md says it is made; where the shell is there, it runs the script and completes a word."""
    environment = {**os.environ, "_MARLIN_JIT_COMPLETE": f"{shell}_source", "ZDOTDIR": str(tmp_path)}
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    command = bin_folder / "marlin-jit"
    command.write_text(
        f"#!{sys.executable}\nfrom marlin_jit.cli.main import main\nmain(prog_name='marlin-jit')\n"
    )
    command.chmod(0o755)
    environment["PATH"] = f"{bin_folder}:{environment['PATH']}"
    script = subprocess.run(
        ["marlin-jit"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "_MARLIN_JIT_COMPLETE" in script
    (tmp_path / "script").write_text(script)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = {
        "bash": 'source "$1"; COMP_WORDS=(marlin-jit ver); COMP_CWORD=1; _marlin_jit_completion marlin-jit; '
        'printf "%s\\n" "${COMPREPLY[@]}"',
        "zsh": 'autoload -U compinit; compinit -u -D; source "$1"; [[ -n ${_comps[marlin-jit]} ]] || exit 1; '
        "COMP_WORDS='marlin-jit ver' COMP_CWORD=1 _MARLIN_JIT_COMPLETE=zsh_complete marlin-jit",
        "fish": 'source "$argv[-1]"; complete -C "marlin-jit ver"',
    }[shell]
    del environment["_MARLIN_JIT_COMPLETE"]
    arguments = [shell, "-c", program, *(["--"] if shell == "fish" else [shell]), str(tmp_path / "script")]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert "verify" in done.stdout.split()
