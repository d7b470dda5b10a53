"""Checkpoints that hold Marlin bytes already.

The original project and AutoGPTQ (``is_marlin_format: true`` or ``checkpoint_format: marlin``) call them
``B`` and ``s``; AutoAWQ (``version: marlin``) calls them ``qweight`` and ``scales``. All are symmetric: B
int32 [K/16, 2N], s float16 [G, N] in the order that :mod:`marlin_jit.layout` describes.

Sources: IST-DASLab/marlin ``marlin/__init__.py``; AutoGPTQ 0.7.1 ``qlinear_marlin.py``; AutoAWQ 0.2.9
``linear/marlin.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.layer import Parameters, SourceLayer
from marlin_jit.layout import GROUP_SIZES, padded_shape
from marlin_jit.weight import MarlinWeight

__all__ = ["MarlinLayer"]


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
        names = [f"{self.name}.{suffix}" for suffix in self.suffixes]
        return tuple(name for name in names if name in self.files)

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
        return Parameters(
            K=K,
            N=N,
            group_size=group_size,
            scale=self.files.read(s),
            zero_point=None,
            g_idx=None,
            symmetric=True,
        )

    def read(self) -> MarlinWeight:
        found = self.checked_parameters()
        B = self.files.read(f"{self.name}.{self.suffixes[0]}")
        return MarlinWeight(B, found.scale, None, shape=(found.K, found.N), group_size=found.group_size)

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
