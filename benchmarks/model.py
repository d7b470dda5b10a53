"""A whole model: perplexity by path, and tokens a second beside cuBLAS and PyTorch.

python -m benchmarks.model FOLDER [-o OUT.json] [--new 256] [--prompt 128]

FOLDER is what `marlin-jit pack` (or `marlin-jit demo`) wrote. All numbers are of one run. Decoding is greedy
and includes the copy of each token to the host, as a user has it; every rate is the median of several runs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np

import marlin_jit as mj
from benchmarks.report import write_text
from benchmarks.run import environment
from marlin_jit import models
from marlin_jit.bench import read_nvidia_smi
from marlin_jit.device import unavailable_reason

SCHEMA = "marlin-jit-model/1"
PREFILLS = (128, 512, 2048, 8192)


@contextmanager
def by_path(name: str) -> Iterator[None]:
    """Within the block a model's products insist on a path."""
    with (
        patch.object(mj, "matmul", partial(mj.matmul, path=name)),
        patch.object(mj, "matmul_swiglu", partial(mj.matmul_swiglu, path=name)),
    ):
        yield


def cached(model: models.Model, *, keep: bool) -> None:
    """Give every product its dense float16 weight, or take it away."""
    for linear in model.linears:
        linear.weight.cache_fp16() if keep else linear.weight.drop_fp16()


def perplexities(model: models.Model, tokens: list[int]) -> dict[str, dict[str, Any]]:
    """Perplexity and the paths taken, dispatched and by each path."""
    found: dict[str, dict[str, Any]] = {}

    def measure(name: str) -> None:
        mj.reset_stats()
        found[name] = {"perplexity": model.score(tokens).perplexity, "paths": mj.stats()}

    measure("dispatched")
    with mj.dispatch(False):
        measure("dispatch off")
    with by_path("marlin_pair"):
        measure("marlin_pair")
    cached(model, keep=True)
    measure("fp16_cache")
    cached(model, keep=False)
    return found


def rate(run: Callable[[], int], repeats: int = 5) -> float:
    """Tokens a second: median over runs, each of which returns how many it read; one more warms up."""
    run()
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        count = run()
        rates.append(count / (time.perf_counter() - start))
    return statistics.median(rates)


def decode_rate(model: models.Model, prompt: list[int], new: int, *, graph: bool) -> float:
    """Tokens a second between the first new token and the last."""
    rates = []
    for _ in range(4):
        tokens = model.generate(prompt, new, eos=(), graph=graph)
        next(tokens)
        next(tokens)  # by now a graph is captured
        start = time.perf_counter()
        count = sum(1 for _ in tokens)
        rates.append(count / (time.perf_counter() - start))
    return statistics.median(rates[1:])


def prefill_rate(model: models.Model, tokens: list[int]) -> float:
    """Tokens of a prompt read a second, at once; the logits of the last."""
    xp = model.xp
    cache = model.new_cache(len(tokens))
    ids = xp.asarray(np.array([tokens], np.int32))

    def run() -> int:
        cache.reset()
        model.forward(ids, cache, last_only=True)
        xp.cuda.get_current_stream().synchronize()
        return len(tokens)

    return rate(run)


def ours(model: models.Model, prompt: list[int], long: list[int], new: int) -> dict[str, Any]:
    """Rates of a model of ours as it is."""
    return {
        "decode graph": decode_rate(model, prompt, new, graph=True),
        "decode eager": decode_rate(model, prompt, new, graph=False),
        "prefill": {n: prefill_rate(model, long[:n]) for n in PREFILLS},
    }


