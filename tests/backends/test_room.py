"""Room for responses after their prompts."""

from types import SimpleNamespace

import pytest
from transformers import GPT2Config, LlamaConfig

from rlflow.backends.local.room import check_room, longest, positions
from rlflow.errors import PlanError


def test_a_model_has_its_configured_and_extended_positions():
    assert positions(GPT2Config(n_positions=200)) == longest(GPT2Config(n_positions=200)) == 200
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    assert longest(LlamaConfig(max_position_embeddings=512, rope_parameters=rope)) == 2048
    layers = LlamaConfig(max_position_embeddings=512)
    layers.rope_parameters = {"full_attention": {"factor": 8.0}, "sliding_attention": {"factor": None}}
    assert longest(layers) == 4096
    nothing_said = SimpleNamespace()
    nothing_said.get_text_config = lambda: nothing_said
    assert longest(nothing_said) is None


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "most"), [([1, 90], 10, 100), ([], 500, 100), ([900], 500, None)]
)
def test_prompts_with_room_are_accepted(prompts, max_tokens, most):
    check_room(prompts, max_tokens, most, "the positions of a model")


def test_prompts_without_room_are_refused_with_a_limit_that_fits():
    with pytest.raises(
        PlanError,
        match=r"a prompt of 91 tokens and max_tokens 10\n.*100 tokens together: positions\n.*max_prompt "
        r"90, or",
    ):
        check_room([1, 91], 10, 100, "positions")
    with pytest.raises(PlanError, match=r"remedy:   a smaller max_tokens, or another model"):
        check_room([1], 100, 100, "positions", ", or another model")
    with pytest.raises(ValueError, match="found an empty prompt"):
        check_room([3, 0], 10, 100, "positions")
