"""Every block of docs/authoring.md, docs/reference.md and docs/memory.md runs and prints what the page shows.

Python blocks of these pages continue one another in one module. A block whose first line is ``# NAME.py`` is a
file of its own, and the module starts with the first file. The flows pass `check` and run on the null backend,
planned and eagerly. Console blocks go through the command line's entry point, in a folder with the files; ``#
exits N`` after a command is its exit code. Times (``0.02 s``) are not compared, and a line ``…`` stands for any
lines. Blocks of ``text`` are drawings.

RLFLOW_WRITE_DOCS=1 writes the codes and levels of the reference's tables from the source, and keeps the texts of
the codes that the tables have.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from sources import ROOT, sources

import rlflow
from rlflow.author.flow import Flow
from rlflow.author.load import flows_of, load
from rlflow.author.stage import Stage
from rlflow.cli.main import exit_code
from rlflow.compiler.check.checker import check

pytestmark = pytest.mark.slow

REFERENCE = ROOT / "docs" / "reference.md"
PAGES = {
    path.stem: path.read_text()
    for path in (ROOT / "docs" / "authoring.md", REFERENCE, ROOT / "docs" / "memory.md")
}
CHECKED = (
    "rlflow/author",
    "rlflow/compiler/trace",
    "rlflow/compiler/check",
    "rlflow/cli/check.py",
    "rlflow/config/flags.py",
    "rlflow/config/meant.py",
)  # codes of `check`
EAGER = ("rlflow/author/batch.py", "rlflow/execution")  # further codes of eager calls
KEPT = "rlflow/execution/offload_manager.py"  # reported only by runs within a memory limit
LEVELS = ("error", "warning", "note")
METHODS = ("generate", "logprobs", "values", "update")
CAST = {"threads": 1, "backend": "null", "prompts": 4}


@dataclass(frozen=True)
class Block:
    """A fenced block: the page, its language, its text and the line where it opens."""

    page: str
    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """Return the name of the file that the block is, if it is one."""
        named = re.match(r"# (\w+\.py)\n", self.text)
        return named.group(1) if named else None

    def __str__(self) -> str:
        return f"{self.page}-line-{self.line}"


def blocks(language: str | None = None) -> list[Block]:
    found = [
        Block(name, fence.group(1), fence.group(2), page.count("\n", 0, fence.start()) + 1)
        for name, page in PAGES.items()
        for fence in re.finditer(r"^```(.+)\n((?s:.*?))^```$", page, re.MULTILINE)
    ]
    return [block for block in found if language in (None, block.language)]


def table(heading: str) -> list[list[str]]:
    """Cells of the first table after a text of the reference, row by row, without the header."""
    page = PAGES["reference"]
    rows = page[page.index(heading) :].partition("|---")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A module of all Python blocks; its folder holds them as files."""
    folder = tmp_path_factory.mktemp("docs")
    path, modules = list(sys.path), set(sys.modules)
    module = sys.modules["authoring"] = ModuleType("authoring")
    vars(module).update(
        {name: getattr(rlflow, name) for name in rlflow.__all__}, rlflow=rlflow, folder=folder
    )
    files = [block for block in blocks("python") if block.file]
    for block in files:
        (folder / str(block.file)).write_text(block.text)
    with contextlib.chdir(folder):
        sys.path.insert(0, str(folder))
        vars(module).update(
            {
                k: v
                for k, v in vars(importlib.import_module(files[0].file.partition(".")[0])).items()
                if k[:2] != "__"
            }
        )
        for block in blocks("python"):
            if not block.file:
                source = folder / f"{block}.py"
                source.write_text(block.text)
                exec(compile(block.text, str(source), "exec"), vars(module))
    yield module
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name == "authoring" or str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def in_folder(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(page.folder)


def normal(text: str) -> str:
    return "".join(line.rstrip() + "\n" for line in re.sub(r"\b\d+\.\d+ s\b", "_ s", text).splitlines())


def matches(shown: str, printed: str) -> bool:
    """Return True if the printed text matches the text on the page."""
    parts = [re.escape(part) for part in re.split(r"^…\n", normal(shown), flags=re.MULTILINE)]
    return re.fullmatch(r"(?:.*\n)*".join(parts), normal(printed)) is not None


def commands(block: Block) -> Iterator[tuple[str, int, str]]:
    """Return (command, exit code, output on the page) for the commands of a console block."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        command, _, code = line.partition("  # exits ")
        yield command, int(code or 0), shown


def run_command(command: str) -> tuple[int, str]:
    """Run a line that starts with `rlflow` in this process, because a process for each would take a minute;
    return its exit code and output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return exit_code(shlex.split(command)[1:]), out.getvalue()


def flows(page: ModuleType, block: Block) -> list[Flow]:
    """Return the flows that a Python block defines."""
    if block.file:
        return list(flows_of(load(page.folder / block.file)).values())
    names = [node.name for node in ast.parse(block.text).body if isinstance(node, ast.FunctionDef)]
    return [value for name in names if isinstance(value := getattr(page, name), Flow)]


def one_iteration(flow: Flow) -> Any:
    """Run two planned iterations, then an eager one."""
    rlflow.run(flow, iterations=2, **CAST)
    roles = rlflow.roles(flow, **CAST)
    try:
        return flow(roles.take(), **roles)
    finally:
        roles.close()


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_flows_of_the_page_pass_check_and_run(page: ModuleType, block: Block) -> None:
    refused = {command for other in blocks("console") for command, code, _ in commands(other) if code}
    for flow in flows(page, block):
        loud = [str(problem) for problem in check(flow).problems if problem.severity != "note"]
        assert bool(loud) is (f"rlflow check {block.file}" in refused), "\n".join(loud)
        one_iteration(flow)


def test_stages_without_a_flow_on_the_page_run(page: ModuleType) -> None:
    @rlflow.loss
    def reader(new: Any, price: Any, long: Any, halved: Any, noise: Any, advantages: Any) -> Any:
        return new.logprobs * advantages + price + (halved + noise + long)[:, None]

    @rlflow.flow
    def others(prompts: Any, actor: Any, reward: Any) -> Any:
        batch = actor.generate(prompts, samples=2, max_tokens=8)
        batch |= reward(batch)
        batch |= actor.logprobs(batch)
        batch |= page.prices(batch, beta=0.1)
        batch |= page.halve(batch)
        batch |= page.jitter(batch)
        batch |= page.compare(batch, gives="gain").rename(gain="advantages")
        page.norm(batch)
        actor.update(batch, reader)
        return batch

    batch = one_iteration(others)
    assert torch.equal(batch["halved"], batch["scores"] / 2)
    assert batch["noise"].std() > 0
    assert [turn["content"] for turn in page.ask_back.function(["1+1="], ["2"])[0]] == [
        "1+1=",
        "2",
        "Are you sure?",
    ]
    stages = {
        name for name, value in vars(page).items() if isinstance(value, Stage) and name not in rlflow.__all__
    }
    assert {name for name in stages if f"|= {name}(" not in "".join(PAGES.values())} == {
        "prices",
        "halve",
        "jitter",
        "norm",
        "mixed",
        "adapt",
        "learnable",
        "outcomes",
        "spread",
        "ask_back",
    }


@pytest.mark.parametrize("block", blocks("console"), ids=str)
def test_commands_print_the_output_on_the_page(block: Block) -> None:
    for command, code, shown in commands(block):
        found, printed = run_command(command)
        assert matches(shown, printed), f"$ {command}\n{printed}"
        assert found == code, printed


@pytest.mark.parametrize("block", blocks("pycon"), ids=str)
def test_sessions_print_the_output_on_the_page(page: ModuleType, block: Block) -> None:
    session = doctest.DocTestParser().get_doctest(block.text, dict(vars(page)), str(block), None, 0)
    told: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(session, out=told.append)
    assert result.failed == 0, "".join(told)


def test_the_table_of_columns_equals_the_printed_one() -> None:
    assert [block.text for block in blocks("text columns")] == [f"{rlflow.columns()}\n"]


def codes(places: Iterable[str], but: Iterable[str] = ()) -> dict[str, set[str]]:
    """Return code → levels of the problems in the source of these places, except some codes."""
    found: dict[str, set[str]] = {}
    for file in sources("rlflow"):
        if any(map(file.path.is_relative_to, places)) and not any(map(file.path.is_relative_to, but)):
            for node in file.nodes:
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Problem", "PlanError.of"):
                    severity = next(
                        (k.value for k in node.keywords if k.arg == "severity"), ast.Constant("error")
                    )
                    choices = (
                        (severity.body, severity.orelse) if isinstance(severity, ast.IfExp) else (severity,)
                    )
                    found.setdefault(ast.literal_eval(node.args[0]), set()).update(
                        map(ast.literal_eval, choices)
                    )
    return found


def written(heading: str, known: dict[str, set[str]]) -> str:
    """Return the reference with the codes and levels of the source in the table after a heading."""
    page = REFERENCE.read_text()
    start = page.index("|\n", page.index("|---", page.index(heading))) + 2
    rows = {row[0].strip("`"): row[2:] for row in table(heading)}
    order = [code for code in rows if code in known] + sorted(known.keys() - rows.keys())
    lines = [
        " | ".join(
            [f"| `{code}`", ", ".join(sorted(known[code], key=LEVELS.index)), *rows.get(code, ["…", "…"])]
        )
        for code in order
    ]
    return page[:start] + "".join(f"{line} |\n" for line in lines) + page[page.index("\n\n", start) + 1 :]


def test_the_tables_of_codes_equal_the_source() -> None:
    checked = codes(CHECKED, but=EAGER)
    known = checked | codes([KEPT])
    eager = {code: levels for code, levels in codes(EAGER, but=[KEPT]).items() if code not in known}
    for heading, found in (("## What check says", checked), ("In eager calls,", eager)):
        page = written(heading, found)
        if os.environ.get("RLFLOW_WRITE_DOCS"):
            REFERENCE.write_text(page)
        assert page == REFERENCE.read_text()
    assert "| … |" not in REFERENCE.read_text(), "a code has no text"


def test_the_reference_has_every_exported_name_and_method() -> None:
    page = PAGES["reference"]
    assert [name for name in rlflow.__all__ if not re.search(rf"\b{name}\b", page)] == []
    assert [method for method in METHODS if f".{method}(" not in page] == []


def test_every_block_has_a_tested_language() -> None:
    assert {block.language for block in blocks()} == {
        "python",
        "console",
        "pycon",
        "text",
        "text columns",
    }
