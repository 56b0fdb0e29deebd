"""README and the pages without a test of their own are true and short: their commands exist and print the
shown output, their code is the shipped code, and their links have targets. docs/index.md lists all pages."""

import contextlib
import io
import re
import shlex

import pytest
from sources import ROOT

from rlflow.author.load import load
from rlflow.cli.main import exit_code
from rlflow.config.flags import parse_flags

README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
LENGTH = 110  # lines of README at most
NUMBERS = 40  # numbers in README at most
drawn = load(ROOT / "benchmarks" / "pictures.py")
PAGES = [README, *((DOCS / f"{name}.md").read_text() for name in ("pools", "learning"))]
BLOCKS = [
    block for page in PAGES for block in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
]
COMMANDS = [
    line
    for language, text in BLOCKS
    if language == "console"
    for line in text.replace("\\\n", " ").splitlines()
]


def printed(command, folder, monkeypatch):
    """Run a line that starts with `rlflow` in this process; return its exit code and output."""
    out = io.StringIO()
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = exit_code(shlex.split(command)[1:])
    return code, out.getvalue().replace(f"{ROOT}/", "")


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("make ")])
def test_every_make_command_is_a_target(command):
    assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_ci_runs_the_test_command():
    assert "make test" in COMMANDS
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "block", [text for language, text in BLOCKS if language == "console" and text.startswith("$ ")]
)
def test_a_shown_command_prints_the_shown_output(block, tmp_path, monkeypatch):
    line, _, shown = block.removeprefix("$ ").partition("\n")
    command, _, code = line.partition("  # exits ")
    flow = (ROOT / "algorithms" / "rloo.py").read_text()
    (tmp_path / "broken.py").write_text(re.sub(r"    batch \|= truncated_weights\(.*\n", "", flow))
    folder = tmp_path if "broken.py" in command else ROOT
    assert printed(command, folder, monkeypatch) == (int(code or 0), shown)


@pytest.mark.parametrize("block", [text for language, text in BLOCKS if language == "python"])
def test_the_shown_code_is_the_shipped_code(block):
    assert any(block.strip() in path.read_text() for path in (ROOT / "algorithms").glob("*.py"))


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("rlflow run")])
def test_the_shown_flags_exist(command, monkeypatch, tmp_path):
    words = shlex.split(command.removesuffix("&"))[3:]
    flags = parse_flags(words)
    (tmp_path / "style.py").write_text("def polite(completion):\n    return 1.0\n")
    names = [
        word for name, value in flags.items() if name not in ("model", "data") for word in pairs(name, value)
    ]
    file = ROOT / [*shlex.split(command)[2:], "algorithms/grpo.py"][0]
    code, out = printed(shlex.join(["rlflow", "check", str(file), *names]), tmp_path, monkeypatch)
    assert code == 0, out


def pairs(name, value):
    return [
        word for item in (value if isinstance(value, tuple) else (value,)) for word in (f"--{name}", item)
    ]


def test_readme_is_short():
    assert len(README.splitlines()) <= LENGTH
    assert len(re.findall(r"\d[\d.]*", README)) <= NUMBERS


def test_the_pictures_equal_the_output_of_the_command():
    for file, content in drawn.pictures().items():
        assert file.read_text() == content
        assert f'"{file.relative_to(ROOT)}"' in README or f"({file.relative_to(ROOT)})" in README


def test_every_algorithm_is_named():
    shipped = {path.stem for path in (ROOT / "algorithms").glob("*.py")} - {"__init__"}
    assert shipped <= set(re.findall(r"`(\w+)`", (DOCS / "algorithms.md").read_text()))


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.stem)
def test_every_link_has_a_file_and_a_heading(page):
    for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        file = page.parent / target if target else page
        assert target.startswith("https://") or file.exists(), target
        assert not heading or target.startswith("https://") or heading in headings(file), (
            f"{target}#{heading}"
        )


def headings(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_lists_every_page_and_readme_links_it():
    listed = re.findall(r"^\| \[[^]]+\]\((\w+)\.md\) \|", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({path.stem for path in DOCS.glob("*.md")} - {"index"})
    assert "](docs/index.md)" in README


def test_the_changelog_has_this_version():
    import rlflow

    assert f"[{rlflow.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{rlflow.__version__}"' in (ROOT / "pyproject.toml").read_text()
