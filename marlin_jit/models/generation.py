"""Going on with a text: choosing tokens one by one, on a GPU by replaying one captured CUDA graph."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import marlin_jit as mj
from marlin_jit._array import as_integer

from . import ops
from .cache import KVCache

if TYPE_CHECKING:
    from .llama import Model

__all__ = ["GraphDecoder", "generate"]

_PREFILL = 512  # tokens of the prompt that are read at a time
_MOST_WARM_UPS = 8
_LEAST_TEMPERATURE = 1e-6  # logits divided by it are finite, and any difference between them decides


def generate(
    model: Model,
    tokens: Any,
    max_new_tokens: int = 128,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    eos: Sequence[int] | None = None,
    graph: bool = True,
) -> Iterator[int]:
    """Go on with a text.

    Parameters
    ----------
    model : Model
    tokens : int sequence
        The text so far, at least one token.
    max_new_tokens : int
    temperature : float
        0 takes the most likely token each time (the first of equally likely ones); above, tokens are drawn
        from ``softmax(logits/temperature)``.
    top_k : int
        Draw from the `top_k` most likely tokens; 0: from all.
    top_p : float
        Draw from the fewest most likely tokens that together have at least this probability.
    seed : int, optional
        The same seed draws the same tokens from the same logits.
    eos : sequence of int, optional
        Tokens that end the text, and are not returned; default: those of the model's config.
    graph : bool
        On a GPU, replay a captured graph for each token instead of launching every kernel anew.

    Returns
    -------
    iterator of int
        New tokens, each as soon as it is known.

    Raises
    ------
    ShapeError, DTypeError, ValueRangeError
        At once: arguments that make no sense, or a text that with `max_new_tokens` is longer than the model
        was made for.
    DeviceError
        At once: a graph is wanted of a model on a GPU with a dense layer.
    ValueRangeError
        While it goes on: logits that are not finite.
    """
    ids = model.check_tokens(tokens)
    max_new_tokens = as_integer("max_new_tokens", max_new_tokens)
    if max_new_tokens < 0:
        raise mj.ValueRangeError(f"max_new_tokens must not be negative, got {max_new_tokens}")
    length = ids.size + max_new_tokens
    if length > model.config.context:
        raise mj.ShapeError(
            f"{ids.size} tokens and {max_new_tokens} new ones are more than the {model.config.context} that "
            "the model was made for"
        )
    choose = _sampler(temperature, top_k, top_p, seed)
    ends = frozenset(model.config.eos if eos is None else _integers("eos", eos))
    if graph and model.xp is not np:
        check_quantized(model)
    return _tokens(model, ids, max_new_tokens, choose, ends, graph)


def _tokens(
    model: Model,
    ids: NDArray[np.int32],
    count: int,
    choose: Callable[[NDArray[Any]], int] | None,
    ends: frozenset[int],
    graph: bool,
) -> Iterator[int]:
    if not count:
        return
    kv = model.new_cache(ids.size + count)
    for start in range(0, ids.size, _PREFILL):
        piece = model.xp.asarray(ids[None, start : start + _PREFILL])
        logits = model.forward(piece, kv, last_only=True)
    step: GraphDecoder | _Eager
    step = GraphDecoder(model, kv) if graph and model.xp is not np and count > 1 else _Eager(model, kv)
    best = model.xp.empty(1, dtype=np.int32)
    ops.argmax(logits[0], best)
    token = int(best[0]) if choose is None else choose(_host(logits[0, 0]))
    for i in range(count):
        ends_here = token in ends
        # What is not finite stays in the cache and spoils all that follows. On a GPU looking means launches
        # and a wait, so the most likely token is only doubted at both ends.
        if choose is None and (model.xp is np or i == 0 or ends_here or i + 1 == count):
            _check_finite(model.xp, logits, model.dtype)
        if ends_here:
            return
        yield token
        if i + 1 < count:
            best_token, logits = step(token)
            token = best_token if choose is None else choose(_host(logits[0, 0]))


class _Eager:
    """One decode step, every kernel launched anew."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._tokens = model.xp.empty((1, 1), dtype=np.int32)

    def __call__(self, token: int) -> tuple[int, Any]:
        self._tokens[...] = token
        logits = self._model.forward(self._tokens, self._cache)
        ops.argmax(logits[:, 0], self._tokens[:, 0])
        return int(self._tokens[0, 0]), logits


