"""Episodes in real environments of SkyRL-Gym."""

from contextlib import closing

import pytest

from rlflow.rewards.environments.adapters.skyrl_gym import Gym
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.rewards.environments.environment_spec import parse_environment


def test_turns_get_the_rewards_of_the_environment():
    spec = parse_environment("skyrl_gym:gsm8k_multi_turn", {"parallel": "1", "max_turns": "3"})
    assert (spec.library, spec.source.required, spec.source.rest) == ("skyrl_gym", ("prompt",), True)
    with closing(EnvironmentPool(spec)) as pool:
        episodes, opened = pool.open([{"prompt": "2 + 2 ?", "answer": "4"}], [0])
        (first,) = pool.step(episodes, ["#### 5"])
        (last,) = pool.step(episodes, ["#### 4"])
        assert opened == [{"says": ""}]
        assert first["reward"] == pytest.approx(0.2 / 3)
        assert "#### ANSWER" in first["says"]
        assert (last["reward"], last["done"], last["log"]) == (1.0, True, {"steps": 2.0})
        assert pool.end(episodes) == [{}]


def test_data_fields_become_extras():
    episode = Gym(id="gsm8k_multi_turn", chat=True)
    episode.reset("2 + 2 ?", seed=0, reward_spec={"ground_truth": "7"}, extra_info={"max_turns": 2})
    turn = episode.step("#### 4")
    assert turn.says[0]["role"] == "user"
    assert episode.step("#### 7").reward == 1.0
    episode.close()


def test_settings_reach_the_environment_as_attributes():
    episode = Gym(
        id="search",
        config='{"search_url": "http://127.0.0.1:9/retrieve", "topk": 1, "timeout": 1, "log_requests": '
        "false}",
    )
    episode.reset("Who?", seed=0, reward_spec={"ground_truth": {"target": "Ada"}})
    assert episode.step("<answer>Ada</answer>").reward == 1.0
