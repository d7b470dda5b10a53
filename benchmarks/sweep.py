"""Time every plan that the planner considers, beside its prediction: what its model was fitted to.

python benchmarks/sweep.py OUT.json [--m 1,16,64] [--shape 4096x4096,...] [--group 128] [--asymmetric]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from marlin_jit import launch, plan
from marlin_jit.bench import DTYPES, random_weight
from marlin_jit.device import current_device, unavailable_reason
from marlin_jit.timing import CupyTimer, plan_copies, time_launches
from marlin_jit.weight import MarlinWeight


def launcher(
    p: plan.Plan, weights: list[MarlinWeight], x: launch.Matrix, y: launch.Matrix
) -> Callable[[int], None]:
    """What launches plan `p` on copy i of the weight."""

    def run(i: int) -> None:
        launch.marlin(p, x, weights[i], None, y)

    return run


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--m", "rows", default="1,4,8,16,32,64,128,256,512,1024,2048,8192")
@click.option("--shape", "shapes", default="4096x4096,14336x4096,8192x10240,4096x28672")
@click.option("--group", default=128)
@click.option("--asymmetric", is_flag=True)
@click.option("--bf16", is_flag=True)
@click.option("--replays", default=5)
def main(out: Path, rows: str, shapes: str, group: int, asymmetric: bool, bf16: bool, replays: int) -> None:
    """Write one record a plan to OUT; print for each problem the chosen plan's time and the best."""
    reason = unavailable_reason()
    if reason is not None:
        click.echo(f"error: {reason}", err=True)
        sys.exit(2)
    import cupy

    dtype = DTYPES["bfloat16" if bf16 else "float16"]
    zeros = plan.Zeros.DELTAS if asymmetric else plan.Zeros.NONE
    limits = launch.limits_of(current_device())
    records: list[dict[str, Any]] = []
    timer = CupyTimer()
    for shape in shapes.split(","):
        k, n = (int(v) for v in shape.split("x"))
        first = random_weight(k, n, group, dtype, zeros)
        weights = [first]
        for seed in range(1, plan_copies(first.nbytes)):
            weights.append(random_weight(k, n, group, dtype, zeros, seed))
        for m in (int(v) for v in rows.split(",")):
            plans = plan.plans(launch.problem_of(m, first, asymmetric=asymmetric), limits)
            launch.load_all(plans)
            x = cupy.random.standard_normal((m, k), dtype=cupy.float32).astype(dtype)
            y = cupy.empty((m, n), dtype)
            xm, ym = launch.Matrix(x.data.ptr, k, m, k), launch.Matrix(y.data.ptr, n, m, n)
            timed = []
            for p in plans:
                run = launcher(p, weights, xm, ym)
                timing = time_launches(run, len(weights), timer, replays=replays, warmup_ms=10, point_ms=40)
                timed.append((timing.us, p))
                record = {"k": k, "n": n, "m": m, "us": timing.us, "predicted": p.microseconds}
                record |= {
                    "kernel": p.build.name,
                    "grid": p.grid,
                    "split_tiles": p.split_tiles,
                    "each": p.each,
                }
                records.append(record | dict(p.build.macros))
            chosen = timed[0][0]
            timed.sort(key=lambda pair: pair[0])
            print(f"{shape} M={m}: chosen {chosen:.1f} us, best {timed[0][0]:.1f}", flush=True)
            for us, p in timed[:4]:
                macros = " ".join(f"{name}={value}" for name, value in p.build.macros[3:])
                print(f"    {us:7.1f} (predicted {p.microseconds:.1f}) {p.build.name} {macros}", end=" ")
                print(f"grid {p.grid} split {p.split_tiles} each {p.each}", flush=True)
    out.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
