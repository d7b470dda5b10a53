"""The text that is scored where none is named: the opening of Moby-Dick by Herman Melville (1851)."""

from __future__ import annotations

from importlib import resources

__all__ = ["SAMPLE", "sample_text"]

SAMPLE = "moby_dick.txt"
"""About a thousand tokens; in the public domain."""


def sample_text() -> str:
    """Return the text, without the end of its last line."""
    return resources.files(__package__).joinpath(SAMPLE).read_text(encoding="utf-8").rstrip("\n")
