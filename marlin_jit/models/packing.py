"""Packing what a checkpoint left dense, above all the head, so that every product takes the 4-bit path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

import marlin_jit as mj

from .eight_bit import quantize_8bit
from .linear import Linear
from .llama import Model

__all__ = ["PackReport", "pack_model"]

GROUP_SIZE = 32  # that of Q8_0, and a divisor of most K


@dataclass
class PackReport:
    """What `pack_model` did.

    Attributes
    ----------
    packed : dict of str to int
        Bytes of each layer that was packed now, by name.
    left : dict of str to str
        Why each other layer was left as it is.
    bytes_added, bytes_freed : int
        Packed bytes that were added, and dense bytes that are no longer held. The dense matrix of a head
        that is tied to the embedding shares its memory, so nothing is freed with it.
    """

    packed: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    bytes_added: int = 0
    bytes_freed: int = 0


def pack_model(model: Model, *, bits: Literal[4, 8] = 8, head_bits: Literal[4, 8] = 8) -> PackReport:
    """Pack every linear layer of a model that is not packed yet, in place.

    Parameters
    ----------
    model : Model
    bits, head_bits : 8 or 4
        For linear layers and for the head. 8 costs twice the bytes and work of 4 and keeps a Q8_0 matrix
        exactly (`quantize_8bit`); 4 is min-max rounding in groups of 32 (`mj.quantize`).

    Returns
    -------
    PackReport

    Raises
    ------
    ValueRangeError
        `bits` is neither 4 nor 8, or weights are not finite.
    """
    for value in (bits, head_bits):
        if value not in (4, 8):
            raise mj.ValueRangeError(f"a layer is packed in 4 or 8 bits, not {value!r}")
    report = PackReport()
    for linear in model.linears:
        if linear.packed:
            report.left[linear.name] = "packed already"
        elif linear.quantized:
            report.left[linear.name] = "a plain 4-bit weight: mj.pack packs it"
        elif linear.K % GROUP_SIZE:
            report.left[linear.name] = f"K = {linear.K} is no multiple of {GROUP_SIZE}"
        else:
            _pack(linear, head_bits if linear is model.head else bits, model.dtype, report)
    return report


def _pack(linear: Linear, bits: int, dtype: np.dtype[Any], report: PackReport) -> None:
    dense = linear.weight
    quantize = quantize_8bit if bits == 8 else mj.quantize
    linear.weight = mj.pack(quantize(dense, group_size=GROUP_SIZE, dtype=dtype))
    linear.eight_bit = bits == 8
    if linear.bias is not None:
        linear.bias = linear.bias.astype(dtype)
    linear.drop_dense()
    report.packed[linear.name] = linear.weight.nbytes
    report.bytes_added += linear.weight.nbytes
    report.bytes_freed += int(dense.nbytes)
