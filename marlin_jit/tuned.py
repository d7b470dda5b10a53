"""Plans that were measured: a file for each kind of GPU, which `tune` writes and `matmul` reads.

The planner's model chooses a plan within a few per cent of the best one. Where a file holds a plan for
exactly a product's problem, that plan is taken instead. A file is data, not trusted: a plan counts only if
the planner lists the very same one for the problem, and a file written for other kernels counts for nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from marlin_jit import _disk_cache, jit
from marlin_jit._environment import value_of
from marlin_jit.errors import MarlinJitError
from marlin_jit.plan import Limits, Plan, Problem, Zeros, choose, plans

logger = logging.getLogger(__name__)

VARIABLE = "MARLIN_JIT_TUNED"
"""Environment variable: the file to use, or 0 for none. Read once, at a process's first product."""

SCHEMA = "marlin-jit-tuned/1"

_MOST_BYTES = 64 << 20
"""Of a file that is read: 100000 plans take less."""


@dataclass(frozen=True)
class Tuning:
    """What was measured for one problem.

    Attributes
    ----------
    problem : Problem
    plan : Plan
        The fastest one; the planner's own, unless another one was faster by more than noise.
    us, planned_us : float
        Microseconds of a launch with it, and with the planner's own.
    tried : int
        Plans that were timed.
    """

    problem: Problem
    plan: Plan
    us: float
    planned_us: float
    tried: int


def identity(plan: Plan) -> dict[str, Any]:
    """What tells a plan from all others of its problem, as JSON types."""
    return {
        "kernel": plan.build.name,
        "macros": plan.build.defines,
        "grid": list(plan.grid),
        "block": list(plan.block),
        "split_tiles": plan.split_tiles,
        "each": plan.each,
        "cluster": plan.cluster,
    }


def path_for(gpu: str) -> Path | None:
    """The file for a kind of GPU, whether or not it exists; None where none is used or can be written.

    It is the one that `VARIABLE` names, else one of the name ``tuned-<GPU>.json`` in the directory that
    kernels are written to, else in the first of the others that has it: what was measured here comes before
    what a read-only cache brought along.
    """
    places = _places(gpu)
    # Path.is_file raises where a directory may not be searched.
    return next((path for path in places if os.path.isfile(path)), places[0] if places else None)


def destination(gpu: str) -> Path:
    """Where `record` writes; its directory is made.

    Raises
    ------
    MarlinJitError
        No file is used here, or it cannot be written.
    """
    places = _places(gpu)
    if not places:
        raise MarlinJitError(
            f"tuned plans have nowhere to go: {VARIABLE}=0, or no cache directory can be written"
        )
    path = places[0]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MarlinJitError(f"{path} cannot be written: {error}") from error
    what = None
    if os.path.isdir(path):
        what = "it is a directory"
    elif os.path.exists(path) and not os.path.isfile(path):  # a device, which a rename would replace
        what = "it is not a file"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        what = "its directory cannot be written to"
    if what is not None:
        raise MarlinJitError(f"{path} cannot be written: {what}")
    return path


def _places(gpu: str) -> list[Path]:
    """Where the file may be, and first where it is written; nowhere if none is used."""
    given = value_of(VARIABLE, "")
    if given:
        return [] if given == "0" else [Path(os.path.expanduser(given))]
    name = f"tuned-{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    directories = _disk_cache.directories()
    return [directory / name for directory in (*directories[-1:], *directories[:-1])]


def plan_for(problem: Problem, limits: Limits, gpu: str) -> Plan:
    """The plan that was measured for this problem on this kind of GPU, else the planner's."""
    known = _known(gpu)
    if not known or problem not in known:
        return choose(problem, limits)
    return _checked(problem, limits, gpu)


