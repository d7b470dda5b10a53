"""Options of `marlin-jit pack` that choose layers, files and how the work is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from checkpoint_maker import gptq_config, gptq_layer, write_model
from cli_runner import run
from helpers import random_codes, random_scales

from marlin_jit.cli.options import Size
from marlin_jit.formats import load, targets


@pytest.fixture
def source(tmp_path: Path, rng: np.random.Generator) -> Path:
    layers = {
        name: gptq_layer(
            random_codes(rng, 64, 64), random_scales(rng, 2, 64), rng.integers(0, 16, (2, 64), dtype=np.uint8)
        )
        for name in ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")
    }
    return write_model(tmp_path / "m", gptq_config(checkpoint_format="gptq_v2"), layers)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("5GB", 5_000_000_000),
        ("500MB", 500_000_000),
        ("1.5 gb", 1_500_000_000),
        ("20k", 20_000),
        ("3T", 3_000_000_000_000),
        ("100000", 100_000),
        ("7b", 7),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert Size().convert(text, None, None) == count


@pytest.mark.parametrize(
    "text", ["", "0", "-1GB", "5 gigabytes", "1e9", "GB", "0.1", "nan", "9" * 99, "5GiB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no size; give one such as 5GB"):
        Size().convert(text, None, None)


def test_patterns_choose_layers_and_the_summary_says_so(source: Path, tmp_path: Path) -> None:
    result = run("pack", source, tmp_path / "out", "--exclude", "*.down", "--json")
    assert result.code == 0
    told = {layer["name"]: layer["dense"] for layer in result.json["layers"]}
    assert told == {
        "blocks.0.up": False,
        "blocks.0.down": True,
        "blocks.1.up": False,
        "blocks.1.down": True,
    }
    assert set(load(tmp_path / "out")) == {"blocks.0.up", "blocks.1.up"}
    result = run("pack", source, tmp_path / "again", "--include", "*.0.*")
    assert "left dense by the patterns: 2 layers" in result.out


def test_shards_jobs_and_device(source: Path, tmp_path: Path) -> None:
    result = run(
        "pack", source, tmp_path / "out", "--shard-size", "3kB", "--jobs", "3", "--device", "cpu", "--resume"
    )
    assert result.code == 0, result.err
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4
    assert not list(tmp_path.glob(".*"))


def test_a_gpu_that_is_not_there_is_an_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marlin_jit.cli.options.unavailable_reason", lambda: "no CUDA device")
    result = run("pack", source, tmp_path / "out", "--device", "gpu")
    assert result.code == 2
    assert result.err.splitlines()[-1] == "error: no CUDA device"
    assert not (tmp_path / "out").exists()


def test_options_that_decide_how_bits_are_read(source: Path, tmp_path: Path) -> None:
    for zero_format in ("v1", "v2"):
        result = run("pack", source, tmp_path / zero_format, "--zero-format", zero_format, "--quiet")
        assert result.code == 0, result.err
    one, two = (load(tmp_path / name)["blocks.0.up"] for name in ("v1", "v2"))
    assert np.array_equal(one.B, two.B)
    assert not np.array_equal(one.delta, two.delta)


def test_resuming_one_file_is_refused(source: Path, tmp_path: Path) -> None:
    result = run("pack", source / "model.safetensors", tmp_path / "out.safetensors", "--resume")
    assert result.code == 2
    assert "only a folder can be resumed" in result.err


def test_what_was_taken_over_is_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = targets.to_marlin

    def interrupted(layer: Any, device: bool) -> Any:
        if layer.name == "blocks.1.down":
            raise KeyboardInterrupt
        return real(layer, device)

    command = ("pack", source, tmp_path / "out", "--shard-size", "1", "--resume", "--jobs", "1")
    monkeypatch.setattr(targets, "to_marlin", interrupted)
    result = run(*command)
    assert result.code == 130
    assert result.err.splitlines()[-2:] == [
        "finished files are kept: the same command goes on with them",
        "interrupted",
    ]
    kept = len(list(tmp_path.glob(".*/*.safetensors")))
    assert kept > 0
    monkeypatch.setattr(targets, "to_marlin", real)
    result = run(*command)
    assert result.code == 0
    assert f"taken over from an interrupted run: {kept} of 4 files" in result.out


def test_a_folder_is_not_called_like_a_file(source: Path, tmp_path: Path) -> None:
    result = run("pack", source, tmp_path / "out.safetensors")
    assert result.code == 2
    assert "is the name of a file, but the output is a folder" in result.err


def test_existing_output_that_force_would_not_replace_is_not_said_to_be_replaceable(
    source: Path, tmp_path: Path
) -> None:
    assert run("pack", source, tmp_path / "packed").code == 0
    assert run("unpack", tmp_path / "packed", tmp_path / "dense", "--to", "dense").code == 0
    assert "--force" in run("pack", source, tmp_path / "packed").err
    assert "--force" not in run("unpack", tmp_path / "packed", tmp_path / "dense", "--to", "dense").err


def test_gguf_tensors_that_grow_are_told(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = Path(__file__).parent / "fixtures/gguf/q40_q41_q80_k256/model.gguf"
    result = run("pack", model, tmp_path / "out")
    assert result.code == 0
    # 256 x 64 weights: 34 bytes for 32 of them, and 4 for each.
    assert "written as float32: 1 tensor (17.4 kB -> 65.5 kB): blk.0.attn_v.weight" in result.out
    assert "unchanged: 1 other tensor (1.02 kB), 0 other files" in result.out
