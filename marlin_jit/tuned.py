"""Plans that were measured: a file for each kind of GPU, which `tune` writes and `matmul` reads.

The planner's model chooses a plan within a few per cent of the best one. Where a file holds a plan for
exactly a product's problem, that plan is taken instead. A file is data, not trusted: a plan counts only if
the planner lists the very same one for the problem, and a file written for other kernels counts for nothing.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable
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

    It is the one that `VARIABLE` names, else one of the name ``tuned-<GPU>.json`` in the first directory of
    the kernel cache that has it, else in the one that kernels are written to.
    """
    given = value_of(VARIABLE, "")
    if given:
        return None if given == "0" else Path(os.path.expanduser(given))
    name = f"tuned-{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
    directories = _disk_cache.directories()
    found = [directory / name for directory in directories if (directory / name).is_file()]
    return found[0] if found else directories[-1] / name if directories else None


def plan_for(problem: Problem, limits: Limits, gpu: str) -> Plan:
    """The plan that was measured for this problem on this kind of GPU, else the planner's."""
    known = _known(gpu)
    if not known or problem not in known:
        return choose(problem, limits)
    return _checked(problem, limits, gpu)


@lru_cache(maxsize=1 << 12)
def _checked(problem: Problem, limits: Limits, gpu: str) -> Plan:
    wanted = _known(gpu)[problem]
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
    try:
        document = json.loads(path.read_bytes())
        schema, kernels = document["schema"], document["kernels"]
        if schema != SCHEMA or document["gpu"] != gpu:
            raise ValueError(f"{path} is {schema!r} of {document['gpu']!r}, not {SCHEMA!r} of {gpu!r}")
        if kernels != jit.sources_key():
            raise ValueError(f"{path} was measured with other kernels than these: run marlin-jit tune again")
        return {_problem(entry["problem"]): dict(entry["plan"]) for entry in document["tuned"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of tuned plans: {error!r}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _problem(fields: dict[str, Any]) -> Problem:
    return Problem(**{**fields, "zeros": Zeros(fields["zeros"])})


def record(tunings: Iterable[Tuning], gpu: str) -> Path:
    """Add to the file what was measured, in place of what it held for the same problems.

    Problems for which the planner's own plan was the best are taken out of it. Products of this process that
    have been planned already keep their plan.

    Raises
    ------
    MarlinJitError
        No file is used here, or it cannot be written.
    """
    path = path_for(gpu)
    if path is None:
        raise MarlinJitError(
            f"tuned plans have nowhere to go: {VARIABLE}=0, or no cache directory can be written"
        )
    try:
        held = _read(path, gpu)
    except (OSError, ValueError):
        held = {}  # of other kernels, or no such file: begun anew
    figures: dict[Problem, dict[str, float]] = {}
    for tuning in tunings:
        held.pop(tuning.problem, None)
        if tuning.us < tuning.planned_us:
            held[tuning.problem] = identity(tuning.plan)
            figures[tuning.problem] = {"us": round(tuning.us, 3), "planned_us": round(tuning.planned_us, 3)}
    document = {
        "schema": SCHEMA,
        "gpu": gpu,
        "kernels": jit.sources_key(),
        "tuned": [
            {"problem": asdict(problem) | {"zeros": int(problem.zeros)}, "plan": plan}
            | ({"measured": figures[problem]} if problem in figures else {})
            for problem, plan in held.items()
        ],
    }
    _write(path, json.dumps(document, indent=1) + "\n")
    _known.cache_clear()
    _checked.cache_clear()
    return path


def _write(path: Path, text: str) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise MarlinJitError(f"{path} cannot be written: {error}") from error
