"""Llama models over packed weights: against transformers' logits, a plain NumPy Llama, and themselves."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import plain_llama
import pytest
from cli_runner import run
from helpers import FIXTURES
from safetensors.numpy import load_file, save_file

import marlin_jit as mj
from marlin_jit import models
from marlin_jit.jit import nvrtc_version
from marlin_jit.models import GateUp, KVCache, Layer, Linear, LlamaConfig, Model, SideBySide, ops

CHECKPOINTS = ("llama_autoawq_g128", "llama_gptqmodel_asym_g128")
TINY = LlamaConfig(
    layers=2,
    hidden=64,
    intermediate=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=50,
    context=256,
    eps=1e-5,
    rope_base=10000.0,
    interleaved=False,
    tied=False,
)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama of a real tool, and what `marlin-jit pack` makes of it."""
    source = FIXTURES / "checkpoints" / request.param
    packed = tmp_path_factory.mktemp("packed") / "model"
    assert run("pack", source, packed, "--quiet").code == 0
    return source, packed


def random_model(
    config: LlamaConfig = TINY, seed: int = 0, *, bias: bool = False, dtype: Any = np.float16
) -> Model:
    """A model of random dense weights, large enough that nothing is near uniform."""
    rng = np.random.default_rng(seed)

    def linear(name: str, K: int, N: int) -> Linear:
        weight = (rng.standard_normal((K, N)) / np.sqrt(K)).astype(dtype)
        return Linear(name, weight, rng.standard_normal(N).astype(dtype) if bias else None)

    def norm() -> Any:
        return (1 + 0.1 * rng.standard_normal(config.hidden)).astype(np.float32)

    queries, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = [
        Layer(
            norm(),
            SideBySide(
                linear(f"blk.{i}.attn_q", config.hidden, queries),
                linear(f"blk.{i}.attn_k", config.hidden, shared),
                linear(f"blk.{i}.attn_v", config.hidden, shared),
            ),
            linear(f"blk.{i}.attn_output", queries, config.hidden),
            norm(),
            GateUp(
                linear(f"blk.{i}.ffn_gate", config.hidden, config.intermediate),
                linear(f"blk.{i}.ffn_up", config.hidden, config.intermediate),
            ),
            linear(f"blk.{i}.ffn_down", config.intermediate, config.hidden),
        )
        for i in range(config.layers)
    ]
    embedding = rng.standard_normal((config.vocab, config.hidden)).astype(dtype)
    head = linear("output", config.hidden, config.vocab)
    head.bias = None
    return Model(config, embedding, layers, norm(), head)


def plain_logits(model: Model, tokens: Any) -> Any:
    """The logits of a dense model by the plain Llama."""
    linears = {linear.name: linear for linear in model.linears}

    def weight(name: str) -> Any:
        if name.endswith(".bias"):
            bias = linears[name.removesuffix(".bias")].bias
            return None if bias is None else bias.astype(np.float32)
        if name in linears:
            return linears[name].weight.T.astype(np.float32)
        if name == "token_embd":
            return model.embedding.astype(np.float32)
        if name == "output_norm":
            return model.norm
        _, i, role = name.split(".")
        layer = model.layers[int(i)]
        return layer.attention_norm if role == "attn_norm" else layer.mlp_norm

    c = model.config
    sizes = plain_llama.Sizes(c.layers, c.heads, c.kv_heads, c.eps, c.rope_base, c.interleaved)
    return plain_llama.logits(list(tokens), weight, sizes)


def forward(model: Model, tokens: Any, **options: Any) -> Any:
    row = np.asarray(tokens, np.int32)[None]
    return model.forward(row, model.new_cache(row.size), **options)[0].astype(np.float32)


@pytest.fixture
def tokens(rng: np.random.Generator) -> Any:
    return rng.integers(0, TINY.vocab, 40).astype(np.int32)


# ---- checkpoints of real tools ----------------------------------------------------------------------------


def test_logits_of_transformers(checkpoint: tuple[Path, Path]) -> None:
    source, packed = checkpoint
    expected = np.load(source / "expected" / "expected.npz")
    model = models.load(packed, device="cpu", pack=False)
    found = forward(model, expected["input_ids"][0])
    # Activations are rounded to 11 bits some twenty times; logits have a standard deviation of 1.1.
    assert np.abs(found - expected["logits_f32"][0]).max() < 0.01
    assert np.abs(found - expected["logits_f32"][0]).mean() < 0.002


