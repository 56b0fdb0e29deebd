"""--ROLE.generate.NAME: the run may change the sampling settings of a role."""

import json
from pathlib import Path

import pytest

import rlflow
from rlflow import FlowError, PlanError, flow, loss, stage
from rlflow.author.methods import GENERATE, OFF, resampled, sampling_of
from rlflow.compiler.graph.model import Op
from rlflow.compiler.trace.compile import TraceOptions, compile_flow
from rlflow.config.flags import parse_flags, sort_values

DEFAULTS = {name: setting.default for name, setting in GENERATE.items() if name not in OFF}


def sampling(*words):
    return sort_values(parse_flags(words), ["actor", "solver"]).sampling


def test_a_flag_sets_one_call_or_every_call_of_its_role():
    words = (
        "--actor.generate.temperature",
        "0.7",
        "--actor.generate.top-k=20",
        "--actor.generate#2.top_p",
        "0.9",
    )
    assert sampling(*words) == {
        "actor.generate": {"temperature": 0.7, "top_k": 20},
        "actor.generate#2": {"top_p": 0.9},
    }
    assert sampling("--actor.generate#1.top_p", "0.5") == sampling("--actor.generate.top_p", "0.5")


def test_stop_strings_are_given_one_by_one_or_as_a_file_list():
    assert sampling("--actor.generate.stop", "\n", "--actor.generate.stop", "Q:") == {
        "actor.generate": {"stop": ("\n", "Q:")}
    }
    assert sort_values({"actor.generate.stop": ["\n"]}, ["actor"]).sampling == {
        "actor.generate": {"stop": ("\n",)}
    }
    assert sort_values({"actor.generate.stop": "\n"}, ["actor"]).sampling == {
        "actor.generate": {"stop": ("\n",)}
    }


def test_stop_tokens_are_given_one_by_one_or_as_a_file_list():
    assert sampling("--actor.generate.stop_token_ids", "6", "--actor.generate.stop-token-ids", "0") == {
        "actor.generate": {"stop_token_ids": (6, 0)}
    }
    assert sort_values({"actor.generate.stop_token_ids": [6, 0]}, ["actor"]).sampling == {
        "actor.generate": {"stop_token_ids": (6, 0)}
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--actor.generate.temperature", "-1"), "temperature: a number of at least 0"),
        (("--actor.generate.top_p", "0"), "top_p: a number above 0 and at most 1"),
        (("--actor.generate.top_k", "1.5"), "top_k: an integer of at least 0"),
        (("--actor.generate.temprature", "1"), "write --actor.generate.temperature"),
        (("--actor.generate.samples", "1"), "set samples and max_tokens in the flow"),
        (("--actor.generate.stop", ""), "stop: a tuple of strings"),
        (("--actor.generate.stop_token_ids", "</s>"), "stop_token_ids: a tuple of token ids"),
        (("--actor.generate.stop_token_ids", "-1"), "stop_token_ids: a tuple of token ids"),
        (("--actor.generate.skip_special_tokens", "maybe"), "skip_special_tokens: True or False"),
        (("--actor.generate.min_tokens", "-1"), "min_tokens: an integer of at least 0"),
    ],
)
def test_an_unsuitable_setting_is_refused_with_suitable_ones(words, says):
    with pytest.raises(PlanError) as caught:
        sampling(*words)
    assert says in str(caught.value)


def test_recorded_lengths_are_read_from_their_file(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"lengths": [5, 1, 8], "source": "a run"}))
    assert sampling("--actor.generate.lengths", str(file)) == {"actor.generate": {"lengths": (5, 1, 8)}}
    assert sort_values({"actor.generate.lengths": [2, 3]}, ["actor"]).sampling == {
        "actor.generate": {"lengths": (2, 3)}
    }


@pytest.mark.parametrize(
    "text", ['{"lengths": [0]}', '{"lengths": [1.5]}', '{"lengths": []}', '{"lengths": 5}', "[5]", "{", None]
)
def test_a_file_without_lengths_is_refused_with_a_remedy(text, tmp_path):
    file = tmp_path / "lengths.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(PlanError, match="rlflow bench record RUN"):
        sampling("--actor.generate.lengths", str(file))


