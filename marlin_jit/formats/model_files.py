"""Which files make up a model, and in which of them each tensor lies.

A model is one safetensors file or a folder as on the Hugging Face hub: one weight file, or several with an
index. The index is somebody else's text: shard names may not leave the folder, and what it promises must be
there, exactly once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.safetensors_io import (
    SafetensorsFile,
    TensorInfo,
    load_json,
    open_regular,
    shortened,
    shown,
)

__all__ = ["ModelFiles", "WeightFile", "confined"]

INDEX_SUFFIX = ".safetensors.index.json"
# That of most file systems (some count bytes, so that fewer characters fit).
MAX_FILE_NAME = 255
_SHARD_NAME = re.compile(r"-\d+-of-\d+\.safetensors$")


class WeightFile(Protocol):
    """A file of tensors, of any container: a `SafetensorsFile`, or what looks like one."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield its bytes in pieces."""


class ModelFiles:
    """The weight files of a model, opened and checked (headers only).

    Parameters
    ----------
    path : Path
        A safetensors file, or a folder that holds a model.

    Attributes
    ----------
    folder : Path
        Where the files lie that go with the weights (config.json, ...).
    is_folder : bool
        Whether `path` is a folder.
    shards : dict of str to WeightFile
        By file name, in order of name.
    index_name : str or None
        File name of the index, if there is one.
    index_metadata : dict
        Its ``metadata`` object.

    Raises
    ------
    CheckpointError
        A file missing or damaged, a shard outside the folder, a tensor in no shard or in two.
    """

    becomes_folder = False
    """Whether a single file's natural output is a folder."""
    documents: Mapping[str, dict[str, Any]] = {}
    """What the weight files say besides: JSON files to write beside the output, by name."""

    def __init__(self, path: Path) -> None:
        try:
            path.lstat()
            self.is_folder = path.is_dir()
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{path}: no such file or folder") from None
        except (OSError, ValueError) as error:  # too long a name, a zero byte, a folder not to be entered
            reason = error.strerror if isinstance(error, OSError) else None
            raise CheckpointError(f"{path}: cannot be read: {reason or error}") from None
        self.path = path
        self.index_name: str | None = None
        self.index_metadata: dict[str, Any] = {}
        promised: dict[str, str] = {}
        if self.is_folder:
            self.folder = path
            names, promised = self._find_shards()
        else:
            self.folder = path.parent
            if path.name.endswith(INDEX_SUFFIX):
                raise CheckpointError(f"{path}: is an index; give the folder that it lies in")
            names = [path.name]
        # The user's own argument may be a link to anywhere; a name found in a folder may not.
        self.shards: dict[str, WeightFile] = {
            name: SafetensorsFile(self.confined(name) if self.is_folder else path) for name in sorted(names)
        }
        self._where: dict[str, str] = {}
        for shard, file in self.shards.items():
            self._refuse_duplicates(shard, file)
            self._where.update(dict.fromkeys(file.tensors, shard))
        for name in self._unlisted_shards():
            self._refuse_duplicates(name, SafetensorsFile(self.confined(name)))
        for name, shard in promised.items():
            if self._where.get(name) != shard:
                raise CheckpointError(
                    f"{path / shard}: tensor {shortened(name)} is not in it, but {self.index_name} says so"
                )

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def shard_of(self, name: str) -> str:
        """Return the file name of the shard that holds tensor `name`."""
        return self._where[name]

    def info(self, name: str) -> TensorInfo:
        return self.shards[self._where[name]].tensors[name]

    def read(self, name: str) -> NDArray[Any]:
        return self.shards[self._where[name]].read(name)

    def chunks(self, name: str) -> Iterator[bytes]:
        return self.shards[self._where[name]].chunks(name)

    def stored_nbytes(self, name: str) -> int:
        """Return the bytes of tensor `name` in the file, where reading makes it larger."""
        return self.info(name).nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for file in self.shards.values() for info in file.tensors.values())

    def confined(self, name: str) -> Path:
        """Return the path of file `name` in the folder: see `confined`."""
        return confined(self.folder, name)

    def _refuse_duplicates(self, shard: str, file: WeightFile) -> None:
        for name in file.tensors:
            if name in self._where:
                raise CheckpointError(
                    f"{self.path}: tensor {name} is in two files, {self._where[name]} and {shard}"
                )

    def _unlisted_shards(self) -> list[str]:
        """Return files that look like shards but are not in the index: they may hold what is meant."""
        if self.index_name is None:
            return []
        names = sorted(entry.name for entry in self.path.iterdir())
        return [name for name in names if _SHARD_NAME.search(name) and name not in self.shards]

    def _find_shards(self) -> tuple[list[str], dict[str, str]]:
        """Return the names of the weight files and what the index promises (tensor -> file name)."""
        try:
            names = sorted(entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be listed: {error.strerror}") from None
        weights = [name for name in names if name.endswith(".safetensors")]
        indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
        if len(indexes) > 1:
            raise CheckpointError(
                f"{self.path}: several indexes ({shortened(', '.join(indexes))}); keep the one that is meant"
            )
        if indexes:
            return self._read_index(indexes[0], weights)
        if "model.safetensors" in weights:
            return ["model.safetensors"], {}
        if len(weights) == 1:
            return weights, {}
        if weights:
            raise CheckpointError(
                f"{self.path}: {len(weights)} safetensors files and no index; name one of them instead"
            )
        pickles = (
            " (.bin and .pt files are not read)" if any(n.endswith((".bin", ".pt")) for n in names) else ""
        )
        raise CheckpointError(f"{self.path}: no *.safetensors file in this folder{pickles}")

    def _read_index(self, index: str, weights: list[str]) -> tuple[list[str], dict[str, str]]:
        path = self.confined(index)
        content = load_json(path)
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) for shard in weight_map.values()
        ):
            raise CheckpointError(f"{path}: has no weight_map from tensor names to file names")
        metadata = content.get("metadata", {})
        if not isinstance(metadata, dict):
            raise CheckpointError(f"{path}: its metadata is not a JSON object")
        shards = sorted(set(weight_map.values()))
        if not shards:
            raise CheckpointError(f"{path}: lists no tensor")
        for shard in shards:
            if not shard.endswith(".safetensors"):
                raise CheckpointError(f"{path}: shard {shown(shard)} is not a safetensors file")
            open_regular(self.confined(shard))
        if "model.safetensors" in weights and "model.safetensors" not in shards:
            raise CheckpointError(
                f"{self.path}: holds model.safetensors and an index without it; keep the one that is meant"
            )
        self.index_name, self.index_metadata = index, metadata
        return shards, weight_map


def confined(folder: Path, name: str) -> Path:
    """Return the path of file `name` in a folder, refusing names and links that lead out of it.

    The one exception is the download cache of the hub, whose snapshots are links into the ``blobs``
    folder beside them.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: file name {shown(name)} leads out of the folder")
    if len(name) > MAX_FILE_NAME:
        raise CheckpointError(
            f"{folder}: file name {shown(name)} is over the limit of {MAX_FILE_NAME} characters"
        )
    path = folder / name
    try:
        linked = path.is_symlink()
    except OSError as error:  # a name or path with too many bytes
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if linked:
        home = folder.resolve()
        allowed = [home]
        if home.parent.name == "snapshots":
            allowed.append(home.parent.parent / "blobs")
        try:
            target = path.resolve()
        except (OSError, RuntimeError):
            raise CheckpointError(f"{path}: a symbolic link that leads nowhere") from None
        if not any(target.is_relative_to(place) for place in allowed):
            raise CheckpointError(
                f"{path}: a symbolic link out of the folder, to {target}; copy the file there instead"
            )
    return path
