"""The programs in examples/ run; those that need a GPU or other libraries, where these are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from marlin_jit.device import unavailable_reason

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def output_of(name: str) -> str:
    run = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    return run.stdout


def error_of(output: str) -> float:
    """The error that the last line states, as a fraction."""
    return float(re.search(r"([\d.]+)% off", output.splitlines()[-1])[1]) / 100  # type: ignore[index]


def test_own_weight() -> None:
    """Rounding normal values to 4 bits in groups of 128 costs about a tenth."""
    output = output_of("own_weight.py")
    assert "MarlinWeight(1024 x 2048" in output
    assert 0.08 < error_of(output) < 0.12


def test_jax_arrays() -> None:
    pytest.importorskip("jax")
    output = output_of("jax_arrays.py")
    assert "(4, 2048) float16" in output
    assert 0.08 < error_of(output) < 0.12


@pytest.mark.gpu
@pytest.mark.skipif(unavailable_reason() is not None, reason="no CUDA device")
def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    output = output_of("torch_tensors.py")
    assert "(3, 5, 2048) torch.float16 on cuda:0" in output
    assert 0 < error_of(output) < 0.12  # a new layer's weights are uniform, which rounds better
