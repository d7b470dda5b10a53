"""Every exception the package raises on purpose.

All of them are :class:`MarlinJitError`; each is also the built-in exception a NumPy user would expect, so
``except ValueError`` and ``except TypeError`` keep working.
"""

from __future__ import annotations


class MarlinJitError(Exception):
    """Base class of all errors of this package."""


class ShapeError(MarlinJitError, ValueError):
    """Sizes that do not fit together: array shapes, group sizes, group indices."""


class DTypeError(MarlinJitError, TypeError):
    """An array of the wrong kind: not NumPy or CuPy, a mix of both, or a dtype that is not accepted."""


class ValueRangeError(MarlinJitError, ValueError):
    """Values that cannot be right: codes outside 0..15, NaN or infinite scales, results that overflow."""


class CheckpointError(MarlinJitError, ValueError):
    """A file that cannot be read: damaged, incomplete, or of a kind that is not supported.

    The message is one line that cannot steer a terminal: names in it come from strangers.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(
            "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        )


class DeviceError(MarlinJitError, ValueError):
    """Arrays on the wrong device or on different devices, or no usable device at all."""


class CompileError(MarlinJitError, RuntimeError):
    """A kernel that NVRTC could not compile; the message carries its log."""


class LaunchError(MarlinJitError, RuntimeError):
    """A kernel that the driver refused to launch."""
