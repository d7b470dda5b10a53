"""Run ``marlin-jit`` inside the test process, as a shell would see it."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

from marlin_jit.cli.main import UNEXPECTED, main


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: object) -> Ran:
    """Run one command; an exception that nothing in the package expects fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main.main([str(a) for a in arguments], prog_name="marlin-jit")
        except SystemExit as done:
            code = done.code
    assert isinstance(code, int)
    assert UNEXPECTED not in err.getvalue(), err.getvalue()
    return Ran(code, out.getvalue(), err.getvalue())
