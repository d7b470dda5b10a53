r"""Which modules a config means: by name, by pattern, or all of them. Patterns are matched in bounded time.

Patterns (``re:...``) come with the file. Python's ``re`` backtracks, and cannot be stopped: ``(a+)+$`` takes
it hours for a name of fifty letters, and of patterns without nested repeats ``.*.*.*.*.*x`` does too. So here
each part of a pattern maps the *set* of places of the name where it may begin to the set where it may end. A
set is an integer with bit p for the place before character p. Nothing is tried twice, steps are counted, and
a name that takes too many is an error.

=============================  ==================================================================
in a pattern                   means, as in Python's ``re.match``
=============================  ==================================================================
``a``, ``\.``                  the character; a backslash before one that is no letter or digit
``.``                          any character but a line feed
``[a-z_]``, ``[^.]``           any, or any other than these; ``\d \w \s`` and ``\D \W \S`` also
``(...)``, ``(?:...)``         one part; ``|`` between alternatives
``(?=...)``, ``(?!...)``       places where the part matches, or does not
``* + ? {m} {m,} {,n} {m,n}``  repeats; a ``?`` behind them changes nothing here
``^``, ``$``                   begin; end, or before a line feed at the end
=============================  ==================================================================

Everything else (back references, flags, look-behind, named groups, ``\b``) is refused. As with ``re.match``
a pattern has to match the beginning of the name, not the whole of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["ModuleTable", "PatternError"]

MAX_LENGTH = 1024
"""Characters of a pattern, and of a name that is matched with one."""
MAX_STEPS = 10_000
"""Steps a name may take, over all patterns. A usual pattern takes twenty; ten thousand take 2 ms."""
MAX_DEPTH = 20
"""Groups within groups."""
MAX_REPEATS = 1000
"""Largest number in braces."""
MAX_RANGES = 20
"""Ranges and classes in one set."""

_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
    "D": lambda char: not char.isdecimal(),
    "W": lambda char: not (char.isalnum() or char == "_"),
    "S": lambda char: not char.isspace(),
}
_BRACES = re.compile(r"\{(\d*)(,?)(\d*)\}", re.ASCII)

_Value = TypeVar("_Value")


class PatternError(ValueError):
    """A pattern that is not read, or takes too long. The text says what is wrong, not in which pattern."""


class ModuleTable(Generic[_Value]):
    """Values by module.

    A target is a module's name, a pattern ``re:...``, or ``Linear``: the class of all modules with packed
    weights.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, list[_Value]] = {}
        self._by_pattern: list[tuple[_Part, _Value]] = []
        self._for_all: list[_Value] = []

    def add(self, target: str, value: _Value) -> None:
        """Set the value of a target, beside those that it has already.

        Raises
        ------
        PatternError
        """
        if target.startswith("re:"):
            self._by_pattern.append((_Parser(target.removeprefix("re:")).parse(), value))
        elif target == "Linear":
            self._for_all.append(value)
        else:
            self._by_name.setdefault(target, []).append(value)

    def find(self, module: str) -> list[_Value]:
        """Return the values of a module: those of its name, else of patterns, else those of all modules.

        Raises
        ------
        PatternError
            A name that is too long, or takes too many steps.
        """
        named = self._by_name.get(module)
        if named:
            return named
        if self._by_pattern:
            name = _Name(module)
            matched = []
            for part, value in self._by_pattern:
                name.spend()
                if part(name, 1):
                    matched.append(value)
            if matched:
                return matched
        return self._for_all


