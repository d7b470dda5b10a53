"""The parity chain: five levels, each built on the one before.

1. `TestPacker`: a symmetric weight, packed on the device and dequantized by the kernel, is the float16 weight
   that its codes stand for, and the GEMM multiplies by it.
2. `TestCorrectionReference`: the array formula. The symmetric product plus (group sums of x) @ delta is
   x @ W.
3. `TestCorrectionKernels`: the two correction kernels compute that formula, within one or two units in the
   last place of the rounded result.
4. `TestCombinedCall`: symmetric GEMM and correction in one call, and the fused kernel, equal x @ W.
5. `TestWholeRuntime`: a checkpoint packed by the command, loaded, and run as a stack of layers with dispatch
   on and off gives the same scores, every layer on the path it should take.

Levels 1 and 2 run without a device in `tests/test_parity_cpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cli_runner import run
from exact import matrix, product, random_rows, random_weight, relative_error, weight64
from helpers import assert_same_bits, symmetric_codes

import marlin_jit as mj
from marlin_jit import launch, layout

cp = pytest.importorskip("cupy")
engine = import_module("marlin_jit.dispatch")  # the package's attribute of that name is the function

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
BOUND = {FP16: 4e-4, BF16: 3e-3}
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama-gptq"


def plain_delta(w: mj.MarlinWeight) -> Any:
    """What kernels add, in plain column order, as float64 [G, N]."""
    return cp.ascontiguousarray(layout.permute_scales(w.delta16)[:, : w.N]).astype(np.float64)


def exact_sums(x: Any, w: mj.MarlinWeight) -> Any:
    """Sums of x over each packed group, in float64 [M, G]."""
    size = w.padded_shape[0] if w.group_size == -1 else w.group_size
    padded = cp.zeros((x.shape[0], w.groups * size))
    padded[:, : w.K] = x.astype(np.float64)
    return padded.reshape(x.shape[0], w.groups, size).sum(axis=2)


class TestPacker:
    @pytest.mark.parametrize(("K", "N", "group_size"), [(256, 256, 128), (2048, 512, -1), (1024, 192, 64)])
    def test_packed_weight_is_the_reference(
        self, K: int, N: int, group_size: int, rng: np.random.Generator
    ) -> None:
        q, scale, reference = symmetric_codes(rng, K, N, group_size)
        w = mj.pack(mj.QuantWeight(cp.asarray(q), cp.asarray(scale), None, group_size))
        dense = cp.full((K, N), np.nan, FP16)
        launch.dequantize(w, dense)
        assert_same_bits(dense.get(), reference.astype(np.float32).astype(FP16))
        x = random_rows(rng, 16, K, FP16)
        exact = product(x.astype(np.float64), dense.astype(np.float64))
        assert relative_error(mj.matmul(x, w, path="marlin"), exact) <= BOUND[FP16]

    @pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
    @pytest.mark.parametrize("kind", ["symmetric", "zero points", "shuffled", "uneven"])
    def test_dequantize_kernel_is_dequantize(self, kind: str, dtype: Any, rng: np.random.Generator) -> None:
        for K, N, group in ((384, 100, 32), (256, 320, 128), (96, 1, 96), (144, 70, 48)):
            weight = random_weight(rng, K, N, group, symmetric=kind == "symmetric", dtype=dtype)
            groups = weight.groups
            if kind in ("shuffled", "uneven") and groups > 1:
                even = rng.permutation(np.arange(K) // group)
                g_idx = even if kind == "shuffled" else rng.integers(0, groups, K)
                codes = (weight.q, weight.scale, weight.zero, group)
                weight = mj.QuantWeight(*codes, cp.asarray(g_idx.astype(np.int32)))
            weights: list[mj.QuantWeight | mj.MarlinWeight] = [weight]
            if weight.group_size in layout.GROUP_SIZES and (kind != "uneven" or groups == 1):
                weights.append(mj.pack(weight))
            for one in weights:
                dense = cp.full((K, N), np.nan, np.float32).astype(dtype)
                launch.dequantize(one, dense)
                assert_same_bits(dense.get(), mj.dequantize(one.to_host()))


class TestCorrectionReference:
    @pytest.mark.parametrize(
        ("M", "K", "N", "group_size"),
        [(1, 256, 128, 128), (16, 512, 320, 32), (33, 1024, 64, 64), (8, 640, 72, -1)],
    )
    def test_correction_completes_the_symmetric_product(
        self, M: int, K: int, N: int, group_size: int, rng: np.random.Generator
    ) -> None:
        qw = random_weight(rng, K, N, group_size, symmetric=False, dtype=FP16, real_zero=True)
        w = mj.pack(qw)
        symmetric = mj.pack(mj.QuantWeight(qw.q, qw.scale, None, group_size))
        assert bool((symmetric.B == w.B).all() and (symmetric.scales == w.scales).all())
        x = random_rows(rng, M, K, FP16)
        wide = x.astype(np.float64)
        correction = product(exact_sums(x, w), plain_delta(w))
        exact = product(wide, weight64(qw))
        in_arrays = product(wide, weight64(mj.unpack(symmetric))) + correction
        assert relative_error(in_arrays, exact) <= BOUND[FP16]  # delta is rounded to float16
        completed = mj.matmul(x, symmetric, path="marlin").astype(np.float64) + correction
        assert relative_error(completed, exact) <= 2 * BOUND[FP16]  # two terms that may cancel


def sum_places(M: int, w: mj.MarlinWeight) -> Any:
    """Where the pair keeps the sum of (row, group): A fragments, 16 rows x 8 groups, of m16n8k8 (PTX ISA)."""
    m, group = cp.mgrid[: -(-M // 16) * 16, : launch.padded_groups(w)]
    fragment = m // 16 * (launch.padded_groups(w) // 8) + group // 8
    lane, register = 4 * (m % 8) + group % 8 // 2, m % 16 // 8 + 2 * (group % 2)
    return 128 * fragment + 4 * lane + register


CORRECTIONS = [  # M, K, N, group size: 1, 2, 16 (one of the pad), 56 and 112 groups; tails of M and N
    (1, 640, 72, -1),
    (7, 256, 64, 128),
    (33, 480, 1000, 32),
    (64, 7168, 257, 128),
    (16, 3584, 130, 32),
]


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize(("M", "K", "N", "group_size"), CORRECTIONS)
class TestCorrectionKernels:
    def test_group_sums(
        self, M: int, K: int, N: int, group_size: int, dtype: Any, rng: np.random.Generator
    ) -> None:
        w = mj.pack(random_weight(rng, K, N, group_size, symmetric=False, dtype=dtype))
        rounded = -(-K // 8) * 8
        parent = cp.full((M, rounded + 16), np.nan, np.float32).astype(dtype)
        parent[:, 8 : 8 + rounded] = 0  # the launcher's terms: zeros up to the next multiple of 8
        x = parent[:, 8 : 8 + K]
        x[...] = random_rows(rng, M, K, dtype)
        memory = launch.group_sums(matrix(x), w)
        places = sum_places(M, w)
        sums = memory[: 4 * places.size].view(np.float32)[places][:M, : w.groups]
        slack = exact_sums(cp.abs(x.astype(np.float32)), w) * 2.0**-22
        assert bool((cp.abs(sums.astype(np.float64) - exact_sums(x, w)) <= slack + 1e-30).all())

    @pytest.mark.parametrize("group_warps", [1, 2, 4])
    def test_correction(
        self,
        M: int,
        K: int,
        N: int,
        group_size: int,
        dtype: Any,
        group_warps: int,
        rng: np.random.Generator,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(launch, "correction_group_warps", lambda pieces, sm_count: group_warps)
        w = mj.pack(random_weight(rng, K, N, group_size, symmetric=False, dtype=dtype))
        sums = cp.asarray((8 * rng.standard_normal((M, w.groups))).astype(np.float32))
        places = sum_places(M, w)
        memory = cp.full(places.size, np.nan, np.float32)  # rows past M may hold anything
        memory[places[:M]] = 0
        memory[places[:M, : w.groups]] = sums
        delta = plain_delta(w)
        step = 2.0**-10 if dtype == FP16 else 2.0**-7  # a unit in the last place is at most this, relatively
        for first, width in ((0, N + 8 + N % 2), (1, N + 3 + N % 2), (8, -(-N // 8) * 8 + 8)):
            canary = cp.full((M, width), 777, np.float32).astype(dtype)
            parent = canary.copy()
            c = parent[:, first : first + N]
            c[...] = random_rows(rng, M, N, dtype)
            before = c.astype(np.float64)
            launch.correct(memory, w, matrix(c))
            exact = before + product(sums.astype(np.float64), delta)
            terms = cp.abs(before) + product(cp.abs(sums).astype(np.float64), cp.abs(delta))
            error = cp.abs(c.astype(np.float64) - exact)
            assert bool((error <= step * cp.abs(exact) + 2.0**-20 * terms + 2.0**-24).all())
            c[...] = canary[:, first : first + N]
            assert bool((parent == canary).all()), "wrote outside the output"


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
class TestCombinedCall:
    @pytest.mark.parametrize(
        ("M", "N", "K", "group_size"),
        [
            (16, 256, 256, 128),
            (1, 512, 1024, 64),
            (8, 384, 2048, 32),
            (17, 1000, 1024, 128),
            (32, 1024, 4096, 128),
            (64, 2048, 2048, -1),
            (64, 2048, 8192, 128),
        ],
    )
    def test_equals_the_product(
        self, M: int, N: int, K: int, group_size: int, dtype: Any, rng: np.random.Generator
    ) -> None:
        qw = random_weight(rng, K, N, group_size, symmetric=False, dtype=dtype)
        w = mj.pack(qw)
        x, bias = random_rows(rng, M, K, dtype), random_rows(rng, 1, N, dtype)[0]
        exact = product(x.astype(np.float64), weight64(qw))
        for path in ("marlin_pair", "marlin"):
            assert relative_error(mj.matmul(x, w, path=path), exact) <= BOUND[dtype]
            completed = mj.matmul(x, w, bias=bias, path=path)
            assert relative_error(completed, exact + bias.astype(np.float64)) <= BOUND[dtype]


Multiply = Callable[[Any, str], Any]


def scores(model: Any, tokens: np.ndarray, multiply: Multiply) -> Any:
    """A decoder's products without its attention: final states of random tokens, [M, hidden].

    Queries, keys and values are averaged in place of attention; everything between products is float32.
    """

    def tensor(name: str) -> Any:
        return cp.asarray(model.tensors[name].astype(np.float32))

    def normalised(h: Any, name: str) -> Any:
        return (h / cp.sqrt((h * h).mean(axis=-1, keepdims=True) + np.float32(1e-5)) * tensor(name)).astype(
            FP16
        )

    def by(x: Any, name: str) -> Any:
        return multiply(x, name).astype(np.float32)

    h = tensor("model.embed_tokens.weight")[cp.asarray(tokens)]
    h /= cp.sqrt((h * h).mean(axis=-1, keepdims=True) + np.float32(1e-5))
    layers = sorted({name.split(".")[2] for name in model})
    for layer in layers:
        prefix = f"model.layers.{layer}."
        a = normalised(h, prefix + "input_layernorm.weight")
        q, k, v = (by(a, f"{prefix}self_attn.{name}_proj") for name in "qkv")
        mixed = (q + cp.concatenate([k, v], axis=1)) / 2
        h = h + by(mixed.astype(FP16), prefix + "self_attn.o_proj")
        a = normalised(h, prefix + "post_attention_layernorm.weight")
        gate, up = (by(a, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
        h = h + by((gate / (1 + cp.exp(-gate)) * up).astype(FP16), prefix + "mlp.down_proj")
    return normalised(h, "model.norm.weight").astype(np.float64)


def log_likelihood(model: Any, states: Any, tokens: np.ndarray) -> float:
    """Mean log-probability of each token's successor, as a language model is scored."""
    head = cp.asarray(model.tensors["lm_head.weight"].astype(np.float64).T)
    logits = product(states, head)[:-1]
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[cp.arange(len(tokens) - 1), cp.asarray(tokens[1:])]
    return float((chosen - cp.log(cp.exp(logits).sum(axis=1))).mean())


@pytest.mark.usefixtures("fresh_dispatch")
class TestWholeRuntime:
    @pytest.mark.parametrize("M", [1000, 24, 5])
    def test_same_scores_with_dispatch_on_and_off(self, M: int, tmp_path: Path) -> None:
        packed = run("pack", EXAMPLE, tmp_path / "packed", "--quiet")
        assert packed.code == 0, packed.err
        model = mj.load(tmp_path / "packed")
        weights = {name: w.to_device() for name, w in model.items()}
        assert len(weights) == 14
        assert not any(w.symmetric for w in weights.values())
        tokens = np.random.default_rng(0).integers(0, 1000, M)

        states, taken = {}, {}
        for enabled in (True, False):
            mj.reset_stats()
            with mj.dispatch(enabled):
                states[enabled] = scores(model, tokens, lambda x, name: mj.matmul(x, weights[name]))
            taken[enabled] = mj.stats()
        assert taken == {True: {"marlin": 14}, False: {"native": 14}}
        assert engine._refused == {}
        assert relative_error(states[True], states[False]) <= 1e-3
        on, off = (log_likelihood(model, states[enabled], tokens) for enabled in (True, False))
        assert abs(on - off) <= 1e-3 * abs(off)
