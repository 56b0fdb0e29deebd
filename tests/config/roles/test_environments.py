"""Environments are bound to the sampling role. Mistakes are reported at file and line before the run loads a
model.
"""

import json

import pytest
from scenarios import FILE, spec_of
from sources import TASKS

from rlflow.author.load import load_flow
from rlflow.cli.check import check_flow
from rlflow.compiler.trace.compile import TraceOptions, compile_flow
from rlflow.config.flags import sort_values
from rlflow.config.options import Options
from rlflow.config.roles.environments import (
    Environments,
    by_role,
    default_rewards,
    environments_of,
    single_rank,
    wanted_fields,
)
from rlflow.data.json_fields import Wanted
from rlflow.errors import PlanError
from rlflow.runs.api import resolve_config

GRPO, CRITIQUE = "algorithms/grpo.py", "algorithms/critique.py"
READING = """
from rlflow import Turn
class Reading:
    def reset(self, prompt, quest, extra=None, *, seed): ...
    def step(self, said): return Turn()
class Tokens:
    def reset(self, prompt_tokens, *, seed): ...
    def step(self, said): return Turn()
class Rest:
    def reset(self, **fields): ...
    def step(self, said): return Turn()
"""


@pytest.fixture
def reading(tmp_path):
    path = tmp_path / "reading.py"
    path.write_text(READING)
    return path


def problems(file, *flags):
    return check_flow(file, flags).problems


def errors(file, *flags):
    return [problem for problem in problems(file, *flags) if problem.severity == "error"]


def config(**values):
    return sort_values(values, ["actor", "critic"], None)


def test_flags_are_sorted_by_role_and_name():
    sorted_ = config(
        **{"env": "a.py:A", "env.topk": "3", "actor.env": "b.py:B", "actor.env.turns": "2", "actor.lr": "0.1"}
    )
    assert sorted_.environments == {"": {"": "a.py:A", "topk": "3"}, "actor": {"": "b.py:B", "turns": "2"}}
    assert sorted_.options.env == "a.py:A"
    assert sorted_.roles == {"actor": {"lr": "0.1"}}


def test_settings_without_an_environment_are_refused():
    with pytest.raises(PlanError, match=r"--env.topk is a setting of an environment, but none is given"):
        environments_of(config(**{"env.topk": "3"}).environments)
    with pytest.raises(PlanError, match=r"--actor.env.topk is a setting(?s:.*)--actor.env FILE.py:Class"):
        environments_of(config(**{"actor.env.topk": "3"}).environments)


def test_an_environment_with_rewards_is_the_default_reward(reading):
    for name, expected in (("Scripted", ("env",)), ("Judged", ("env",)), ("Silent", ("task",))):
        chosen = config(env=f"{FILE}:{name}")
        assert default_rewards(chosen.options.reward, environments_of(chosen.environments)) == expected
    named = config(env=f"{FILE}:Scripted", reward=("math",))
    assert default_rewards(named.options.reward, environments_of(named.environments)) == ("math",)
    assert default_rewards((), {}) == ("task",)


def test_fields_read_by_reset_are_carried(reading):
    specs = environments_of(config(env=f"{reading}:Reading").environments)
    wanted = wanted_fields(Wanted({"label": True}), specs)
    assert wanted.names == {"prompt": True, "quest": True, "extra": False, "label": True}
    assert not wanted.everything
    assert wanted_fields(Wanted(), environments_of(config(env=f"{reading}:Rest").environments)).everything


def test_the_reward_of_an_environment_replaces_the_default():
    flow = load_flow(GRPO)
    assert resolve_config(flow, None, {})[0].options.reward == ("task",)
    assert resolve_config(flow, None, {"env": f"{FILE}:Scripted"})[0].options.reward == ()
    assert resolve_config(flow, None, {"env": f"{FILE}:Scripted", "reward": ("math",)})[0].options.reward == (
        "math",
    )


def test_check_accepts_an_environment_and_shows_it_at_its_node():
    report = check_flow(GRPO, ["--env", f"{FILE}:Scripted", "--env.turns", "3"])
    assert report.ok
    node = report.program.graph.by_name["actor.generate"]
    assert node.settings.environment == "scripted.py:Scripted(), at most 3 turns"
    assert node.digest == spec_of(turns=3).digest
    assert {"turn", "turn_rewards", "turns", "said", "failed", "episode", "episode_score"} <= {
        output.name for output in node.outputs
    }
    assert node.timeout == 1800 + 3 * 60
    assert "prompt" in {item.parameter for item in node.inputs}
    reward = report.program.graph.by_name["reward"]
    assert {"episode_score", "failed", "said"} <= {item.parameter for item in reward.inputs}


