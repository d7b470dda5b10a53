"""Text to tokens and back, through the ``tokenizers`` library.

From ``tokenizer.json`` of a Hugging Face checkpoint, or made from the key-values of a GGUF file: a byte-level
BPE with the rule by which SmolLM splits text, digits one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import marlin_jit as mj

from .loading import read_json

__all__ = ["Tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_ENDING = "\ufffd"  # what an incomplete UTF-8 sequence is decoded to


class Tokenizer:
    """The tokenizer of a model folder.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
    chat_template : str or None
        The model's own template (Jinja), as text. It is not run here.

    Raises
    ------
    CheckpointError
        From the class methods: the ``tokenizers`` package is not installed, or the files are of no use.
    """

    def __init__(self, backend: Any, chat_template: str | None = None) -> None:
        self._backend = backend
        self.chat_template = chat_template

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load that of a model folder: ``tokenizer.json``, else what ``gguf.json`` holds."""
        path = Path(path)
        if (path / "tokenizer.json").is_file():
            return cls._from_json(path)
        if (path / "gguf.json").is_file():
            return cls.from_gguf(read_json(path / "gguf.json"), str(path / "gguf.json"))
        if not path.exists():
            raise mj.CheckpointError(f"{path}: no such file or folder")
        raise mj.CheckpointError(f"{path}: has neither tokenizer.json nor gguf.json, so no tokenizer")

    @classmethod
    def _from_json(cls, path: Path) -> Tokenizer:
        file = path / "tokenizer.json"
        try:
            backend = _package().Tokenizer.from_file(str(file))
        except mj.CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exceptions
            raise mj.CheckpointError(
                f"{file}: is no tokenizer that the tokenizers package reads: {error}"
            ) from None
        template = None
        if (path / "tokenizer_config.json").is_file():
            template = read_json(path / "tokenizer_config.json").get("chat_template")
        return cls(backend, template if isinstance(template, str) else None)

    @classmethod
    def from_gguf(cls, values: dict[str, Any], where: str = "gguf.json") -> Tokenizer:
        """Make a tokenizer from the key-values of a GGUF file (pre-tokenizer ``smollm``)."""
        package = _package()
        kind, rule = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
        if (kind, rule) != ("gpt2", "smollm"):
            raise mj.CheckpointError(
                f"{where}: its tokenizer is {kind!r} with pre-tokenizer {rule!r}; 'gpt2' with 'smollm' "
                "is what is made from GGUF: put the model's tokenizer.json beside it"
            )
        tokens, merges = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.merges")
        types = values.get("tokenizer.ggml.token_type")
        for key, value, item in (
            ("tokens", tokens, str),
            ("merges", merges, str),
            ("token_type", types, int),
        ):
            if not isinstance(value, list) or not all(isinstance(v, item) for v in value):
                raise mj.CheckpointError(
                    f"{where}: tokenizer.ggml.{key} is missing, or no list of {item.__name__}"
                )
        assert isinstance(tokens, list) and isinstance(merges, list) and isinstance(types, list)
        if len(types) != len(tokens):
            raise mj.CheckpointError(f"{where}: has {len(tokens)} tokens but the types of {len(types)}")
        pairs = [tuple(merge.split(" ")) for merge in merges]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        try:
            backend = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=pairs))
        except Exception as error:  # the library raises bare Exceptions
            raise mj.CheckpointError(f"{where}: its tokens and merges do not fit together: {error}") from None
        split = package.pre_tokenizers
        backend.pre_tokenizer = split.Sequence(
            [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        backend.decoder = package.decoders.ByteLevel()
        for wanted, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
            add([t for t, found in zip(tokens, types, strict=True) if found == wanted])
        template = values.get("tokenizer.chat_template")
        return cls(backend, template if isinstance(template, str) else None)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Special tokens are read where the text spells them; none is added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text of tokens."""
        text: str = self._backend.decode([int(t) for t in tokens], skip_special_tokens=skip_special)
        return text

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of tokens as they come, characters of several tokens when they are whole."""
        pending: list[int] = []
        context: list[int] = []  # tokens told already that the decoder may look at
        for token in tokens:
            pending.append(int(token))
            before, text = self.decode(context), self.decode([*context, *pending])
            if text.endswith(_ENDING) and len(pending) < 8:
                continue
            if len(text) > len(before):
                yield text[len(before) :]
            context, pending = pending, []
        if pending:
            yield self.decode([*context, *pending])[len(self.decode(context)) :]

    def chat(self, message: str, system: str | None = None) -> str:
        """Return a prompt that asks an instruct model of the ChatML kind, as SmolLM2 is one.

        Raises
        ------
        CheckpointError
            The tokenizer does not know ChatML's marks.
        """
        for mark in ("<|im_start|>", "<|im_end|>"):
            if self._backend.token_to_id(mark) is None:
                raise mj.CheckpointError(
                    f"the tokenizer has no token {mark}, so the model was not made for ChatML prompts; write "
                    "its own format into the prompt"
                )
        turns = [("system", system)] if system is not None else []
        turns.append(("user", message))
        return (
            "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in turns)
            + "<|im_start|>assistant\n"
        )


def _package() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
    except ImportError:
        raise mj.CheckpointError(
            "reading and writing text needs the tokenizers package; in the folder of marlin-jit run "
            'pip install ".[models]"'
        ) from None
    return tokenizers
