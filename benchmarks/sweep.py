"""Time every plan that the planner considers, beside its prediction: what the cost model is fitted to.

python benchmarks/sweep.py OUT.json [--m 1,16,64] [--shape 4096x4096,...] [--group 128] [--asymmetric] [--bf16]
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from marlin_jit import launch, plan
from marlin_jit.device import current_device
from marlin_jit.timing import CupyTimer, plan_copies, time_launches
from marlin_jit.weight import MarlinWeight


def random_weight(k: int, n: int, group: int, asymmetric: bool, dtype: Any) -> MarlinWeight:
    """Random words (every code is valid) and scales, in place: nothing is packed."""
    import cupy

    kp, np_ = plan_shape(k, n, group)
    groups = 1 if group == -1 else kp // group
    random = cupy.random.default_rng(1)
    words = random.integers(-(2**31), 2**31 - 1, (kp // 16, 2 * np_), dtype=cupy.int64).astype(cupy.int32)
    scales = (0.01 * (0.5 + random.random((groups, np_)))).astype(dtype)
    delta = (0.05 * (random.random((groups, np_)) - 0.5)).astype(cupy.float32) if asymmetric else None
    return MarlinWeight(words, scales, delta, (k, n), group)


def plan_shape(k: int, n: int, group: int) -> tuple[int, int]:
    from marlin_jit.layout import padded_shape

    return padded_shape(k, n, group)


@click.command()
@click.argument("out")
@click.option("--m", "rows", default="1,4,8,16,32,64,128,256,512,1024,2048,8192")
@click.option("--shape", "shapes", default="4096x4096,14336x4096,8192x10240,4096x28672")
@click.option("--group", default=128)
@click.option("--asymmetric", is_flag=True)
@click.option("--bf16", is_flag=True)
@click.option("--best", default=0, help="Time only that many plans of the best predicted; 0: all.")
@click.option("--replays", default=5)
def main(
    out: str, rows: str, shapes: str, group: int, asymmetric: bool, bf16: bool, best: int, replays: int
) -> None:
    """Write one record a plan to OUT and print the winner of each problem beside the chosen plan."""
    import cupy
    import ml_dtypes
    import numpy as np

    dtype = ml_dtypes.bfloat16 if bf16 else np.float16
    limits = launch.limits_of(current_device())
    records = []
    timer = CupyTimer()
    for shape in shapes.split(","):
        k, n = (int(v) for v in shape.split("x"))
        first = random_weight(k, n, group, asymmetric, dtype)
        copies = plan_copies(first.nbytes)
        weights = [first] + [random_weight(k, n, group, asymmetric, dtype) for _ in range(copies - 1)]
        deltas = [w.delta16 for w in weights]
        for m in (int(v) for v in rows.split(",")):
            problem = launch.problem_of(m, first, asymmetric=asymmetric)
            plans = plan.plans(problem, limits)[: best or None]
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(_load, plans))
            x = (cupy.random.standard_normal((m, k), dtype=cupy.float32)).astype(dtype)
            y = cupy.empty((m, n), dtype)
            xm, ym = launch.Matrix(x.data.ptr, k, m, k), launch.Matrix(y.data.ptr, n, m, n)
            timed = []
            for p in plans:

                def run(i: int, p: plan.Plan = p) -> None:
                    launch.marlin(p, xm, weights[i], deltas[i], None, ym)

                timing = time_launches(run, copies, timer, replays=replays, warmup_ms=10, point_ms=40)
                macros = dict(p.build.macros[3:])
                timed.append((timing.us, p))
                records.append(
                    dict(k=k, n=n, m=m, us=timing.us, predicted=p.microseconds, kernel=p.build.name, grid=p.grid,
                         split_tiles=p.split_tiles, **macros)
                )  # fmt: skip
            chosen = timed[0][0]
            timed.sort(key=lambda pair: pair[0])
            print(f"{shape} M={m}: chosen {chosen:.1f} us, best {timed[0][0]:.1f}", flush=True)
            for us, p in timed[:4]:
                macros_text = " ".join(f"{a}={b}" for a, b in p.build.macros[3:])
                print(f"    {us:7.1f} (predicted {p.microseconds:.1f}) {p.build.name} {macros_text} grid {p.grid}"
                      f" split {p.split_tiles}", flush=True)  # fmt: skip
    with open(out, "w") as file:
        json.dump(records, file)


def _load(p: plan.Plan) -> None:
    launch._kernel(p.build, p.smem)


if __name__ == "__main__":
    main()
