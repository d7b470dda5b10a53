"""From a checkpoint to a converted copy of it, layer by layer.

In two steps. `plan_pack` reads headers, configs, scales and zero points, checks everything that can be wrong
and knows every byte of the output; nothing is written. `run_pack` then goes through the source once: memory
holds one layer for each job. The source is only ever read. What a converted layer looks like is the target's
business (`marlin_jit.formats.targets`); packing is the usual one.
"""

from __future__ import annotations

import fnmatch
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from marlin_jit._cupy import import_cupy
from marlin_jit.errors import CheckpointError
from marlin_jit.formats import resume
from marlin_jit.formats.companions import copy_files, other_files, write_config, write_documents, write_index
from marlin_jit.formats.detect import Checkpoint, open_checkpoint
from marlin_jit.formats.layer import CheckpointWarning, Outline, ReadOptions, SourceLayer
from marlin_jit.formats.model_files import ModelFiles
from marlin_jit.formats.packed import is_packed
from marlin_jit.formats.publish import check_destination, published
from marlin_jit.formats.safetensors_io import SafetensorsWriter, TensorInfo
from marlin_jit.formats.targets import DenseTarget, PackedTarget, Target, to_marlin

__all__ = [
    "LayerPlan",
    "PackPlan",
    "chosen_layers",
    "pack_checkpoint",
    "plan_conversion",
    "plan_pack",
    "run_pack",
    "to_marlin",
]

Progress = Callable[[int], None]


@dataclass(frozen=True)
class LayerPlan:
    """One layer of a `PackPlan`.

    Attributes
    ----------
    source : SourceLayer
    outline : Outline
        What the source says of it.
    target : Target
        What it becomes.
    group_size : int
        As written. Groups that the Marlin format cannot hold are split into equal ones, which changes no
        weight.
    tensors : dict of str to TensorInfo
        That it is written as.
    """

    source: SourceLayer
    outline: Outline
    target: Target
    group_size: int
    tensors: dict[str, TensorInfo]

    @property
    def bytes_before(self) -> int:
        return self.source.nbytes

    @property
    def bytes_after(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())


@dataclass(frozen=True)
class PackPlan:
    """Everything that converting a checkpoint will do.

    Attributes
    ----------
    checkpoint : Checkpoint
    target : Target
    destination : Path
    folder : bool
        Whether the output is a folder or one file.
    force : bool
    layers : dict of str to LayerPlan
    shards : dict of str to dict of str to TensorInfo
        Output files by name (for a single file: the one name), with their tensors.
    home : dict of str to str
        Which of them each copied tensor goes into, by its name, and each layer, by that of its first tensor.
    copied, skipped : tuple of str
        Other files of a model folder that go along, and those that do not: weights in other formats, hidden
        files, and configs whose content moves into the new config.json.
    """

    checkpoint: Checkpoint
    target: Target
    destination: Path
    folder: bool
    force: bool
    layers: dict[str, LayerPlan]
    shards: dict[str, dict[str, TensorInfo]]
    home: dict[str, str]
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
        notes = (note for layer in self.layers.values() for note in layer.outline.notes)
        return tuple(dict.fromkeys(notes))  # one about the whole model comes with each layer

    def layers_in(self, shard: str) -> dict[str, LayerPlan]:
        """Return the layers that go into an output file."""
        return {name: p for name, p in self.layers.items() if self.home[p.source.tensors[0]] == shard}