def pytorch(model: models.Model, prompt: list[int], long: list[int], new: int) -> dict[str, Any]:
    """The same by PyTorch, after a look at whether it is the same model."""
    import torch

    from benchmarks.torch_llama import TorchDecoder, TorchLlama

    with torch.inference_mode():
        other = TorchLlama(model, len(prompt) + new)
        decoders = {graph: TorchDecoder(other, graph=graph) for graph in (True, False)}
        ids = torch.tensor([prompt], device="cuda")
        position = torch.arange(len(prompt), device="cuda")
        theirs = other.forward(ids, position, decode=False).float().cpu().numpy()[0, -1]
        mine = model.forward(model.xp.asarray(np.array([prompt], np.int32)), model.new_cache(len(prompt)))
        difference = mine[0, -1].get().astype(np.float32) - theirs
        if not np.linalg.norm(difference) < 0.01 * np.linalg.norm(theirs):
            raise ValueError(f"PyTorch's logits differ: {np.linalg.norm(difference):.2e}")
        expected = list(model.generate(prompt, new, eos=()))
        found: dict[str, Any] = {"version": torch.__version__}
        for graph, decoder in decoders.items():
            rates, same = [], 0
            for _ in range(4):
                decoder.start(ids)
                told = [int(decoder.token), decoder.step()]
                start = time.perf_counter()
                told += [decoder.step() for _ in range(new - 2)]
                rates.append((new - 2) / (time.perf_counter() - start))
                same = next((i for i in range(new) if told[i] != expected[i]), new)
            found[f"decode {'graph' if graph else 'eager'}"] = statistics.median(rates[1:])
            found["same tokens"] = same
        found["prefill"] = {}
        for n in PREFILLS:
            text, places = torch.tensor([long[:n]], device="cuda"), torch.arange(n, device="cuda")
            big = other if n <= other.keys.shape[3] else TorchLlama(model, n)

            def run(big: Any = big, text: Any = text, places: Any = places) -> int:
                big.forward(text, places, decode=False)
                torch.cuda.synchronize()
                return text.shape[1]

            found["prefill"][n] = rate(run)
            del big
    return found


def table(document: dict[str, Any]) -> str:
    """Perplexities, then rates."""
    lines = ["perplexity of the opening of Moby-Dick:"]
    base = document["perplexity"]["dispatch off"]["perplexity"]
    for name, found in document["perplexity"].items():
        paths = ", ".join(f"{path} {count}" for path, count in found["paths"].items())
        away = found["perplexity"] / base - 1
        lines.append(f"  {name:14s} {found['perplexity']:9.4f} {away:+9.4%} of native  ({paths})")
    prefill = "".join(f"{f'prefill {n}':>14s}" for n in PREFILLS)
    lines.append(f"{'tokens/s':28s}{'decode graph':>14s}{'decode eager':>14s}{prefill}")
    for name, rates in document["rates"].items():
        cells = [rates["decode graph"], rates["decode eager"], *(rates["prefill"].get(n) for n in PREFILLS)]
        told = ["-" if cell is None else f"{cell:,.0f}" for cell in cells]
        lines.append(f"{name:28s}" + "".join(f"{cell:>14s}" for cell in told))
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompt", "prompt_tokens", default=128, help="Tokens of the prompt before decoding.")
@click.option("--new", default=256, help="Tokens that are decoded.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Result file (JSON).")
def main(folder: Path, prompt_tokens: int, new: int, output: Path | None) -> None:
    """Measure a packed model on a GPU."""
    reason = unavailable_reason()
    if reason is not None:
        click.echo(f"error: {reason}", err=True)
        sys.exit(2)
    smi_before = read_nvidia_smi()
    model = models.load(folder, device="gpu")
    tokens = models.Tokenizer.load(folder).encode(models.sample_text())
    long = (tokens * (PREFILLS[-1] // len(tokens) + 1))[: PREFILLS[-1]]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": repr(model),
        "text_tokens": len(tokens),
        "prompt": prompt_tokens,
        "new": new,
        "perplexity": perplexities(model, tokens),
        "rates": {"marlin": ours(model, tokens[:prompt_tokens], long, new)},
    }
    cached(model, keep=True)
    document["rates"]["fp16_cache (cuBLAS)"] = ours(model, tokens[:prompt_tokens], long, new)
    cached(model, keep=False)
    with mj.dispatch(False):
        document["rates"]["native"] = {
            "decode graph": decode_rate(model, tokens[:prompt_tokens], 32, graph=True),
            "decode eager": decode_rate(model, tokens[:prompt_tokens], 32, graph=False),
            "prefill": {
                n: prefill_rate(model, long[:n]) for n in PREFILLS if n <= 512
            },  # the rest takes long
        }
    document["rates"]["PyTorch fp16"] = pytorch(model, tokens[:prompt_tokens], long, new)
    document["environment"] = environment(smi_before, read_nvidia_smi())
    click.echo(table(document))
    if output is not None:
        write_text(output, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
