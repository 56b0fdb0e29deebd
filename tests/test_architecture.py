"""docs/architecture.md is true: a call passes the files of its trail in that order, and every file that the page names exists."""

from __future__ import annotations

import ast
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trail

import rlflow
from rlflow.author.load import load

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FLOW = str(Path(trail.__file__))
FEW = {"iterations": 1, "prompts": 2, "held_out": 0, "save_every": 0, "threads": 1}
MODEL = ROOT / "rlflow" / "tasks" / "arithmetic_model"
QUESTIONS = ["how rows are split over ranks", "what a killed worker's message says", "when a checkpoint is written",
             "how a reward's deadline is counted"]  # fmt: skip


def named(start: str) -> list[str]:
    """The files in the first column of the first table after a text."""
    table = PAGE[PAGE.index(start):].partition("|")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.M)


def traced(folder: Path, name: str) -> list[str]:
    files: list[str] = json.loads((folder / f"{name}.json").read_text())
    return files


def driver(folder: Path) -> list[str]:
    """The calls that were open around the node's job, then those of the job."""
    return list(dict.fromkeys([*traced(folder, "outside"), *traced(folder, "inside")]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a run of the flow writes its trail; workers find it in their environment."""
    monkeypatch.setenv(trail.FOLDER, str(tmp_path))
    load.cache_clear()  # the file begins the trail as it is loaded
    yield tmp_path
    threading.setprofile(None)  # type: ignore[arg-type]
    load.cache_clear()


def run(folder: Path, **pools: str) -> None:
    """One iteration on two questions."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{number} + 1 =", "answer": str(number + 1)}) + "\n" for number in (4, 5)))
    rlflow.run(FLOW, out=str(folder / "runs"), model=str(MODEL), data=str(data), **FEW, **pools)


def test_a_call_in_one_process_passes_the_files_of_the_page_in_their_order(folder: Path) -> None:
    run(folder)
    assert driver(folder) == named("**In one process.**")


@pytest.mark.slow
def test_a_call_on_pools_passes_the_files_of_the_page_in_their_order(folder: Path) -> None:
    run(folder, pools="all=2")
    assert driver(folder) == named("**On pools: the driver.**")
    ranks = [traced(folder, path.stem) for path in folder.glob("worker-*.json")]
    assert ranks == [named("**On pools: each rank.**")] * 2


def paths() -> list[str]:
    """Whatever the page names that looks like a file or folder of the repository."""
    tops = "rlflow|backends|algorithms|tests|docs|benchmarks"
    return sorted(set(re.findall(rf"`((?:{tops})/[\w/.*-]*|(?:README|CONTRIBUTING)\.md|pyproject\.toml)`", PAGE)))


def test_every_file_that_the_page_names_exists() -> None:
    assert len(paths()) > 100
    assert [path for path in paths() if not list(ROOT.glob(path.rstrip("/")))] == []


def test_every_folder_of_the_package_is_a_component() -> None:
    components = PAGE[PAGE.index("## Components"):PAGE.index("## The trail")]
    folders = {path.parent.name for path in (ROOT / "rlflow").glob("*/__init__.py")} - {"tasks"}  # which is data
    assert [folder for folder in sorted(folders) if f"`rlflow/{folder}/`" not in components] == []


def test_what_the_page_says_of_functions_stands_in_their_files() -> None:
    """Of the four questions, each answer names a function and the file that has it."""
    start = PAGE[PAGE.index("## Where to change what"):PAGE.index("## Components")]
    rows = {row.split(" | ")[0].strip("| "): row for row in start.splitlines() if row.startswith("| ") and "---" not in row}
    assert [question for question in QUESTIONS if question not in rows] == []
    sources = {row: "".join((ROOT / path).read_text() for path in re.findall(r"`(rlflow/[^`]+\.py)`", text)) for row, text in rows.items()}
    unknown = [name for row, text in rows.items() for name in re.findall(r"`([\w.]+)`", text)
               if not re.search(rf"\b(def|class) {name.split('.')[-1]}\b", sources[row])]  # fmt: skip
    assert unknown == []


@pytest.mark.parametrize("package", ["rlflow", "backends", "algorithms"])
def test_every_package_says_what_lives_there_and_what_does_not(package: str) -> None:
    texts = {str(path.parent): ast.get_docstring(ast.parse(path.read_text())) or "" for path in (ROOT / package).rglob("__init__.py")}
    assert [path for path, text in texts.items() if "Not here: " not in text or len(text.splitlines()) < 3] == []