def pack_checkpoint(
    source: str | Path, destination: str | Path, *, force: bool = False, progress: Progress | None = None
) -> PackPlan:
    """Pack a checkpoint: a folder into a folder, a safetensors file into a file.

    Parameters
    ----------
    source, destination : str or Path
        A GGUF file becomes a folder, unless `destination` ends in ``.safetensors``.
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


def plan_pack(
    source: str | Path,
    destination: str | Path,
    *,
    force: bool = False,
    checkpoint: Checkpoint | None = None,
    options: ReadOptions | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    shard_size: int | None = None,
) -> PackPlan:
    """Check a checkpoint and say what packing it will write.

    Parameters
    ----------
    source, destination, force
        As for `pack_checkpoint`.
    checkpoint : Checkpoint, optional
        `source`, opened already.
    options : ReadOptions, optional
    include, exclude : sequence of str
        Shell patterns of layer names. Layers that match none of `include` (if given), or one of `exclude`,
        are written dense, as ``X.weight`` [N, K].
    shard_size : int, optional
        Most bytes of tensors in an output file, where one tensor or layer is not larger by itself. Without it
        the output has the files of the source.
    """
    source = Path(source)
    checkpoint = checkpoint or open_checkpoint(source, options or ReadOptions())
    if is_packed(checkpoint.files):
        raise CheckpointError(f"{source}: is packed already")
    if not checkpoint.layers:
        raise CheckpointError(
            f"{source}: holds no 4-bit layer to pack (`marlin-jit quantize` takes unquantized models)"
        )
    return plan_conversion(
        checkpoint,
        Path(destination),
        PackedTarget(),
        force=force,
        include=include,
        exclude=exclude,
        shard_size=shard_size,
    )


def plan_conversion(
    checkpoint: Checkpoint,
    destination: Path,
    target: Target,
    *,
    force: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    shard_size: int | None = None,
) -> PackPlan:
    """Check a checkpoint and say what writing it for any target will write."""
    files = checkpoint.files
    folder = files.is_folder or (files.becomes_folder and destination.suffix != ".safetensors")
    if folder and destination.suffix in (".safetensors", ".gguf"):
        raise CheckpointError(f"{destination}: is the name of a file, but the output is a folder")
    if shard_size is not None and not folder:
        raise CheckpointError(f"{destination}: is one file, which a shard size would divide; name a folder")
    _check_places(files, destination, folder, force)
    chosen = chosen_layers(checkpoint, include, exclude)
    layers = {
        name: _plan_layer(layer, target if name in chosen else DenseTarget(None))
        for name, layer in checkpoint.layers.items()
    }
    target.check({name: p.outline for name, p in layers.items() if name in chosen}, str(files.path))
    _check_names(checkpoint, layers)
    shards, home = _plan_shards(checkpoint, layers, folder, shard_size)
    copied, skipped = other_files(files) if files.is_folder else ((), ())
    if not folder:
        skipped = (*skipped, *files.documents)
    return PackPlan(checkpoint, target, destination, folder, force, layers, shards, home, copied, skipped)


def run_pack(
    plan: PackPlan,
    progress: Progress | None = None,
    *,
    jobs: int = 1,
    device: bool = False,
    resumable: bool = False,
) -> int:
    """Do what `plan` says; return how many files were taken over from an interrupted run.

    Parameters
    ----------
    plan : PackPlan
    progress : callable, optional
        Called with the source bytes done since the last call.
    jobs : int
        Layers converted at the same time. Each takes 2 to 6 bytes of memory a weight, and with a Hessian
        about 32 K^2 more.
    device : bool
        Pack on the current GPU.
    resumable : bool
        Keep finished files if interrupted, and take those that an interrupted run of the same plan has left.
    """
    advance = progress or (lambda count: None)
    if resumable and not plan.folder:
        raise CheckpointError(f"{plan.destination}: is one file; only a folder can be resumed, file by file")
    try:
        with (
            warnings.catch_warnings(),
            published(
                plan.destination,
                folder=plan.folder,
                force=plan.force,
                may_replace=_is_own_output,
                keep=resume.fingerprint(plan) if resumable else None,
            ) as temporary,
        ):
            warnings.simplefilter("ignore", CheckpointWarning)  # the plan has them already
            paths = {shard: temporary / shard if plan.folder else temporary for shard in plan.shards}
            done = {s for s, path in paths.items() if resumable and resume.is_done(path, plan.shards[s])}
            _check_space(plan, [shard for shard in plan.shards if shard not in done])
            for shard, tensors in plan.shards.items():
                if shard in done:
                    advance(_source_bytes(plan, shard))
                else:
                    _write_shard(plan, shard, paths[shard], tensors, advance, max(1, jobs), device)
            if plan.folder:
                _write_companions(plan, temporary)
            taken = len(done)
    except OSError as error:  # those of the source's files are CheckpointErrors that name the file
        raise CheckpointError(f"{plan.destination}: cannot be written: {error.strerror or error}") from None
    return taken


def _check_space(plan: PackPlan, shards: Iterable[str]) -> None:
    """Raise if the disk has no room: a file may announce terabytes of nothing."""
    needed = sum(info.nbytes for shard in shards for info in plan.shards[shard].values())
    free = shutil.disk_usage(plan.destination.parent).free
    if needed > free:
        raise CheckpointError(
            f"{plan.destination}: takes {needed:,} bytes, but only {free:,} are free in "
            f"{plan.destination.parent}"
        )


def _write_companions(plan: PackPlan, folder: Path) -> None:
    files = plan.checkpoint.files
    if len(plan.shards) > 1 or files.index_name is not None:
        tensors_by_shard = {shard: tuple(tensors) for shard, tensors in plan.shards.items()}
        write_index(files, folder, tensors_by_shard, plan.bytes_after)
    write_documents(folder, files.documents)
    if files.is_folder:
        write_config(files, folder, plan.target.config)
        copy_files(files, folder, plan.copied)


def chosen_layers(checkpoint: Checkpoint, include: Sequence[str], exclude: Sequence[str]) -> set[str]:
    """Return the layers that the patterns choose. A pattern that chooses nothing is a mistake."""
    for pattern in (*include, *exclude):
        if not any(fnmatch.fnmatchcase(name, pattern) for name in checkpoint.layers):
            raise CheckpointError(f"{checkpoint.files.path}: no layer is called like {pattern!r}")

    def matches(name: str, patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    chosen = {
        name
        for name in checkpoint.layers
        if (not include or matches(name, include)) and not matches(name, exclude)
    }
    if checkpoint.layers and not chosen:
        raise CheckpointError(f"{checkpoint.files.path}: the patterns leave no layer")
    return chosen


def _plan_layer(layer: SourceLayer, target: Target) -> LayerPlan:
    outline = layer.outline()
    group_size, tensors = target.tensors(layer.name, layer.format, outline, layer.label)
    return LayerPlan(layer, outline, target, group_size, tensors)


def _check_names(checkpoint: Checkpoint, layers: dict[str, LayerPlan]) -> None:
    """Raise if a tensor that is copied has a name that a layer's target keeps for itself."""
    others = set(checkpoint.others)
    for name, plan in layers.items():
        for tensor in plan.target.reserved_names(name):
            if tensor in others:
                raise CheckpointError(
                    f"{checkpoint.files.path}: tensor {tensor} belongs to no layer, but packing reserves its "
                    f"name for layer {name}"
                )


