"""`rlflow.run` takes the flow's settings as an object, as a dict, or as keywords named like the flags."""

import pytest

from rlflow.author.load import load_flow
from rlflow.errors import PlanError
from rlflow.runs.api import resolve_config

NULL = {"backend": "null"}


def resolved(hp, **keywords):
    return resolve_config(load_flow("grpo"), hp, {**NULL, **keywords})[1]


def test_a_dict_of_settings_equals_the_flags():
    assert resolved({"samples": 3, "clip": 0.1}) == resolved(None, **{"hp.samples": 3, "hp.clip": 0.1})
    assert resolved({"samples": 3}).samples == 3
    # a keyword sets one setting and wins
    assert resolved({"samples": 3}, **{"hp.samples": 5}).samples == 5


def test_a_misspelt_setting_is_reported_with_the_nearest_name():
    with pytest.raises(PlanError, match="sampels") as refused:
        resolved({"sampels": 3})
    assert "nearest:  --hp.samples" in str(refused.value)


def test_a_dict_keeps_the_settings_of_the_packaged_task():
    flow = load_flow("grpo")
    own = type(flow.parameters.hp)
    assert resolve_config(flow, {"beta": 0.5}, {})[1].samples == resolve_config(flow, None, {})[1].samples
    assert resolve_config(flow, own(), {})[1] == own()
