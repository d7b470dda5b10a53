"""Patterns of modules: what `re.match` says, in time that no pattern can stretch."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marlin_jit.formats.module_patterns import MAX_LENGTH, ModuleTable, PatternError

ALPHABET = "ab.1_\n"


def matches(pattern: str, name: str) -> bool:
    table: ModuleTable[int] = ModuleTable()
    table.add("re:" + pattern, 1)
    return table.find(name) == [1]


ATOMS = st.one_of(
    st.sampled_from([*"ab1_.", r"\.", r"\_", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S"]),
    st.sampled_from(["[ab]", "[^a]", "[a-b1]", r"[^.\d]", "[]a]", "[^]a]", "[a-]", r"[\w.]", "[*+(|]"]),
)
REPEATS = st.sampled_from(["", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,}", "{,2}", "{0,2}", "{1,3}?"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, REPEATS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(ATOMS, REPEATS).map("".join),
        st.lists(inner, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: f"({'|'.join(options)})"),
        st.tuples(st.sampled_from(["(?=", "(?!"]), inner).map(lambda pair: f"{pair[0]}{pair[1]})"),
        st.sampled_from(["^", "$", "()", "(a|)"]),
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(pattern=PATTERNS, name=st.text(ALPHABET, max_size=8))
@example("(a*)*", "")
@example("(a|ab)(c|bcd)$", "abcd")
@example("a$", "a\n")
@example("$a", "a")
@example("(^a|b)*$", "aab")
@example("(?!a)*b", "b")
def test_it_is_what_re_match_says(pattern: str, name: str) -> None:
    try:
        found = matches(pattern, name)
    except PatternError:  # such as a repeat of a look-ahead, which says nothing
        assert re.search(r"\(\?[=!].*\)[*+?{]", pattern)
        return
    assert found == (re.match(pattern, name) is not None)


@settings(max_examples=200, deadline=None)
@given(pattern=st.text(r"ab.^$*+?{}[]()|\,-:=!1d", max_size=10), name=st.text(ALPHABET, max_size=6))
def test_any_text_is_read_as_re_reads_it_or_refused(pattern: str, name: str) -> None:
    try:
        found = matches(pattern, name)
    except PatternError as error:
        assert "\n" not in str(error)
        return
    assert found == (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (r".*lm_head", "lm_head", True),
        (r".*mlp.gate$", "model.layers.0.mlp.gate", True),
        (r".*mlp.gate$", "model.layers.0.mlp.gate_proj", False),
        (r"model\.layers\.(?:[0-9]|1[0-9])\.mlp\..*", "model.layers.19.mlp.up_proj", True),
        (r"model\.layers\.(?:[0-9]|1[0-9])\.mlp\..*", "model.layers.20.mlp.up_proj", False),
        (r".*self_attn\.(q|k|v|o)_proj$", "model.layers.3.self_attn.k_proj", True),
        (r"^(?!.*vision).*\.experts\.\d+\.(gate|up|down)_proj", "model.mlp.experts.127.up_proj", True),
        (r"^(?!.*vision).*\.experts\.\d+\.(gate|up|down)_proj", "vision.mlp.experts.127.up_proj", False),
        ("self_attn", "model.self_attn", False),
        ("model", "model.self_attn", True),
    ],
)
def test_patterns_of_usual_configs(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*$",
        "(a|aa)+$",
        "(.*a){20}$",
        ".*" * 400 + "x",
        "(((a?)*)*)*$",
        "((a{1000}){1000}){1000}",
        "(" * 20 + "a{1000}" + "){1000}" * 20,
        "(?=.*x)" * 100,
        "(.(?!.*(.(?!.*(.(?!.*x))*x))*x))*x",
        "[" + "".join(f"{chr(i)}-{chr(i)}" for i in range(97, 117)) + "]*x",
        "a?" * 300 + "a" * 300,
    ],
)
def test_no_pattern_takes_long(pattern: str) -> None:
    """Python's `re` takes hours for most of these. A match is a match, or an error, within the step limit."""
    start = time.perf_counter()
    try:
        matches(pattern, "a" * (MAX_LENGTH - 1) + "!")
    except PatternError as error:
        assert str(error) == "takes more than 10000 steps"
    assert time.perf_counter() - start < 1


def test_many_patterns_share_the_limit_of_a_name() -> None:
    table: ModuleTable[int] = ModuleTable()
    for i in range(10_001):
        table.add("re:", i)
    with pytest.raises(PatternError, match="takes more than 10000 steps"):
        table.find("a")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a" * 1025, "has 1025 characters; at most 1024 are read"),
        ("(" * 21 + ")" * 21, "has more than 20 groups within each other"),
        ("(" * 1000, "has more than 20 groups within each other"),
        ("(a", r"has a \( without its \)"),
        ("a)", r"has a \) without its \("),
        ("*a", r"has a \* with nothing to repeat before it"),
        ("^*", r"has a \* with nothing to repeat before it"),
        ("a**", "has two repeats behind each other"),
        ("a*+", "has two repeats behind each other"),
        ("a{2}{3}", "has two repeats behind each other"),
        ("a{", r"has a \{ that is no \{m\}, \{m,\}, \{,n\} or \{m,n\}"),
        ("a{,}", r"has a \{ that is no"),
        ("a{x}", r"has a \{ that is no"),
        ("a{3,2}", "has braces whose numbers do not ascend or go beyond 1000"),
        ("a{1,0}", "has braces whose numbers do not ascend"),
        ("a{1001}", "has braces whose numbers do not ascend or go beyond 1000"),
        ("a{" + "9" * 900 + "}", "has braces whose numbers do not ascend or go beyond 1000"),
        ("[a", "ends within a set"),
        ("[", "ends within a set"),
        ("[]", "ends within a set"),
        ("[a\\", "ends within a set"),
        ("[b-a]", "has a set with a range that does not ascend"),
        (r"[\d-z]", "has a set with a range that does not ascend"),
        (r"[a-\d]", "has a set with a range that does not ascend"),
        (r"[\b]", r"has \\b in a set, which is not read"),
        ("[" + "a-b" * 21 + "]", "has a set of more than 20 ranges"),
        ("a\\", "ends within an escape"),
        (r"\bgate", r"has \\b, which is not read"),
        (r"(a)\1", r"has \\1, which is not read"),
        ("(?i)a", r"has \(\?i, which is not read"),
        ("(?P<x>a)", r"has \(\?P, which is not read"),
        ("(?<=a)b", r"has \(\?<, which is not read"),
        ("(?>a)", r"has \(\?>, which is not read"),
        ("(?", r"has \(\?, which is not read"),
    ],
)
def test_patterns_that_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(PatternError, match=f"^{message}"):
        ModuleTable().add("re:" + pattern, None)


def test_names_that_are_too_long_for_patterns() -> None:
    table: ModuleTable[str] = ModuleTable()
    table.add("a" * 2000, "by name")
    assert table.find("a" * 2000) == ["by name"]
    table.add("re:b", "by pattern")
    with pytest.raises(PatternError, match="a name of 2001 characters; at most 1024 are matched"):
        table.find("a" * 2001)


def test_a_name_comes_before_a_pattern_and_that_before_all() -> None:
    table: ModuleTable[int] = ModuleTable()
    for value, target in enumerate(["Linear", "re:a", "re:.*b", "ab", "ab", "re:c"]):
        table.add(target, value)
    assert table.find("ab") == [3, 4]
    assert table.find("abb") == [1, 2]
    assert table.find("c") == [5]
    assert table.find("d") == [0]
    assert ModuleTable[int]().find("d") == []