def test_greedy_tokens_of_transformers(checkpoint: tuple[Path, Path]) -> None:
    source, packed = checkpoint
    expected = np.load(source / "expected" / "expected.npz")
    case = json.loads((source / "expected" / "case.json").read_text())
    for model in (models.load(packed, device="cpu"), models.load(packed, device="cpu", pack=False)):
        assert list(model.generate(expected["input_ids"][0], 12, eos=())) == case["greedy12"]


def test_packed_head_is_close(checkpoint: tuple[Path, Path]) -> None:
    source, packed = checkpoint
    expected = np.load(source / "expected" / "expected.npz")
    model = models.load(packed, device="cpu")
    assert all(linear.packed for linear in model.linears)
    found = forward(model, expected["input_ids"][0])
    # 8 bits cost half a step of max/127 in each weight of the head: 0.3 % of a typical one.
    assert np.abs(found - expected["logits_f32"][0]).max() < 0.03


def test_reference_path_and_cached_weights_agree(checkpoint: tuple[Path, Path], tokens: Any) -> None:
    model = models.load(checkpoint[1], device="cpu")
    mj.reset_stats()
    by_reference = forward(model, tokens)
    assert mj.stats() == {"reference": 9}  # two layers of four products, and the head
    cached = forward(model.cache_dense(), tokens)
    assert mj.stats() == {"reference": 9}  # two layers of four products, and the head
    assert np.abs(cached - by_reference).max() < 0.01
    model.drop_dense()
    assert np.array_equal(forward(model, tokens), by_reference)


def test_head_is_tied_where_the_config_says_so(checkpoint: tuple[Path, Path]) -> None:
    source, packed = checkpoint
    model = models.load(packed, device="cpu", pack=False)
    tied = json.loads((source / "config.json").read_text())["tie_word_embeddings"]
    assert model.config.tied == tied
    assert (model.head.name == "model.embed_tokens") == tied
    assert np.array_equal(model.head.weight.T, model.embedding) == tied


def test_tokenizer_of_a_checkpoint(checkpoint: tuple[Path, Path]) -> None:
    tokenizer = models.Tokenizer.load(checkpoint[1])
    text = "Hello, wörld 123"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "".join(tokenizer.stream(tokenizer.encode(text))) == text


# ---- the forward ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_forward_of_the_plain_llama(tokens: Any, bias: bool, interleaved: bool) -> None:
    model = random_model(replace(TINY, interleaved=interleaved), bias=bias)
    exact = plain_logits(model, tokens)
    found = forward(model, tokens)
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 2e-3


def test_bfloat16_follows(tokens: Any) -> None:
    model = random_model(dtype=ml_dtypes.bfloat16)
    exact = plain_logits(model, tokens)
    found = forward(model, tokens)
    assert model.dtype == ml_dtypes.bfloat16
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 1.6e-2


@pytest.mark.parametrize("pieces", [(1,) * 40, (39, 1), (7, 16, 17), (20, 1, 19)])
def test_any_chunks_give_the_whole(tokens: Any, pieces: tuple[int, ...]) -> None:
    model = random_model()
    cache = model.new_cache(50)
    found, start = [], 0
    for piece in pieces:
        found.append(model.forward(tokens[None, start : start + piece], cache)[0])
        start += piece
    assert (cache.used, int(cache.position[0])) == (40, 40)
    # The order of float32 sums may differ, and so the last bit of what is rounded.
    np.testing.assert_allclose(
        np.concatenate(found).astype(np.float32), forward(model, tokens), rtol=0, atol=0.01
    )


def test_last_only_is_the_last(tokens: Any) -> None:
    model = random_model()
    np.testing.assert_allclose(
        forward(model, tokens, last_only=True)[0], forward(model, tokens)[-1], atol=0.005
    )


def test_texts_side_by_side_do_not_mix(tokens: Any) -> None:
    model = random_model()
    batch = np.stack([tokens, tokens[::-1]])
    both = model.forward(batch, model.new_cache(40, batch=2)).astype(np.float32)
    for row, found in zip(batch, both, strict=True):
        np.testing.assert_allclose(found, forward(model, row), atol=0.01)


