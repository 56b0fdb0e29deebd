"""Limits on the length of rows: from model configurations, from engines, and the rest for prompts."""

import json
import math
from dataclasses import replace

import pytest

from rlflow import encode, flow, loss, repeat, stage
from rlflow.author.load import load_flow
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.flags import sort_values
from rlflow.config.roles.bound import bind_roles
from rlflow.config.roles.prompt_room import boundaries, longest_row, most_tokens, positions_of, room
from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder
from rlflow.data.faults import Room
from rlflow.data.fields import Record
from rlflow.errors import PlanError
from rlflow.training.pretrained import Boundary


@pytest.fixture
def folder(tmp_path):
    """Return a model folder with this configuration."""

    def make(name="model", **config):
        made = tmp_path / name
        made.mkdir(exist_ok=True)
        (made / "config.json").write_text(json.dumps(config))
        return made

    return make


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}, "max_position_embeddings": 9}, 512),
        ({"text_config": [1], "max_position_embeddings": 9}, 9),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}, "max_position_embeddings": 9}, 9),
        ({"hidden_size": 8}, None),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "linear", "factor": 2}}, 4096),
        (
            {
                "max_position_embeddings": 2048,
                "rope_parameters": {"full_attention": {"rope_type": "default"}},
            },
            2048,
        ),
        ({"max_position_embeddings": 2048, "rope_scaling": None}, 2048),
    ],
)
def test_the_longest_row_is_configured_or_computed(folder, config, positions):
    assert positions_of(folder(**config)) == positions


@loss
def likelihood(new):
    return -new.logprobs, {}


@loss
def policy_loss(new, logprobs):
    return logprobs - new.logprobs, {}


@stage(gives="keep", rows="group")
def mixed(scores, group):
    return scores > group


@flow
def sampling(prompts, actor, critic, reward):
    def body(prompts):
        rows = actor.generate(prompts, samples=2, max_tokens=20)
        rows |= reward(rows)
        return rows | mixed(rows)

    batch = repeat(body, prompts, groups=2, tries=2)
    batch |= actor.logprobs(batch)
    batch |= critic.values(batch)
    greedy = actor.generate(prompts, max_tokens=8, temperature=0.0)
    greedy |= actor.logprobs(greedy)
    actor.update(greedy, policy_loss)
    actor.update(batch, policy_loss)


@flow(data={"completion": None})
def learning(examples, actor):
    examples |= actor.logprobs(examples)
    actor.update(examples, policy_loss)


def of(chosen, responses=False, **values):
    graph = compile_flow(chosen).graph
    given = sort_values(values, [use.name for use in graph.roles])
    return room(graph, bind_roles(graph, given), given.options.reward, responses)


def test_the_shortest_model_and_the_longest_sample_limit_prompts(folder):
    model, critic = folder(max_position_embeddings=100), folder("critic", max_position_embeddings=64)
    assert of(sampling, model=str(model)).prompt == 80
    limited = of(sampling, model=str(model), **{"critic.model": str(critic)})
    assert limited == Room(
        44, None, " (64 positions of role 'critic', of which actor.generate may sample 20)"
    )
    assert (
        str(limited)
        == "at most 44 tokens of a prompt (64 positions of role 'critic', of which actor.generate may "
        "sample 20)"
    )
    assert of(sampling, model=str(folder("endless"))) == Room()


def test_an_engine_and_a_reward_model_have_their_own_limits(folder):
    model, judge = (
        folder(max_position_embeddings=100),
        folder("judge", max_position_embeddings=50, architectures=["X"]),
    )
    assert (
        of(sampling, model=str(model), **{"actor.generator": "vllm", "actor.max_model_len": 70}).prompt == 50
    )
    assert of(sampling, model=str(model), reward=(str(judge),)).prompt == 30
    assert of(sampling, model=str(model), backend="null") == Room()


