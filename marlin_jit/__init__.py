"""INT4 Marlin GEMM for NumPy and CuPy, compiled at first use."""

from __future__ import annotations

__version__ = "0.1.0"
