"""docs/first_look.ipynb runs from its first cell to its last, and shows each picture that a cell ends
with."""

import ast
import json
import os

import pytest
from sources import ROOT

PAGE = ROOT / "docs" / "first_look.ipynb"


def cells():
    return [
        "".join(cell["source"])
        for cell in json.loads(PAGE.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]


def shown(source, names):
    """Return what a notebook shows below a cell: the value of its last line as HTML."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(PAGE), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(PAGE), "eval"), names)._repr_html_() if last else None


@pytest.mark.slow
def test_every_cell_runs_and_shows_a_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    pages = [shown(source, names) for source in cells()]
    assert len(pages) == 4
    assert all("<svg" in page for page in pages)
    assert "reference" not in pages[0]
    assert "reference" in pages[1]
    assert "held out, after" in pages[3]
    assert os.listdir("runs") == ["grpo-1"]


def test_the_notebook_stores_no_outputs():
    assert all(not cell.get("outputs") for cell in json.loads(PAGE.read_text())["cells"])
