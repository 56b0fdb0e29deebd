"""Placements that cannot work are refused with the flag to change. Placements that only waste ranks are
warned about.
"""

import re
import sys
import types
from pathlib import Path

import pytest
from sources import ROOT

import rlflow.data.tasks
from rlflow.backends import null
from rlflow.errors import PlanError

FOLDER = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"


@pytest.mark.parametrize(
    ("line", "code", "found", "remedy"),
    [
        (
            "grpo --pools train=1,rollout=1 --actor.trainer.pool trian",
            "no-pool",
            "trian",
            "name a pool of --pools",
        ),
        ("grpo --pools a=1,b=1", "pool-undecided", "a, b", "--actor.trainer.pool a --actor.generator.pool b"),
        ("grpo --pools a=0", "pools", "--pools a=0", "--pools all=2, or --pools train=4,rollout=4"),
        (
            "ppo --pools all=1 --critic.generator.pool all",
            "no-half",
            "--critic.generator.pool",
            "remove --critic.generator.pool",
        ),
        (
            "ppo --pools all=1 --reference.generate_seconds 1",
            "no-half",
            "--reference.generate_seconds",
            "remove --reference.generate_seconds",
        ),
        ("ppo --critic.generator null", "no-half", "--critic.generator", "remove --critic.generator"),
        ("ppo --pools all=1 --reward.pool all", "no-half", "--reward.pool", "remove --reward.pool"),
        ("grpo --staleness -1", "staleness-range", "--staleness -1", "--staleness 0"),
        (
            "grpo --staleness 1",
            "staleness",
            "--staleness 1",
            "--pools train=1,rollout=1, or remove --staleness",
        ),
        (
            "grpo --pools all=5 --staleness 1",
            "staleness",
            "--staleness 1, both sides on 'all'",
            "--pools train=2,rollout=3, or remove --staleness",
        ),
        (
            "sft --stream 2",
            "stream-nothing",
            "--stream 2: nothing is scored before all rows are sampled",
            "remove --stream",
        ),
        (
            "grpo --pools train=1,rollout=1 --staleness 1 --stream 2",
            "stream-ahead",
            "--stream 2 --staleness 1",
            "remove --stream",
        ),
    ],
)
def test_an_impossible_placement_is_refused(planned_as, line, code, found, remedy):
    with pytest.raises(PlanError) as refused:
        planned_as(line)
    assert [(problem.code, problem.found, problem.remedy) for problem in refused.value.problems] == [
        (code, found, remedy)
    ]


WITH = f"--model {FOLDER} --data chain_sum"
PROCESSES = "--pools all=2, whose ranks are processes"


@pytest.mark.parametrize(
    ("line", "names"),
    [
        pytest.param(
            f"ppo {WITH} --pools all=2@threads --critic.trainer fsdp --actor.generator vllm",
            # imports vLLM
            ["the trainer fsdp of role 'critic'", "the generator vllm of role 'actor'"],
            marks=pytest.mark.slow,
        ),
        (
            f"grpo {WITH} --pools all=2@threads --actor.trainer deepspeed",
            ["the trainer deepspeed of role 'actor'"],
        ),
        (
            "grpo --pools all=2@threads --weights alltoall --ray-address auto",
            ["--weights alltoall", "--ray-address joins a Ray"],
        ),
        ("grpo --pools all=2@threads --weights segment", ["--weights segment"]),
    ],
)
def test_options_that_need_processes_are_refused_for_thread_ranks(request, planned_as, line, names):
    if "vllm" in line:
        request.getfixturevalue("vllm_installed")
    with pytest.raises(PlanError) as refused:
        planned_as(line)
    problems = refused.value.problems
    assert [(problem.code, problem.remedy) for problem in problems] == [("pool-threads", PROCESSES)] * len(
        names
    )
    assert all(problem.message.startswith(name) for problem, name in zip(problems, names, strict=True))


def test_pools_of_threads_and_of_processes_are_refused_together(planned_as):
    with pytest.raises(PlanError, match="some pools are threads of this process and others are not"):
        planned_as("grpo --pools train=1@threads,rollout=1")


