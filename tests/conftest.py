"""Tests marked ``gpu`` (all of tests/gpu) are skipped, with the reason, where there is no CUDA device."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
from helpers import no_gpu_reason

from marlin_jit import rounding


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := no_gpu_reason()):
        pytest.skip(reason)


@pytest.fixture
def fresh_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No switch, count, refusal or logged path of another test."""
    engine = import_module("marlin_jit.dispatch")  # the package's attribute of that name is the function
    monkeypatch.delenv(engine.SWITCH, raising=False)
    monkeypatch.delenv(rounding.SWITCH, raising=False)
    monkeypatch.setattr(engine, "_enabled", None)
    monkeypatch.setattr(engine, "_taken", {})
    monkeypatch.setattr(engine, "_refused", {})
    monkeypatch.setattr(engine, "_logged", set())


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240731)
