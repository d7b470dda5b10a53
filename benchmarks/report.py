"""The result file of a run, and the tables made from it.

A file is one JSON object, schema ``marlin-jit-benchmark/1``: where and how it was measured, then one record a
number. Numbers are as measured; ratios are made when a table is printed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shapes import PROVENANCE, PUBLISHED, floor_us
from marlin_jit.formats.publish import published

SCHEMA = "marlin-jit-benchmark/1"

_DOCUMENT_KEYS = {
    "schema": str, "date": str, "environment": dict, "libraries": dict, "method": dict, "published": str,
    "seconds": (int, float), "complete": bool, "records": list,
}  # fmt: skip
_RECORD_KEYS = {
    "library": str, "variant": str, "k": int, "n": int, "m": int, "group_size": int, "dtype": str,
    "us": (int, float, type(None)), "pass_us": list, "samples": list, "launches": int, "copies": int,
    "method": (str, type(None)), "error": (int, float, str, type(None)), "path": (str, type(None)),
    "reason": (str, type(None)),
}  # fmt: skip

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("sym", "ours", "symmetric"),
    ("mma.sync", "ours", "mma_sync"),
    ("asym", "ours", "asymmetric"),
    ("pair", "ours", "pair"),
    ("native", "ours", "native"),
    ("fp16c", "ours", "fp16_cache"),
    ("cuBLAS", "cublas", "best"),
    ("humming", "humming", "symmetric"),
)
"""Heading, library and variant of each column of times. cuBLAS's is the faster of its two layouts."""


def document(
    records: Sequence[dict[str, Any]],
    *,
    date: str,
    environment: dict[str, Any],
    libraries: dict[str, Any],
    method: dict[str, Any],
    seconds: float,
    complete: bool,
) -> dict[str, Any]:
    """The object that a result file holds."""
    return {
        "schema": SCHEMA,
        "date": date,
        "environment": environment,
        "libraries": libraries,
        "method": method,
        "published": PROVENANCE,
        "seconds": round(seconds, 1),
        "complete": complete,
        "records": list(records),
    }