def test_grouped_queries_are_repeated_heads(tokens: Any) -> None:
    model = random_model()
    repeated = random_model()
    for layer in repeated.layers:
        for linear in layer.qkv.linears[1:]:
            heads = linear.weight.reshape(TINY.hidden, TINY.kv_heads, TINY.head_dim)
            linear.weight = np.repeat(heads, TINY.heads // TINY.kv_heads, axis=1).reshape(TINY.hidden, -1)
        layer.qkv = SideBySide(*layer.qkv.linears)
    repeated.config = replace(TINY, kv_heads=TINY.heads)
    np.testing.assert_allclose(forward(repeated, tokens), forward(model, tokens), atol=0.01)


def test_rotary_conventions_differ_by_a_permutation(tokens: Any) -> None:
    halves = random_model()
    pairs = random_model(replace(TINY, interleaved=True))
    # Row 2i of a head in a GGUF file is row i of the checkpoint, row 2i + 1 is row i + head_dim/2.
    order = np.arange(TINY.head_dim).reshape(2, -1).T.reshape(-1)
    for layer in pairs.layers:
        for linear in layer.qkv.linears[:2]:
            heads = linear.weight.reshape(TINY.hidden, -1, TINY.head_dim)
            linear.weight = heads[:, :, order].reshape(TINY.hidden, -1)
    same, other = forward(pairs, tokens), forward(random_model(replace(TINY, interleaved=True)), tokens)
    np.testing.assert_allclose(same, forward(halves, tokens), atol=0.01)
    assert np.abs(other - forward(halves, tokens)).max() > 0.1


def test_later_tokens_change_nothing_before_them(tokens: Any) -> None:
    model = random_model()
    changed = tokens.copy()
    changed[25:] = (changed[25:] + 1) % TINY.vocab
    a, b = forward(model, tokens), forward(model, changed)
    assert np.array_equal(a[:25], b[:25])
    assert not np.array_equal(a[25], b[25])


def test_what_lies_behind_the_position_is_never_read(tokens: Any) -> None:
    model = random_model()
    clean, dirty = model.new_cache(64), model.new_cache(64)
    dirty.keys[...] = dirty.values[...] = 7
    assert np.array_equal(model.forward(tokens[None], clean), model.forward(tokens[None], dirty))


def test_cache_is_full() -> None:
    model = random_model()
    cache = model.new_cache(3)
    model.forward(np.zeros((1, 2), np.int32), cache)
    with pytest.raises(mj.ShapeError, match="holds 3 positions, 2 of them used; 2 more do not fit"):
        model.forward(np.zeros((1, 2), np.int32), cache)
    cache.reset()
    model.forward(np.zeros((1, 3), np.int32), cache)
    with pytest.raises(mj.ShapeError, match="positive length and batch"):
        KVCache(TINY, 0, dtype=np.float16, xp=np)
    with pytest.raises(mj.ShapeError, match="1 texts side by side"):
        model.forward(np.zeros((2, 1), np.int32), model.new_cache(3))


# ---- scoring ----------------------------------------------------------------------------------------------


def test_score_is_the_softmax_of_the_plain_llama(tokens: Any) -> None:
    model = random_model()
    expected = plain_llama.mean_nll(plain_logits(model, tokens), list(tokens))
    for chunk in (512, 39, 7, 1):
        found = model.score(tokens, chunk=chunk)
        assert found.tokens == 39
        assert found.mean_nll == pytest.approx(expected, abs=2e-3)
        assert found.perplexity == pytest.approx(np.exp(found.mean_nll))


def test_a_context_starts_anew(tokens: Any) -> None:
    model = random_model()
    found = model.score(tokens, context=16, chunk=5)
    parts = [model.score(tokens[start : start + 17]).nll for start in (0, 16, 32)]
    np.testing.assert_allclose(found.nll, np.concatenate(parts), atol=0.01)


@pytest.mark.parametrize(
    ("tokens", "options", "error", "message"),
    [
        ([1], {}, mj.ShapeError, "nothing to predict"),
        ([], {}, mj.ShapeError, "at least one"),
        ([[1, 2]], {}, mj.ShapeError, "one row of tokens"),
        ([1, 50], {}, mj.ValueRangeError, "token 50 is outside the vocabulary of 50"),
        ([1, -1], {}, mj.ValueRangeError, "token -1 is outside"),
        ([1.0, 2.0], {}, mj.DTypeError, "tokens are integers, got float64"),
        ([1, 2], {"chunk": 0}, mj.ShapeError, "chunk must be at least 1"),
        ([1, 2], {"context": 1}, mj.ShapeError, "context at least 2"),
    ],
)
def test_what_cannot_be_scored(tokens: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        random_model().score(tokens, **options)


# ---- generating -------------------------------------------------------------------------------------------


def test_greedy_takes_the_largest_logit(tokens: Any) -> None:
    model = random_model()
    found = list(model.generate(tokens, 10))
    text = list(tokens)
    for token in found:
        assert token == forward(model, text)[-1].argmax()
        text.append(token)
    assert len(found) == 10


def test_it_stops_before_eos(tokens: Any) -> None:
    model = random_model()
    free = list(model.generate(tokens, 10))
    assert list(model.generate(tokens, 10, eos=[free[4]])) == free[: free.index(free[4])]
    model.config = replace(TINY, eos=(free[0],))
    assert list(model.generate(tokens, 10)) == []


def test_seeds_repeat(tokens: Any) -> None:
    model = random_model()

    def draw(seed: int | None, **options: Any) -> list[int]:
        return list(model.generate(tokens, 12, temperature=1.0, seed=seed, **options))

    assert draw(3) == draw(3)
    assert len({tuple(draw(seed)) for seed in range(5)}) == 5
    greedy = list(model.generate(tokens, 12))
    assert draw(3, top_k=1) == greedy
    assert draw(3, top_p=1e-9) == greedy


def test_draws_follow_the_softmax() -> None:
    from marlin_jit.models.generation import _sampler

    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float64)).astype(np.float32)
    for options, expected in (
        ((1.0, 0, 1.0), [0.5, 0.25, 0.15, 0.1]),
        ((0.5, 0, 1.0), np.array([25, 6.25, 2.25, 1]) / 34.5),
        ((1.0, 2, 1.0), [2 / 3, 1 / 3, 0, 0]),
        ((1.0, 0, 0.6), [2 / 3, 1 / 3, 0, 0]),
    ):
        draw = _sampler(*options, 0)
        counts = np.bincount([draw(logits) for _ in range(8000)], minlength=4) / 8000
        np.testing.assert_allclose(counts, expected, atol=0.02)