class GraphDecoder:
    """One decode step of a model, captured into a CUDA graph: a token costs one launch and one small copy.

    Everything that changes between steps is on the device: the token, which the step itself replaces by the
    most likely next one, the position, and the cache. Shapes never change, so one graph serves all positions.

    Parameters
    ----------
    model : Model
        On a GPU, every layer in 4 bits.
    cache : KVCache
        For one text or several. The decoder works on this cache and no other, from where it stands.

    Attributes
    ----------
    tokens : int32 array [batch, 1]
        The last tokens; after a step the most likely next ones.
    logits : array [batch, 1, vocab]
        Of the last step.

    Raises
    ------
    DeviceError
        The model is not on a GPU, or has a dense layer, which CuPy cannot capture.
    ShapeError
        The cache is full.

    Notes
    -----
    The graph holds addresses. They stay good because all it uses lives as long as the decoder does: weights
    and cache through their objects, everything allocated on the way through a memory pool of its own, and the
    scratch memory of `mj.matmul`, which belongs to a stream where only decoders run. Decoders of one device
    share that stream, so their steps follow each other.
    """

    def __init__(self, model: Model, cache: KVCache) -> None:
        if model.xp is np:
            raise mj.DeviceError("a CUDA graph needs a model on a GPU; this one is in NumPy")
        check_quantized(model)
        cache.room_for(1)
        import cupy

        self._cupy = cupy
        self._model, self._cache = model, cache
        self.tokens = cupy.zeros((cache.batch, 1), dtype=np.int32)
        self.logits: Any = None
        self._pool = cupy.cuda.MemoryPool()
        self._stream, self._turn = _stream_of_graphs(cupy.cuda.runtime.getDevice())
        with self._turn:
            self._graph = self._captured()

    def __call__(self, token: int) -> tuple[int, Any]:
        """Read `token` in every text; return the most likely next one (of the first text), and the logits."""
        with self._turn:
            with self._stream:
                self.tokens.fill(token)
            return int(self.step()[0, 0]), self.logits

    def step(self) -> NDArray[np.int32]:
        """Read `tokens`, and return what they are then: the most likely next ones, [batch, 1].

        Raises
        ------
        ShapeError
            The cache is full.
        """
        self._cache.room_for(1)
        with self._turn:
            self._graph.launch(self._stream)
            self._cache.used += 1  # the graph has counted on the device
            tokens: NDArray[np.int32] = self.tokens.get(stream=self._stream)  # waits for this step
        return tokens

    def _captured(self) -> Any:
        cupy = self._cupy
        cupy.cuda.get_current_stream().synchronize()  # what the cache and weights come from is done
        used = self._cache.used
        with self._stream, cupy.cuda.using_allocator(self._pool.malloc):
            # Kernels are compiled and loaded, scratch memory and the pool grow. A pass that made nothing
            # grow, all of its memory given back, will make nothing grow when it is repeated.
            for _ in range(_MOST_WARM_UPS):
                before = self._pool.total_bytes()
                self._cache.position.fill(used)
                self._run(used)
                self.logits = None
                if self._pool.total_bytes() == before:
                    break
            self._stream.synchronize()
            self._stream.begin_capture()
            try:
                self._run(used)
            except BaseException:
                self._abandon_capture()
                raise
            graph = self._stream.end_capture()
            self._cache.position.fill(used)  # the warm-up has moved it, the capture has not
            self._stream.synchronize()
        return graph

    def _run(self, used: int) -> None:
        """Launch one step; leave the host's count of positions as it was."""
        self.logits = self._model.forward(self.tokens, self._cache)
        self._cache.used = used
        ops.argmax(self.logits[:, 0], self.tokens[:, 0])

    def _abandon_capture(self) -> None:
        """End a capture that failed; its own error tells more than the one that ending it may raise."""
        with contextlib.suppress(RuntimeError):
            self._stream.end_capture()


@cache
def _stream_of_graphs(device: int) -> tuple[Any, threading.RLock]:
    """The stream that decoders of a device are captured on and run on, and whose turn it is there.

    It is one stream, so that scratch memory is not allocated anew for each decoder. What a thread enqueued
    while another one captures would become part of that one's graph.
    """
    import cupy

    return cupy.cuda.Stream(non_blocking=True), threading.RLock()


def _check_finite(xp: Any, logits: Any, dtype: Any) -> None:
    if not bool(xp.isfinite(logits).all()):
        raise mj.ValueRangeError(
            f"the model's logits are not finite: damaged weights, or activations that overflow {dtype}"
        )


def check_quantized(model: Model) -> None:
    """Raise `DeviceError` if a layer is dense: what CuPy multiplies cannot be captured into a CUDA graph."""
    dense = [linear.name for linear in model.linears if not linear.quantized]
    if dense:
        raise mj.DeviceError(
            f"{dense[0]} is dense, and CuPy's products of dense arrays cannot be captured into a CUDA "
            "graph: call marlin_jit.models.pack_model(model) first"
        )


def _integers(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise mj.DTypeError(f"{name} must be a sequence of integers, got {values!r}") from None


def _host(array: Any) -> NDArray[Any]:
    host: NDArray[Any] = array if ops.is_numpy(array) else array.get()
    return host


def _sampler(
    temperature: float, top_k: int, top_p: float, seed: int | None
) -> Callable[[NDArray[Any]], int] | None:
    """Return what draws a token from a row of logits; None where the most likely one is taken."""
    try:
        temperature, top_p = float(temperature), float(top_p)
    except (TypeError, ValueError):
        raise mj.DTypeError(f"temperature and top_p are numbers, got {temperature!r} and {top_p!r}") from None
    if not (temperature == 0 or _LEAST_TEMPERATURE <= temperature < float("inf")):
        raise mj.ValueRangeError(
            f"temperature must be 0, or {_LEAST_TEMPERATURE} or more, got {temperature}; 0 takes the most "
            "likely token"
        )
    if as_integer("top_k", top_k) < 0:
        raise mj.ValueRangeError(f"top_k must be 0 (all tokens) or positive, got {top_k}")
    if not 0 < top_p <= 1:
        raise mj.ValueRangeError(f"top_p must be above 0 and at most 1, got {top_p}")
    if seed is not None and as_integer("seed", seed) < 0:
        raise mj.ValueRangeError(f"seed must not be negative, got {seed}")
    if temperature == 0:
        return None
    rng = np.random.default_rng(seed)

    def draw(logits: NDArray[Any]) -> int:
        _check_finite(np, logits, logits.dtype)
        values = logits.astype(np.float64) / temperature
        order = np.argsort(-values, kind="stable")  # the most likely first
        if top_k:
            order = order[:top_k]
        weights = np.exp(values[order] - values[order[0]])
        sums = np.cumsum(weights / weights.sum())
        kept = int(np.searchsorted(sums, top_p)) + 1 if top_p < 1 else order.size
        sums = sums[:kept]
        return int(
            order[min(int(np.searchsorted(sums, rng.random() * sums[-1], side="right")), sums.size - 1)]
        )

    return draw
