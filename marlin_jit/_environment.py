"""What environment variables may say."""

from __future__ import annotations

import os

from marlin_jit.errors import ValueRangeError

# A variable that is not set costs os.environ a microsecond, most of it for raising and catching KeyError; the
# dictionary behind it, where there is one, a tenth of that.
_RAW = getattr(os.environ, "_data", None)


def value_of(name: str, default: str) -> str:
    """What the environment has for `name` now."""
    if _RAW is not None and os.environ.encodekey(name) not in _RAW:
        return default
    return os.environ.get(name, default)


def zero_or_one(name: str, value: str) -> bool:
    """Return whether a switch is on, from the value that the environment has for `name`.

    Raises
    ------
    ValueRangeError
        Neither 0 nor 1.
    """
    if value not in ("0", "1"):
        raise ValueRangeError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"
