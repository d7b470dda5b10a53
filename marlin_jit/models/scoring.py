"""How well a model predicts a text: its negative log likelihood, and perplexity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import marlin_jit as mj
from marlin_jit._array import as_integer

if TYPE_CHECKING:
    from .llama import Model

__all__ = ["Score", "negative_log_likelihood", "score"]

_ROWS = 64  # rows of logits that are float32 at a time


@dataclass(frozen=True, eq=False)
class Score:
    """What `score` found.

    Attributes
    ----------
    nll : float64 array [tokens - 1]
        Negative log likelihood (natural logarithm) of each token but the first.
    """

    nll: NDArray[np.float64]

    @property
    def tokens(self) -> int:
        """Number of tokens that were predicted."""
        return int(self.nll.size)

    @property
    def mean_nll(self) -> float:
        """Mean negative log likelihood."""
        return float(self.nll.mean())

    @property
    def perplexity(self) -> float:
        """``exp(mean_nll)``; infinite where that is too large for a float."""
        try:
            return math.exp(self.mean_nll)
        except OverflowError:
            return math.inf


def score(model: Model, tokens: Any, *, chunk: int = 512, context: int | None = None) -> Score:
    """Return how well a model predicts a text.

    Parameters
    ----------
    model : Model
    tokens : int sequence
        At least two.
    chunk : int
        Tokens that are read at a time; bounds memory and changes nothing else.
    context : int, optional
        Most tokens that a prediction looks back at; default: what the model was made for. A longer text is
        read in pieces of this many tokens, each from an empty cache, the last token of one being the first
        of the next, so every token but the first is predicted once.

    Returns
    -------
    Score

    Raises
    ------
    ShapeError, DTypeError, ValueRangeError
        Fewer than two tokens, a chunk or context too small or too large, ids outside the vocabulary; logits
        that are not finite.
    """
    ids = model.check_tokens(tokens)
    chunk = as_integer("chunk", chunk)
    context = model.config.context if context is None else as_integer("context", context)
    if ids.size < 2:
        raise mj.ShapeError("a text of one token has nothing to predict; give at least two")
    if chunk < 1 or context < 2:
        raise mj.ShapeError(f"chunk must be at least 1 and context at least 2, got {chunk} and {context}")
    if context > model.config.context:
        raise mj.ShapeError(f"the model was made for a context of {model.config.context}, not {context}")
    inputs, targets = ids[:-1], ids[1:]
    cache = model.new_cache(min(context, inputs.size))
    nll = np.empty(targets.size, np.float64)
    start = 0
    while start < inputs.size:
        if cache.used == cache.length:
            cache.reset()
        stop = min(start + chunk, start + cache.length - cache.used, inputs.size)
        logits = model.forward(model.xp.asarray(inputs[None, start:stop]), cache)[0]
        nll[start:stop] = negative_log_likelihood(model.xp, logits, targets[start:stop])
        start = stop
    if not np.isfinite(nll).all():
        first = int(np.argmin(np.isfinite(nll))) + 1
        raise mj.ValueRangeError(
            f"the model's logits for token {first} ({ids[first]}) are not finite: damaged weights, or "
            f"activations that overflow {model.dtype}"
        )
    return Score(nll)


def negative_log_likelihood(xp: Any, logits: Any, targets: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return ``-log softmax(logits)[target]`` of each row, in float32 with float64 sums."""
    found = xp.empty(len(targets), dtype=np.float64)
    wanted = xp.asarray(targets)
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, min(start + _ROWS, len(targets)))
        values = logits[rows].astype(np.float32)
        values -= values.max(axis=1, keepdims=True)
        chosen = xp.take_along_axis(values, wanted[rows, None], axis=1)[:, 0].astype(np.float64)
        found[rows] = xp.log(xp.exp(values).sum(axis=1, dtype=np.float64)) - chosen
    host: NDArray[np.float64] = found if xp is np else found.get()
    return host