def test_logits_that_are_not_finite_are_an_error(tokens: Any) -> None:
    model = random_model()
    model.norm[3] = np.nan
    with pytest.raises(mj.ValueRangeError, match=r"logits for token 1 .* are not finite"):
        model.score(tokens)
    for options in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_k": 5, "top_p": 0.5}):
        with pytest.raises(mj.ValueRangeError, match="logits are not finite: damaged weights"):
            list(model.generate(tokens, 3, **options))


def test_a_perplexity_beyond_floats_is_infinite() -> None:
    assert models.Score(np.array([800.0])).perplexity == float("inf")


def test_tokens_of_other_shapes_are_refused(tokens: Any) -> None:
    model = random_model()
    for wrong in (tokens, tokens[None, :0], tokens[None, None]):
        with pytest.raises(mj.ShapeError, match=r"shape \[batch, tokens\]"):
            model.forward(wrong, model.new_cache(40))
    for wrong, what in (([1, 2], "got list"), (np.array([[1.5]]), "got float64")):
        with pytest.raises(mj.DTypeError, match=f"an array of integers, {what}"):
            model.forward(wrong, model.new_cache(40))


def test_scores_that_make_no_sense_are_refused(tokens: Any) -> None:
    model = random_model()
    for options, error, message in (
        ({"chunk": "x"}, mj.DTypeError, "chunk must be an integer"),
        ({"context": 2.5}, mj.DTypeError, "context must be an integer"),
        ({"context": 257}, mj.ShapeError, "made for a context of 256, not 257"),
    ):
        with pytest.raises(error, match=message):
            model.score(tokens, **options)  # type: ignore[arg-type]


def test_a_model_copies(tokens: Any) -> None:
    model = random_model()
    other = copy.deepcopy(model)
    model.embedding[...] = 0
    assert not np.array_equal(forward(other, tokens), forward(model, tokens))


