"""docs/algorithms.md lists every algorithm, and its diffs equal the output of `rlflow diff` except for
digests of function bodies.

Other tests check whether a body is right. RLFLOW_WRITE_DOCS=1 rewrites the diffs.
"""

import os
import re
import shlex

import pytest
from sources import ROOT

from rlflow.author.load import load_flow
from rlflow.cli.main import exit_code
from rlflow.compiler.graph.diff import diff
from rlflow.compiler.trace.compile import compile_flow

PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def test_every_algorithm_is_in_the_table():
    assert set(re.findall(r"\]\(../algorithms/(\w+)\.py\) \|", PAGE)) == {
        path.stem for path in (ROOT / "algorithms").glob("[!_]*.py")
    }


@pytest.mark.parametrize("command", re.findall(r"`(rlflow run [^`]+ --[^`]+)`", PAGE))
def test_a_variant_is_a_setting_that_check_accepts(command, capsys):
    assert exit_code(["check", *shlex.split(command)[2:]]) == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("command", "shown"),
    re.findall(r"^\$ (rlflow diff .*?)  # exits 1\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL),
)
def test_a_diff_in_the_page_equals_the_printed_one(command, shown):
    old, new = (compile_flow(load_flow(str(ROOT / name))).graph for name in command.split()[2:])
    found = re.sub(r"[0-9a-f]{12} -> [0-9a-f]{12}", "… -> …", "".join(f"{line}\n" for line in diff(old, new)))
    if os.environ.get("RLFLOW_WRITE_DOCS"):
        path = ROOT / "docs" / "algorithms.md"
        path.write_text(
            path.read_text().replace(f"$ {command}  # exits 1\n{shown}", f"$ {command}  # exits 1\n{found}")
        )
    else:
        assert found == shown
