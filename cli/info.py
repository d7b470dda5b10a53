"""``marlin-jit info``."""

from __future__ import annotations

import platform
from typing import Any

import click
import numpy as np
from click.core import ParameterSource

import marlin_jit
from marlin_jit import _disk_cache, jit
from marlin_jit._array import BFLOAT16, FLOAT16
from marlin_jit._cupy import import_cupy
from marlin_jit.cli.show import counted, print_json, print_line, size
from marlin_jit.device import DeviceInfo, device_info, unavailable_reason
from marlin_jit.errors import DeviceError, MarlinJitError
from marlin_jit.launch import architectures
from marlin_jit.layout import group_count, padded_shape
from marlin_jit.weight import MarlinWeight

__all__ = ["info"]

_DTYPES = {"float16": FLOAT16, "bfloat16": BFLOAT16}


@click.command()
@click.option("--m", type=click.IntRange(1), help="Rows of x: also show which path a product would take.")
@click.option("--k", type=click.IntRange(1), help="Input features of its weight. [default: 4096]")
@click.option("--n", type=click.IntRange(1), help="Output features of its weight. [default: 4096]")
@click.option(
    "--group",
    type=click.Choice(["32", "64", "128", "-1"]),
    default="128",
    show_default=True,
    help="Group size of its weight.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(_DTYPES)),
    default="float16",
    show_default=True,
    help="Of x and the scales.",
)
@click.option("--symmetric", is_flag=True, help="A weight without zero points.")
@click.option("--clear-cache", is_flag=True, help="Remove all compiled kernels from the cache.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def info(
    ctx: click.Context,
    m: int | None,
    k: int | None,
    n: int | None,
    group: str,
    dtype: str,
    symmetric: bool,
    clear_cache: bool,
    as_json: bool,
) -> None:
    """Show the device, the driver, the compiler and the cache of compiled kernels.

    Works without a GPU, and then says what is missing. With --m, --k or --n it also shows which path a
    product of that size would take on this machine, and why.
    """
    for option in ("group", "dtype", "symmetric"):
        given = ctx.get_parameter_source(option) is not ParameterSource.DEFAULT
        if given and not (m or k or n):
            raise click.UsageError(f"--{option} describes a product: also give --m, --k or --n")
    found = _environment()
    if clear_cache:
        found["cache"]["removed"] = _disk_cache.clear()
        found["cache"] |= _cache()
    explanation = None
    if m or k or n:
        explanation = _explain(m or 1, k or 4096, n or 4096, int(group), dtype, symmetric)
        found["dispatch"] = {
            "m": m or 1,
            "k": k or 4096,
            "n": n or 4096,
            "group_size": int(group),
            "dtype": dtype,
            "symmetric": symmetric,
            "path": explanation.path,
            "paths": [
                {"path": answer.path, "gates": dict(answer.gates), "chosen": answer.chosen}
                for answer in explanation.answers
            ],
        }
    if as_json:
        print_json(found)
        return
    _print(found)
    if explanation is not None:
        asked = found["dispatch"]
        click.echo()
        print_line(
            f"x [{asked['m']}, {asked['k']}] @ w [{asked['k']}, {asked['n']}], {dtype}, group size {group}, "
            f"{'symmetric' if symmetric else 'asymmetric'}:"
        )
        click.echo(str(explanation))


def _environment() -> dict[str, Any]:
    """Everything that is found, None where it is not there, and why it is not."""
    found: dict[str, Any] = {
        "marlin_jit": marlin_jit.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": None,
        "nvrtc": None,
        "architectures": [],
        "driver": None,
        "devices": [],
        "missing": [],
        "cache": _cache(),
    }
    try:
        cupy = import_cupy()
    except DeviceError as error:
        found["missing"].append(str(error))
        return found
    found["cupy"] = cupy.__version__
    try:
        found["nvrtc"] = ".".join(map(str, jit.nvrtc_version()))
        found["architectures"] = [
            arch
            for number in jit.supported_archs()
            if (arch := jit.arch_for(divmod(number, 10))) in architectures()
        ]
    except MarlinJitError as error:
        found["missing"].append(str(error))
    found["driver"] = _cuda_version(cupy.cuda.runtime.driverGetVersion())
    reason = unavailable_reason()
    if reason is None:
        found["devices"] = [_device(device_info(i)) for i in range(cupy.cuda.runtime.getDeviceCount())]
    else:
        found["missing"].append(reason)
    return found


def _cuda_version(number: int) -> str | None:
    """CUDA's 12090 as 12.9; None for the 0 that stands for no driver."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _device(device: DeviceInfo) -> dict[str, Any]:
    try:
        arch = f"sm_{jit.arch_for(device.capability, jit.supported_archs())}"
    except MarlinJitError:  # too old, or newer than this NVRTC
        arch = None
    return {
        "id": device.id,
        "name": device.name,
        "capability": ".".join(map(str, device.capability)),
        "architecture": arch,
        "sm_count": device.sm_count,
        "smem_per_block": device.smem_per_block,
        "smem_per_sm": device.smem_per_sm,
        "l2_bytes": device.l2_bytes,
    }


def _cache() -> dict[str, Any]:
    directory = jit.cache_directory()
    entries, nbytes = _disk_cache.usage()
    return {"directory": None if directory is None else str(directory), "entries": entries, "bytes": nbytes}


def _explain(m: int, k: int, n: int, group_size: int, dtype: str, symmetric: bool) -> marlin_jit.Explanation:
    kp, np_ = padded_shape(k, n, group_size)
    groups = group_count(kp, group_size)
    weight = MarlinWeight(
        B=np.zeros((kp // 16, 2 * np_), np.int32),
        scales=np.zeros((groups, np_), _DTYPES[dtype]),
        delta=None if symmetric else np.zeros((groups, np_), np.float32),
        shape=(k, n),
        group_size=group_size,
    )
    x = np.zeros((m, k), _DTYPES[dtype])
    if unavailable_reason() is not None:
        return marlin_jit.explain(x, weight)
    return marlin_jit.explain(import_cupy().asarray(x), weight.to_device())


def _print(found: dict[str, Any]) -> None:
    print_line(
        f"marlin-jit {found['marlin_jit']}, Python {found['python']}, NumPy {found['numpy']}, "
        f"CuPy {found['cupy'] or 'not installed'}"
    )
    archs = ", ".join(f"sm_{arch}" for arch in found["architectures"])
    print_line(f"NVRTC: {found['nvrtc'] or 'not found'}{' for ' + archs if archs else ''}")
    print_line(f"driver: {'CUDA ' + found['driver'] if found['driver'] else 'not found'}")
    for device in found["devices"]:
        print_line(
            f"device {device['id']}: {device['name']}, {device['architecture'] or 'not supported'}, "
            f"{device['sm_count']} SMs, {size(device['l2_bytes'])} L2, "
            f"{size(device['smem_per_block'])} shared memory a block"
        )
    for reason in found["missing"]:
        print_line(f"missing: {reason}")
    if not found["devices"]:
        both = "packing and compiling ahead work here"
        works = both if found["nvrtc"] else "packing works here, compiling ahead does not"
        print_line(f"no GPU: NumPy arrays take the reference path; {works}")
    cache = found["cache"]
    removed = f" ({cache['removed']} removed)" if "removed" in cache else ""
    where = cache["directory"] or "memory only, as no directory can be written"
    print_line(f"cache: {where}, {counted(cache['entries'], 'kernel')}, {size(cache['bytes'])}{removed}")
