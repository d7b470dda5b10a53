"""What a Llama-family model looks like, from Hugging Face's ``config.json`` or a GGUF file's key-values.

Whatever the forward does not do is refused here, by name, before a weight is read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import marlin_jit as mj

__all__ = ["LlamaConfig"]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a model.

    Attributes
    ----------
    layers, hidden, intermediate : int
        Number of layers, width of the residual stream, width of the MLP.
    heads, kv_heads, head_dim : int
        Query heads, key and value heads (a divisor of `heads`), elements of each.
    vocab : int
        Rows of the embedding.
    context : int
        Most positions the model was made for.
    eps : float
        Of the RMSNorms.
    rope_base : float
        Base of the rotary frequencies.
    interleaved : bool
        Which elements of a head turn together: 2i and 2i + 1 (True: GGUF files of the llama architecture,
        whose q and k rows were permuted for it), or i and i + head_dim/2 (False: Hugging Face checkpoints).
    tied : bool
        Whether the head multiplies by the embedding.
    bos : int or None
    eos : tuple of int
        Tokens that end a text.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    rope_base: float
    interleaved: bool
    tied: bool
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise mj.CheckpointError(f"{self.heads} heads cannot share {self.kv_heads} key and value heads")
        if self.head_dim % 2:
            raise mj.CheckpointError(f"heads of {self.head_dim} elements have no pairs to rotate")

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], where: str = "config.json") -> LlamaConfig:
        """Read a ``config.json`` of transformers 4 or 5.

        Parameters
        ----------
        values : mapping
            The document.
        where : str
            Its name in error messages.

        Raises
        ------
        CheckpointError
            A key that is missing or of the wrong kind, or something that the forward does not do.
        """
        get = _Reader(values, where)
        kind = values.get("model_type")
        if kind != "llama":
            raise mj.CheckpointError(f"{where}: model_type is {kind!r}; 'llama' is what runs")
        if (activation := values.get("hidden_act", "silu")) != "silu":
            raise mj.CheckpointError(f"{where}: hidden_act is {activation!r}; 'silu' is what runs")
        # transformers 5 gathers in rope_parameters what 4 wrote as rope_theta and rope_scaling.
        rope = values.get("rope_parameters") or {}
        scaling = values.get("rope_scaling") or {}
        if not isinstance(rope, Mapping) or not isinstance(scaling, Mapping):
            raise mj.CheckpointError(f"{where}: rope_parameters and rope_scaling must be objects or null")
        for settings in (rope, scaling):
            rope_kind = settings.get("rope_type", settings.get("type", "default"))
            if rope_kind != "default":
                raise mj.CheckpointError(
                    f"{where}: rope scaling {rope_kind!r}; plain rotary positions are what runs"
                )
        base = _Reader(rope, where) if "rope_theta" in rope else get
        hidden, heads = get.count("hidden_size"), get.count("num_attention_heads")
        return cls(
            layers=get.count("num_hidden_layers"),
            hidden=hidden,
            intermediate=get.count("intermediate_size"),
            heads=heads,
            kv_heads=get.count("num_key_value_heads", heads),
            head_dim=get.count("head_dim", hidden // heads),
            vocab=get.count("vocab_size"),
            context=get.count("max_position_embeddings", 2048),
            eps=get.positive("rms_norm_eps", 1e-6),
            rope_base=base.positive("rope_theta", 10000.0),
            interleaved=False,
            tied=get.flag("tie_word_embeddings"),
            bos=get.token("bos_token_id"),
            eos=get.tokens("eos_token_id"),
        )

    @classmethod
    def from_gguf(cls, values: Mapping[str, Any], where: str = "gguf.json") -> LlamaConfig:
        """Read the key-values of a GGUF file, as ``marlin-jit pack`` keeps them in ``gguf.json``.

        `tied` is not among them: a file without ``output.weight`` is tied.

        Raises
        ------
        CheckpointError
            As `from_hf`.
        """
        get = _Reader(values, where)
        architecture = values.get("general.architecture")
        if architecture != "llama":
            raise mj.CheckpointError(
                f"{where}: general.architecture is {architecture!r}; 'llama' is what runs"
            )
        scaling = values.get("llama.rope.scaling.type")
        # llama.cpp takes a factor without a type as linear scaling; `scale_linear` is its old name.
        factors = [values.get(f"llama.rope.{key}") for key in ("scaling.factor", "scale_linear")]
        if scaling is None and any(factor not in (None, 0, 1) for factor in factors):
            scaling = "linear"
        if scaling not in (None, "none"):
            raise mj.CheckpointError(
                f"{where}: rope scaling {scaling!r}; plain rotary positions are what runs"
            )
        if values.get("llama.expert_count"):
            raise mj.CheckpointError(f"{where}: is a mixture of experts; dense models are what runs")
        hidden, heads = get.count("llama.embedding_length"), get.count("llama.attention.head_count")
        head_dim = get.count("llama.attention.key_length", hidden // heads)
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            if get.count(key, head_dim) != head_dim:
                raise mj.CheckpointError(
                    f"{where}: {key} is {values[key]}; {head_dim}, as of keys, is what runs"
                )
        tokens = values.get("tokenizer.ggml.tokens")
        return cls(
            layers=get.count("llama.block_count"),
            hidden=hidden,
            intermediate=get.count("llama.feed_forward_length"),
            heads=heads,
            kv_heads=get.count("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab=get.count("llama.vocab_size", len(tokens) if isinstance(tokens, list) else None),
            context=get.count("llama.context_length"),
            eps=get.positive("llama.attention.layer_norm_rms_epsilon"),
            rope_base=get.positive("llama.rope.freq_base", 10000.0),
            interleaved=True,
            tied=True,
            bos=get.token("tokenizer.ggml.bos_token_id"),
            eos=get.tokens("tokenizer.ggml.eos_token_id"),
        )


_LARGEST = 1 << 31


class _Reader:
    """Values of a document with their kinds checked."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def count(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or not 0 < value < _LARGEST:
            raise self._wrong(key, value, "a positive integer")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._values.get(key)
        if value is not None and type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return bool(value)

    def token(self, key: str) -> int | None:
        found = self.tokens(key)
        return found[0] if found else None

    def tokens(self, key: str) -> tuple[int, ...]:
        """One token, a list of them, or none."""
        value = self._values.get(key)
        several = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(v) is not int or not 0 <= v < _LARGEST for v in several):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(several)

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise mj.CheckpointError(f"{self._where}: {key} is missing")
        return default

    def _wrong(self, key: str, value: Any, expected: str) -> mj.CheckpointError:
        return mj.CheckpointError(f"{self._where}: {key} is {str(value)[:80]!r}; expected {expected}")
