"""``python -m marlin_jit``: the same commands as ``marlin-jit``."""

from __future__ import annotations

from marlin_jit.cli.main import main

if __name__ == "__main__":
    main()
