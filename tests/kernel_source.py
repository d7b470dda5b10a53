"""Index arithmetic read out of the kernels' own text, so that a test computes what the kernel computes.

Covers the integer subset that index formulas use: constants declared, ``if (...) return``,
``return``, the ternary operator, and division of numbers that are not negative.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import marlin_jit

KERNELS = Path(marlin_jit.__file__).parent / "kernels"


@cache
def source(name: str) -> str:
    """The text of a kernel file without comments, all white space one blank."""
    text = re.sub(r"//[^\n]*", "", (KERNELS / name).read_text())
    return re.sub(r"\s+", " ", text)


def find(name: str, pattern: str) -> re.Match[str]:
    """The one place of a kernel file that matches."""
    found = list(re.finditer(pattern, source(name)))
    assert len(found) == 1, f"{name}: {len(found)} places match {pattern!r}"
    return found[0]


def expression(text: str) -> str:
    """A C++ integer expression as a Python one."""
    text = re.sub(r"(?:static|reinterpret)_cast<\w+>", "", text)
    text = re.sub(r"!(?!=)", " not ", text)
    text = re.sub(r"\btrue\b", "True", re.sub(r"\bfalse\b", "False", text))
    text = text.replace("&&", " and ").replace("||", " or ").replace("/", "//")
    return _ternary(text).strip()


def _ternary(text: str) -> str:
    """Rewrite ``a ? b : c``, also within parentheses."""
    text = _in_parentheses(text)
    question = _top_level(text, "?")
    if question is None:
        return text
    condition, rest = text[:question], text[question + 1 :]
    depth = 0
    for i, c in enumerate(rest):
        if c in "([":
            depth += 1
        elif c in ")]":
            depth -= 1
        elif depth == 0 and c == ":":
            yes, no = rest[:i], rest[i + 1 :]
            return f"(({_ternary(yes).strip()}) if ({condition.strip()}) else ({_ternary(no).strip()}))"
    raise AssertionError(f"no ':' in {text!r}")


def _in_parentheses(text: str) -> str:
    out, i = "", 0
    while i < len(text):
        if text[i] != "(":
            out += text[i]
            i += 1
            continue
        depth, end = 1, i + 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        inner = text[i + 1 : end - 1]
        out += "(" + (_ternary(inner) if "?" in inner else inner) + ")"
        i = end
    return out


def _top_level(text: str, wanted: str) -> int | None:
    depth = 0
    for i, c in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(c, 0)
        if depth == 0 and c == wanted:
            return i
    return None


def value(text: str, names: Mapping[str, Any]) -> Any:
    """An expression's value."""
    return eval(_code(text), {"min": min, "max": max}, dict(names))


@cache
def _code(text: str) -> CodeType:
    return compile(expression(text), text, "eval")


def function(name: str, head: str, constants: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """A small device function as a Python one.

    Parameters
    ----------
    name : str
        The kernel file.
    head : str
        Name and parameters as the file has them, e.g. ``scale_position(int n, bool one_group)``.
    constants : mapping
        Values of names that the body uses.
    """
    body = find(name, re.escape(head) + r"(?: const)? \{(.*?)\}(?! ?;| ?\})").group(1)
    parameters = [
        p.split()[-1].lstrip("*&") for p in re.findall(r"\((.*)\)", head)[0].split(",") if p.strip()
    ]
    lines = [f"def emulated({', '.join(parameters)}):"]
    for statement in filter(None, (s.strip() for s in body.split(";"))):
        guard = re.fullmatch(r"if \((.+?)\) return (.*)", statement)
        declared = re.fullmatch(r"const (?:int|bool|int64_t) (\w+) = (.*)", statement)
        returned = re.fullmatch(r"return (.*)", statement)
        if guard:
            lines.append(f"    if {expression(guard[1])}: return {expression(guard[2])}")
        elif declared:
            lines.append(f"    {declared[1]} = {expression(declared[2])}")
        else:
            assert returned, statement
            result = returned[1].strip()
            lines.append(f"    return {expression(result.strip('{}'))}")
    space: dict[str, Any] = {"min": min, "max": max, **(constants or {})}
    exec("\n".join(lines), space)
    return space["emulated"]


def constants(name: str, macros: Mapping[str, int]) -> SimpleNamespace:
    """All ``constexpr int`` of a file's top level under a build's macros (and the macros themselves)."""
    text = re.sub(r"struct \w+ \{.*?\};", "", source(name))
    known: dict[str, Any] = dict(macros)
    for names in re.findall(r"(?<!static )constexpr int ([^;]*);", text):
        for one in re.split(r", (?=[A-Z_]+ =)", names):
            left, right = one.split("=", 1)
            try:
                known[left.strip()] = value(right, known)
            except NameError:
                continue  # a constant of a function, which uses what only the function knows
    return SimpleNamespace(**known)
