"""From a checkpoint to a packed copy of it.

In two steps. `plan_pack` reads headers, configs, scales and zero points, checks everything that can be wrong
and knows every byte of the output; nothing is written. `run_pack` then goes through the source once, layer by
layer, so memory holds one layer. The source is only ever read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit.errors import CheckpointError, MarlinJitError
from marlin_jit.formats.companions import copy_files, other_files, write_config, write_index
from marlin_jit.formats.detect import Checkpoint, open_checkpoint
from marlin_jit.formats.layer import CheckpointWarning, SourceLayer
from marlin_jit.formats.model_files import ModelFiles
from marlin_jit.formats.packed import (
    LayerEntry,
    file_metadata,
    is_packed,
    layer_arrays,
    layer_tensors,
    reserved_names,
)
from marlin_jit.formats.publish import check_destination, published
from marlin_jit.formats.safetensors_io import SafetensorsWriter, TensorInfo
from marlin_jit.layout import GROUP_SIZES
from marlin_jit.pack import pack
from marlin_jit.weight import MarlinWeight, QuantWeight

__all__ = ["LayerPlan", "PackPlan", "pack_checkpoint", "plan_pack", "run_pack", "to_marlin"]

Progress = Callable[[int], None]


@dataclass(frozen=True)
class LayerPlan:
    """One layer of a `PackPlan`.

    Attributes
    ----------
    source : SourceLayer
    entry : LayerEntry
        Its metadata in the packed file.
    source_group_size : int
        Groups that the Marlin format cannot hold are split into equal ones, which changes no weight.
    symmetric, permuted : bool
    notes : tuple of str
    bytes_before, bytes_after : int
    """

    source: SourceLayer
    entry: LayerEntry
    source_group_size: int
    symmetric: bool
    permuted: bool
    notes: tuple[str, ...]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class PackPlan:
    """Everything that packing a checkpoint will do.

    Attributes
    ----------
    checkpoint : Checkpoint
    destination : Path
    force : bool
    layers : dict of str to LayerPlan
    shards : dict of str to dict of str to TensorInfo
        Output files by name (for a single file: the one name), with their tensors.
    copied, skipped : tuple of str
        Other files of a model folder that go along, and those that do not: weights in other formats, hidden
        files, and configs whose content moves into the new config.json.
    """

    checkpoint: Checkpoint
    destination: Path
    force: bool
    layers: dict[str, LayerPlan]
    shards: dict[str, dict[str, TensorInfo]]
    copied: tuple[str, ...]
    skipped: tuple[str, ...]

    @property
    def bytes_before(self) -> int:
        """Bytes of all source tensors."""
        return self.checkpoint.files.nbytes

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors that will be written."""
        return sum(info.nbytes for tensors in self.shards.values() for info in tensors.values())

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for layer in self.layers.values() for note in layer.notes)


def pack_checkpoint(
    source: str | Path, destination: str | Path, *, force: bool = False, progress: Progress | None = None
) -> PackPlan:
    """Pack a checkpoint: a folder into a folder, a safetensors file into a file.

    Parameters
    ----------
    source, destination : str or Path
    force : bool
        Replace `destination` if it exists (a folder only if it holds a packed model).
    progress : callable, optional
        Called with the source bytes done since the last call.

    Returns
    -------
    PackPlan
        What was done.

    Raises
    ------
    CheckpointError
        Nothing was written, and `destination` is as it was.
    """
    plan = plan_pack(source, destination, force=force)
    run_pack(plan, progress)
    return plan


def plan_pack(source: str | Path, destination: str | Path, *, force: bool = False) -> PackPlan:
    """Check a checkpoint and say what packing it will write."""
    source, destination = Path(source), Path(destination)
    checkpoint = open_checkpoint(source)
    files = checkpoint.files
    _check_places(files, destination, force)
    if is_packed(files):
        raise CheckpointError(f"{source}: is packed already")
    if not checkpoint.layers:
        raise CheckpointError(f"{source}: holds no 4-bit layer to pack")
    layers = {name: _plan_layer(layer) for name, layer in checkpoint.layers.items()}
    shards = _plan_shards(checkpoint, layers)
    copied, skipped = other_files(files) if files.is_folder else ((), ())
    return PackPlan(checkpoint, destination, force, layers, shards, copied, skipped)


def run_pack(plan: PackPlan, progress: Progress | None = None) -> None:
    """Do what `plan` says."""
    files = plan.checkpoint.files
    advance = progress or (lambda count: None)
    try:
        with published(
            plan.destination, folder=files.is_folder, force=plan.force, may_replace=_is_own_output
        ) as temporary:
            for shard, tensors in plan.shards.items():
                _write_shard(
                    plan, shard, temporary / shard if files.is_folder else temporary, tensors, advance
                )
            if files.is_folder:
                tensors_by_shard = {shard: tuple(tensors) for shard, tensors in plan.shards.items()}
                write_index(files, temporary, tensors_by_shard, plan.bytes_after)
                write_config(files, temporary)
                copy_files(files, temporary, plan.copied)
    except OSError as error:  # those of the source's files are CheckpointErrors that name the file
        raise CheckpointError(f"{plan.destination}: cannot be written: {error.strerror or error}") from None


