"""The packed file: what `marlin-jit pack` writes, and how it is read again.

A packed file is a safetensors file. A layer ``X`` is stored as

=============  ================  ==================================================================
tensor         shape             content
=============  ================  ==================================================================
``X.B``        int32 [Kp/16,     codes in Marlin order
               2*Np]
``X.s``        [G, Np]           scales in Marlin order, float16 or bfloat16
``X.delta``    float32 [G, Np]   ``zero + 8*scale`` in the order of the scales; absent if symmetric
``X.perm``     int32 [K]         packed row i is source row perm[i]; absent without activation order
=============  ================  ==================================================================

and everything else (biases, norms, embeddings) as it was. ``__metadata__`` holds ``format`` = "marlin-jit",
``format_version`` and ``layers``: JSON of ``{name: {"K", "N", "group_size", "dtype", "source_format"}}`` for
the layers in that file. A model of several files is a folder with an index, as on the Hugging Face hub.
Described for other readers in docs/format.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_jit._array import BFLOAT16, is_device_array, namespace, to_host
from marlin_jit.errors import CheckpointError, DTypeError
from marlin_jit.formats.layer import Parameters, SourceLayer, naming
from marlin_jit.formats.model_files import ModelFiles
from marlin_jit.formats.publish import published
from marlin_jit.formats.safetensors_io import SafetensorsWriter, TensorInfo, array_info, shortened, shown
from marlin_jit.layout import GROUP_SIZES, TILE_K, group_count, padded_shape
from marlin_jit.weight import MarlinWeight

__all__ = ["FORMAT", "FORMAT_VERSION", "LayerEntry", "PackedModel", "load", "save"]

FORMAT = "marlin-jit"
FORMAT_VERSION = 1

# A layer's names are its own even where it lacks the tensor: a stranger's X.delta would change its weights.
_SUFFIXES = ("B", "s", "delta", "perm")
_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16}


@dataclass(frozen=True)
class LayerEntry:
    """What the metadata says about one packed layer.

    Attributes
    ----------
    K, N : int
        Logical shape.
    group_size : int
        32, 64, 128 or -1.
    dtype : str
        Of the scales: ``"float16"`` or ``"bfloat16"``.
    source_format : str
        Where the layer came from, e.g. ``"gptq"``.
    """

    K: int
    N: int
    group_size: int
    dtype: str
    source_format: str


def reserved_names(name: str) -> tuple[str, ...]:
    """Return the tensor names that no other tensor may have beside packed layer `name`."""
    return tuple(f"{name}.{suffix}" for suffix in _SUFFIXES)


def layer_tensors(name: str, entry: LayerEntry, symmetric: bool, permuted: bool) -> dict[str, TensorInfo]:
    """Return the tensors that a packed layer takes, before it is packed."""
    Kp, Np = padded_shape(entry.K, entry.N, entry.group_size)
    scales = (group_count(Kp, entry.group_size), Np)
    tensors = {
        f"{name}.B": array_info(np.dtype(np.int32), (Kp // TILE_K, 2 * Np)),
        f"{name}.s": array_info(_DTYPES[entry.dtype], scales),
    }
    if not symmetric:
        tensors[f"{name}.delta"] = array_info(np.dtype(np.float32), scales)
    if permuted:
        tensors[f"{name}.perm"] = array_info(np.dtype(np.int32), (entry.K,))
    return tensors


def layer_arrays(name: str, weight: MarlinWeight) -> dict[str, NDArray[Any]]:
    """Return the arrays of a packed layer by their names in the file."""
    host = weight.to_host()
    arrays = {f"{name}.B": host.B, f"{name}.s": host.scales}
    if host.delta is not None:
        arrays[f"{name}.delta"] = host.delta
    if host.perm is not None:
        arrays[f"{name}.perm"] = host.perm
    return arrays


def file_metadata(layers: Mapping[str, LayerEntry]) -> dict[str, str]:
    """Return the ``__metadata__`` of a packed file with these layers."""
    table = {name: asdict(entry) for name, entry in layers.items()}
    return {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "layers": json.dumps(table, separators=(",", ":")),
    }


def is_packed(files: ModelFiles) -> bool:
    """Whether any of the files says that this package wrote it."""
    return any(file.metadata.get("format") == FORMAT for file in files.shards.values())


def read_layer_table(files: ModelFiles) -> dict[str, LayerEntry]:
    """Return the layers of a packed model, checked against the tensors that are there."""
    table: dict[str, LayerEntry] = {}
    for file in files.shards.values():
        if file.metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{file.path}: was not written by {FORMAT}, but other files of the model were"
            )
        version = file.metadata.get("format_version")
        if version != str(FORMAT_VERSION):
            raise CheckpointError(
                f"{file.path}: format version {shortened(str(version))}; this release reads version "
                f"{FORMAT_VERSION}"
            )
        try:
            layers = json.loads(file.metadata.get("layers", ""))
        except (ValueError, RecursionError):
            raise CheckpointError(f"{file.path}: the table of layers in its metadata is not JSON") from None
        if not isinstance(layers, dict):
            raise CheckpointError(f"{file.path}: the table of layers in its metadata is not a JSON object")
        for name, values in layers.items():
            table[name] = _checked_entry(files, file.path, name, values)
    return table


def _checked_entry(files: ModelFiles, path: Path, name: str, values: Any) -> LayerEntry:
    where = f"{path}: layer {shortened(name)}"
    fields = {"K": int, "N": int, "group_size": int, "dtype": str, "source_format": str}
    if not isinstance(values, dict) or any(type(values.get(key)) is not kind for key, kind in fields.items()):
        raise CheckpointError(f"{where}: its metadata is not of the form {', '.join(fields)}")
    entry = LayerEntry(**{key: values[key] for key in fields})
    if (
        entry.dtype not in _DTYPES
        or entry.group_size not in GROUP_SIZES
        or not (0 < entry.K < 1 << 31 and 0 < entry.N < 1 << 31)
    ):
        raise CheckpointError(f"{where}: its metadata has values out of range: {shown(asdict(entry))}")
    expected = layer_tensors(name, entry, f"{name}.delta" not in files, f"{name}.perm" in files)
    for tensor, info in expected.items():
        if tensor not in files:
            raise CheckpointError(f"{where}: tensor {tensor} is missing")
        found = files.info(tensor)
        if (found.dtype, found.shape) != (info.dtype, info.shape):
            raise CheckpointError(
                f"{where}: tensor {tensor} is {found.dtype} {list(found.shape)}; expected {info.dtype} "
                f"{list(info.shape)}"
            )
    return entry


@dataclass(frozen=True)
class PackedLayer(SourceLayer):
    """A layer of a packed file, seen as any other layer of a checkpoint."""

    entry: LayerEntry

    @property
    def format(self) -> str:
        return FORMAT

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.present(*_SUFFIXES)

    @property
    def scale_name(self) -> str:
        return f"{self.name}.s"

    def parameters(self) -> Parameters:
        return Parameters(
            K=self.entry.K,
            N=self.entry.N,
            group_size=self.entry.group_size,
            scale=self.files.read(self.scale_name),
            zero_point=None,
            g_idx=self._optional("perm"),
            symmetric=f"{self.name}.delta" not in self.files,
        )

    def read(self) -> MarlinWeight:
        found = self.checked_parameters()
        with naming(self.label):
            return MarlinWeight(
                self.files.read(f"{self.name}.B"),
                found.scale,
                self._optional("delta"),
                shape=(self.entry.K, self.entry.N),
                group_size=self.entry.group_size,
                perm=found.g_idx,
            )

    def _uneven_groups(self, g_idx: NDArray[np.int32], K: int, group_size: int) -> str:
        """Return nothing: packed groups are full. Raise unless `g_idx`, here the order of rows, is one."""
        if not np.array_equal(np.sort(g_idx), np.arange(K)):
            raise CheckpointError(f"{self.where(f'{self.name}.perm')}: is no permutation of 0..{K - 1}")
        return ""

    def _optional(self, suffix: str) -> NDArray[Any] | None:
        tensor = f"{self.name}.{suffix}"
        return self.files.read(tensor) if tensor in self.files else None


class PackedModel(Mapping[str, MarlinWeight]):
    """The packed weights of a model by module name, read from the disk each time one is asked for.

    Attributes
    ----------
    entries : dict of str to LayerEntry
        Shapes and origin of the layers, known without reading them.
    tensors : mapping of str to numpy.ndarray
        All other tensors (biases, norms, embeddings), read when asked for.
    """

    def __init__(self, path: str | Path) -> None:
        self.files = ModelFiles(Path(path))
        if not is_packed(self.files):
            raise CheckpointError(
                f"{path}: was not written by {FORMAT}; convert it with `marlin-jit pack {path} DST`"
            )
        self.entries = read_layer_table(self.files)
        self._layers = {name: PackedLayer(self.files, name, entry) for name, entry in self.entries.items()}
        packed = {tensor for layer in self._layers.values() for tensor in layer.tensors}
        self.tensors: Mapping[str, NDArray[Any]] = _OtherTensors(
            self.files, [n for n in self.files if n not in packed]
        )

    def __getitem__(self, name: str) -> MarlinWeight:
        return self._layers[name].read()

    def __contains__(self, name: object) -> bool:  # that of Mapping would read the weight
        return name in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return (
            f"<PackedModel {str(self.files.path)!r}: layers: {len(self)}, other tensors: {len(self.tensors)}>"
        )


class _OtherTensors(Mapping[str, NDArray[Any]]):
    def __init__(self, files: ModelFiles, names: list[str]) -> None:
        self._files = files
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        return self._files.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load(path: str | Path) -> PackedModel:
    """Open what `marlin-jit pack` wrote: a folder or one safetensors file.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    PackedModel
        A mapping from module name to `MarlinWeight` (NumPy arrays; `to_device` moves one to the GPU). Only
        headers are read now.

    Raises
    ------
    CheckpointError
        Damaged files, or files that this package did not write.
    """
    return PackedModel(path)


def save(
    path: str | Path,
    weights: Mapping[str, MarlinWeight],
    tensors: Mapping[str, NDArray[Any]] | None = None,
    *,
    source_format: str = "array",
    force: bool = False,
) -> None:
    """Write packed weights to one file, which `load` reads.

    Parameters
    ----------
    path : str or Path
        The file appears when it is complete.
    weights : mapping of str to MarlinWeight
        By module name; NumPy or CuPy.
    tensors : mapping of str to array, optional
        Other tensors, stored as they are. The names X.B, X.s, X.delta and X.perm belong to layer X.
    source_format : str
        Noted in the metadata.
    force : bool
        Replace a file that exists. A folder or a symbolic link is never replaced.

    Raises
    ------
    DTypeError
        A weight that is no `MarlinWeight`, a tensor that is no array, a name that is no string.
    CheckpointError
        A name that cannot be used, a dtype that cannot be stored, or a file that cannot be written.
    """
    for what in (source_format, *weights, *(tensors or ())):
        if not isinstance(what, str):
            raise DTypeError(f"names and source_format must be strings, got {what!r}")
    for name, weight in weights.items():
        if not isinstance(weight, MarlinWeight):
            raise DTypeError(
                f"weights[{name!r}] is a {type(weight).__name__}; expected a MarlinWeight, as pack makes it"
            )
    entries = {
        name: LayerEntry(weight.K, weight.N, weight.group_size, weight.dtype.name, source_format)
        for name, weight in weights.items()
    }
    infos: dict[str, TensorInfo] = {}
    for name, weight in weights.items():
        infos.update(layer_tensors(name, entries[name], weight.symmetric, weight.perm is not None))
    others: dict[str, Any] = dict(tensors or {})
    reserved = {"__metadata__", *(tensor for name in weights for tensor in reserved_names(name))}
    for name, array in others.items():
        if not (isinstance(array, np.ndarray) or is_device_array(array)):
            raise DTypeError(f"tensors[{name!r}] is a {type(array).__name__}; expected a NumPy or CuPy array")
        namespace(array)  # refuses a masked array, whose mask a file cannot hold
        if name in reserved:
            owner = "the file format" if name == "__metadata__" else "a packed layer"
            raise CheckpointError(f"tensors[{name!r}]: this name is reserved for {owner}; choose another")
        infos[name] = array_info(array.dtype, array.shape)
    path = Path(path)
    try:
        with (
            published(path, folder=False, force=force) as temporary,
            SafetensorsWriter(temporary, infos, file_metadata(entries)) as writer,
        ):
            for name, weight in weights.items():
                for tensor, array in layer_arrays(name, weight).items():
                    writer.write(tensor, array)
            for name, array in others.items():
                writer.write(name, to_host(array))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from None