# ---- which file everything goes into ----------------------------------------------------------------------


def _plan_shards(
    checkpoint: Checkpoint, layers: dict[str, LayerPlan], folder: bool, shard_size: int | None
) -> tuple[dict[str, dict[str, TensorInfo]], dict[str, str]]:
    """Return the tensors of each output file, and where each source tensor that starts something goes.

    A layer goes where its codes are; a file left without tensors is dropped.
    """
    files = checkpoint.files
    units = {name: {name: replace(files.info(name), start=0)} for name in checkpoint.others}
    units |= {plan.source.tensors[0]: plan.tensors for plan in layers.values()}
    if shard_size is not None:
        home = _deal(files, units, shard_size)
    elif folder and not files.is_folder:
        home = dict.fromkeys(units, "model.safetensors")
    else:
        home = {unit: files.shard_of(unit) for unit in units}
    shards: dict[str, dict[str, TensorInfo]] = {shard: {} for shard in sorted(set(home.values()))}
    for unit, tensors in units.items():
        shards[home[unit]].update(tensors)
    return shards, home


def _deal(files: ModelFiles, units: dict[str, dict[str, TensorInfo]], shard_size: int) -> dict[str, str]:
    """Deal tensors and layers out to new files, in the order of the source."""
    number, filled = 0, 0
    numbers: dict[str, int] = {}
    for unit in (name for name in files if name in units):
        nbytes = sum(info.nbytes for info in units[unit].values())
        if filled and filled + nbytes > shard_size:
            number, filled = number + 1, 0
        numbers[unit] = number
        filled += nbytes
    if not number:
        return dict.fromkeys(numbers, "model.safetensors")
    return {unit: f"model-{i + 1:05d}-of-{number + 1:05d}.safetensors" for unit, i in numbers.items()}


