"""Going on with an interrupted conversion: which finished files can be taken over.

A resumable run keeps its unfinished folder, under a name that the next run finds, with a fingerprint of the
plan in it. Files are written under another name and renamed when they are complete, so a file that is there
is whole; the fingerprint says that it is of the same sources, untouched since, and of the same settings.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.safetensors_io import SafetensorsFile, TensorInfo

if TYPE_CHECKING:
    from marlin_jit.formats.convert import PackPlan

__all__ = ["UNFINISHED", "fingerprint", "is_done"]

UNFINISHED = ".unfinished"
"""What ends the name of a file that is being written."""


def fingerprint(plan: PackPlan) -> str:
    """Return a text that two plans share only if they write the same bytes from the same files."""
    sources = []
    for file in plan.checkpoint.files.shards.values():
        try:
            status = file.path.stat()
        except OSError as error:
            raise CheckpointError(f"{file.path}: cannot be read: {error.strerror or error}") from None
        sources.append([str(file.path.resolve()), status.st_size, status.st_mtime_ns])
    layers = {
        name: [layer.source.format, layer.source.decided_by, repr(layer.target), repr(layer.outline)]
        for name, layer in plan.layers.items()
    }
    outputs = {
        shard: {name: [info.dtype, info.shape] for name, info in tensors.items()}
        for shard, tensors in plan.shards.items()
    }
    from marlin_jit import __version__  # here, since the package imports this module on its way

    text = json.dumps([__version__, sources, layers, outputs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def is_done(path: Path, tensors: dict[str, TensorInfo]) -> bool:
    """Whether a file of an interrupted run is there, whole, with these tensors."""
    if not path.exists():
        return False
    try:
        found = SafetensorsFile(path).tensors
    except CheckpointError:
        return False
    return {n: (i.dtype, i.shape) for n, i in found.items()} == {
        n: (i.dtype, i.shape) for n, i in tensors.items()
    }