class _Name:
    """A name as sets of places, and the steps spent on it."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise PatternError(f"a name of {len(text)} characters; at most {MAX_LENGTH} are matched")
        self.end = 1 << len(text)
        self.ends = self.end >> 1 | self.end if text.endswith("\n") else self.end
        self._places: dict[str, int] = {}
        for p, char in enumerate(text):
            self._places[char] = self._places.get(char, 0) | 1 << p
        self._accepted: dict[Callable[[str], bool], int] = {}
        self._steps = 0

    def spend(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise PatternError(f"takes more than {MAX_STEPS} steps")

    def where_is(self, char: str) -> int:
        """Return the places before a character."""
        self.spend()
        return self._places.get(char, 0)

    def where(self, accepts: Callable[[str], bool]) -> int:
        """Return the places before all characters that are accepted."""
        self.spend()
        known = self._accepted.get(accepts)
        if known is not None:
            return known
        found = 0
        for char, places in self._places.items():
            self.spend()
            if accepts(char):
                found |= places
        self._accepted[accepts] = found
        return found


# From a name and the places where a part may begin to those where it may end.
_Part = Callable[[_Name, int], int]


def _literal(char: str) -> _Part:
    return lambda name, starts: (starts & name.where_is(char)) << 1


def _one_of(accepts: Callable[[str], bool]) -> _Part:
    return lambda name, starts: (starts & name.where(accepts)) << 1


def _many_of(accepts: Callable[[str], bool]) -> _Part:
    """Any number of characters that are accepted: what `_repeat` of `_one_of` gives, in one step."""

    def part(name: _Name, starts: int) -> int:
        inside = name.where(accepts)
        # Adding a start to a run of ones carries to the place behind it, so what changes is what is reached.
        return ((starts & inside) + inside ^ inside) | starts

    return part


def _sequence(parts: list[_Part]) -> _Part:
    def part(name: _Name, starts: int) -> int:
        for step in parts:
            if not starts:
                return 0
            starts = step(name, starts)
        return starts

    return parts[0] if len(parts) == 1 else part


def _choice(parts: list[_Part]) -> _Part:
    def part(name: _Name, starts: int) -> int:
        found = 0
        for option in parts:
            found |= option(name, starts)
        return found

    return parts[0] if len(parts) == 1 else part


def _repeat(body: _Part, low: int, high: int | None) -> _Part:
    def part(name: _Name, starts: int) -> int:
        for _ in range(low):
            name.spend()
            starts = body(name, starts)
        reached = new = starts
        count = low
        while new and count != high:
            name.spend()
            new = body(name, new) & ~reached
            reached |= new
            count += 1
        return reached

    return part


def _look(body: _Part, wanted: bool) -> _Part:
    def part(name: _Name, starts: int) -> int:
        found = 0
        while starts:
            name.spend()
            place = starts & -starts
            starts ^= place
            if bool(body(name, place)) == wanted:
                found |= place
        return found

    return part


def _begin(name: _Name, starts: int) -> int:
    return starts & 1


def _end(name: _Name, starts: int) -> int:
    return starts & name.ends


def _any_but_line_feed(char: str) -> bool:
    return char != "\n"


class _Parser:
    """From the text of a pattern to a `_Part`."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise PatternError(f"has {len(text)} characters; at most {MAX_LENGTH} are read")
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> _Part:
        part = self._alternatives()
        if self._at < len(self._text):
            raise PatternError("has a ) without its (")
        return part

    def _take(self, text: str) -> bool:
        """Step over `text` if it comes next."""
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _next(self, within: str) -> str:
        if self._at == len(self._text):
            raise PatternError(f"ends within {within}")
        self._at += 1
        return self._text[self._at - 1]

    def _alternatives(self) -> _Part:
        options = [self._items()]
        while self._take("|"):
            options.append(self._items())
        return _choice(options)

    def _items(self) -> _Part:
        parts: list[_Part] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._item())
        return _sequence(parts)

    def _item(self) -> _Part:
        """Read one part and the repeat behind it."""
        char = self._next("a pattern")
        accepts: Callable[[str], bool] | None = None
        part: _Part | None = None
        if char in "^$":
            return _begin if char == "^" else _end
        if char in "*+?{":
            raise PatternError(f"has a {char} with nothing to repeat before it")
        if char == "(":
            look = next((kind for kind in ("?=", "?!") if self._take(kind)), None)
            if look is None and not self._take("?:") and self._take("?"):
                raise PatternError(f"has (?{self._text[self._at : self._at + 1]}, which is not read")
            part = self._group()
            if look is not None:
                return _look(part, look == "?=")
        elif char == ".":
            accepts = _any_but_line_feed
        elif char == "[":
            accepts = self._set()
        elif char == "\\":
            char = self._next("an escape")
            accepts = _CLASSES.get(char)
            if accepts is None and char.isalnum():
                raise PatternError(f"has \\{char}, which is not read")
        if part is None:
            part = _literal(char) if accepts is None else _one_of(accepts)
        bounds = self._bounds()
        if bounds is None:
            return part
        return _many_of(accepts) if accepts is not None and bounds == (0, None) else _repeat(part, *bounds)

    def _group(self) -> _Part:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(f"has more than {MAX_DEPTH} groups within each other")
        part = self._alternatives()
        if not self._take(")"):
            raise PatternError("has a ( without its )")
        self._depth -= 1
        return part

    def _bounds(self) -> tuple[int, int | None] | None:
        """Return the least and the largest number of repeats; None for none, and None for no limit."""
        bounds: tuple[int, int | None]
        if self._take("*"):
            bounds = 0, None
        elif self._take("+"):
            bounds = 1, None
        elif self._take("?"):
            bounds = 0, 1
        elif self._text.startswith("{", self._at):
            found = _BRACES.match(self._text, self._at)
            low, comma, high = found.groups() if found else ("", "", "")
            if found is None or not (low or high):
                raise PatternError("has a { that is no {m}, {m,}, {,n} or {m,n}")
            self._at = found.end()
            least = int(low or 0)
            most = int(high) if high else MAX_REPEATS if comma else least
            if not least <= most <= MAX_REPEATS:
                raise PatternError(f"has braces whose numbers do not ascend or go beyond {MAX_REPEATS}")
            bounds = least, most if high or not comma else None
        else:
            return None
        self._take("?")
        if self._at < len(self._text) and self._text[self._at] in "*+?{":
            raise PatternError("has two repeats behind each other")
        return bounds

    def _set(self) -> Callable[[str], bool]:
        """Read a set behind its opening bracket."""
        inverted = self._take("^")
        chars: set[str] = set()
        ranges: list[tuple[str, str]] = []
        classes: list[Callable[[str], bool]] = []
        first = True
        while first or not self._take("]"):
            first = False
            low = self._member()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._member()
                if not (isinstance(low, str) and isinstance(high, str) and low <= high):
                    raise PatternError("has a set with a range that does not ascend")
                ranges.append((low, high))
            elif isinstance(low, str):
                chars.add(low)
            else:
                classes.append(low)
        if len(ranges) + len(classes) > MAX_RANGES:
            raise PatternError(f"has a set of more than {MAX_RANGES} ranges")

        def accepts(char: str) -> bool:
            found = char in chars or any(low <= char <= high for low, high in ranges)
            return (found or any(member(char) for member in classes)) != inverted

        return accepts

    def _member(self) -> str | Callable[[str], bool]:
        char = self._next("a set")
        if char != "\\":
            return char
        char = self._next("a set")
        found = _CLASSES.get(char)
        if found is not None:
            return found
        if char.isalnum():
            raise PatternError(f"has \\{char} in a set, which is not read")
        return char
