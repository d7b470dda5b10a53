"""GGUF files, through the ``gguf`` package."""

from __future__ import annotations

from pathlib import Path

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.layer import ReadOptions, SourceLayer
from marlin_jit.formats.model_files import ModelFiles

__all__ = ["GGUFFiles", "find", "make_layers"]


class GGUFFiles(ModelFiles):
    """A GGUF file behind the interface of `ModelFiles`."""


def find(path: Path) -> Path | None:
    """Return the GGUF file that `path` is, or the one that a folder without safetensors files holds."""
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path}: GGUF is not read yet; accepted: safetensors files")
    return None


def make_layers(files: GGUFFiles, options: ReadOptions) -> dict[str, SourceLayer]:
    """Return the 4-bit tensors of a GGUF file as layers, by tensor name without ``.weight``."""
    return {}
