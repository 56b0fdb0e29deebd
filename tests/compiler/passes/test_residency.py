"""Plans within a memory limit: when parts move, plans that cannot fit, and how a run follows its plan."""

from dataclasses import replace
from pathlib import Path

import pytest

import rlflow.data.tasks
from rlflow.compiler.residency_schedule import prove
from rlflow.errors import PlanError

FOLDER = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"
JUDGED = """
from rlflow import compare, flow, loss


@loss
def policy_loss(new, logprobs, advantages):
    return -(new.logprobs - logprobs).exp() * advantages, {}


@loss(new="scores", rows="group")
def spread_loss(new, scores):
    return (new.scores - scores).square(), {}


@flow
def judged(prompts, actor, judge):
    batch = actor.generate(prompts, samples=2, max_tokens=8)
    batch |= judge(batch)
    batch |= actor.logprobs(batch)
    batch |= compare(batch)
    actor.update(batch, policy_loss)
    judge.update(batch, spread_loss, mean="rows")
"""
LEAGUE = """
from rlflow import ALL, compare, flow, loss, stage


@stage(on="rival", dispatch=ALL, pure=False)
def renewed(rival, temperature):
    return {}


@loss
def policy_loss(new, logprobs, advantages):
    return -(new.logprobs - logprobs).exp() * advantages, {}


@flow
def league(prompts, actor, rival, reward):
    theirs = rival.generate(prompts, samples=2, max_tokens=8)
    renewed(theirs)
    rival.generate(prompts, samples=2, max_tokens=8)
    batch = actor.generate(prompts, samples=2, max_tokens=8)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= compare(batch)
    actor.update(batch, policy_loss)
"""
SMALL = f"--model {FOLDER} --data chain_sum --held-out 0 --batch_tokens 1024"


def moves(schedule):
    return [f"{move.before}: {'away' if move.away else 'back'} {move.part}" for move in schedule.moves]


def test_nothing_moves_without_a_limit_or_with_enough_room(planned_as):
    free = planned_as(f"ppo {SMALL}")
    assert free.residency == ()
    assert {note.name for note in free.notes}.isdisjoint({"residency", "verify"})
    roomy = planned_as(f"ppo {SMALL} --memory 1GB")
    assert [(schedule.moves, schedule.moving) for schedule in roomy.residency] == [((), False)]
    assert roomy.time == free.time


def test_a_lower_limit_moves_more_parts(planned_as):
    [schedule] = planned_as(f"grpo {SMALL} --memory 19.5MB").residency
    assert moves(schedule) == [
        "actor.generate: away actor.trainer weights",
        "actor.logprobs: back actor.trainer weights",
    ]
    assert [moment.step for moment in schedule.moments] == [
        "weights of actor",
        "actor.generate",
        "actor.logprobs",
        "actor.update",
    ]
    tight = next(iter(planned_as(f"grpo {SMALL} --memory 16MB").residency))
    assert len(tight.moves) == 4
    assert tight.peak <= 16_000_000 < tight.peak_without
    with pytest.raises(PlanError, match="are wrong at"):
        prove(replace(tight, awake=schedule.awake))


def test_moments_cover_each_pool_chunk_commit_and_weight_check(planned_as):
    line = f"ppo {SMALL} --pools train=1,rollout=1 --memory 20MB"
    steps = {
        schedule.pool: [moment.step for moment in schedule.moments] for schedule in planned_as(line).residency
    }
    assert steps["rollout"] == ["weights of actor", "actor.generate"]
    assert steps["train"] == [
        "the in-memory checkpoint of actor",
        "the in-memory checkpoint of critic",
        "weights of actor",
        "actor.logprobs",
        "reference.logprobs",
        "critic.values",
        "critic.update",
        "actor.update",
    ]
    rare = {schedule.pool: schedule for schedule in planned_as(f"{line} --commit-every 2").residency}["train"]
    assert rare.moments[0].step == "weights of actor"
    assert {moment.step for moment in rare.beside} == {"saving actor", "saving critic"}


def test_a_role_given_to_side_effects_is_committed_saved_and_delivered(planned_as, tmp_path):
    (tmp_path / "league.py").write_text(LEAGUE)
    plan = planned_as(f"{tmp_path / 'league'}::league {SMALL} --pools train=1,rollout=1 --memory 30MB")
    steps = {schedule.pool: [moment.step for moment in schedule.moments] for schedule in plan.residency}
    assert "the in-memory checkpoint of rival" in steps["train"]
    # the copy of the previous iteration, and the copy for the stage
    assert steps["rollout"].count("weights of rival") == 2
    assert plan.commits.bytes["rival"] < plan.commits.bytes["actor"] / 2  # no optimizer


def test_a_trained_reward_and_the_body_of_a_repeat_have_moments(planned_as):
    prime = planned_as(f"prime {SMALL} --memory 20MB")
    assert any(schedule.moves for schedule in prime.residency)
    dapo = planned_as(f"dapo {SMALL} --memory 16MB").residency[0]
    assert [moment.step for moment in dapo.moments] == [
        "weights of actor",
        "actor.generate",
        "actor.logprobs",
        "actor.update",
    ]


