"""Files to files: `marlin-jit pack` of a synthetic checkpoint of several GB, beside `cp` of the same files.

python -m benchmarks.packing FOLDER [--blocks 8] [--jobs 1] [--device cpu]

Writes to FOLDER a GPTQ checkpoint (v2, groups of 128) whose blocks have the shapes of a 70-billion-parameter
Llama, one file a block, packs it in a process of its own and prints time, GB/s of the source's bytes and that
process's peak memory. The files are removed in the end.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
from safetensors.numpy import save_file

HIDDEN, KV, FFN, GROUP = 8192, 1024, 28672, 128
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, FFN),
    "mlp.up_proj": (HIDDEN, FFN),
    "mlp.down_proj": (FFN, HIDDEN),
}
"""(K, N) of the layers of a block."""


def make_checkpoint(folder: Path, blocks: int) -> int:
    """Write the checkpoint; return its bytes."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    weight_map, total = {}, 0
    for block in range(blocks):
        tensors = {}
        for name, (K, N) in SHAPES.items():
            prefix = f"model.layers.{block}.{name}"
            words = rng.integers(-(2**31), 2**31, (K // 8, N), np.int64).astype(np.int32)
            tensors[f"{prefix}.qweight"] = words
            tensors[f"{prefix}.qzeros"] = rng.integers(
                -(2**31), 2**31, (K // GROUP, N // 8), np.int64
            ).astype(np.int32)
            tensors[f"{prefix}.scales"] = rng.uniform(0.005, 0.015, (K // GROUP, N)).astype(np.float16)
        tensors[f"model.layers.{block}.input_layernorm.weight"] = np.ones(HIDDEN, np.float16)
        shard = f"model-{block + 1:05d}-of-{blocks:05d}.safetensors"
        save_file(tensors, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
        total += sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
    quantization["checkpoint_format"] = "gptq_v2"
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return total


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds, and the largest peak memory in GB of any child so far."""
    start = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--blocks", default=8, help="0.46 GB each.")
@click.option("--jobs", multiple=True, type=int, default=(1,), help="May be repeated.")
@click.option("--device", default="cpu", help="As for `marlin-jit pack`.")
def main(folder: Path, blocks: int, jobs: tuple[int, ...], device: str) -> None:
    """Measure packing from file to file."""
    folder.mkdir(parents=True, exist_ok=True)
    source, copy, packed = folder / "source", folder / "copy", folder / "packed"
    try:
        nbytes = make_checkpoint(source, blocks)
        seconds, _ = timed(["cp", "-r", str(source), str(copy)])
        click.echo(f"{nbytes / 1e9:.2f} GB; cp: {seconds:.1f} s, {nbytes / 1e9 / seconds:.2f} GB/s", err=True)
        shutil.rmtree(copy)
        for count in sorted(jobs):  # the peak is the largest of all children so far
            command = [sys.executable, "-m", "marlin_jit", "pack", str(source), str(packed), "--quiet"]
            seconds, peak = timed([*command, "--jobs", str(count), "--device", device])
            click.echo(
                f"pack --jobs {count} --device {device}: {seconds:.1f} s, {nbytes / 1e9 / seconds:.2f} GB/s, "
                f"peak memory {peak:.2f} GB"
            )
            shutil.rmtree(packed)
    finally:
        for made in (source, copy, packed):
            shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    main()
