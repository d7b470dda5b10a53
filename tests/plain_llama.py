"""A Llama in plain float32 NumPy, to compare with: a text at once, a loop over heads, complex numbers.

It shares no code with marlin_jit, and no way of doing things either: no cache, no chunks, no grouped queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sizes:
    layers: int
    heads: int
    kv_heads: int
    eps: float
    base: float
    interleaved: bool


def logits(tokens: list[int], weight: Callable[[str], Any], sizes: Sizes) -> Any:
    """Logits [tokens, vocab] in float32.

    `weight` gives weights by GGUF's names without ``.weight``, float32 [out, in]; of names with ``.bias`` a
    bias or None.
    """

    def linear(name: str, x: Any) -> Any:
        bias = weight(name + ".bias")
        return x @ weight(name).T + (0 if bias is None else bias)

    def norm(name: str, x: Any) -> Any:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + sizes.eps) * weight(name)

    h = weight("token_embd")[tokens]
    for i in range(sizes.layers):
        x = norm(f"blk.{i}.attn_norm", h)
        q, k, v = (linear(f"blk.{i}.attn_{role}", x) for role in "qkv")
        size = q.shape[1] // sizes.heads
        y = np.empty_like(q)
        for head in range(sizes.heads):
            shared = head * sizes.kv_heads // sizes.heads
            mine, theirs = slice(head * size, (head + 1) * size), slice(shared * size, (shared + 1) * size)
            scores = turned(q[:, mine], sizes) @ turned(k[:, theirs], sizes).T / np.sqrt(np.float32(size))
            weights = np.exp(scores - scores.max()) if len(tokens) == 1 else masked_exp(scores)
            y[:, mine] = weights @ v[:, theirs] / weights.sum(1, keepdims=True)
        h = h + linear(f"blk.{i}.attn_output", y)
        x = norm(f"blk.{i}.ffn_norm", h)
        gate = linear(f"blk.{i}.ffn_gate", x)
        h = h + linear(f"blk.{i}.ffn_down", gate * (1 / (1 + np.exp(-gate))) * linear(f"blk.{i}.ffn_up", x))
    return linear("output", norm("output_norm", h))


def masked_exp(scores: Any) -> Any:
    """Exponentials of what lies at or before each row's place, scaled by row."""
    seen = np.tril(np.ones_like(scores))
    return seen * np.exp(
        np.where(seen > 0, scores - np.where(seen > 0, scores, -1e9).max(1, keepdims=True), 0)
    )


def turned(x: Any, sizes: Sizes) -> Any:
    """Pairs of elements of one head, as complex numbers, turned by place times frequency."""
    count, size = x.shape
    a, b = (x[:, ::2], x[:, 1::2]) if sizes.interleaved else (x[:, : size // 2], x[:, size // 2 :])
    angles = np.outer(np.arange(count), sizes.base ** (-2 * np.arange(size // 2) / size))
    z = ((a + 1j * b) * np.exp(1j * angles)).astype(np.complex64)
    out = np.empty_like(x)
    if sizes.interleaved:
        out[:, ::2], out[:, 1::2] = z.real, z.imag
    else:
        out[:, : size // 2], out[:, size // 2 :] = z.real, z.imag
    return out


def mean_nll(scores: Any, tokens: list[int]) -> float:
    """Mean negative log likelihood of all tokens but the first, in float64."""
    values = scores[:-1].astype(np.float64)
    values -= values.max(1, keepdims=True)
    chosen = values[np.arange(len(values)), tokens[1:]]
    return float((np.log(np.exp(values).sum(1)) - chosen).mean())
