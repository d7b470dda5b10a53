"""Importing CuPy: late, once, and with an error that says what to install.

CuPy is an optional dependency, needed only where a GPU (or NVRTC) is. Everything that needs it calls
`import_cupy` inside a function, so that ``import marlin_jit`` never touches CuPy.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from marlin_jit.errors import DeviceError

INSTALL_HINT = (
    'in the folder of marlin-jit run pip install ".[cuda12]" (or ".[cuda13]"), or anywhere '
    'pip install cupy-cuda12x "cuda-toolkit[nvrtc,cudart]==12.*"'
)


def import_cupy() -> Any:
    """Return the ``cupy`` module, imported at the first call.

    Importing CuPy creates its kernel cache under the home directory and fails where it cannot. If no
    cache directory can be written there (and the user named none), a private temporary one is named in
    ``CUPY_CACHE_DIR`` first; the variable stays set for this process and its children.

    Raises
    ------
    DeviceError
        CuPy is not installed, or is installed but cannot be imported. The message says what to do.
    """
    module = sys.modules.get("cupy")
    if module is not None:
        return module
    _choose_cupy_cache()
    try:
        with warnings.catch_warnings():
            # On a machine without a driver CuPy only warns; what needs a device raises later, with a reason.
            warnings.filterwarnings("ignore", message=".*CUDA path could not be detected.*")
            import cupy
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            raise DeviceError(f"CuPy is not installed: {INSTALL_HINT}") from error
        raise DeviceError(f"CuPy cannot be imported ({error}): {INSTALL_HINT}") from error
    except ImportError as error:
        raise DeviceError(f"CuPy cannot be imported ({error}): {INSTALL_HINT}") from error
    except OSError as error:
        raise DeviceError(
            f"CuPy cannot create its cache directory ({error}): set CUPY_CACHE_DIR to a writable directory"
        ) from error
    return cupy


def private_temp_dir(name: str) -> Path | None:
    """A directory of this user alone under the system's temporary directory, or None.

    The temporary directory is shared by all users, so a directory found there counts only when it
    belongs to this user and nobody else can enter it; else another user could plant files in it.

    Parameters
    ----------
    name : str
        What the directory is for; the user id is appended.
    """
    uid = os.getuid() if hasattr(os, "getuid") else None
    try:
        path = Path(tempfile.gettempdir()) / (name if uid is None else f"{name}-{uid}")
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode):
        return None
    if uid is not None and (status.st_uid != uid or status.st_mode & 0o077):
        return None
    return path


def _choose_cupy_cache() -> None:
    """Name a temporary cache directory for CuPy if the one under the home directory cannot be written."""
    if os.environ.get("CUPY_CACHE_DIR"):
        return
    home_cache = Path(os.path.expanduser("~/.cupy/kernel_cache"))
    try:
        home_cache.mkdir(parents=True, exist_ok=True)
        if os.access(home_cache, os.W_OK | os.X_OK):
            return
    except OSError:
        pass
    fallback = private_temp_dir("marlin-jit-cupy")
    if fallback is not None:
        os.environ["CUPY_CACHE_DIR"] = str(fallback)
