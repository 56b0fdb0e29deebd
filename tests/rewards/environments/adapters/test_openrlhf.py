"""An OpenRLHF agent file works unchanged."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from rlflow.rewards.environments.adapters.openrlhf import Agent
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.rewards.environments.environment_spec import parse_environment

FILE = Path(__file__).parents[1] / "openrlhf_agent.py"


def test_the_feedback_and_rewards_of_an_agent_belong_to_turns():
    spec = parse_environment(f"openrlhf:{FILE}", {"parallel": "1"})
    assert (spec.source.required, spec.source.optional, spec.source.later) == (("prompt",), ("answer",), True)
    assert (spec.settings["id"], spec.paths) == (str(FILE), ("id",))
    with closing(EnvironmentPool(spec)) as pool:
        episodes, opened = pool.open(
            [{"prompt": "A number?", "answer": "7"}, {"prompt": "A number?", "answer": "8"}], [0, 0]
        )
        first, second = pool.step(episodes, ["3", "8"]), pool.step(episodes[:1], ["7"])
    assert opened == [{"says": " Guess: "}] * 2
    assert first[0] == {
        "says": "\nAgain: ",
        "reward": pytest.approx(-0.1),
        "done": False,
        "log": {"steps": 1.0},
    }
    assert first[1] == {"says": "", "reward": 1.0, "done": True, "log": {"steps": 1.0}}
    assert second[0] == {"says": "", "reward": 1.0, "done": True, "log": {"steps": 2.0}}


def test_an_agent_that_changes_the_prompt_is_refused(tmp_path):
    file = tmp_path / "other.py"
    file.write_text(FILE.read_text().replace('states["observation"] + " Guess: "', '"Another"'))
    with pytest.raises(ValueError, match="changes prompts"):
        asyncio.run(Agent(id=file).reset("A number?", seed=0))
