"""Cross-iteration rounding: a weight that is used again and again is rounded differently each time.

A looped transformer applies the same layer at every iteration. With codes rounded once, each iteration makes
the same error and the errors add up. A weight that carries a rounding channel knows on which side of its
codes the unrounded weight lies, and moves some of its codes to that side at each iteration. Which ones
follows from (seed, iteration, k, n) alone; their mean over the iterations approaches the unrounded weight.

Let ``v = (W - zero)/scale``, kept within 0..15, be the real-valued code, and `q` the nearest code. A
:class:`marlin_jit.weight.QuantWeight` carries at most one of two channels, both uint8 [K, N]:

``frac4``
    The 4-bit fraction of v. Below 8, v is above its nearest code, and the code is q or q + 1; from 8 on it
    is below, and the code is q - 1 or q. The upper one is taken in frac4 of 16 iterations. (So it is also
    ``16*(v - q)`` in two's complement, and all zeros mean no rounding.) The mean is within 1/32 of v; within
    1/16 where v is more than 15/32 above q, since +8/16 has no place beside -8/16 in four bits.
``sign_bit``
    1 where v is below q, as `numpy.signbit` of the residual ``v - q``, else 0. The code moves one step to
    that side in 4 of 16 iterations, since a residual spread evenly over -1/2..1/2 is 1/4 in the mean of its
    magnitude. The mean of the codes is then within 1/4 of v, and its error half that of q (root mean square).

A code that would leave 0..15 stays at the end. A single iteration is less accurate than `q`: the gain is in
the mean over several.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from marlin_jit._array import Array, as_integer, column_chunks, is_device_array, namespace, on_device
from marlin_jit._environment import zero_or_one
from marlin_jit.errors import DTypeError, ValueRangeError
from marlin_jit.weight import QuantWeight

SWITCH = "MARLIN_JIT_CROSS_ITER_ROUND"
"""Environment variable: 0 turns it off everywhere, 1 on everywhere; unset, it is on in `iteration` blocks."""

PERIOD = 16
"""Iterations after which the codes repeat; the means over any so many in a row are exact."""
SIGN_MOVES = 4
"""In how many of them a `sign_bit` moves its code."""


# ---- the mode -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Iteration:
    """Which of the roundings of a weight is meant."""

    index: int
    seed: int

    def __post_init__(self) -> None:
        for name, value, end in (("iteration", self.index, None), ("seed", self.seed, 1 << 32)):
            number = as_integer(name, value)
            if number < 0 or (end is not None and number >= end):
                raise ValueRangeError(
                    f"{name} must be {'0 or more' if end is None else f'0..{end - 1}'}, got {number}"
                )

    @cached_property
    def phase(self) -> int:
        """The last four bits of the index, the lowest first: 0, 8, 4, 12, 2, ... (van der Corput)."""
        return int(f"{operator.index(self.index) % PERIOD:04b}"[::-1], 2)

    @cached_property
    def seed_key(self) -> int:
        """The seed, mixed."""
        return int(_mix(np.array([self.seed], dtype=np.uint32))[0])


_here: ContextVar[Iteration | None] = ContextVar("marlin_jit_iteration", default=None)


@contextlib.contextmanager
def iteration(index: int, seed: int = 0) -> Iterator[None]:
    """Round weights as this iteration of a loop has them, within a ``with`` block, in this thread or task.

    It concerns products with a `QuantWeight` that carries a rounding channel
    (``quantize(..., rounding="frac4")``); all others are what they are outside. An inner block counts, not
    the outer one.

    Parameters
    ----------
    index : int
        0 or more. The codes repeat after 16 iterations.
    seed : int
        0..2**32 - 1. Two weights of one shape move the same places with the same seed: give each layer its
        own where errors of several layers should not go together.

    Raises
    ------
    DTypeError, ValueRangeError
        An argument that is no integer, or out of range.

    Notes
    -----
    `MARLIN_JIT_CROSS_ITER_ROUND=0` in the environment turns it off all the same. A CUDA graph keeps the
    iteration that it was captured in.
    """
    token = _here.set(Iteration(index, seed))
    try:
        yield
    finally:
        _here.reset(token)


def current() -> Iteration | None:
    """Return the iteration that weights are rounded for here, or None where the mode is off.

    Raises
    ------
    ValueRangeError
        The environment variable is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH)
    here = _here.get()
    if value is None:
        return here
    if not zero_or_one(SWITCH, value):
        return None
    return Iteration(0, 0) if here is None else here


# ---- the codes of an iteration --------------------------------------------------------------------------