@pytest.mark.parametrize("flags", ["", "--weights gather", "--memory 20GiB", "--stream 2", "--staleness 1"])
def test_thread_ranks_otherwise_have_the_plan_of_processes(planned_as, flags):
    threads, processes = (
        planned_as(f"grpo --pools train=2{kind},rollout=1{kind} {flags}") for kind in ("@threads", "")
    )
    assert (threads.steps, threads.edges, threads.memory) == (
        processes.steps,
        processes.edges,
        processes.memory,
    )
    assert threads.placement.threads
    assert not processes.placement.threads


def test_all_problems_are_reported_at_once(planned_as):
    with pytest.raises(PlanError) as refused:
        planned_as("miles_1735::uncorrected --pools all=2 --staleness 2 --reward.pool all")
    assert [problem.code for problem in refused.value.problems] == [
        "no-half",
        "stale-uncorrected",
        "staleness",
    ]


@pytest.mark.parametrize(
    ("line", "warned"),
    [
        (
            "grpo --pools train=1,rollout=1,rest=1 --actor.trainer.pool train --actor.generator.pool rollout",
            {"pool-unused": "rest"},
        ),
        (
            "grpo --pools train=4,rollout=8 --prompts 4 --hp.samples 2",
            {"idle-ranks": "8 ranks, but at most 4 rows at once"},
        ),
        (
            "grpo --pools train=4,rollout=2 --prompts 4 --hp.minibatch 2",
            {"small-minibatch": "minibatch=2, 4 ranks"},
        ),
        # as many rows as ranks
        ("grpo --pools train=8,rollout=4 --prompts 4 --hp.samples 2 --hp.minibatch 8", {}),
        # in a repeat
        (
            "dapo --pools train=2,rollout=9 --prompts 4 --hp.samples 2 --hp.groups 2",
            {"idle-ranks": "9 ranks, but at most 4 rows"},
        ),
        ("dpo --pools all=9 --prompts 4", {"idle-ranks": "9 ranks, but at most 8 rows at once"}),
        (f"grpo --model {FOLDER}", {"no-room": "256 positions of role 'actor'"}),
        (f"grpo --model {FOLDER} --hp.max_tokens 255", {}),
        ("grpo --pools train=4,rollout=4", {}),
        ("grpo --pools train=4,rollout=4 --reference.pool train", {}),
    ],
)
def test_a_wasteful_placement_is_warned_about(planned_as, line, warned):
    found = {problem.code: problem for problem in planned_as(line).warnings}
    assert list(found) == list(warned)
    for code, says in warned.items():
        assert says in found[code].message + found[code].found
        assert found[code].severity == "warning"
        assert found[code].remedy


def test_a_trainer_that_cannot_reset_its_optimizer_is_refused(planned_as, monkeypatch):
    class Trainer(null.Trainer):
        reset_optimizer = None

    module = types.ModuleType("planted_reset.one")
    module.Trainer, module.Generator = Trainer, null.Generator
    monkeypatch.setitem(sys.modules, "planted_reset", types.ModuleType("planted_reset"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    flow = f"restarting --model {FOLDER}"
    with pytest.raises(PlanError, match="the trainer planted_reset.one cannot reset its optimizer") as error:
        planned_as(f"{flow} --actor.trainer planted_reset.one")
    assert [problem.code for problem in error.value.problems] == ["optimizer-reset"]
    assert planned_as(f"{flow} --critic.trainer planted_reset.one")  # its updates reset nothing


def test_the_page_has_a_line_for_every_code():
    sources = (
        "compiler/preview/fits.py",
        "runs/preview.py",
        "compiler/placement.py",
        "compiler/graph/due.py",
        "compiler/check/staleness.py",
        "compiler/residency_schedule.py",
        "compiler/passes/residency.py",
        "config/roles/following.py",
        "config/roles/prompt_room.py",
        "runs/planning.py",
    )
    found = {
        code
        for file in sources
        for code in re.findall(r'(?:Problem|\.of)\(\s*"([a-z-]+)"', (ROOT / "rlflow" / file).read_text())
    }
    found -= {
        "model-folder",
        "memory-proof",
        "tensor-parallel",
        "lone-change",
        "lone-stage",
    }  # no plan reports these
    page = (
        (ROOT / "docs" / "runs.md")
        .read_text()
        .partition("## What a plan says")[2]
        .partition("`--json` prints")[0]
    )
    table = page.partition("| --- | --- | --- |")[2]
    assert found == {
        code for row in table.splitlines()[1:] for code in re.findall(r"`([a-z-]+)`", row.split(" | ")[0])
    }
