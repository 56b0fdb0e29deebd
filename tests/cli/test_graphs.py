"""`rlflow graph` prints each format, and refuses unknown ones."""

import pytest

from rlflow.cli.plan import FORMATS, print_graph
from rlflow.errors import PlanError


@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_is_printed_in_each_format(format, capsys):
    assert print_graph("grpo", format, []) == 0
    assert "actor.generate" in capsys.readouterr().out


def test_an_unknown_format_is_reported():
    with pytest.raises(PlanError, match="unknown graph format 'tex'"):
        print_graph("grpo", "tex", [])
