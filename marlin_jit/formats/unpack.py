"""From any checkpoint back to what other tools read: GPTQ v2, or dense weights.

It is a conversion as packing is (`marlin_jit.formats.convert`), from the same readers. What is special here
concerns the source's own statements, made on a copy of its list of files: that it is packed no longer holds,
and a GPTQ model needs a config beside its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.convert import PackPlan, plan_conversion
from marlin_jit.formats.detect import Checkpoint, open_checkpoint
from marlin_jit.formats.gptq_target import GPTQTarget
from marlin_jit.formats.layer import ReadOptions
from marlin_jit.formats.packed import file_metadata, is_packed
from marlin_jit.formats.targets import DenseTarget

__all__ = ["UNPACKED", "plan_unpack"]

UNPACKED = ("gptq", "float16", "bfloat16", "dense")
"""What a checkpoint can be unpacked to; ``dense`` is in the dtype of each layer's scales."""

_OF_PACKED = frozenset(file_metadata({}))


def plan_unpack(
    source: str | Path,
    destination: str | Path,
    to: str = "gptq",
    *,
    force: bool = False,
    options: ReadOptions | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    shard_size: int | None = None,
) -> PackPlan:
    """Check a checkpoint and say what unpacking it will write; `run_pack` does it.

    Parameters
    ----------
    source, destination : str or Path
        As for `pack_checkpoint`. GPTQ is always written to a folder.
    to : str
        One of `UNPACKED`.
    force, options, include, exclude, shard_size
        As for `plan_pack`: layers that the patterns leave out are dense, in the dtype of their scales.

    Raises
    ------
    CheckpointError
        What cannot be read, or cannot be written in the way that is asked for.
    """
    if to not in UNPACKED:
        raise CheckpointError(f"{source}: cannot be unpacked to {to!r}; accepted: {', '.join(UNPACKED)}")
    checkpoint = open_checkpoint(source, options)
    if not checkpoint.layers:
        raise CheckpointError(f"{source}: holds no quantized layer to unpack")
    checkpoint = _no_longer_packed(checkpoint)
    target = GPTQTarget(checkpoint) if to == "gptq" else DenseTarget(None if to == "dense" else to)
    files, destination = checkpoint.files, Path(destination)
    if isinstance(target, DenseTarget):
        _refuse_stray_marlin(checkpoint)
    if isinstance(target, GPTQTarget):
        files.becomes_folder = True
        if destination.suffix == ".safetensors" and not files.is_folder:
            raise CheckpointError(
                f"{destination}: GPTQ weights mean nothing without the config beside them; name a folder"
            )
    plan = plan_conversion(
        checkpoint,
        destination,
        target,
        force=force,
        include=include,
        exclude=exclude,
        shard_size=shard_size,
    )
    if isinstance(target, GPTQTarget):
        documents = dict(files.documents)
        if "config.json" in documents:
            documents["config.json"] = target.config(documents)
        files.documents = documents | {"quantize_config.json": target.settings()}
        plan = replace(plan, skipped=tuple(name for name in plan.skipped if name not in files.documents))
    return plan


def _refuse_stray_marlin(checkpoint: Checkpoint) -> None:
    """Raise if a model without a quantization config would be taken for Marlin files by its tensors."""
    others = set(checkpoint.others)
    for name in checkpoint.others:
        if name.endswith(".B") and f"{name[:-2]}.s" in others:
            raise CheckpointError(
                f"{checkpoint.files.path}: tensors {name} and {name[:-2]}.s belong to no layer, but dense "
                "models would be read as if they did"
            )


def _no_longer_packed(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a list of files of its own, without what packed files say of themselves."""
    files = copy.copy(checkpoint.files)
    if not is_packed(files):
        return replace(checkpoint, files=files)
    files.shards = {name: copy.copy(shard) for name, shard in files.shards.items()}
    for shard in files.shards.values():
        shard.metadata = {k: v for k, v in shard.metadata.items() if k not in _OF_PACKED}
    return replace(checkpoint, files=files)
