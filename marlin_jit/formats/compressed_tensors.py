"""compressed-tensors checkpoints, format ``pack-quantized``."""

from __future__ import annotations

from typing import Any

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.layer import ReadOptions, SourceLayer
from marlin_jit.formats.model_files import ModelFiles

__all__ = ["make_layers"]


def make_layers(
    files: ModelFiles, config: dict[str, Any], where: str, options: ReadOptions
) -> dict[str, SourceLayer]:
    """Return the quantized layers of a checkpoint by module name."""
    raise CheckpointError(f"{where}: compressed-tensors checkpoints are not read yet")
