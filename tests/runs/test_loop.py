"""The loop alone, with workers in this process: how it handles lost workers, and when it checks the run's
folder."""

import json
from dataclasses import replace

import pytest

from rlflow import RANK0, flow, loss, row, scalar, stage
from rlflow.author.load import load_flow
from rlflow.checkpoints.reading import load_latest
from rlflow.errors import PlanError, RemoteError, StageError
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import early_end, final, resume
from rlflow.runs.api import resolve_config
from rlflow.runs.prepare import prepare
from rlflow.runs.session import Interrupted, start_run


class Workers:
    """Pools that cannot be restarted after a given check, counted from 1."""

    def __init__(self, lost_at):
        self.lost_at, self.looks = lost_at, 0

    def lost(self):
        self.looks += 1
        return "Ray's gcs_server (pid 7) has died" if self.looks >= self.lost_at else None

    def death(self, error):
        return None


class Copied:
    """The state of trainers, copied at once."""

    complete = True

    def __init__(self, models):
        self.states = {
            role: (dict(model.trainer.state()), model.version)
            for role, model in models.items()
            if model.trainer is not None
        }

    def settled(self, seconds):
        return True

    versions = property(lambda self: {role: version for role, (_, version) in self.states.items()})
    queue = None

    def then(self, action):
        action()


class Recovering(Workers):
    """Pools that are restored if a call reports the death of one."""

    def __init__(self, engine):
        super().__init__(lost_at=100)
        self.engine = engine

    def commit(self, iteration):
        return Copied(self.engine.models)

    def death(self, error):
        return "a worker died" if "died" in str(error) else None

    def restart(self, death):
        return ["all"]

    def copied(self, commit):
        return ((role, state) for role, (state, _) in commit.states.items())

    def restore(self, commit):
        for role, (state, version) in commit.states.items():
            self.engine.models[role].trainer.restore(state)
            self.engine.models[role].version = version


def context(tmp_path, flow="grpo", **keywords):
    values = {
        "backend": "null",
        "prompts": 4,
        "iterations": 5,
        "save_every": 0,
        "commit_every": 0,
        "out": str(tmp_path),
        "name": "run",
    }
    source = load_flow(flow) if isinstance(flow, str) else flow
    config, hp = resolve_config(source, None, values | keywords)
    return prepare(source, hp, config, judge=None)


def run(tmp_path, workers):
    return start_run(replace(context(tmp_path), workers=workers), Quiet())


def test_a_run_with_lost_pools_is_saved_and_ends(tmp_path):
    with pytest.raises(
        StageError, match=r"(?s)gcs_server \(pid 7\) has died.*saved as step-0*2; to continue: rlflow resume"
    ):
        run(tmp_path, Workers(lost_at=3))
    assert load_latest(tmp_path / "run").snapshot.iteration == 2


def test_workers_are_checked_before_every_iteration(tmp_path):
    workers = Workers(lost_at=100)
    assert run(tmp_path, workers).iterations == 5
    assert workers.looks == 5


@stage(gives="level", dispatch=RANK0)
def raised(level: scalar("float32")):
    return level + 1


@loss(unrewarded="what is judged here is counted, not learned from")
def likelihood(new):
    return -new.logprobs, {}


def trained(prompts, actor, reward):
    batch = actor.generate(prompts, max_tokens=4)
    return batch | reward(batch)


@flow(state=lambda hp: {"level": 0.0}, evaluate=trained)
def counting(prompts, actor, reward):
    """Count the iterations."""
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    actor.update(batch, likelihood)
    raised(batch)


class Evaluations(Quiet):
    """A reporter that keeps evaluations."""

    def __init__(self):
        self.evaluations = []

    def evaluation(self, number, *details):
        self.evaluations.append(number)