def to_marlin(layer: SourceLayer) -> MarlinWeight:
    """Read a layer of any format as a packed weight."""
    try:
        weight = layer.read()
        return weight if isinstance(weight, MarlinWeight) else pack(_split_groups(weight))
    except CheckpointError:
        raise
    except MarlinJitError as error:
        raise CheckpointError(f"{layer.files.path}: layer {layer.name}: {error}") from None


def packed_group_size(K: int, group_size: int) -> int | None:
    """Return the largest group size of the format that divides the weight's own, or None."""
    if group_size in (-1, K):
        return -1
    return next(
        (size for size in sorted(GROUP_SIZES, reverse=True) if size > 0 and group_size % size == 0), None
    )


def _split_groups(weight: QuantWeight) -> QuantWeight:
    """Split groups into equal ones of a size that the format holds, with the same scale and zero."""
    size = packed_group_size(weight.K, weight.group_size)
    if size is None or size == weight.group_size:
        return weight
    parts = weight.group_size // size

    def repeated(array: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(array, parts, axis=0)

    zero = None if weight.zero is None else repeated(weight.zero)
    return QuantWeight(weight.q, repeated(weight.scale), zero, size, weight.g_idx)


def _plan_layer(layer: SourceLayer) -> LayerPlan:
    found = layer.outline()
    size = packed_group_size(found.K, found.group_size)
    where = f"{layer.files.path}: layer {layer.name}"
    if size is None:
        raise CheckpointError(
            f"{where}: group size {found.group_size} is no multiple of 32; the Marlin format holds "
            f"{GROUP_SIZES}"
        )
    if found.permuted and size != found.group_size:
        raise CheckpointError(
            f"{where}: group size {found.group_size} with activation order; packed are {GROUP_SIZES}"
        )
    entry = LayerEntry(found.K, found.N, size, found.dtype, layer.format)
    after = layer_tensors(layer.name, entry, found.symmetric, found.permuted)
    return LayerPlan(
        source=layer,
        entry=entry,
        source_group_size=found.group_size,
        symmetric=found.symmetric,
        permuted=found.permuted,
        notes=found.notes,
        bytes_before=layer.nbytes,
        bytes_after=sum(info.nbytes for info in after.values()),
    )


def _plan_shards(checkpoint: Checkpoint, layers: dict[str, LayerPlan]) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of each output file.

    A layer goes where its codes are; a file left without tensors is dropped.
    """
    files = checkpoint.files
    shards: dict[str, dict[str, TensorInfo]] = {shard: {} for shard in files.shards}
    others = set(checkpoint.others)
    for name in checkpoint.others:
        shards[files.shard_of(name)][name] = replace(files.info(name), start=0)
    for name, plan in layers.items():
        for tensor in reserved_names(name):
            if tensor in others:
                raise CheckpointError(
                    f"{files.path}: tensor {tensor} belongs to no layer, but packing reserves its name for "
                    f"layer {name}"
                )
        shards[files.shard_of(plan.source.tensors[0])].update(
            layer_tensors(name, plan.entry, plan.symmetric, plan.permuted)
        )
    return {shard: tensors for shard, tensors in shards.items() if tensors}


def _check_places(files: ModelFiles, destination: Path, force: bool) -> None:
    """Raise if the two are in each other's way, or what is at the destination may not be replaced."""
    try:
        source, target = files.path.resolve(), destination.resolve()
    except (OSError, RuntimeError):  # links in a circle
        raise CheckpointError(f"{destination}: a symbolic link that leads nowhere") from None
    if source == target:
        raise CheckpointError(f"{destination}: is the source itself")
    if files.is_folder and target.is_relative_to(source):
        raise CheckpointError(f"{destination}: lies inside the source folder; choose a place outside it")
    if source.is_relative_to(target):
        raise CheckpointError(f"{destination}: holds the source; choose another place")
    check_destination(destination, folder=files.is_folder, force=force, may_replace=_is_own_output)


def _is_own_output(folder: Path) -> bool:
    """Whether a folder is empty or holds a model that this package packed."""
    try:
        return not any(folder.iterdir()) or is_packed(ModelFiles(folder))
    except (CheckpointError, OSError):
        return False


def _write_shard(
    plan: PackPlan, shard: str, path: Path, tensors: dict[str, TensorInfo], advance: Progress
) -> None:
    files = plan.checkpoint.files
    here = {
        name: layer for name, layer in plan.layers.items() if files.shard_of(layer.source.tensors[0]) == shard
    }
    # What the source says about itself stays, except the keys that now say something else.
    metadata = {
        **files.shards[shard].metadata,
        **file_metadata({name: layer.entry for name, layer in here.items()}),
    }
    with SafetensorsWriter(path, tensors, metadata) as writer:
        for name in plan.checkpoint.others:
            if files.shard_of(name) == shard:
                writer.write(name, _counted(files.chunks(name), advance))
        for name, layer in here.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)  # the plan has them already
                weight = to_marlin(layer.source)
            for tensor, array in layer_arrays(name, weight).items():
                writer.write(tensor, array)
            advance(layer.bytes_before)


def _counted(chunks: Iterator[bytes], advance: Progress) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        advance(len(chunk))
