"""What several test modules share: the fixture files, comparisons to the bit, and whether a GPU is there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy, and so safetensors, bfloat16)
import numpy as np
from safetensors.numpy import load_file

FIXTURES = Path(__file__).parent / "fixtures"


class PlayedTime:
    """What every stand-in for a `marlin_jit.timing.Timer` has: a time that the test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def run(self, body: Any) -> None:
        body()

    def mark(self) -> float:
        return self.now

    def elapsed_us(self, start: float, stop: float) -> float:
        return stop - start

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """One folder of tests/fixtures: what a tool wrote and what its own decoder reads (see INDEX.md there)."""

    path: Path

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def info(self) -> dict[str, Any]:
        """case.json: K, N, group_size, prefix of the tensors' names and more."""
        return json.loads((self.path / "case.json").read_text())

    @property
    def expected(self) -> dict[str, np.ndarray]:
        """expected.npz: W [K, N], and codes, scales, zeros in plain order where there are."""
        with np.load(self.path / "expected.npz") as arrays:
            return dict(arrays)

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Tensors of model.safetensors without the prefix of a single-layer case."""
        prefix = self.info["prefix"] + "."
        return {k.removeprefix(prefix): v for k, v in load_file(self.path / "model.safetensors").items()}


def cases(pattern: str) -> list[Case]:
    """Fixture folders that match, e.g. ``marlin/orig_*``; never an empty list."""
    found = [Case(path) for path in sorted(FIXTURES.glob(pattern)) if path.is_dir()]
    assert found, f"no fixture matches {pattern}"
    return found


def case_id(case: Case) -> str:
    return case.name


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, zero_sign: bool = True) -> None:
    """Same dtype, shape and bits; without `zero_sign`, -0 and 0 count as the same."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if not zero_sign:
        actual, expected = actual + actual.dtype.type(0), expected + expected.dtype.type(0)  # -0 + 0 = 0
    unsigned = np.dtype(f"u{actual.dtype.itemsize}")
    same = np.ascontiguousarray(actual).view(unsigned) == np.ascontiguousarray(expected).view(unsigned)
    if not same.all():
        where = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(
            f"{(~same).sum()} differ; {where}: {actual[where]!r}, expected {expected[where]!r}"
        )


@cache
def no_gpu_reason() -> str | None:
    """Why GPU tests cannot run here, or None where they can."""
    try:
        import cupy
    except (ImportError, OSError) as error:
        return f"CuPy cannot be imported: {error}"
    if not cupy.cuda.is_available():
        return "no CUDA device"
    return None


def random_codes(rng: np.random.Generator, K: int, N: int) -> np.ndarray:
    return rng.integers(0, 16, (K, N), dtype=np.uint8)


def random_scales(rng: np.random.Generator, groups: int, N: int, dtype: Any = np.float16) -> np.ndarray:
    """Scales of both signs and many magnitudes, with zeros and (in float16) subnormal ones among them."""
    scale = rng.standard_normal((groups, N)) * 2.0 ** rng.integers(-22, 4, (groups, N))
    scale[rng.random((groups, N)) < 0.05] = 0
    return scale.astype(np.float32).astype(dtype)


def symmetric_codes(
    rng: np.random.Generator, K: int, N: int, group_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, float16 scales near 0.01, and ``(q - 8)*scale`` in float64."""
    groups = 1 if group_size == -1 else K // group_size
    q = random_codes(rng, K, N)
    scale = (0.002 + 0.02 * rng.random((groups, N))).astype(np.float16)
    return q, scale, (q.astype(np.float64) - 8) * np.repeat(scale.astype(np.float64), K // groups, axis=0)