def validate(data: Any) -> None:
    """Raise ValueError, naming the place, unless `data` is a result file of this schema."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"not a result file: its schema must be {SCHEMA!r}")
    _check(data, _DOCUMENT_KEYS, "file")
    for i, record in enumerate(data["records"]):
        _check(record, _RECORD_KEYS, f"record {i}")
        us = record["us"]
        if (us is None) == (record["reason"] is None):
            raise ValueError(f"record {i}: it must have either us or a reason")
        if us is not None and not (math.isfinite(us) and us > 0 and record["samples"]):
            raise ValueError(f"record {i}: us is {us!r} with {len(record['samples'])} samples")


def _check(data: Any, keys: dict[str, Any], where: str) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: must be an object")
    missing, unknown = sorted(set(keys) - set(data)), sorted(set(data) - set(keys))
    if missing or unknown:
        raise ValueError(f"{where}: missing {missing}, unknown {unknown}")
    for key, kind in keys.items():
        if not isinstance(data[key], kind) or (isinstance(data[key], bool) and kind is not bool):
            raise ValueError(f"{where}: {key} is {data[key]!r}")


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a result file beside `path` and rename it, so that a kill leaves the older one whole."""
    validate(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, compact(data, "records") + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file, which appears when it is complete; where `path` is a link, what it leads to."""
    with published(path.resolve(), folder=False, force=True) as temporary:
        temporary.write_text(text)


def compact(data: dict[str, Any], records: str) -> str:
    """JSON that ends with the list called `records`, one of them a line: readable, and small in a diff."""
    head = {key: value for key, value in data.items() if key != records}
    text = json.dumps(head, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(record, allow_nan=False) for record in data[records])
    return f'{text},\n "{records}": [\n{lines}\n ]\n}}'


def read(path: Path) -> dict[str, Any]:
    """Read and validate a result file."""
    data = json.loads(path.read_text())
    validate(data)
    result: dict[str, Any] = data
    return result


def select(records: Iterable[dict[str, Any]], m: int, library: str, variant: str) -> float | None:
    """Microseconds of one number of one layer's records, None where there is none.

    Variant ``best`` is the least of a library's.
    """
    times = [
        r["us"]
        for r in records
        if r["m"] == m and r["library"] == library and r["us"] and variant in (r["variant"], "best")
    ]
    return min(times, default=None)


def table(data: dict[str, Any]) -> str:
    """A plain table a shape: times in microseconds, then the symmetric kernel's time over others'.

    Below 1 in a ratio column means that ours is faster. ``/floor`` is over the time of a launch that only
    moves the bytes; ``/vllm*`` is over vllm_marlin's published time, which is from another run and exists
    for fp16, group 128 alone.
    """
    ratios = ["/floor", "/vllm*", "/cuBLAS", "/humm", "asym+"]
    headings = ["M", "floor", *(c[0] for c in COLUMNS), "vllm*", *ratios]
    blocks = []
    for (k, n, group_size, dtype), mine in _layers(data).items():
        comparable = group_size == 128 and dtype == "float16"
        rows = []
        for m in dict.fromkeys(r["m"] for r in mine):
            times = {c[0]: select(mine, m, c[1], c[2]) for c in COLUMNS}
            published = PUBLISHED.get((k, n, m)) if comparable else None
            floor = floor_us(m, k, n, group_size)
            vllm = published.vllm_marlin if published else None
            sym = times["sym"]
            asym = ratio(times["asym"], sym)
            rows.append(
                [str(m), number(floor), *(number(times[c[0]]) for c in COLUMNS), number(vllm)]
                + [fraction(ratio(sym, other)) for other in (floor, vllm, times["cuBLAS"], times["humming"])]
                + ["-" if asym is None else f"{100 * (asym - 1):+.1f}%"]
            )
        title = f"K {k} x N {n}, group {group_size}, {dtype} (us)"
        blocks.append("\n".join([title, *align([headings, *rows])]))
        reasons = list(
            dict.fromkeys(f"{r['library']} {r['variant']}: {r['reason']}" for r in mine if r["reason"])
        )
        blocks[-1] += "".join(f"\n  ! {reason}" for reason in reasons[:6])
    return "\n\n".join(blocks)


@dataclass(frozen=True)
class Launches:
    """Microseconds of the symmetric kernel for a few rows, chained and single.

    A chained launch begins while the one before it ends, as in a model of such products; a single one does
    not. Beside them `floor_us`, and the fastest rival of the same run, if there is one.
    """

    m: int
    floor: float
    chain: float | None
    single: float | None
    rival: float | None
    which: str

    @property
    def cells(self) -> list[str]:
        """Of a table: the floor, and both times and what they are over it."""
        cells = [number(self.floor)]
        for us in (self.chain, self.single):
            cells += [number(us), fraction(ratio(us, self.floor))]
        return cells


def launches(data: dict[str, Any]) -> dict[tuple[int, int, int, str], list[Launches]]:
    """By layer; those without a single launch that was asked for are left out, as older files have none."""
    found = {}
    for layer, mine in _layers(data).items():
        k, n, group_size, _ = layer
        rows = []
        for m in dict.fromkeys(r["m"] for r in mine if r["library"] == "ours_single"):
            chain, single = (select(mine, m, name, "symmetric") for name in ("ours", "ours_single"))
            rivals = {name: select(mine, m, name, "best") for name in ("cublas", "humming")}
            best = min(((us, name) for name, us in rivals.items() if us), default=(None, "-"))
            rows.append(Launches(m, floor_us(m, k, n, group_size), chain, single, *best))
        if rows:
            found[layer] = rows
    return found


def launches_table(data: dict[str, Any]) -> str:
    """A plain table a shape of `launches`."""
    blocks = []
    for (k, n, group_size, dtype), rows in launches(data).items():
        headings = ["M", "floor", "chain", "/floor", "single", "/floor", "rival", "which"]
        title = f"K {k} x N {n}, group {group_size}, {dtype}: chained and single launches (us)"
        cells = [[str(row.m), *row.cells, number(row.rival), row.which] for row in rows]
        blocks.append("\n".join([title, *align([headings, *cells])]))
    return "\n\n".join(blocks)


def _layers(data: dict[str, Any]) -> dict[tuple[int, int, int, str], list[dict[str, Any]]]:
    """Records by (K, N, group size, dtype)."""
    layers: dict[tuple[int, int, int, str], list[dict[str, Any]]] = {}
    for record in data["records"]:
        layer = (record["k"], record["n"], record["group_size"], record["dtype"])
        layers.setdefault(layer, []).append(record)
    return layers


def ratio(ours: float | None, other: float | None) -> float | None:
    """`ours` over `other`, where both exist."""
    return None if ours is None or other is None else ours / other


def number(us: float | None) -> str:
    """Microseconds with the digits that mean something."""
    if us is None:
        return "-"
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def fraction(value: float | None) -> str:
    """A ratio with two decimals."""
    return "-" if value is None else f"{value:.2f}"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with every column right-aligned to its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
