"""One library in a process of its own: requests as JSON lines on stdin, answers on stdout.

Libraries share a machine but not a process, so that allocators, loaded modules and a crash stay apart. The
parent asks one worker at a time, so the device works for one library at a time.

Requests, each answered by one line:

* ``{"op": "open", "layer": {"k":, "n":, "ms":, "group_size":, "dtype":, "variants":}}``
* ``{"op": "time", "variant":, "m":, "options":}`` -> the record of a measurement
* ``{"op": "close"}``

The first line a worker writes says what it is: ``{"version": {...}}``, or ``{"missing": reason}`` and an end.
An answer with ``"fatal"`` is the last one: the device context is lost.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import IO, Any

from benchmarks.rivals import Layer, Library, Missing, make
from marlin_jit.bench import as_record

_LOST_CONTEXT = ("illegal memory access", "illegal instruction", "unspecified launch failure", "misaligned")


def answer(library: Library, request: dict[str, Any]) -> dict[str, Any]:
    """Do what `request` asks; what goes wrong becomes part of the answer."""
    started = time.perf_counter()
    try:
        if request["op"] == "open":
            library.open(Layer(**request["layer"]))
            reply: dict[str, Any] = {"version": library.version}
        elif request["op"] == "close":
            library.close()
            reply = {}
        else:
            result, path = library.measure(request["variant"], request["m"], request["options"])
            reply = as_record(result) | {"path": path}
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        reply = {"failed": " ".join(text.split())[:300]}
        if any(sign in text.lower() for sign in _LOST_CONTEXT):
            reply["fatal"] = True
    return reply | {"seconds": round(time.perf_counter() - started, 3)}


def serve(name: str, requests: IO[str], answers: IO[str]) -> None:
    """Answer `requests` until they end."""

    def write(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        library = make(name)
    except Missing as reason:
        write({"missing": str(reason)})
        return
    except Exception as error:
        traceback.print_exc()
        write({"missing": f"{type(error).__name__}: {error}".splitlines()[0]})
        return
    write({"version": library.version})
    for line in requests:
        reply = answer(library, json.loads(line))
        write(reply)
        if reply.get("fatal"):
            # A lost context makes even an orderly end hang or fail.
            os._exit(3)


if __name__ == "__main__":
    # Libraries print as they like; their output must not mix with the answers.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, channel)
