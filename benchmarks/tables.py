"""Markdown tables of a result file, for the README and docs/performance.md: times as measured, nothing else.

python -m benchmarks.tables benchmarks/results/FILE.json    # rewrites what stands between the markers

A file of the layers in `benchmarks.shapes` fills the tables of those; one of other layers, their table; one
of `benchmarks.alternate`, its own.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import alternate
from benchmarks.report import fraction, launches, number, ratio, validate, write_text
from benchmarks.shapes import MS, PUBLISHED, SHAPES, floor_us

ROOT = Path(__file__).parent.parent
EXCERPT = (1, 16, 64, 256, 1024, 8192)
ALTERNATED = (1, 8, 16, 24, 32, 48, 64)


def times(document: dict[str, Any]) -> dict[tuple[int, int, int], dict[str, float]]:
    """Microseconds by (K, N, M) and column; cuBLAS is the faster of its layouts."""
    table: dict[tuple[int, int, int], dict[str, float]] = {}
    for record in document["records"]:
        if record["us"] is None:
            continue
        row = table.setdefault((record["k"], record["n"], record["m"]), {})
        name = record["variant"] if record["library"] == "ours" else record["library"]
        row[name] = min(record["us"], row.get(name, float("inf")))
    return table


def markdown(
    table: dict[tuple[int, int, int], dict[str, float]], columns: Sequence[str], rows: Sequence[int] | None
) -> str:
    """A Markdown table with a row a problem.

    Column ``mma_sync`` is left out where no row has it: older files were written without.
    """
    if not any("mma_sync" in row for row in table.values()):
        columns = [column for column in columns if column != "mma_sync"]
    headings = {
        "symmetric": "symmetric",
        "mma_sync": "mma.sync",
        "asymmetric": "zero points",
        "pair": "correction pair",
        "native": "native",
        "fp16_cache": "FP16 cache",
        "cublas": "cuBLAS fp16",
        "humming": "humming",
        "vllm_marlin": "vllm_marlin (*)",
        "floor": "floor",
    }
    lines = ["| K x N | M | " + " | ".join(headings[c] for c in columns) + " |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for (k, n, m), row in sorted(table.items()):
        if rows is not None and m not in rows:
            continue
        extra = {"vllm_marlin": PUBLISHED[k, n, m].vllm_marlin, "floor": floor_us(m, k, n)}
        cells = [number(row.get(c, extra.get(c))) for c in columns]
        lines.append(f"| {k} x {n} | {m} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def few_rows(document: dict[str, Any]) -> str:
    """A Markdown table of chained and single launches over the floor, and the best rival."""
    lines = ["| K x N | M | floor | chain | / floor | single | / floor | best rival | chain / rival |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for (k, n, *_), rows in sorted(launches(document).items()):
        for row in rows:
            which = "cuBLAS" if row.which == "cublas" else row.which
            cells = [*row.cells, f"{number(row.rival)} ({which})", fraction(ratio(row.chain, row.rival))]
            lines.append(f"| {k} x {n} | {row.m} | {' | '.join(cells)} |")
    return "\n".join(lines)


def product_of(shapes: Sequence[tuple[int, int]], ms: Sequence[int]) -> list[tuple[int, int, int]]:
    """(K, N, M) of every layer with every number of rows."""
    return [(k, n, m) for k, n in shapes for m in ms]


def alternation(document: dict[str, Any]) -> str:
    """A Markdown table of what zero points, activation order and batch invariance cost."""
    lines = ["| K x N | M | symmetric | zero points | activation order | batch invariant |"]
    lines.append("|---|---|---|---|---|---|")
    for point in document["points"]:
        taken = point["us"]
        ordered, _ = alternate.costs(taken, alternate.ORDERED)
        zeros, invariant = (alternate.costs(taken, name)[1] for name in ("asymmetric", alternate.INVARIANT))
        cells = [f"{statistics.median(taken[alternate.BASE]):.1f}", f"{100 * zeros:+.1f}%"]
        cells += [f"{ordered:+.1f} us", f"{100 * invariant:+.1f}%"]
        lines.append(f"| {point['k']} x {point['n']} | {point['m']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def replace_between(text: str, marker: str, body: str) -> str:
    """`text` with what stands between ``<!-- marker -->`` and ``<!-- /marker -->`` replaced."""
    pattern = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)", re.DOTALL)
    changed, count = pattern.subn(lambda match: f"{match[1]}\n{body}\n\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"expected one pair of markers {marker!r}, found {count}")
    return changed


def pages(document: dict[str, Any], name: str) -> dict[Path, str]:
    """The pages that show numbers, with those of a result file called `name`.

    Raises
    ------
    ValueError
        The file is not what the pages say of it: a complete run, float16, groups of 128, beside both rivals.
    """
    performance = ROOT / "docs/performance.md"
    if isinstance(document, dict) and document.get("schema") == alternate.SCHEMA:
        method, points = document["method"], document["points"]
        if (method["dtype"], method["group_size"]) != ("float16", 128):
            raise ValueError(f"{name}: the page shows float16 with groups of 128")
        if {(p["k"], p["n"], p["m"]) for p in points} != set(product_of(SHAPES, ALTERNATED)):
            raise ValueError(f"{name}: the page shows M = {ALTERNATED} on the layers {SHAPES}")
        return {performance: replace_between(performance.read_text(), "alternation", alternation(document))}
    validate(document)
    kinds = {(record["dtype"], record["group_size"]) for record in document["records"]}
    if not document["complete"] or kinds != {("float16", 128)}:
        raise ValueError(f"{name}: the pages show a complete run of float16 with groups of 128")
    versions = document["libraries"]
    if "cuda" not in versions.get("cublas", {}) or "humming" not in versions.get("humming", {}):
        raise ValueError(f"{name}: the pages show a run beside cuBLAS, through PyTorch, and humming-kernels")
    table = times(document)
    if not {(k, n) for k, n, _ in table} <= set(SHAPES):
        return {performance: replace_between(performance.read_text(), "other layers", few_rows(document))}
    if lacking := [point for point in product_of(SHAPES, MS) if "symmetric" not in table.get(point, {})]:
        raise ValueError(f"{name}: the pages show all layers and M, and it lacks {lacking}")
    source = (
        f"Microseconds a launch, float16, group 128, cold L2 cache, measured on an {_gpu(document)} in one "
        f"run on {document['date'][:10]} with CUDA {versions['cublas']['cuda']}: "
        f"`benchmarks/results/{name}`. humming is humming-kernels {versions['humming']['humming']}, "
        "cuBLAS the faster of two layouts through PyTorch. (*) vLLM 0.26.0's Marlin, measured on an H200 in "
        "another run."
    )
    short = ("symmetric", "mma_sync", "asymmetric", "cublas", "humming", "vllm_marlin")
    long = (
        "floor",
        "symmetric",
        "mma_sync",
        "asymmetric",
        "pair",
        "native",
        "fp16_cache",
        "cublas",
        "humming",
        "vllm_marlin",
    )
    result = {}
    for path, columns, rows in (
        (ROOT / "README.md", short, EXCERPT),
        (performance, long, None),
    ):
        body = f"{source}\n\n{markdown(table, columns, rows)}"
        result[path] = replace_between(path.read_text(), "numbers", body)
    result[performance] = replace_between(result[performance], "few rows", few_rows(document))
    return result


def _gpu(document: dict[str, Any]) -> str:
    return str(document["environment"]["nvidia_smi_before"]["name"]).removeprefix("NVIDIA ")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Put the numbers of FILE, of benchmarks.run or .alternate, into the README and docs/performance.md."""
    try:
        found = pages(json.loads(file.read_text()), file.name)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    for path, text in found.items():
        write_text(path, text)
        click.echo(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