def test_joining_keeps_what_was_cached(tokens: Any) -> None:
    model = random_model()
    models.pack_model(model)
    model.cache_dense()
    cached = forward(model, tokens)
    model.fuse()
    assert all(linear.cached is not None for linear in model.linears)
    np.testing.assert_allclose(forward(model, tokens), cached, atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must not be negative"),
        ({"max_new_tokens": 1000}, "40 tokens and 1000 new ones are more than the 256"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be an integer"),
        ({"temperature": -1.0}, "temperature must be 0, or 1e-06 or more"),
        ({"temperature": 1e-320}, "temperature must be 0, or 1e-06 or more"),
        ({"temperature": 1.0, "top_k": -1}, "top_k must be 0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 5.0}, "top_p must be above 0"),
        ({"seed": -1}, "seed must not be negative"),
        ({"seed": "a"}, "seed must be an integer"),
        ({"eos": 3}, "eos must be a sequence of integers"),
        ({"temperature": "x"}, "temperature and top_p are numbers, got 'x'"),
    ],
)
def test_wishes_that_make_no_sense_are_refused_at_once(tokens: Any, options: Any, message: str) -> None:
    with pytest.raises(mj.MarlinJitError, match=message):
        random_model().generate(tokens, **options)


def test_graphs_are_for_gpus() -> None:
    model = random_model()
    with pytest.raises(mj.DeviceError, match="needs a model on a GPU"):
        model.decode_graph(model.new_cache(4))


# ---- packing what is dense --------------------------------------------------------------------------------


def test_pack_model_packs_what_is_dense(tokens: Any) -> None:
    model = random_model()
    before = forward(model, tokens)
    report = models.pack_model(model)
    assert len(report.packed) == 15 and not report.left
    assert all(linear.packed for linear in model.linears)
    assert report.bytes_added == sum(linear.weight.nbytes for linear in model.linears)
    after = forward(model, tokens)
    assert np.linalg.norm(after - before) / np.linalg.norm(before) < 0.03
    again = models.pack_model(model)
    assert not again.packed and set(again.left.values()) == {"packed already"}


def test_biases_are_packed_with_their_layers(tokens: Any) -> None:
    model = random_model(bias=True)
    for linear in model.linears:
        if linear.bias is not None:
            linear.bias = linear.bias.astype(np.float32)  # as GGUF files have them
    before = forward(model, tokens)
    models.pack_model(model)
    assert np.linalg.norm(forward(model, tokens) - before) / np.linalg.norm(before) < 0.03


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_joined_products_are_the_products_apart(tokens: Any, bias: bool, bits: Any, dtype: Any) -> None:
    model = random_model(bias=bias, dtype=dtype)
    models.pack_model(model, bits=bits)
    apart = forward(model, tokens)
    assert model.fuse() == (2 if bias else 4)  # no bias goes into SwiGLU
    names = [linear.name for linear in model.layers[1].linears]
    gate_up = ["blk.1.ffn_gate", "blk.1.ffn_up"] if bias else ["blk.1.ffn_gate+blk.1.ffn_up"]
    assert names == [
        "blk.1.attn_q+blk.1.attn_k+blk.1.attn_v",
        "blk.1.attn_output",
        *gate_up,
        "blk.1.ffn_down",
    ]
    assert [linear.K for linear in model.layers[0].linears] == [64, 64, *[64] * len(gate_up), 96]
    bound = 2e-3 if dtype is np.float16 else 1.6e-2  # gate and up are rounded apart, not joined
    for _ in range(2):
        together = forward(model, tokens)
        assert np.linalg.norm(together - apart) / np.linalg.norm(apart) < bound
        model.cache_dense()
    assert model.fuse() == (2 if bias else 4)


@pytest.mark.parametrize(("rounding", "left"), [("frac4", 0.25), ("sign_bit", 0.6)])
def test_iterations_average_to_the_unrounded_model(tokens: Any, rounding: Any, left: float) -> None:
    """Logits of a model whose weights are rounded anew each iteration, against the model they come from."""
    model = random_model()
    unrounded = forward(model, tokens).astype(np.float64)
    for linear in model.linears:
        linear.weight = mj.quantize(linear.weight, group_size=32, rounding=rounding)

    def error(logits: Any) -> float:
        return float(np.linalg.norm(logits - unrounded) / np.linalg.norm(unrounded))

    nearest = forward(model, tokens)
    runs = []
    for i in range(16):
        with mj.iteration(i, seed=3):
            runs.append(forward(model, tokens).astype(np.float64))
    errors = [error(np.mean(runs[:count], axis=0)) for count in (1, 2, 4, 16)]
    assert errors[0] > errors[1] > errors[2] >= errors[3]
    assert errors[3] < left * error(nearest)
    with mj.iteration(5, seed=3):
        assert np.array_equal(forward(model, tokens), runs[5])  # reproducible
    with mj.iteration(5, seed=4):
        assert not np.array_equal(forward(model, tokens), runs[5])
    assert np.array_equal(forward(model, tokens), nearest)  # off outside


def test_layers_left_dense_by_patterns(tmp_path: Path, tokens: Any) -> None:
    source = FIXTURES / "checkpoints" / CHECKPOINTS[1]
    for name, options in (("all", ()), ("some", ("--exclude", "*.q_proj", "--exclude", "*.down_proj"))):
        assert run("pack", source, tmp_path / name, "--quiet", *options).code == 0
    whole = forward(models.load(tmp_path / "all", device="cpu", pack=False), tokens)
    part = models.load(tmp_path / "some", device="cpu", pack=False, fuse=False)
    assert [linear.packed for linear in part.layers[0].linears] == [
        False,
        True,
        True,
        True,
        True,
        True,
        False,
    ]
    np.testing.assert_allclose(forward(part, tokens), whole, atol=0.01)
    packed = models.load(tmp_path / "some", device="cpu")
    # q in 8 bits is not joined with k and v in 4; gate and up are one.
    assert [linear.eight_bit for linear in packed.layers[0].linears] == [True, *[False] * 4, True]
    assert np.linalg.norm(forward(packed, tokens) - whole) / np.linalg.norm(whole) < 0.02


def test_pack_model_says_what_it_leaves(tokens: Any) -> None:
    config = replace(TINY, intermediate=50)
    model = random_model(config)
    report = models.pack_model(model, bits=4)
    assert report.left == {f"blk.{i}.ffn_down": "K = 50 is no multiple of 32" for i in range(2)}
    assert [linear.eight_bit for linear in model.linears] == [False] * 14 + [True]
    with pytest.raises(mj.ValueRangeError, match="4 or 8 bits, not 3"):
        models.pack_model(model, bits=3)  # type: ignore[arg-type]


# ---- what is refused --------------------------------------------------------------------------------------

Change = Callable[[Path], Any]


def edit(path: Path, **values: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    document = json.loads(path.read_text())
    for key, value in values.items():
        document.pop(key, None)
        if value is not None:
            document[key] = value
    path.write_text(json.dumps(document))


def config(**values: Any) -> Change:
    return lambda folder: edit(folder / "config.json", **values)


def tensor(name: str, change: Callable[[Any], Any]) -> Change:
    """Replace a tensor, or with None remove it."""

    def apply(folder: Path) -> None:
        for path in folder.glob("*.safetensors"):
            from safetensors import safe_open

            with safe_open(path, "numpy") as file:
                metadata = file.metadata()
            tensors = load_file(path)
            if name in tensors or (change(None) is not None and path.name.startswith("model-00001")):
                value = change(tensors.pop(name, None))
                if value is not None:
                    tensors[name] = value
                save_file(tensors, path, metadata)
                index = json.loads((folder / "model.safetensors.index.json").read_text())
                index["weight_map"].pop(name, None)
                if value is not None:
                    index["weight_map"][name] = path.name
                (folder / "model.safetensors.index.json").write_text(json.dumps(index))
                return

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(hidden_size=None), "config.json: hidden_size is missing"),
        (config(num_hidden_layers=None), "config.json: num_hidden_layers is missing"),
        (config(num_hidden_layers="2"), "num_hidden_layers is '2'; expected a positive integer"),
        (config(num_hidden_layers=3), "tensor model.layers.2.input_layernorm.weight is missing"),
        (config(num_hidden_layers=1), "tensors that a Llama has no use for"),
        (config(vocab_size=999), "model.embed_tokens.weight is [1000, 256]; the config says [999, 256]"),
        (
            config(intermediate_size=512),
            "layer model.layers.0.mlp.gate_proj is 256 x 384; the config says 256 x 512",
        ),
        (config(rms_norm_eps=-1), "rms_norm_eps is '-1'; expected a positive number"),
        (config(rms_norm_eps=float("nan")), "rms_norm_eps is 'nan'; expected a positive number"),
        (config(num_key_value_heads=3), "4 heads cannot share 3"),
        (config(head_dim=3), "no pairs to rotate"),
        (config(model_type="mamba"), "model_type is 'mamba'; 'llama' is what runs"),
        (config(model_type=None), "model_type is None"),
        (config(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (config(rope_scaling={"rope_type": "llama3", "factor": 8}), "rope scaling 'llama3'"),
        (config(rms_norm_eps=10**400), "0000'; expected a positive number"),
        (config(tie_word_embeddings="false"), "tie_word_embeddings is 'false'; expected true or false"),
        (config(tie_word_embeddings=0), "tie_word_embeddings is '0'; expected true or false"),
        (config(rope_scaling={"type": "linear", "factor": 2}), "rope scaling 'linear'"),
        (config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope scaling 'yarn'"),
        (config(rope_parameters=[1]), "must be objects or null"),
        (config(eos_token_id="</s>"), "eos_token_id is '</s>'; expected a token id or a list"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: is not a JSON object"),
        (lambda folder: (folder / "config.json").unlink(), "has neither config.json nor gguf.json"),
        (tensor("model.norm.weight", lambda _: None), "tensor model.norm.weight is missing"),
        (
            tensor("model.norm.weight", lambda old: None if old is None else old[:-1]),
            "model.norm.weight is [255]; the config says [256]",
        ),
        (
            tensor("model.layers.0.self_attn.q_norm.weight", lambda _: np.ones(64, np.float16)),
            "holds 1 tensors that a Llama has no use for (model.layers.0.self_attn.q_norm.weight)",
        ),
        (
            tensor("model.norm.weight", lambda old: None if old is None else old.astype(np.int32)),
            "model.norm.weight is int32",
        ),
    ],
)
def test_hostile_folders(tmp_path: Path, change: Change, message: str) -> None:
    folder = tmp_path / "model"
    assert run("pack", FIXTURES / "checkpoints" / CHECKPOINTS[1], folder, "--quiet").code == 0
    change(folder)
    with pytest.raises(mj.CheckpointError) as caught:
        models.load(folder, device="cpu")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(mj.CheckpointError, match="no such file or folder"):
        models.load(tmp_path / "nothing")
    with pytest.raises(mj.CheckpointError, match="convert it with `marlin-jit pack"):
        models.load(FIXTURES / "checkpoints" / CHECKPOINTS[0], device="cpu")
    with pytest.raises(mj.CheckpointError, match=r"neither tokenizer\.json nor gguf\.json"):
        models.Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(mj.CheckpointError, match="is no tokenizer"):
        models.Tokenizer.load(tmp_path)


def test_missing_head(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "checkpoints" / CHECKPOINTS[0], tmp_path / "source")
    edit(tmp_path / "source" / "config.json", tie_word_embeddings=False)
    assert run("pack", tmp_path / "source", folder, "--quiet").code == 0
    with pytest.raises(mj.CheckpointError, match=r"tensor lm_head\.weight is missing"):
        models.load(folder, device="cpu")


GGUF_VALUES = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 50,
}


def test_gguf_values() -> None:
    config = LlamaConfig.from_gguf(GGUF_VALUES | {"tokenizer.ggml.eos_token_id": 7})
    assert (config.kv_heads, config.head_dim, config.rope_base, config.eos) == (4, 16, 10000.0, (7,))
    assert config.interleaved


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture is 'gemma3'"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.attention.head_count": [4, 4]}, r"head_count is '\[4, 4\]'; expected a positive integer"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.scale_linear": 4.0}, "rope scaling 'linear'"),
        ({"llama.rope.scaling.factor": 8.0}, "rope scaling 'linear'"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8; 16, as of keys"),
        ({"llama.attention.layer_norm_rms_epsilon": "NaN"}, "epsilon is 'NaN'"),
    ],
)
def test_gguf_values_that_are_refused(values: Any, message: str) -> None:
    with pytest.raises(mj.CheckpointError, match=message):
        LlamaConfig.from_gguf(GGUF_VALUES | values)


