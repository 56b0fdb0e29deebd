"""Rows that are asked become prompts by the tokenizer and the chat template of the role that samples from them."""

import json
import math
import shutil
from pathlib import Path

import pytest

from rlflow import ask, flow, loss, stage
from rlflow.binding.asking import asking
from rlflow.binding.roles import bind_roles
from rlflow.columns import text
from rlflow.config.flags import sort_values
from rlflow.data.encode import TokenizerEncoder
from rlflow.errors import PlanError
from rlflow.trace.compile import compile_flow

MODEL = Path(__file__).parents[2] / "rlflow" / "tasks" / "arithmetic_model"


@stage(gives={"question": text})
def again(completion):
    return [f"{said}+1=" for said in completion]


@loss
def gain(new, scores):
    return -new.logprobs * scores[:, None], {}


@flow
def both(prompts, solver, critic, reward):
    first = solver.generate(prompts, max_tokens=4)
    asked = ask(first | again(first), "question")
    mine = solver.generate(asked, max_tokens=4)
    its = critic.generate(asked, max_tokens=4)
    mine |= reward(mine)
    its |= reward(its, gives="scores")
    solver.update(mine, gain)
    critic.update(its, gain)


def encoder(solver, critic, **data):
    values = {"model": str(MODEL), "solver.model": str(solver), "critic.model": str(critic), **data}
    config = sort_values(values, ["solver", "critic", "reward"])
    graph = compile_flow(both).graph
    return asking(graph, bind_roles(graph, config), config)


@pytest.fixture
def other(tmp_path):
    """A model folder whose tokenizer is told otherwise than that of the packaged model."""
    folder = shutil.copytree(MODEL, tmp_path / "other")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "padding_side": "right", "model_max_length": 7}))
    return folder


def test_a_text_is_encoded_as_a_prompt_of_the_data_is():
    texts = ["1+2=", "7"]
    asked = encoder(MODEL, MODEL)
    assert asked.encode(("solver",), texts) == TokenizerEncoder(MODEL).prompts(texts)
    assert asked.longest == math.inf


def test_what_is_too_long_for_a_prompt_of_the_data_is_too_long_to_be_asked():
    assert encoder(MODEL, MODEL, **{"data.max_prompt": "12"}).longest == 12


def test_roles_of_different_tokenizers_do_not_share_asked_rows(other):
    with pytest.raises(PlanError) as caught:
        encoder(MODEL, other)
    assert "ask once for each role" in str(caught.value)
    assert str(other) in str(caught.value)


def test_a_copy_of_a_tokenizer_is_the_same_tokenizer(tmp_path):
    copy = shutil.copytree(MODEL, tmp_path / "copy")
    assert encoder(MODEL, copy).encode(("critic",), ["1+2="]) == encoder(MODEL, MODEL).encode(("critic",), ["1+2="])


def test_a_text_that_follows_a_response_is_not_put_as_a_prompt():
    asked = encoder(MODEL, MODEL)
    ids, first = asked.encode(("solver",), ["1+2="])[0], TokenizerEncoder(MODEL).tokenizer.bos_token_id
    assert asked.follow(("solver",), ["1+2="], [[5]])[0] == [number for number in ids if number != first]


def test_ids_become_the_text_that_they_were_of():
    asked = encoder(MODEL, MODEL)
    assert asked.decode(("solver",), asked.encode(("solver",), ["1+2=", "7"])) == ["1+2=", "7"]