@pytest.mark.parametrize("deaths", [0, 1])
def test_an_iteration_interrupted_by_a_death_is_repeated_exactly(tmp_path, deaths):
    """The run counts and writes the same as an undisturbed run: state of the flow, rows, held-out accuracy,
    checkpoints."""
    cut = context(tmp_path, counting, commit_every=2, eval_every=1, save_every=2, keep=9, held_out=12)
    run_plan, left, told = cut.executor.run, [deaths], Evaluations()

    def dying(plan, prompts, *sampled):
        outcome = run_plan(plan, prompts, *sampled)
        if plan is cut.plan and cut.engine.iteration == 3 and left[0]:
            left[0] -= 1
            raise RemoteError("a worker has died")
        return outcome

    cut.executor.run = dying
    result = start_run(replace(cut, workers=Recovering(cut.engine)), told)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["level"] for line in lines if "level" in line] == [1, 2, 3, 4, 5]
    evaluations = [line["iteration"] for line in lines if "level" not in line]
    assert (sorted(evaluations), told.evaluations) == (
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, *([3] * deaths), 4, 5],
    )
    assert len(result.answers) == 10
    assert result.before is not None
    assert (result.totals.iterations, result.skipped, left) == (5, 0, [0])
    saved = sorted(path.name for path in (result.folder / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000004", "step-00000005"]
    rows = [json.loads(line) for line in (result.folder / "samples.jsonl").read_text().splitlines()]
    prompts = {
        iteration: [row["prompt"] for row in rows if row["iteration"] == iteration] for iteration in range(5)
    }
    assert sorted(prompts[0] + prompts[3]) != sorted(prompts[0] * 2)
    assert all(len(said) == 4 for said in prompts.values())
    assert len((result.folder / "fates.jsonl").read_text().splitlines()) == 5


def test_a_stopping_run_is_saved_before_the_next_iteration(tmp_path):
    asked = context(tmp_path)

    class Stopping(Quiet):
        def iteration(self, number, *details):
            asked.executor.stopping = number == 2

    with pytest.raises(Interrupted):
        start_run(asked, Stopping())
    assert load_latest(tmp_path / "run").snapshot.iteration == 3


@stage(gives={"share": row("float32")})
def shares(scores, iteration: scalar("int64")):
    if iteration == 3:
        raise OSError("the judge is away")
    return scores


@loss
def shared(new, share: row("float32")):
    return -new.logprobs * share[:, None], {}


@loss(unrewarded="what is judged here is counted, not learned from")
def fails_in_the_third(new, iteration: scalar("int64")):
    if iteration == 3:
        raise OSError("no memory is left")
    return -new.logprobs, {}


@flow(state=lambda hp: {"level": 0.0})
def failing_before(prompts, actor, reward):
    """Fail in iteration 3 before weights change."""
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    raised(batch)
    batch |= reward(batch)
    batch |= shares(batch)
    actor.update(batch, shared)


@flow
def failing_within(prompts, actor, reward):
    """Fail in iteration 3 as weights change."""
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    actor.update(batch, fails_in_the_third)


def saved_steps(folder):
    newest = load_latest(folder).snapshot
    return newest.iteration, int(newest.tensors["actor.parameters"]["steps"])


def test_a_run_that_fails_before_weights_change_saves_its_state(tmp_path):
    with pytest.raises(
        StageError, match=r"(?s)the judge is away.*saved as step-0*3; to continue: rlflow resume"
    ):
        start_run(context(tmp_path, failing_before), Quiet())
    assert saved_steps(tmp_path / "run") == (3, 3)
    assert load_latest(tmp_path / "run").snapshot.state["flow_state"] == {"level": 3.0}


def test_a_run_that_fails_as_weights_change_reports_them_lost(tmp_path):
    with pytest.raises(
        StageError,
        match=r"(?s)no memory is left.*iteration 3 failed while it changed weights.*no checkpoint is left: start",
    ):
        start_run(context(tmp_path, failing_within), Quiet())
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


@pytest.mark.parametrize(("every", "whole"), [(1, 3), (2, 2)])
def test_a_failing_run_is_saved_from_a_copy_if_requested(tmp_path, every, whole):
    with pytest.raises(StageError, match=rf"(?s)no memory is left.*saved as step-0*{whole}; to continue"):
        start_run(context(tmp_path, failing_within, commit_every=every), Quiet())
    assert saved_steps(tmp_path / "run") == (whole, whole)


def test_a_failing_run_on_pools_is_saved_from_the_recovery_copies(tmp_path):
    failing = context(tmp_path, failing_within, commit_every=1)
    with pytest.raises(StageError, match=r"(?s)no memory is left.*saved as step-0*3; to continue"):
        start_run(replace(failing, workers=Recovering(failing.engine)), Quiet())
    assert saved_steps(tmp_path / "run") == (3, 3)


def test_a_run_whose_workers_die_after_an_iteration_is_saved_from_their_last_copies(tmp_path):
    dying = context(tmp_path, commit_every=1)

    def gone():
        raise RemoteError("Ray's raylet (pid 7) has died")

    class Dying(Quiet):
        def iteration(self, number, *details):
            if number == 3:
                dying.engine.models["actor"].trainer.state = gone
                gone()

    with pytest.raises(StageError, match=r"(?s)raylet \(pid 7\) has died.*saved as step-0*3; to continue"):
        start_run(replace(dying, workers=Recovering(dying.engine)), Dying())
    assert saved_steps(tmp_path / "run") == (3, 3)


@pytest.mark.slow
def test_the_copies_of_workers_are_read_without_the_workers(tmp_path):
    with pytest.raises(StageError, match=r"(?s)no memory is left.*saved as step-0*3; to continue"):
        start_run(context(tmp_path, failing_within, commit_every=1, pools="all=2@threads"), Quiet())
    assert saved_steps(tmp_path / "run") == (3, 3)


@pytest.mark.slow
def test_a_run_that_ends_between_iterations_saves_the_last_one(tmp_path):
    class Raising(Quiet):
        def iteration(self, number, *details):
            if number == 3:
                raise RuntimeError("nobody can be told")

    with pytest.raises(RuntimeError):
        start_run(context(tmp_path), Raising())
    assert load_latest(tmp_path / "run").snapshot.iteration == 4


class Blocking(Quiet):
    """A reporter that lets no checkpoint be written into the run's folder. ``ended``: how the run ended."""

    def __init__(self, folder):
        self.folder, self.iterations, self.ended = folder, 0, ()

    def start(self, run):
        (self.folder / "checkpoints").touch()

    def iteration(self, number, *details):
        self.iterations += 1

    def close(self, *ended):
        self.ended = ended


def test_a_state_is_saved_next_to_an_unwritable_folder(tmp_path):
    told = Blocking(tmp_path / "run")
    result = start_run(context(tmp_path), told)
    assert "the newest state could not be saved: checkpoint of iteration 5 not saved" in result.unsaved
    assert result.unsaved.endswith("run-saved")
    assert told.ended == ("done", result.unsaved)
    assert result.as_json()["unsaved"] == result.unsaved
    assert final.summary(result).splitlines()[-1] == f"warning: {result.unsaved}"
    assert saved_steps(tmp_path / "run-saved") == (5, 5)
    assert resume.resume(tmp_path / "run-saved", {"iterations": 6}, Quiet()).unsaved == ""


@pytest.mark.slow
def test_three_failed_saves_in_a_row_end_the_run(tmp_path):
    told = Blocking(tmp_path / "run")
    says = r"(?s)3 checkpoints in a row could not be saved.*remedy:.*to continue: rlflow resume \S*run-saved"
    with pytest.raises(PlanError, match=says) as error:
        start_run(context(tmp_path, save_every=1, iterations=20), told)
    assert told.ended == ("failed", str(error.value))
    assert saved_steps(tmp_path / "run-saved") == (told.iterations, told.iterations)


@pytest.mark.slow
def test_a_state_that_cannot_be_saved_anywhere_is_reported_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(early_end, "_places", lambda folder: [])
    with pytest.raises(
        PlanError,
        match=r"(?s)no other folder could store it, so it is lost; no checkpoint is left: start the run again",
    ):
        start_run(context(tmp_path, save_every=1, iterations=20), Blocking(tmp_path / "run"))


class Moving(Quiet):
    """A reporter that moves the run's folder while the last iteration is reported."""

    def __init__(self, folder):
        self.folder = folder

    def iteration(self, number, *details):
        if number == 4:
            self.folder.rename(self.folder.with_name("moved"))


def test_a_run_moved_in_its_last_iteration_is_saved_there(tmp_path):
    with pytest.raises(PlanError, match=r"(?s)saved as .*moved"):
        start_run(context(tmp_path), Moving(tmp_path / "run"))
    assert load_latest(tmp_path / "moved").snapshot.iteration == 5
