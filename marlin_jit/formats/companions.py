"""What goes along with packed weights, so that the output is a whole model: index, config and other files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.detect import CONFIG_FILES
from marlin_jit.formats.model_files import INDEX_SUFFIX, ModelFiles
from marlin_jit.formats.safetensors_io import COPY_CHUNK, load_json

__all__ = ["copy_files", "other_files", "write_config", "write_documents", "write_index"]

# Weights in other clothes: of no use beside the packed ones, and often larger than everything else.
_OTHER_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
)


def other_files(files: ModelFiles) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return relative names of the files that go along with the weights, and of those that do not."""
    made_anew = {*files.shards, "config.json", files.index_name}
    copied: list[str] = []
    skipped: list[str] = []
    folders = [""]  # relative names, each with a slash at its end
    try:
        while folders:
            prefix = folders.pop()
            for entry in sorted((files.folder / prefix).iterdir()):
                name = prefix + entry.name
                if name in made_anew:
                    continue
                if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
                    folders.append(name + "/")
                elif _is_companion(entry, top=not prefix):
                    if not prefix:
                        files.confined(entry.name)
                    copied.append(name)
                else:
                    skipped.append(name)
    except OSError as error:
        raise CheckpointError(f"{files.folder}: cannot be listed: {error.strerror}") from None
    return tuple(sorted(copied)), tuple(sorted(skipped))


def _is_companion(entry: Path, *, top: bool) -> bool:
    """Whether a file of a model folder (at its top, or below) goes along with packed weights."""
    if not entry.is_file() or entry.name.startswith("."):
        return False
    if entry.suffix.lower() in _OTHER_WEIGHTS or entry.name.endswith(INDEX_SUFFIX):
        return False
    return entry.name not in CONFIG_FILES if top else not entry.is_symlink()


def copy_files(files: ModelFiles, folder: Path, names: Sequence[str]) -> None:
    """Copy files of the source folder, by relative name, into `folder`."""
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            for chunk in _chunks(files.folder / name):
                file.write(chunk)


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file of the source; what goes wrong here is not the output's fault."""
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(COPY_CHUNK):
                yield chunk
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def write_index(
    files: ModelFiles, folder: Path, tensors: Mapping[str, Sequence[str]], total_size: int
) -> None:
    """Write the index, under the name of the source's if it has one, for shards that hold these tensors."""
    weight_map = {name: shard for shard, names in tensors.items() for name in names}
    index = {
        "metadata": {**files.index_metadata, "total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(folder / (files.index_name or "model" + INDEX_SUFFIX), index)


def write_documents(folder: Path, documents: Mapping[str, dict[str, Any]]) -> None:
    """Write JSON files, by name."""
    for name, content in documents.items():
        _write_json(folder / name, content)


def write_config(
    files: ModelFiles, folder: Path, change: Callable[[dict[str, dict[str, Any]]], dict[str, Any]]
) -> None:
    """Write config.json, where the source has a config: what `change` makes of its files, by their names."""
    originals = {
        name: load_json(files.confined(name)) for name in CONFIG_FILES if (files.folder / name).exists()
    }
    if originals:
        _write_json(folder / "config.json", change(originals))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(value, file, indent=2)  # in ASCII: a source may hold text that UTF-8 cannot express
        file.write("\n")