def test_responses_of_the_data_need_room(folder):
    model = folder(max_position_embeddings=100)
    assert of(learning, responses=True, model=str(model)) == Room(
        None, 100, " (100 positions of role 'actor')"
    )
    assert of(sampling, responses=True, model=str(model)).row == 100


def test_samples_that_leave_no_room_for_a_prompt_are_refused(folder):
    with pytest.raises(
        PlanError, match=r"'actor.generate' may sample 20 tokens, which leaves no room for a prompt"
    ) as caught:
        of(sampling, model=str(folder(max_position_embeddings=20)))
    assert "max_tokens=10 in actor.generate" in str(caught.value)
    assert caught.value.problems[0].place.path == __file__

    graph = compile_flow(load_flow("grpo")).graph
    given = sort_values({"model": str(folder(max_position_embeddings=512))}, ["actor", "reference", "reward"])
    with pytest.raises(PlanError, match=r"such as --hp.max_tokens 256"):
        room(graph, bind_roles(graph, given), (), False)


def data(*texts, responses=()):
    return Dataset("data", [Record(text, responses=responses) for text in texts], ByteEncoder())


def test_the_longest_possible_row_is_computed():
    correction = compile_flow(load_flow("correction")).graph
    prompts = (data("a", "abc"), data("abcde"), data())
    assert longest_row(compile_flow(sampling).graph, prompts, None) == 5 + 20
    assert longest_row(correction, prompts, None) == 0  # only a run can show it
    assert longest_row(correction, prompts, 40) == 40 + dict(correction.hp)["max_tokens"]
    assert longest_row(compile_flow(sampling).graph, prompts, 40) == 5 + 20
    limited = replace(data("abc", "a" * 90), room=Room(80))
    # a skipped record does not count
    assert longest_row(compile_flow(sampling).graph, [limited], None) == 3 + 20


@pytest.mark.parametrize(("limit", "longest"), [(None, 0), (7, 3 + 20), (30, 3 + 30)])
def test_encoded_responses_have_a_longest_row_if_they_have_a_limit(limit, longest):
    @flow
    def taught(prompts, actor):
        actor.update(actor.generate(prompts, max_tokens=20), likelihood)
        actor.update(encode(prompts, "answer", actor, max_tokens=limit), likelihood)

    assert longest_row(compile_flow(taught).graph, [data("abc")], None) == longest


def test_a_row_has_at_most_the_tokens_of_the_smallest_model(folder):
    graph = compile_flow(sampling).graph
    values = {"model": str(folder(max_position_embeddings=100))}
    given = sort_values(
        values | {"critic.model": str(folder("critic", n_positions=64))}, ["actor", "critic", "reward"]
    )
    assert most_tokens(bind_roles(graph, given)) == 64
    endless = sort_values({"model": str(folder("endless"))}, ["actor", "critic", "reward"])
    assert most_tokens(bind_roles(graph, endless)) == math.inf


def test_the_longest_row_of_data_with_responses_is_computed():
    pairs = data("ab", responses=("12345",))
    # its end token, and one more for an evaluation
    assert longest_row(compile_flow(learning).graph, [pairs], None) == 2 + 5 + 1 + 1


def test_rotary_frequencies_change_at_known_lengths(folder):
    model = {"model_type": "llama", "max_position_embeddings": 64}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    long = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 16,
        "short_factor": [1.0],
        "long_factor": [2.0],
        "rope_theta": 1e4,
    }
    assert boundaries(folder(**model, rope_parameters=dynamic)) == [(64, True)]
    assert boundaries(folder(**model, rope_parameters=long)) == [(16, False)]
    assert boundaries(folder(**model)) == boundaries(None) == []


def test_rows_must_match_the_chosen_frequencies():
    assert [Boundary(64, True).reach(longest) for longest in (1, 64, 65, 90)] == [64, 64, 65, 90]
    assert [Boundary(16, False).reach(longest) for longest in (1, 16, 17)] == [16, 16, None]
