"""Scripted environments for tests, and their episodes."""

import json
from pathlib import Path

from rlflow.rewards.environments.environment_spec import parse_environment

FILE = Path(__file__).with_name("scripted.py")


def spec_of(name="Scripted", **settings):
    """Return the spec of a class of scripted.py."""
    return parse_environment(f"{FILE}:{name}", settings)


def script(*turns, **more):
    """Return the prompt of an episode with these turns."""
    return json.dumps({"turns": list(turns), **more})