@lru_cache(maxsize=1 << 12)
def _checked(problem: Problem, limits: Limits, gpu: str) -> Plan:
    wanted = _known(gpu).get(problem)
    if wanted is None:  # another thread has just recorded that the planner's own is the best
        return choose(problem, limits)
    for plan in plans(problem, limits):
        if identity(plan) == wanted:
            return plan
    logger.warning("no plan for %s is the one in %s: the planner's is taken", problem, path_for(gpu))
    return choose(problem, limits)


@lru_cache(maxsize=64)
def _known(gpu: str) -> dict[Problem, dict[str, Any]]:
    """Plans by problem; none if there is no file, or (with a warning) if it cannot be used."""
    path = path_for(gpu)
    if path is None:
        return {}
    try:
        return _read(path, gpu)
    except FileNotFoundError:
        if value_of(VARIABLE, ""):
            logger.warning("%s names %s, which does not exist: no tuned plans are used", VARIABLE, path)
        return {}
    except (OSError, ValueError) as error:
        logger.warning("tuned plans are not used: %s", error)
        return {}


def _read(path: Path, gpu: str) -> dict[Problem, dict[str, Any]]:
    if path.is_fifo():  # to open it would wait for a writer
        raise ValueError(f"{path} is a pipe")
    with open(path, "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} is not a file of tuned plans: it has more than {_MOST_BYTES} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    try:
        schema, name, kernels, entries = (document[key] for key in ("schema", "gpu", "kernels", "tuned"))
        known = schema == SCHEMA and name == gpu and kernels == jit.sources_key()
        found = {_problem(entry["problem"]): dict(entry["plan"]) for entry in entries if known}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of tuned plans: {error!r}") from error
    if schema != SCHEMA or name != gpu:
        raise ValueError(f"{path} is {schema!r} of {name!r}, not {SCHEMA!r} of {gpu!r}")
    if not known:
        raise ValueError(f"{path} was measured with other kernels than these: run marlin-jit tune again")
    return found


def _problem(fields: dict[str, Any]) -> Problem:
    return Problem(**{**fields, "zeros": Zeros(fields["zeros"])})


def record(tunings: Iterable[Tuning], gpu: str) -> Path:
    """Add to the file what was measured, in place of what it held for the same problems.

    Problems for which the planner's own plan was the best are taken out of it. Products that this process
    repeats (`marlin_jit.repeat`) keep the plan that they had. Others may record at the same time.

    Raises
    ------
    MarlinJitError
        No file is used here, or it cannot be written.
    """
    path = destination(gpu)
    try:
        with _alone_in(path.parent):
            _write(path, json.dumps(_document(tunings, gpu, _held(gpu)), indent=1) + "\n")
    except OSError as error:
        raise MarlinJitError(f"{path} cannot be written: {error}") from error
    _known.cache_clear()
    _checked.cache_clear()
    return path


def _held(gpu: str) -> dict[Problem, dict[str, Any]]:
    """Plans that the file holds until now; none, with a warning, if it cannot be used."""
    path = path_for(gpu)
    try:
        return {} if path is None else _read(path, gpu)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("tuned plans are begun anew: %s", error)
        return {}


def _document(tunings: Iterable[Tuning], gpu: str, held: dict[Problem, dict[str, Any]]) -> dict[str, Any]:
    figures: dict[Problem, dict[str, float]] = {}
    for tuning in tunings:
        held.pop(tuning.problem, None)
        if tuning.us < tuning.planned_us:
            held[tuning.problem] = identity(tuning.plan)
            figures[tuning.problem] = {"us": round(tuning.us, 3), "planned_us": round(tuning.planned_us, 3)}
    return {
        "schema": SCHEMA,
        "gpu": gpu,
        "kernels": jit.sources_key(),
        "tuned": [
            {"problem": asdict(problem) | {"zeros": int(problem.zeros)}, "plan": plan}
            | ({"measured": figures[problem]} if problem in figures else {})
            for problem, plan in held.items()
        ],
    }


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let others who record into a folder wait meanwhile, if the system knows such locks."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):  # of a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    """Beside, then renamed. (A file of `tempfile` would be for its owner alone, whatever the umask.)"""
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
