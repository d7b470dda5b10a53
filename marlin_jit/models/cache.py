"""The keys and values of what a model has read so far."""

from __future__ import annotations

from typing import Any

import marlin_jit as mj

from . import ops
from .config import LlamaConfig

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of all layers, allocated once for a longest text.

    Parameters
    ----------
    config : LlamaConfig
    length : int
        Most positions it holds.
    batch : int
        Texts that are read side by side; all have the same length.
    dtype : float16 or bfloat16
    xp : module
        numpy or cupy.

    Attributes
    ----------
    keys, values : array [layers, batch, kv_heads, length, head_dim]
    tables : (array, array)
        Cosines and sines of the rotary angles of all positions (`ops.rotary_tables`).
    position : int32 array [1]
        Where the next token goes, beside the keys: kernels read it, so a captured graph stays right as it
        moves.
    used : int
        The same number, known to the host.
    """

    def __init__(self, config: LlamaConfig, length: int, batch: int = 1, *, dtype: Any, xp: Any) -> None:
        if length < 1 or batch < 1:
            raise mj.ShapeError(f"a cache has a positive length and batch, got {length} and {batch}")
        shape = (config.layers, batch, config.kv_heads, length, config.head_dim)
        # Zeros, not whatever was there: what is masked out is still multiplied, and 0 times NaN is NaN.
        self.keys = xp.zeros(shape, dtype=dtype)
        self.values = xp.zeros(shape, dtype=dtype)
        self.tables = ops.rotary_tables(config, length, xp)
        self.position = xp.zeros(1, dtype="int32")
        self.used = 0

    @property
    def length(self) -> int:
        """Most positions that it holds."""
        return int(self.keys.shape[3])

    @property
    def batch(self) -> int:
        """Texts that are read side by side."""
        return int(self.keys.shape[1])

    def room_for(self, tokens: int) -> None:
        """Raise `ShapeError` unless `tokens` more positions fit."""
        if self.used + tokens > self.length:
            raise mj.ShapeError(
                f"the cache holds {self.length} positions, {self.used} of them used; {tokens} more do not "
                "fit: make a longer one"
            )

    def advance(self, tokens: int) -> None:
        """Count `tokens` more positions as used."""
        self.position += tokens
        self.used += tokens

    def reset(self) -> None:
        """Forget everything that was read; the memory stays."""
        self.position[...] = 0
        self.used = 0