def _check_places(files: ModelFiles, destination: Path, folder: bool, force: bool) -> None:
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
    check_destination(destination, folder=folder, force=force, may_replace=_is_own_output)


def _is_own_output(folder: Path) -> bool:
    """Whether a folder is empty or holds a model that this package packed."""
    try:
        return not any(folder.iterdir()) or is_packed(ModelFiles(folder))
    except (CheckpointError, OSError):
        return False


# ---- writing ----------------------------------------------------------------------------------------------


def _write_shard(
    plan: PackPlan,
    shard: str,
    path: Path,
    tensors: dict[str, TensorInfo],
    advance: Progress,
    jobs: int,
    device: bool,
) -> None:
    files = plan.checkpoint.files
    here = plan.layers_in(shard)
    # What the source says about itself stays, except the keys that now say something else.
    metadata = {**_source_metadata(plan, shard), **plan.target.metadata(here)}
    unfinished = path.with_name(path.name + resume.UNFINISHED) if plan.folder else path
    with SafetensorsWriter(unfinished, tensors, metadata) as writer:
        for name in plan.checkpoint.others:
            if plan.home[name] == shard:
                share = files.stored_nbytes(name) / max(1, files.info(name).nbytes)
                writer.write(name, _counted(files.chunks(name), advance, share))
        for layer, arrays in _converted(here.values(), jobs, device):
            while arrays:  # freed one by one, so that the next layer does not come on top of them
                writer.write(*arrays.popitem())
            advance(layer.bytes_before)
    if unfinished != path:
        unfinished.rename(path)


def _source_metadata(plan: PackPlan, shard: str) -> dict[str, str]:
    """Return what the metadata of those source files agree on that an output file is made of."""
    files = plan.checkpoint.files
    made_of = {files.shard_of(unit) for unit, home in plan.home.items() if home == shard}
    first, *others = (files.shards[name].metadata for name in sorted(made_of))
    return {key: value for key, value in first.items() if all(m.get(key) == value for m in others)}


def _source_bytes(plan: PackPlan, shard: str) -> int:
    files = plan.checkpoint.files
    copied = sum(files.stored_nbytes(name) for name in plan.checkpoint.others if plan.home[name] == shard)
    return copied + sum(layer.bytes_before for layer in plan.layers_in(shard).values())


def _converted(
    layers: Iterable[LayerPlan], jobs: int, device: bool
) -> Iterator[tuple[LayerPlan, dict[str, NDArray[Any]]]]:
    """Yield the layers with their arrays, in order, `jobs` of them being converted at the same time."""
    if jobs == 1:
        for layer in layers:
            yield layer, layer.target.arrays(layer.source, device)
        return
    waiting: list[tuple[LayerPlan, Future[dict[str, NDArray[Any]]]]] = []
    # A new thread begins on the first GPU, whatever the current one is here.
    start = import_cupy().cuda.Device().use if device else None
    with ThreadPoolExecutor(jobs, initializer=start) as pool:
        try:
            for layer in layers:
                if len(waiting) == jobs:
                    first, future = waiting.pop(0)
                    yield first, future.result()
                waiting.append((layer, pool.submit(layer.target.arrays, layer.source, device)))
            while waiting:
                first, future = waiting.pop(0)
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _counted(chunks: Iterator[bytes], advance: Progress, share: float) -> Iterator[bytes]:
    """Pass bytes on and count them as those that they were in the source."""
    for chunk in chunks:
        yield chunk
        advance(round(len(chunk) * share))