def rounded(weight: QuantWeight, iteration: int, seed: int = 0) -> QuantWeight:
    """Return the weight as an iteration has it, without a channel: what its product multiplies by then.

    Parameters
    ----------
    weight : QuantWeight
        With a rounding channel.
    iteration, seed : int
        As for :func:`marlin_jit.iteration`.

    Returns
    -------
    QuantWeight
        Codes [K, N] of that iteration; scale, zero and groups are those of `weight`. The mean of its codes
        over any 16 iterations in a row is exactly ``v`` rounded to 1/16 (``frac4``), or q moved by 1/4
        (``sign_bit``), save for codes kept within 0..15.

    Raises
    ------
    DTypeError
        No QuantWeight, or an argument that is no integer.
    ValueRangeError
        A weight without a rounding channel, or an argument out of range.

    Notes
    -----
    The switches do not matter here. As a product, ``x @ rounded(w, i)`` is what ``x @ w`` is within
    ``with iteration(i):``, to the bit on the ``reference`` path, and on a GPU on the ``native`` path.
    """
    if not isinstance(weight, QuantWeight):
        raise DTypeError(
            f"expected a QuantWeight (packed weights have no rounding channel), got {type(weight).__name__}"
        )
    if weight.rounding is None:
        raise ValueRangeError(
            'the weight carries no rounding channel: make it with quantize(..., rounding="frac4")'
        )
    which = Iteration(iteration, seed)
    xp = namespace(weight.q)
    with on_device(weight.q):
        q = xp.empty_like(weight.q)
        for start, stop in column_chunks(*weight.shape, is_device_array(q), scratch=16):
            part = np.s_[:, start:stop]
            at = thresholds(xp, weight.K, start, stop, which)
            if weight.frac4 is not None:
                q[part] = _frac4_codes(xp, weight.q[part], weight.frac4[part], at)
            else:
                assert weight.sign_bit is not None
                q[part] = _sign_bit_codes(xp, weight.q[part], weight.sign_bit[part], at)
    return replace(weight, q=q, frac4=None, sign_bit=None)


def thresholds(xp: Any, K: int, start: int, stop: int, which: Iteration) -> Array:
    """Return the thresholds 0..15 of columns `start` to `stop` at an iteration, uint8 [K, stop - start].

    A code takes its upper value where the threshold is below its fraction, so what matters is how the
    thresholds of one place follow each other, and how those of different places go together.

    In time they are stratified: ``phase ^ hash``, where the phase is the bit-reversed iteration and the hash
    belongs to the place. Any 16 iterations in a row take every value once, so their mean is exact, where
    independent draws would be off by about 1/8 of a step at fraction 1/2. Bit reversal spreads shorter runs
    evenly too: the first 2, 4 and 8 of a period lie 8, 4 and 2 apart, and exclusive or, unlike most
    permutations, keeps that. The hash leaves the iteration out: if each period were shuffled anew, 16
    iterations that begin inside a period would not be exact any more.

    Over places they are independent, as far as a hash can make them, so that at one iteration errors add up
    like noise and not in step. The hash chains :func:`_mix` over seed, n and k, with k last: a thread that
    walks down a column mixes once a weight. The highest four bits are taken, which every bit of the input
    reaches.
    """
    n = xp.arange(start, stop, dtype=np.uint32)
    k = xp.arange(K, dtype=np.uint32)
    column_key = _mix(n ^ np.uint32(which.seed_key))
    place = _mix(k[:, None] ^ column_key)
    place >>= np.uint32(28)
    place ^= np.uint32(which.phase)
    return place.astype(np.uint8)


def _mix(x: Array) -> Array:
    """Return `x`, a uint32 array, hashed: lowbias32 of Chris Wellons' hash-prospector (public domain).

    A bijection, so no two columns of a weight share a key. ``rounding.cuh`` has the same.
    """
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def _frac4_codes(xp: Any, q: Array, frac4: Array, at: Array) -> Array:
    lower = q.astype(np.int8) - (frac4 >= 8)
    return xp.clip(lower + (at < frac4), 0, 15)


def _sign_bit_codes(xp: Any, q: Array, sign_bit: Array, at: Array) -> Array:
    step = 1 - 2 * sign_bit.astype(np.int8)
    return xp.clip(q.astype(np.int8) + step * (at < SIGN_MOVES), 0, 15)


# ---- making channels ------------------------------------------------------------------------------------


def channel(xp: Any, kind: str, q: Array, residual: Array) -> Array:
    """Return a rounding channel, uint8 of the shape of `q`.

    Parameters
    ----------
    kind : {"frac4", "sign_bit"}
    q : integer or float array
        The nearest codes, 0..15.
    residual : float32 array
        ``v - q``, within -1/2..1/2; overwritten.
    """
    if kind == "sign_bit":
        # An exact code has no side; at the ends it gets the one it cannot move to, so it stays exact.
        return ((residual < 0) | ((residual == 0) & (q < 8))).astype(np.uint8)
    residual *= np.float32(16)
    sixteenths = xp.rint(residual, out=residual)
    # Half a step up has no place in four bits beside half a step down, and is taken for 7/16.
    sixteenths = xp.clip(sixteenths, -8, 7, out=sixteenths)
    return sixteenths.astype(np.int8).view(np.uint8) & np.uint8(15)
