"""Warnings at the start and end of a run about common mistakes."""

import json
import re

import pytest
import torch

import rlflow
from rlflow import PlanError, StageError
from rlflow.author.load import load_flow
from rlflow.cli.check import check_flow
from rlflow.compiler.placement import Placement
from rlflow.compiler.preview.fits import crowded, too_many_rows
from rlflow.compiler.preview.sizes import Assumed, Sizes
from rlflow.compiler.trace.compile import compile_flow
from rlflow.errors import FlowError
from rlflow.monitoring.reporter import Quiet
from rlflow.rewards.reward_spec import parse_reward
from rlflow.rewards.values import number
from rlflow.runs.api import resolve_config
from rlflow.runs.prepare import prepare
from rlflow.runs.resume import resume

FLOW = """
from rlflow import RANK0, flow, loss, stage
@stage(gives="advantages", dispatch=RANK0)
def spread(scores, mask): return scores[:, None] * mask
@loss
def simple(new, advantages): return -new.logprobs * advantages, {}
@flow
def f(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    spread(batch)
    batch |= spread(batch)
    actor.update(batch, simple)
"""


@pytest.fixture
def file(tmp_path):
    def write(text, name="flow.py"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def notes_of(flow, **values):
    """Return the notes of the preparation of a run on the null backend."""
    notes = []
    loaded = load_flow(str(flow))
    given, hp = resolve_config(
        loaded, None, {"backend": "null", "threads": torch.get_num_threads(), **values}
    )
    prepare(loaded, hp, given, notes.append, judge=None).close()
    return notes


def test_a_run_gives_the_warnings_of_check(file):
    flow = str(file(FLOW))
    warned = [problem for problem in check_flow(flow, []).problems if problem.severity == "warning"]
    assert warned
    assert [str(problem) for problem in warned] == notes_of(flow)
    assert notes_of("grpo") == []


@pytest.mark.parametrize(
    ("records", "prompts", "says"),
    [
        (1, 4, "has 1 record to train on, and an iteration takes 4: each record appears about 4 times"),
        (3, 4, "each record appears about 1.33 times"),
        (4, 4, None),
    ],
)
def test_data_smaller_than_an_iteration_are_reported(tmp_path, records, prompts, says):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}", "answer": f"{i}"}) + "\n" for i in range(records)))
    notes = notes_of("grpo", data=str(data), prompts=prompts, held_out=0)
    assert [note for note in notes if "appears about" in note] == [
        note for note in notes if says and says in note
    ]
    assert len(notes) == (says is not None)


def test_an_iteration_without_rewards_is_not_reported_as_done(file, tmp_path):
    class Reports(Quiet):
        done: list[int] = []

        def iteration(self, number, metrics, samples, stages):
            self.done.append(number)

    from rlflow.runs.session import start_run

    reward = file("def silent(completion):\n    return None\n", "silent.py")
    flow = load_flow("grpo")
    values = {"backend": "null", "prompts": 2, "reward": (f"{reward}:silent",), "out": str(tmp_path / "runs")}
    given, hp = resolve_config(flow, None, values)
    with pytest.raises(StageError, match="100% of the rewards are missing"):
        start_run(prepare(flow, hp, given), Reports())
    assert Reports.done == []
    assert (tmp_path / "runs/grpo-1/metrics.jsonl").read_text().count("\n") == 1  # for the user to look at


def test_more_workers_than_cores_cause_a_warning():
    (problem,) = crowded(Placement({"train": 300, "rollout": 200}), 2)
    assert (problem.severity, problem.found) == ("warning", "train=300, rollout=200")
    assert "500 workers share 2 cores" in problem.message
    assert not list(crowded(Placement({"all": 2}), 2))


def test_more_rows_than_can_be_kept_are_refused():
    graph = compile_flow(load_flow("grpo")).graph
    (problem,) = too_many_rows(Sizes.of(graph, Assumed(100_000_000)))
    assert "100000000 prompts" in problem.found
    assert not list(too_many_rows(Sizes.of(graph, Assumed(1000))))


def test_a_finished_run_explains_how_to_add_iterations(tmp_path):
    rlflow.run(
        "grpo",
        backend="null",
        prompts=2,
        iterations=2,
        out=str(tmp_path),
        name="done",
        threads=torch.get_num_threads(),
    )
    with pytest.raises(PlanError, match=r"(?s)2 done, 1 configured.*--iterations above 2.*rlflow export"):
        resume(tmp_path / "done", {"iterations": 1}, Quiet())


def test_a_missing_import_from_rlflow_is_shown(file):
    with pytest.raises(
        FlowError, match=r"(?s)name 'RANK0' is not defined.*remedy: +from rlflow import RANK0$"
    ):
        load_flow(str(file(FLOW.replace("import RANK0, ", "import "))))


def test_a_file_that_shadows_a_package_is_named(file):
    file("", "colorsys.py")
    flow = file("raise ImportError('partially initialized module')\n", "second.py")
    with pytest.raises(FlowError, match=r"(?s)colorsys\.py:1: .*remedy: +rename colorsys\.py"):
        load_flow(str(flow))


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ("label", "name the parameter 'answer'; or --data.answer label if"),
        (
            "solution_str",
            "name the parameter 'completion'; or map a field of the data: --data.solution_str FIELD",
        ),
        ("extra_info", "give the parameter a default; or map a field of the data: --data.extra_info FIELD"),
    ],
)
def test_a_reward_that_reads_a_missing_column_gets_a_remedy(file, parameter, says):
    reward = file(f"\n\ndef judge(completion, {parameter}):\n    return 1.0\n", "judge.py")
    report = check_flow("grpo", ["--reward", f"{reward}:judge"])
    (problem,) = report.errors
    assert problem.definition.line == 3
    assert re.search(says, problem.remedy)


def test_a_weight_that_is_not_a_number_is_refused(file):
    reward = file("def short(completion):\n    return 1.0\n", "short.py")
    with pytest.raises(
        PlanError, match=r"(?s)the weight of reward '.*short\.py:short' is not a number.*found: +abc"
    ):
        parse_reward(f"{reward}:short:abc")


async def later():
    return 1.0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            {"acc": 1.0},
            "the function returned dict, not a number: use the key 'score' for the score instead of 'acc'",
        ),
        ({"why": "x"}, "the function returned dict, not a number"),
        (
            [1.0],
            "the function returned list, not a number: it is called for one row, and must return one number",
        ),
        ("1", "the function returned str, not a number"),
    ],
)
def test_a_wrong_return_value_of_a_reward_gets_a_remedy(value, says):
    assert number(value) == ["type", says]


def test_a_coroutine_is_reported():
    started = later()
    assert number(started)[1].endswith("define the function with async def")
    started.close()
