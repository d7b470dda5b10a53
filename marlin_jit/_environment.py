"""What environment variables may say."""

from __future__ import annotations

from marlin_jit.errors import ValueRangeError


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
