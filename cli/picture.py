"""Files that ``--plot FILE`` draws to: which names there may be, and how a figure gets there.

matplotlib is imported when a picture is asked for, and not before.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

from marlin_jit.errors import MarlinJitError
from marlin_jit.formats.publish import check_destination, published

__all__ = ["check", "figure_class", "save"]

_FORMATS = {".png": "png", ".svg": "svg"}


def check(path: Path, *, force: bool) -> None:
    """Raise, before any work is done, if no picture can be drawn to `path`."""
    if path.suffix.lower() not in _FORMATS:
        raise MarlinJitError(f"{path}: --plot draws {' or '.join(_FORMATS)}, told by the end of the name")
    check_destination(path, folder=False, force=force)
    figure_class()


def figure_class() -> Any:
    """matplotlib's `Figure`, which draws without a display.

    Raises
    ------
    MarlinJitError
        matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise MarlinJitError(
            '--plot needs matplotlib: in the folder of marlin-jit run pip install ".[plot]"'
        ) from None


def save(figure: Any, path: Path, *, force: bool) -> None:
    """Write a figure; the file appears when it is complete.

    Raises
    ------
    CheckpointError
        `path` exists and may not be replaced.
    """
    name = path.suffix.lower()
    metadata = {"Date": None} if name == ".svg" else None  # the same data give the same file
    with published(path, folder=False, force=force) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure.savefig(temporary, format=_FORMATS[name], metadata=metadata)