# ---- GGUF -------------------------------------------------------------------------------------------------


def write_gguf(path: Path, model: Model, *, tied: bool, extra: str | None = None) -> dict[str, Any]:
    """Write a model as GGUF by the gguf package; return its weights, dequantized by that package."""
    gguf = pytest.importorskip("gguf", reason="needs the package `gguf`")
    c = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c.layers)
    writer.add_context_length(c.context)
    writer.add_embedding_length(c.hidden)
    writer.add_feed_forward_length(c.intermediate)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_base)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_vocab_size(c.vocab)
    kinds = gguf.GGMLQuantizationType
    weights: dict[str, Any] = {}

    def add(name: str, array: Any, kind: Any) -> None:
        data = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind)
        writer.add_tensor(name + ".weight", data, raw_dtype=kind)
        weights[name] = gguf.quants.dequantize(data, kind)

    add("token_embd", model.embedding, kinds.Q8_0)
    add("output_norm", model.norm, kinds.F32)
    for i, layer in enumerate(model.layers):
        add(f"blk.{i}.attn_norm", layer.attention_norm, kinds.F32)
        add(f"blk.{i}.ffn_norm", layer.mlp_norm, kinds.F32)
        for linear in layer.linears:
            add(linear.name, linear.weight.T, kinds.Q4_1 if "attn" in linear.name else kinds.Q4_0)
    if tied:
        weights["output"] = weights["token_embd"]
    else:
        add("output", model.head.weight.T, kinds.Q8_0)
    if extra is not None:
        add(extra, np.ones(8, np.float32), kinds.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_forward_of_a_gguf_file(tmp_path: Path, tokens: Any, tied: bool) -> None:
    weights = write_gguf(tmp_path / "model.gguf", random_model(), tied=tied)
    assert run("pack", tmp_path / "model.gguf", tmp_path / "packed", "--quiet").code == 0
    model = models.load(tmp_path / "packed", device="cpu")
    assert (model.config.interleaved, model.config.tied) == (True, tied)
    head = mj.dequantize(model.head.weight, np.float32)
    assert np.array_equal((head[:64] + head[64:]).T, weights["output"])
    sizes = plain_llama.Sizes(2, 4, 2, 1e-5, 10000.0, interleaved=True)
    exact = plain_llama.logits(list(tokens), weights.get, sizes)
    found = forward(model, tokens)
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 2e-3


def test_rope_factors_of_a_gguf_file_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", random_model(), tied=True, extra="rope_freqs")
    assert run("pack", tmp_path / "model.gguf", tmp_path / "packed", "--quiet").code == 0
    with pytest.raises(mj.CheckpointError, match=r"no use for \(rope_freqs\.weight\)"):
        models.load(tmp_path / "packed", device="cpu")


BYTES = [chr(i) for i in range(33, 127)] + ["Ġ", "ab", "<|im_end|>", "<|im_start|>"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": BYTES,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1] * (len(BYTES) - 2) + [3, 3],
}


def test_tokenizer_of_gguf_values() -> None:
    pytest.importorskip("tokenizers", reason="needs the package `tokenizers`")
    tokenizer = models.Tokenizer.from_gguf(TOKENIZER)
    assert tokenizer.size == len(BYTES)
    ids = tokenizer.encode("ab 12<|im_end|>")
    assert [BYTES[i] for i in ids] == ["ab", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == "ab 12<|im_end|>"
    assert tokenizer.decode(ids, skip_special=True) == "ab 12"
    assert tokenizer.chat("a").endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, "'gpt2' with pre-tokenizer 'llama-bpe'"),
        ({"tokenizer.ggml.model": "llama"}, "'llama' with pre-tokenizer 'smollm'"),
        ({"tokenizer.ggml.tokens": None}, r"tokens is missing, or no list of str"),
        ({"tokenizer.ggml.merges": [1]}, r"merges is missing, or no list of str"),
        ({"tokenizer.ggml.token_type": [1]}, "has 98 tokens but the types of 1"),
        ({"tokenizer.ggml.merges": ["a c"]}, "do not fit together"),
        ({"tokenizer.ggml.merges": ["abc"]}, "do not fit together"),
    ],
)
def test_tokenizers_that_are_refused(values: Any, message: str) -> None:
    pytest.importorskip("tokenizers", reason="needs the package `tokenizers`")
    with pytest.raises(mj.CheckpointError, match=message) as caught:
        models.Tokenizer.from_gguf(TOKENIZER | values)
    assert "\n" not in str(caught.value)


# ---- the kernels of the GPU, which compile without one ----------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("arch", ["80", "86", "89", "90a", "100", "120"])
def test_kernels_compile_without_spills(arch: str, dtype: Any) -> None:
    try:
        nvrtc_version()
    except mj.MarlinJitError as error:
        pytest.skip(f"needs NVRTC: {error}")
    from cupy.cuda import nvrtc

    for head_dim in (8, 16, 32, 64, 128, 256):
        program = nvrtc.createProgram(ops.source(), "llama.cu", [], [])
        options = (*ops.build_options(dtype, head_dim), f"--gpu-architecture=sm_{arch}", "--ptxas-options=-v")
        nvrtc.compileProgram(program, options)
        log = nvrtc.getProgramLog(program)
        kernels = 5 if head_dim == 8 else 6
        assert log.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == kernels, log
        assert max(int(size) for size in re.findall(r"(\d+) bytes smem", log)) <= 48 * 1024
        assert "warning" not in log


def test_gpu_takes_heads_of_powers_of_two() -> None:
    ops.check_head_dim(128)
    with pytest.raises(mj.CheckpointError, match="heads of 96 elements"):
        ops.check_head_dim(96)
