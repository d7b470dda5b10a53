"""Checkpoints that hold Marlin bytes already.

============  ================  ====================================================================
tensor        shape             content
============  ================  ====================================================================
B             int32 [K/16, 2N]  codes in the order of :mod:`marlin_jit.layout`
s             [G, N]            float16 or bfloat16, in the order of that module
zp            int32 [G, N/8]    zero points; asymmetric only
sort_indices  int32 [K]         packed row i is source row sort_indices[i]; activation order only
g_idx_sorted  int32 [K]         group of each packed row, 0 0 ... 1 1 ...; goes with sort_indices
============  ================  ====================================================================

B and s are those of the original project and of AutoGPTQ (``is_marlin_format: true`` or ``checkpoint_format:
marlin``). AutoAWQ (``version: marlin``) calls them ``qweight`` and ``scales``. The other three are what vLLM
holds beside them; an empty one means none.

Zero points are in the order that scales have where there are *several* groups, also where there is only one,
and then packed like AWQ's qzeros: eight columns in a word, nibble i for column 0,2,4,6,1,3,5,7.

Sources: IST-DASLab/marlin ``marlin/__init__.py``; AutoGPTQ 0.7.1 ``qlinear_marlin.py``; AutoAWQ 0.2.9
``linear/marlin.py``; vLLM 0.32.0 and 0.11.2 ``marlin_utils.py``, ``marlin_utils_test.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.awq import unpack_columns
from marlin_jit.formats.layer import Parameters, SourceLayer, naming
from marlin_jit.layout import GROUP_SIZES, padded_shape, permute_scales, swap_columns
from marlin_jit.weight import MarlinWeight

__all__ = ["MarlinLayer"]

_VLLM = ("zp", "sort_indices", "g_idx_sorted")


@dataclass(frozen=True)
class MarlinLayer(SourceLayer):
    """A layer of Marlin bytes.

    Attributes
    ----------
    group_size : int or None
        As the config gives it; None reads it off the shapes.
    suffixes : tuple of str
        What the file calls B and s.
    """

    group_size: int | None
    suffixes: tuple[str, str] = ("B", "s")

    @property
    def format(self) -> str:
        return "marlin" if self.suffixes == ("B", "s") else "awq-marlin"

    @property
    def tensors(self) -> tuple[str, ...]:
        more = _VLLM if self.suffixes == ("B", "s") else ()
        return self.present(*self.suffixes, *more)

    @property
    def scale_name(self) -> str:
        return f"{self.name}.{self.suffixes[1]}"

    def parameters(self) -> Parameters:
        B = self.require(self.suffixes[0], ("I32",))
        s = self.require(self.suffixes[1], ("F16", "BF16"))
        tiles, words = self.files.info(B).shape
        groups, N = self.files.info(s).shape
        K = 16 * tiles
        if words != 2 * N:
            raise CheckpointError(
                f"{self.where(B)} has {words} words a row for N = {N} scale columns; 4-bit Marlin codes "
                f"take {2 * N}"
            )
        group_size = self._group_size(K, groups)
        if padded_shape(K, N, group_size) != (K, N):
            raise CheckpointError(
                f"{self.where(B)}: K = {K} or N = {N} is no multiple of 64 (K also of the group size)"
            )
        zero_point = self._zero_points(groups, N)
        perm = self._perm(K, groups)
        return Parameters(
            K=K,
            N=N,
            group_size=group_size,
            scale=self.files.read(s),
            zero_point=zero_point,
            g_idx=None if perm is None else _groups_of_source_rows(perm, groups),
            symmetric=zero_point is None,
        )

    def read(self) -> MarlinWeight:
        found = self.checked_parameters()
        delta = None
        if found.zero_point is not None:
            delta = (np.float32(8) - found.zero_point) * found.scale.astype(np.float32)
        with naming(self.label):
            return MarlinWeight(
                self.files.read(f"{self.name}.{self.suffixes[0]}"),
                found.scale,
                delta,
                shape=(found.K, found.N),
                group_size=found.group_size,
                perm=self._perm(found.K, len(found.scale)),
            )

    def _has(self, suffix: str) -> bool:
        """Whether the file has one of vLLM's tensors; at run time vLLM holds an empty one for none."""
        tensor = f"{self.name}.{suffix}"
        return tensor in self.tensors and self.files.info(tensor).nbytes > 0

    def _zero_points(self, groups: int, N: int) -> NDArray[np.uint8] | None:
        """Return zero points [G, N] in the order of the scales, None where all are 8."""
        if not self._has("zp"):
            return None
        tensor = self.require("zp", ("I32",))
        self.expect_shape(tensor, (groups, N // 8), f"one word for 8 of {N} columns, {groups} groups")
        stored = unpack_columns(self.files.read(tensor))
        if (stored == 8).all():
            return None
        if groups > 1:
            return stored
        in_order: NDArray[np.uint8] = permute_scales(swap_columns(stored))
        return in_order

    def _perm(self, K: int, groups: int) -> NDArray[np.int32] | None:
        """Return the source row of each packed row, None where rows are in order."""
        if not self._has("sort_indices") and not self._has("g_idx_sorted"):
            return None
        rows, sorted_groups = self._vector("sort_indices", K), self._vector("g_idx_sorted", K)
        wrong = np.flatnonzero(sorted_groups != np.arange(K, dtype=np.int32) // np.int32(K // groups))
        if wrong.size:
            k = int(wrong[0])
            raise CheckpointError(
                f"{self.where(f'{self.name}.g_idx_sorted')}: {wrong.size} of {K} rows are not in groups of "
                f"{K // groups} in order, the first ({int(sorted_groups[k])}) at index {k}"
            )
        in_order = np.arange(K, dtype=np.int32)
        if not np.array_equal(np.sort(rows), in_order):
            raise CheckpointError(
                f"{self.where(f'{self.name}.sort_indices')} is no permutation of 0..{K - 1}"
            )
        return None if np.array_equal(rows, in_order) else rows

    def _vector(self, suffix: str, length: int) -> NDArray[np.int32]:
        tensor = f"{self.name}.{suffix}"
        if not self._has(suffix):
            raise CheckpointError(f"{self.label} has no {suffix}; sort_indices and g_idx_sorted go together")
        info = self.files.info(tensor)
        if info.dtype != "I32" or info.shape != (length,):
            raise CheckpointError(
                f"{self.where(tensor)} is {info.dtype} {list(info.shape)}; expected I32 [{length}]"
            )
        vector: NDArray[np.int32] = self.files.read(tensor)
        return vector

    def _group_size(self, K: int, groups: int) -> int:
        if groups == 1:
            size = -1  # one group a column, also where the config names K: the format makes no difference
        elif K % groups == 0 and K // groups in GROUP_SIZES:
            size = K // groups
        else:
            raise CheckpointError(
                f"{self.where(self.scale_name)}: {groups} groups for K = {K}; group sizes are {GROUP_SIZES}"
            )
        named = self.group_size
        if named is not None and named != size and not (size == -1 and named == K):
            raise CheckpointError(
                f"{self.where(self.scale_name)}: {groups} groups for K = {K}, but group_size is {named}"
            )
        return size


def _groups_of_source_rows(perm: NDArray[np.int32], groups: int) -> NDArray[np.int32]:
    """Return the group of each source row, where packed row i, of group i // (K/G), is source row perm[i]."""
    g_idx = np.empty_like(perm)
    g_idx[perm] = np.arange(len(perm), dtype=np.int32) // np.int32(len(perm) // groups)
    return g_idx