def test_a_call_takes_shared_settings_and_then_its_own():
    flags = {"actor.generate": {"temperature": 0.7, "top_k": 5}, "actor.generate#2": {"top_k": 7}}
    assert resampled(DEFAULTS, sampling_of(flags, "actor.generate", "actor.generate")) == {
        **DEFAULTS,
        "temperature": 0.7,
        "top_k": 5,
    }
    assert resampled(DEFAULTS, sampling_of(flags, "actor.generate", "actor.generate#2")) == {
        **DEFAULTS,
        "temperature": 0.7,
        "top_k": 7,
    }


def test_a_greedy_call_stays_greedy():
    greedy = {**DEFAULTS, "temperature": 0}
    assert resampled(greedy, {"temperature": 0.7, "top_k": 5}) == {**greedy, "top_k": 5}


@stage(gives="advantages")
def over_greedy(scores, baseline, mask):
    return (scores - baseline)[:, None] * mask


@loss
def gain(new, advantages):
    return -new.logprobs * advantages, {}


@flow
def twice(prompts, actor, reward):
    greedy = actor.generate(prompts, max_tokens=4, temperature=0)
    batch = actor.generate(prompts, samples=2, max_tokens=4, stop=("old",))
    batch |= reward(greedy, gives="baseline").select("baseline")
    batch |= reward(batch)
    batch |= over_greedy(batch)
    actor.update(batch, gain)


def calls(sampling=None):
    graph = compile_flow(twice, options=TraceOptions(sampling=sampling or {})).graph
    return graph, {node.name: dict(node.settings.shown) for node in graph.nodes if node.op is Op.GENERATE}


def test_the_graph_changes_only_in_the_settings_of_the_run():
    graph, own = calls()
    changed, replaced = calls({"actor.generate": {"temperature": 0.5, "stop": ("\n",)}})
    assert replaced["actor.generate"] == {**own["actor.generate"], "stop": ("\n",)}
    assert replaced["actor.generate#2"] == {**own["actor.generate#2"], "temperature": 0.5, "stop": ("\n",)}
    assert changed != graph
    assert calls({})[0] == graph


def test_an_unknown_call_is_refused_with_the_known_calls():
    with pytest.raises(FlowError) as caught:
        calls({"actor.generate#3": {"top_k": 2}})
    (problem,) = caught.value.problems
    assert problem.code == "no-such-generate"
    assert problem.expected == "one of actor.generate, actor.generate#2"


@pytest.mark.parametrize(("call", "problems"), [("actor.generate", 2), ("actor.generate#2", 1)])
def test_a_minimum_of_tokens_above_the_maximum_is_refused(call, problems):
    calls({call: {"min_tokens": 4}})
    with pytest.raises(FlowError) as caught:
        calls({call: {"min_tokens": 5}})
    assert [problem.found for problem in caught.value.problems] == [
        f"--{call}.min_tokens = 5, max_tokens = 4"
    ] * problems
    assert {Path(problem.place.path) for problem in caught.value.problems} == {Path(__file__)}


def test_an_eager_run_uses_and_records_the_sampling_settings(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n} =", "answer": str(n)}) + "\n" for n in range(8)))
    keywords = {
        "backend": "null",
        "data": str(data),
        "prompts": 2,
        "held_out": 0,
        "threads": 1,
        "actor": {"generate": {"temperature": 0.5}},
    }
    roles = rlflow.roles(twice, **keywords)
    try:
        prompts = roles.take()
        assert roles["actor"].generate(prompts, max_tokens=2)["temperature"].tolist() == [0.5, 0.5]
        assert roles["actor"].generate(prompts, max_tokens=2, temperature=0)["temperature"].tolist() == [
            1.0,
            1.0,
        ]
        with pytest.raises(FlowError, match="min_tokens above its max_tokens"):
            roles["actor"].generate(prompts, max_tokens=2, min_tokens=3)
    finally:
        roles.close()
