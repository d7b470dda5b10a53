"""Checkpoint formats: readers of other tools' files, and the packed file of this package.

One module a format: `gptq`, `awq`, `compressed_tensors`, `gguf_files`, `marlin_files`, `packed`, and `dense`
for what is not quantized yet. `detect` chooses among them, `convert` writes a whole checkpoint as one of
`targets`, `compare` proves that nothing changed.
"""

from __future__ import annotations

from marlin_jit.formats.compare import Comparison, Difference, compare
from marlin_jit.formats.convert import (
    LayerPlan,
    PackPlan,
    pack_checkpoint,
    plan_conversion,
    plan_pack,
    run_pack,
    to_marlin,
)
from marlin_jit.formats.detect import Checkpoint, open_checkpoint
from marlin_jit.formats.layer import CheckpointWarning, Outline, Parameters, ReadOptions, SourceLayer
from marlin_jit.formats.packed import LayerEntry, PackedModel, load, save

__all__ = [
    "Checkpoint",
    "CheckpointWarning",
    "Comparison",
    "Difference",
    "LayerEntry",
    "LayerPlan",
    "Outline",
    "PackPlan",
    "PackedModel",
    "Parameters",
    "ReadOptions",
    "SourceLayer",
    "compare",
    "load",
    "open_checkpoint",
    "pack_checkpoint",
    "plan_conversion",
    "plan_pack",
    "run_pack",
    "save",
    "to_marlin",
]
