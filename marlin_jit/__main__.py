"""``python -m marlin_jit``: the same commands as ``marlin-jit``."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from marlin_jit.cli.main import main
except ModuleNotFoundError as error:
    if error.name != "marlin_jit.cli":
        raise
    # The commands lie in cli/ of a checkout and are a part of the package only once it is installed.
    here = Path(__file__).resolve().parent.parent
    print(
        f"error: the commands of the copy in {here} are not installed: run `pip install -e .` there, or use "
        "an installed marlin-jit from another folder",
        file=sys.stderr,
    )
    sys.exit(2)

if __name__ == "__main__":
    main()