def test_scores_of_a_trained_reward_wait_and_other_scores_do_not(planned_as, tmp_path):
    """If parts move, no two nodes with a model run at once; a reward in its own processes may run."""
    path = tmp_path / "judged.py"
    path.write_text(JUDGED)
    limited = planned_as(f"{path} {SMALL} --memory 20MB")
    assert {(pair.first, pair.second): pair.lane for pair in limited.pairs}[
        "judge", "actor.logprobs"
    ] == "model"
    assert any(schedule.moves for schedule in limited.residency)
    free = planned_as(f"{path} {SMALL}")
    assert {(pair.first, pair.second): pair.lane for pair in free.pairs}["judge", "actor.logprobs"] is None
    of_processes = planned_as(f"grpo {SMALL} --memory 19.5MB")
    assert {(pair.first, pair.second): pair.lane for pair in of_processes.pairs}[
        "reward", "actor.logprobs"
    ] is None


@pytest.mark.parametrize(
    ("held_out", "beside"),
    [
        (0, {"saving actor"}),
        (16, {"saving actor", "weights of actor", "the evaluation"}),
    ],
)
def test_an_evaluation_is_a_moment_between_iterations(planned_as, held_out, beside):
    [schedule] = planned_as(
        f"grpo {SMALL.replace('--held-out 0', f'--held-out {held_out}')} --memory 19.5MB"
    ).residency
    assert {moment.step for moment in schedule.beside} == beside


def test_copies_of_the_optimizer_count_as_its_memory(planned_as):
    whole = {
        (held.half, held.what): held.bytes
        for held in planned_as(f"ppo {SMALL}").memory
        if held.role == "critic"
    }
    schedule = planned_as(f"ppo {SMALL} --memory 20MB --critic.trainer deepspeed --critic.zero 1").residency[
        0
    ]
    sizes = {str(part): size for part, size in schedule.sizes.items()}
    # a float32 copy next to two moments
    assert sizes["critic.trainer optimizer"] == whole["trainer", "optimizer"] * 3 // 2
    assert "critic.trainer gradient" not in sizes


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (
            f"grpo {SMALL} --memory 12MB",
            "memory",
            "actor.update does not fit into a rank's memory on this process: 3.2 MB too much",
        ),
        (f"grpo {SMALL.replace('1024', '8192')} --memory 20MB", "memory", "--actor.batch_tokens"),
        (f"grpo {SMALL} --memory 5MB --pools train=4,rollout=1 --actor.trainer fsdp", "memory", "on rollout"),
        (
            f"grpo {SMALL} --memory 13MB --reward {FOLDER}",
            "memory",
            "and always arithmetic_model.reward weights 3.8 MB",
        ),
        (f"grpo {SMALL} --memory plenty", "setting-range", "plenty"),
    ],
)
def test_a_plan_that_cannot_fit_is_refused(planned_as, line, code, says):
    with pytest.raises(PlanError) as refused:
        planned_as(line)
    [problem] = refused.value.problems
    assert problem.code == code
    assert says in str(problem)


def test_the_memory_that_the_remedy_names_is_enough(planned_as):
    with pytest.raises(PlanError) as refused:
        planned_as(f"ppo {SMALL} --memory 8MB")
    asked = max(int(problem.remedy.split()[1].rstrip(";")) for problem in refused.value.problems)
    [schedule] = planned_as(f"ppo {SMALL} --memory {asked}").residency
    assert schedule.peak == asked


def test_memory_of_vllm_on_a_cpu_never_moves(planned_as):
    line = (
        f"ppo {SMALL.partition(' --batch')[0]} --actor.generator vllm --actor.kv_cache_memory_bytes 4000000"
    )
    [schedule] = planned_as(f"{line} --memory 30MB").residency
    assert {str(part) for part in schedule.fixed} == {"actor.generator weights", "actor.generator cache"}
    assert "the weight check of actor" in [moment.step for moment in schedule.moments]
    amounts = [
        held.bytes for held in planned_as(line.partition(" --actor.kv")[0]).memory if held.what == "cache"
    ]
    assert amounts == [256 << 20]


def test_model_nodes_keep_the_planned_order_if_parts_move(planned_as):
    order = [step.name for step in planned_as(f"ppo {SMALL} --memory 16MB").steps]
    assert set(order) == {step.name for step in planned_as(f"ppo {SMALL}").steps}
    free, settled = (planned_as(f"ppo {SMALL} --memory {limit}") for limit in ("1GB", "16MB"))
    beside = {(pair.first, pair.second) for pair in settled.pairs if pair.lane is None}
    assert beside <= {(pair.first, pair.second) for pair in free.pairs if pair.lane is None}
    assert settled.time.makespan >= free.time.makespan
