"""`rlflow graph` prints, and ends well."""

import pytest

from rlflow.cli.plan import FORMATS, print_graph
from rlflow.errors import PlanError


@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_is_printed_in_each_format(format, capsys):
    assert print_graph("grpo", format, []) == 0
    assert "actor.generate" in capsys.readouterr().out


def test_a_format_that_is_not_there_is_told():
    with pytest.raises(PlanError, match="unknown graph format 'tex'"):
        print_graph("grpo", "tex", [])