def test_parameters_of_reset_are_checked_at_their_line(reading):
    (error,) = errors(GRPO, "--env", f"{reading}:Reading")
    assert error.message == "the environment reading.py:Reading reads 'quest', but the prompts do not have it"
    assert str(error.definition).endswith("reading.py:3")
    assert "--data.quest FIELD" in error.remedy
    (error,) = errors(GRPO, "--env", f"{reading}:Tokens")
    assert (
        error.message
        == "the environment reading.py:Tokens reads column 'prompt_tokens', which is not a row column"
    )


def test_data_fields_are_read_by_their_names(reading, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "p", "answer": "a", "quest": "q", "extra": 1}) + "\n")
    report = check_flow(
        GRPO, ["--env", f"{reading}:Reading", "--data", str(data), "--model", str(TASKS / "arithmetic_model")]
    )
    assert report.ok
    inputs = {item.parameter for item in report.program.graph.by_name["actor.generate"].inputs}
    assert {"prompt", "data.quest", "data.extra"} <= inputs


def test_an_environment_needs_a_sampling_role():
    (error,) = errors("algorithms/sft.py", "--env", f"{FILE}:Silent")
    assert error.message == "flow 'sft' does not sample, so no environment can answer"
    (error,) = errors(GRPO, "--reference.env", f"{FILE}:Silent")
    assert error.message == "role 'reference' does not sample, so no environment can answer it"
    (error,) = errors(CRITIQUE, "--env", f"{FILE}:Silent")
    assert error.message.startswith(
        "several roles sample, and --env does not name the role that scripted.py:Silent answers"
    )
    role = error.found.partition(",")[0]
    assert not errors(CRITIQUE, f"--{role}.env", f"{FILE}:Silent")


def test_episode_columns_exist_only_with_an_environment():
    (error,) = errors(GRPO, "--reward", "env")
    assert error.message == "reward needs column 'episode_score', which exists only with an environment"
    assert error.remedy.startswith("--env FILE.py:Class")


def test_recorded_lengths_and_an_environment_are_incompatible(tmp_path):
    lengths = tmp_path / "lengths.json"
    lengths.write_text('{"lengths": [2, 3]}')
    codes = [
        problem.code
        for problem in errors(GRPO, "--env", f"{FILE}:Silent", "--actor.generate.lengths", str(lengths))
    ]
    assert codes == ["env-lengths"]


def test_the_graph_changes_with_the_environment():
    flow = load_flow(GRPO)
    graphs = {
        digest: compile_flow(flow, None, TraceOptions(environments=specs)).graph
        for digest, specs in (
            ("none", {}),
            ("two", {"": spec_of(turns=2)}),
            ("three", {"": spec_of(turns=3)}),
            ("actor", {"actor": spec_of(turns=3)}),
        )
    }
    nodes = {name: graph.by_name["actor.generate"] for name, graph in graphs.items()}
    assert nodes["none"].digest == ""
    assert nodes["two"].digest != nodes["three"].digest == nodes["actor"].digest
    assert by_role({"": spec_of(turns=3)}, graphs["three"]).keys() == {"actor"}
    assert by_role({"critic": spec_of()}, graphs["three"]) == {}


def test_a_generator_whose_ranks_share_rows_refuses_environments():
    graph = compile_flow(load_flow(GRPO), None, TraceOptions(environments={"": spec_of()})).graph
    single_rank({"": spec_of()}, graph, {"actor": 1})
    with pytest.raises(
        PlanError, match=r"samples each row on 2 ranks, but its environment needs a single rank"
    ):
        single_rank({"": spec_of()}, graph, {"actor": 2})


def test_processes_end_with_the_run_and_failures_name_their_cause():
    graph = compile_flow(load_flow(GRPO), None, TraceOptions(environments={"": spec_of()})).graph
    environments = Environments({"": spec_of(parallel=1)}, graph, Options())
    reported = []
    environments.on_output(reported.append)
    episodes, _ = environments.pools["actor"].open([{"prompt": '{"turns": [{"raise": "no"}]}'}], [1])
    environments.pools["actor"].step(episodes, ["x"])
    assert list(map(str, environments.reasons())) == ["env_raised"]
    assert len(environments.pids()) == 1
    environments.close()
    assert environments.pids() == []
