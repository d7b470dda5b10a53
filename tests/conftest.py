"""Tests marked ``gpu`` (all of tests/gpu) are skipped, with the reason, where there is no CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import no_gpu_reason


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := no_gpu_reason()):
        pytest.skip(reason)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240731)
