"""Plans of flows, as the command line makes them."""

import shlex
from pathlib import Path

import pytest

from rlflow.author.load import load_flow
from rlflow.cli.plan import options_of
from rlflow.config.flags import parse_flags
from rlflow.runs.api import resolve_config
from rlflow.runs.preview import preview

FIXTURES = Path(__file__).parent / "compiler" / "preview" / "fixtures"


@pytest.fixture(scope="session")
def planned_as():
    """``planned_as("grpo --pools all=2")``: the explanation of a plan. The name of a fixture stands for its
    file. Without a model unless the line names one."""

    def make(line):
        name, *flags = shlex.split(line)
        file, _, flow = name.partition("::")
        path = FIXTURES / f"{file}.py"
        found = load_flow(f"{path}::{flow}" if flow else str(path) if path.is_file() else name)
        values = parse_flags(flags)
        given, hp = resolve_config(
            found, None, values if "model" in values else {"backend": "null", **values}
        )
        return preview(found, hp, given, options_of(given))

    return make
