"""Placements that cannot be meant are refused with the flag that helps; those that only waste ranks are warned of."""

import re
from pathlib import Path

import pytest

import rlflow.tasks
from rlflow.errors import PlanError

FOLDER = Path(next(iter(rlflow.tasks.__path__))) / "arithmetic_model"

@pytest.mark.parametrize(("line", "code", "found", "remedy"), [
    ("grpo --pools train=1,rollout=1 --actor.trainer.pool trian", "no-pool", "trian", "name a pool of --pools"),
    ("grpo --pools a=1,b=1", "pool-undecided", "a, b", "--actor.trainer.pool a --actor.generator.pool b"),
    ("grpo --pools a=0", "pools", "--pools a=0", "--pools all=2, or --pools train=4,rollout=4"),
    ("ppo --pools all=1 --critic.generator.pool all", "no-half", "--critic.generator.pool", "leave --critic.generator.pool out"),
    ("ppo --pools all=1 --reference.generate_seconds 1", "no-half", "--reference.generate_seconds",
     "leave --reference.generate_seconds out"),
    ("ppo --critic.generator null", "no-half", "--critic.generator", "leave --critic.generator out"),
    ("ppo --pools all=1 --reward.pool all", "no-half", "--reward.pool", "leave --reward.pool out"),
    ("grpo --staleness -1", "staleness-range", "--staleness -1", "--staleness 0"),
    ("grpo --staleness 1", "staleness", "--staleness 1", "--pools train=1,rollout=1, or leave --staleness out"),
    ("grpo --pools all=5 --staleness 1", "staleness", "--staleness 1, both halves on 'all'",
     "--pools train=2,rollout=3, or leave --staleness out"),
    ("sft --stream 2", "stream-nothing", "--stream 2: nothing is scored before all rows are sampled", "leave --stream out"),
    ("grpo --pools train=1,rollout=1 --staleness 1 --stream 2", "stream-ahead", "--stream 2 --staleness 1", "leave --stream out"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(planned_as, line, code, found, remedy):
    with pytest.raises(PlanError) as refused:
        planned_as(line)
    assert [(problem.code, problem.found, problem.remedy) for problem in refused.value.problems] == [(code, found, remedy)]


def test_all_that_does_not_fit_is_said_at_once(planned_as):
    with pytest.raises(PlanError) as refused:
        planned_as("miles_1735::uncorrected --pools all=2 --staleness 2 --reward.pool all")
    assert [problem.code for problem in refused.value.problems] == ["no-half", "stale-uncorrected", "staleness"]


@pytest.mark.parametrize(("line", "warned"), [
    ("grpo --pools train=1,rollout=1,rest=1 --actor.trainer.pool train --actor.generator.pool rollout", {"pool-unused": "rest"}),
    ("grpo --pools train=4,rollout=8 --prompts 4 --hp.samples 2", {"idle-ranks": "8 ranks, at most 4 rows at once"}),
    ("grpo --pools train=4,rollout=2 --prompts 4 --hp.minibatch 2", {"small-minibatch": "minibatch=2, 4 ranks"}),
    ("grpo --pools train=8,rollout=4 --prompts 4 --hp.samples 2 --hp.minibatch 8", {}),  # as many rows as ranks
    ("dapo --pools train=2,rollout=9 --prompts 4 --hp.samples 2 --hp.groups 2", {"idle-ranks": "9 ranks, at most 4 rows"}),  # in a repeat
    ("dpo --pools all=9 --prompts 4", {"idle-ranks": "9 ranks, at most 8 rows at once"}),
    (f"grpo --model {FOLDER}", {"no-room": "256 positions of role 'actor'"}),
    (f"grpo --model {FOLDER} --hp.max_tokens 255", {}),
    ("grpo --pools train=4,rollout=4", {}),
    ("grpo --pools train=4,rollout=4 --reference.pool train", {}),
])  # fmt: skip
def test_what_only_wastes_is_warned_of(planned_as, line, warned):
    found = {problem.code: problem for problem in planned_as(line).warnings}
    assert list(found) == list(warned)
    for code, says in warned.items():
        assert says in found[code].message + found[code].found
        assert found[code].severity == "warning"
        assert found[code].remedy


def test_the_page_has_a_line_for_every_code():
    root = Path(__file__).parents[2]
    sources = ("explain/fits.py", "runs/preview.py", "placement.py", "check/staleness.py", "memory/schedule.py", "passes/residency.py",
               "binding/positions.py", "runs/planning.py")
    found = {code for file in sources for code in re.findall(r'(?:Problem|\.of)\(\s*"([a-z-]+)"', (root / "rlflow" / file).read_text())}
    found -= {"model-folder", "memory-proof"}
    page = (root / "docs" / "runs.md").read_text().partition("## What a plan says")[2].partition("`--json` prints")[0]
    table = page.partition("| --- | --- | --- |")[2]
    assert found == {code for row in table.splitlines()[1:] for code in re.findall(r"`([a-z-]+)`", row.split(" | ")[0])}
