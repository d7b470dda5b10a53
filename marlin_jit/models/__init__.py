"""Llama-family models over packed weights: loading, scoring and generating, on CuPy or NumPy arrays.

>>> from marlin_jit import models
>>> model = models.load("smollm2-marlin")             # what `marlin-jit pack` wrote
>>> tokenizer = models.Tokenizer.load("smollm2-marlin")
>>> prompt = tokenizer.encode("The capital of France is")
>>> for piece in tokenizer.stream(model.generate(prompt, max_new_tokens=20)):
...     print(piece, end="", flush=True)

It uses nothing of marlin_jit but what `import marlin_jit` shows, so it can be copied as the start of another
architecture. docs/models.md says what is supported.
"""

from __future__ import annotations

from .cache import KVCache
from .config import LlamaConfig
from .eight_bit import doubled, quantize_8bit
from .generation import GraphDecoder, generate
from .linear import GateUp, Linear, SideBySide
from .llama import Layer, Model
from .loading import load
from .packing import PackReport, pack_model
from .scoring import Score, score
from .text import sample_text
from .tokenizer import Tokenizer

__all__ = [
    "GateUp",
    "GraphDecoder",
    "KVCache",
    "Layer",
    "Linear",
    "LlamaConfig",
    "Model",
    "PackReport",
    "Score",
    "SideBySide",
    "Tokenizer",
    "doubled",
    "generate",
    "load",
    "pack_model",
    "quantize_8bit",
    "sample_text",
    "score",
]
