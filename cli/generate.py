"""``marlin-jit generate MODEL PROMPT``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

import marlin_jit as mj
from marlin_jit import models
from marlin_jit.cli.language import device_option, place_of, stream_text
from marlin_jit.cli.show import print_json

__all__ = ["generate"]


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option(
    "--max-tokens", type=click.IntRange(0), default=128, show_default=True, help="Most tokens that are added."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="0: always the most likely token; above: drawn at random, the wilder the higher.",
)
@click.option("--top-k", type=click.IntRange(0), default=0, help="Draw from that many tokens; 0: from all.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Draw from the most likely tokens that together have this probability.",
)
@click.option("--seed", type=click.IntRange(0), help="Draw the same tokens each time.")
@click.option("--chat", is_flag=True, help="Put PROMPT as a question to an instruct model (ChatML).")
@click.option("--system", help="With --chat: what the model is told before.")
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, at the end.")
def generate(
    model: Path,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    chat: bool,
    system: str | None,
    device: Any,
    as_json: bool,
) -> None:
    """Let the packed MODEL go on with PROMPT, and print the text as it comes.

    MODEL is a folder that `marlin-jit pack` wrote. On a GPU every token is one replay of a CUDA graph; in
    NumPy the weights are kept in float32 too, 4 bytes each, which makes a token some ten times as fast.
    """
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    tokenizer = models.Tokenizer.load(model)
    text = tokenizer.chat(prompt, system) if chat else prompt
    prompt_tokens = tokenizer.encode(text)
    if not prompt_tokens:
        raise mj.ShapeError("PROMPT is empty; give at least a word to go on with")
    loaded = models.load(model, device=device).cache_dense()
    start = time.perf_counter()
    tokens = loaded.generate(
        prompt_tokens, max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    if not as_json:
        stream_text(tokenizer.stream(tokens))
        return
    found = list(tokens)
    seconds = time.perf_counter() - start
    print_json(
        {
            "model": str(model),
            "prompt": text,
            "text": tokenizer.decode(found),
            "tokens": found,
            "place": place_of(loaded),
            "seconds": round(seconds, 3),
        }
    )
