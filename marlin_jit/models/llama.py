"""The forward of a Llama-family model over packed weights, one code for CuPy and NumPy.

A layer is ::

    x = rms_norm(h);  h += output(attention(rotate(q(x)), rotate(k(x)), v(x)))
    x = rms_norm(h);  h += down(silu(gate(x)) * up(x))

where products are `mj.matmul`, q, k and v in one, and gate and up with what joins them in one
`mj.matmul_swiglu`, and what lies between is in `ops`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import marlin_jit as mj

from . import generation, ops, scoring
from .cache import KVCache
from .config import LlamaConfig
from .linear import GateUp, Linear, SideBySide
from .ops import module_of

__all__ = ["Layer", "Model"]


@dataclass
class Layer:
    """The weights of one layer."""

    attention_norm: Any  # float32 [hidden]
    qkv: SideBySide
    output: Linear
    mlp_norm: Any  # float32 [hidden]
    gate_up: GateUp
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All products of the layer."""
        return (*self.qkv.linears, self.output, *self.gate_up.linears, self.down)


class Model:
    """A whole model, on the GPU or in NumPy: as its arrays are.

    Parameters
    ----------
    config : LlamaConfig
    embedding : array [vocab, hidden]
        float16 or bfloat16, which is the dtype of all activations.
    layers : list of Layer
    norm : float32 array [hidden]
        Weight of the last norm.
    head : Linear
        hidden x vocab.
    """

    def __init__(
        self, config: LlamaConfig, embedding: Any, layers: Sequence[Layer], norm: Any, head: Linear
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = list(layers)
        self.norm = norm
        self.head = head
        if self.xp is not np:
            ops.check_head_dim(config.head_dim)

    @property
    def xp(self) -> Any:
        """The module of its arrays, numpy or cupy."""
        return module_of(self.embedding)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of activations."""
        dtype: np.dtype[Any] = self.embedding.dtype
        return dtype

    @property
    def linears(self) -> Iterator[Linear]:
        """All products, the head last."""
        for layer in self.layers:
            yield from layer.linears
        yield self.head

    def new_cache(self, length: int, batch: int = 1) -> KVCache:
        """Return an empty cache for `length` positions of `batch` texts of equal length."""
        return KVCache(self.config, length, batch, dtype=self.dtype, xp=self.xp)

    def forward(self, tokens: Any, cache: KVCache, *, last_only: bool = False) -> Any:
        """Read more tokens of each text.

        Parameters
        ----------
        tokens : int array [batch, tokens]
            On the device of the model. Ids are not checked here: `check_tokens` does that on the host.
        cache : KVCache
            What was read before; the new tokens are added.
        last_only : bool
            Compute the logits of the last token alone.

        Returns
        -------
        array [batch, tokens or 1, vocab]
            Logits, of the model's dtype.

        Raises
        ------
        DTypeError, ShapeError
            No array of integers. Tokens of another shape or batch than the cache's, or more than it has
            room for.
        """
        dtype = getattr(tokens, "dtype", type(tokens).__name__)
        if isinstance(dtype, str) or dtype.kind not in "iu":
            raise mj.DTypeError(f"tokens are an array of integers, got {dtype}")
        if tokens.ndim != 2 or not tokens.size:
            raise mj.ShapeError(f"tokens have shape [batch, tokens], at least one each; got {tokens.shape}")
        batch, count = tokens.shape
        if batch != cache.batch:
            raise mj.ShapeError(
                f"the cache is for {cache.batch} texts side by side, got tokens {tokens.shape}"
            )
        cache.room_for(count)
        h = self.xp.take(self.embedding, tokens, axis=0)
        delta: Any = None
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x = ops.add_rms_norm(h, delta, layer.attention_norm, self.config.eps)
            q, k, v = layer.qkv(x)
            q = ops.rotate_and_store(
                q, k, v, cache.tables, cache.position, keys, values, self.config.interleaved
            )
            delta = layer.output(ops.attention(q, keys, values, cache.position))
            x = ops.add_rms_norm(h, delta, layer.mlp_norm, self.config.eps)
            delta = layer.down(layer.gate_up(x))
        cache.advance(count)
        if last_only and count > 1:
            h, delta = (self.xp.ascontiguousarray(part[:, -1:]) for part in (h, delta))
        return self.head(ops.add_rms_norm(h, delta, self.norm, self.config.eps))

    def check_tokens(self, tokens: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return a text's tokens as int32 [count].

        Raises
        ------
        ShapeError, DTypeError, ValueRangeError
            No tokens, more than one dimension, not integers, or ids outside the vocabulary.
        """
        array = np.asarray(tokens)
        if array.ndim != 1 or not array.size:
            raise mj.ShapeError(f"expected one row of tokens, at least one; got shape {array.shape}")
        if array.dtype.kind not in "iu":
            raise mj.DTypeError(f"tokens are integers, got {array.dtype}")
        if array.min() < 0 or array.max() >= self.config.vocab:
            bad = next(int(t) for t in array if not 0 <= t < self.config.vocab)
            raise mj.ValueRangeError(f"token {bad} is outside the vocabulary of {self.config.vocab}")
        return array.astype(np.int32)

    def fuse(self) -> int:
        """Join q, k and v to one product, and gate and up to another, where they are packed alike.

        Returns
        -------
        int
            How many such pairs and triples are joined now.
        """
        return sum(layer.qkv.fuse() + layer.gate_up.fuse() for layer in self.layers)

    def cache_dense(self) -> Model:
        """On NumPy, keep every weight as float32 too: 4 bytes a weight, for products without dequantizing.

        Generating multiplies by every weight once a token, so it is some ten times as fast with it. Products
        then do not go through `mj.matmul`; they are the same to the order of float32 sums. On a GPU nothing
        is done.

        Returns
        -------
        Model
            This model.
        """
        if self.xp is np:
            for linear in self.linears:
                linear.cache_dense()
        return self

    def drop_dense(self) -> None:
        """Free what `cache_dense` made."""
        for linear in self.linears:
            linear.drop_dense()

    score = scoring.score
    generate = generation.generate

    def decode_graph(self, cache: KVCache) -> generation.GraphDecoder:
        """Capture one decode step: see :class:`marlin_jit.models.generation.GraphDecoder`."""
        return generation.GraphDecoder(self, cache)

    def __repr__(self) -> str:
        c = self.config
        place = "NumPy" if self.xp is np else "GPU"
        return (
            f"<Model: {c.layers} layers, hidden {c.hidden}, heads {c.heads}/{c.kv_heads}, "
            f"vocabulary {c.vocab}, {self.dtype}, {place}>"
        )
