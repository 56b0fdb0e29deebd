"""Scripted environments for tests, and episodes of theirs."""

import json
from pathlib import Path

from rlflow.rewards.environments.environment_spec import parse_environment

FILE = Path(__file__).with_name("scripted.py")


def spec_of(name="Scripted", **settings):
    """The spec of a class of scripted.py."""
    return parse_environment(f"{FILE}:{name}", settings)


def script(*turns, **more):
    """The prompt of an episode whose environment does this."""
    return json.dumps({"turns": list(turns), **more})
