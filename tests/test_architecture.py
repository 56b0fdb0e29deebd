"""docs/architecture.md and docs/inside.md are true: every named file exists, every folder of the package is a
component, and functions are in the named files."""

import re

from sources import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
INSIDE = (ROOT / "docs" / "inside.md").read_text()


def paths():
    """Return everything on the page that looks like a file or folder of the repository."""
    tops = "rlflow|backends|algorithms|tests|docs|benchmarks"
    return sorted(
        set(
            re.findall(
                rf"`((?:{tops})/[\w/.*-]*|(?:README|CONTRIBUTING)\.md|pyproject\.toml)`", PAGE + INSIDE
            )
        )
    )


def test_every_file_on_the_page_exists():
    assert len(paths()) > 100
    assert [path for path in paths() if not list(ROOT.glob(path.rstrip("/")))] == []


def test_every_folder_of_the_package_is_a_component():
    components = PAGE[PAGE.index("## Components") : PAGE.index("## Four ways")]
    folders = {path.parent.name for path in (ROOT / "rlflow").glob("*/__init__.py")}
    assert [folder for folder in sorted(folders) if f"`rlflow/{folder}/`" not in components] == []


def test_functions_on_the_page_are_in_their_files():
    """Each row of the first table names functions and their files."""
    start = PAGE[PAGE.index("## Where to change what") : PAGE.index("## How to add")]
    rows = [row for row in start.splitlines() if "`rlflow/" in row]
    assert len(rows) > 3
    for row in rows:
        text = "".join((ROOT / path).read_text() for path in re.findall(r"`(rlflow/[^`]+\.py)`", row))
        named = [name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", row)]
        assert [name for name in named if not re.search(rf"\b(def|class) {name}\b", text)] == [], row[:60]
