"""A run interrupted in any way and resumed equals the uninterrupted run: parameters, optimizer and metrics,
bit for bit."""

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from run_faults import ADAPTIVE, content, differences, in_child, nodes, resumed, run, signal_at

import rlflow
from rlflow.author.load import load_flow
from rlflow.checkpoints.lock import Lock
from rlflow.checkpoints.reading import load_latest
from rlflow.errors import PlanError, RunHeld
from rlflow.monitoring.outputs import make_reporter
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import final, resume, state
from rlflow.runs.evaluate import Evaluation

pytestmark = pytest.mark.slow


def assert_same(one, two):
    assert list(differences(one, two)) == []
    assert sum(len(group) for group in one.tensors.values()) > 10


def own_nodes(name):
    """Return the nodes of a flow that does something; for flows other than ppo, only the nodes that ppo
    lacks."""
    return [node for node in nodes(name) if name == "ppo" or node not in nodes("ppo")]


def assert_killed_at(name, places, sums, wanted):
    """Check that a run killed as each of these nodes begins and then resumed ends the same."""
    assert wanted.iteration == sums["iterations"]
    for number, node in enumerate(places):

        def cut(node=node, number=number):
            signal_at(node, 2, signal.SIGKILL)
            run(name, sums, f"cut-{number}")

        assert in_child(cut) == -signal.SIGKILL, node
        folder = Path(sums["out"]) / f"cut-{number}"
        assert len((folder / "metrics.jsonl").read_text().splitlines()) < sums["iterations"]
        assert resumed(folder) == 0
        assert_same(content(folder), wanted)


@pytest.mark.parametrize("name", ["ppo", ADAPTIVE], ids=lambda name: Path(name).stem)
def test_a_run_killed_at_a_random_node_resumes_to_the_same_end(name, sums, straight):
    assert_killed_at(name, random.Random(0).sample(own_nodes(name), 2), sums, content(straight(name)))


@pytest.mark.long
# among them nodes of each kind
@pytest.mark.parametrize("name", ["ppo", ADAPTIVE], ids=lambda name: Path(name).stem)
def test_a_run_killed_at_any_node_resumes_to_the_same_end(name, sums, straight):
    assert_killed_at(name, own_nodes(name), sums, content(straight(name)))


@pytest.mark.parametrize(
    ("first", "second"), [(4, 5), (3, 6)], ids=["twice within an epoch", "twice at its edge"]
)
def test_a_run_resumed_twice_ends_the_same(first, second, sums, straight):
    sums = {**sums, "iterations": 8}

    def cut():
        signal_at("actor.update", first, signal.SIGKILL)
        run("grpo", sums, "cut")

    folder = Path(sums["out"]) / "cut"
    assert in_child(cut) == -signal.SIGKILL

    def cut_again():
        signal_at("actor.generate", second, signal.SIGKILL)
        resume.resume(folder, {}, Quiet())

    assert in_child(cut_again) == -signal.SIGKILL
    assert resumed(folder) == 0
    assert_same(content(folder), content(straight("grpo", iterations=8)))


def test_the_kl_coefficient_resumes_from_its_last_value(sums, straight):
    straight = content(straight("ppo_adaptive", iterations=4))
    first = run("ppo_adaptive", {**sums, "iterations": 2}, "first").folder
    resume.resume(first, {"iterations": 4}, Quiet())
    assert_same(content(first), straight)
    betas = [line["adapt/beta"] for line in straight.metrics if "adapt/beta" in line]
    assert len(set(betas)) == 4


@pytest.mark.parametrize(
    ("node", "number"),
    [
        ("actor.generate", signal.SIGINT),
        ("reward", signal.SIGTERM),
        ("gae", signal.SIGINT),
        ("critic.update", signal.SIGTERM),
        ("actor.update", signal.SIGINT),
        ("actor.update", signal.SIGTERM),
    ],
)
def test_a_run_stopped_within_an_iteration_saves_and_resumes(node, number, sums, straight):
    sums = {**sums, "save_every": 0}

    def stop():
        signal_at(node, 2, number)
        run("ppo", sums, "stopped")

    folder = Path(sums["out"]) / "stopped"
    assert in_child(stop) == 130
    # a change of weights is never interrupted
    assert load_latest(folder).snapshot.iteration == (3 if node.endswith("update") else 2)
    assert json.loads((folder / "status.json").read_text())["state"] == "interrupted"
    assert resumed(folder) == 0
    assert_same(content(folder), content(straight("ppo")))


def test_a_run_stopped_while_evaluating_or_saving_ends_the_same(sums):
    sums = {**sums, "iterations": 4, "held_out": 4, "eval_every": 2}
    straight = run("grpo", sums, "straight").folder

    def stop_evaluating():
        evaluate, calls = Evaluation.__call__, []

        def evaluating(self, keep):
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return evaluate(self, keep)

        Evaluation.__call__ = evaluating
        run("grpo", sums, "stopped")

    folder = straight.parent / "stopped"
    assert in_child(stop_evaluating) == 130
    assert resumed(folder) == 0
    assert_same(content(folder), content(straight))


@pytest.mark.parametrize("known", [True, False], ids=["evaluated", "as an earlier version saved it"])
def test_a_run_killed_before_its_final_models_is_evaluated_once(known, sums, straight):
    changes = {"iterations": 2, "held_out": 4, "save_every": 0}
    straight = straight("grpo", **changes)

    def cut():
        final.write_models = lambda prepared, folder: os.kill(os.getpid(), signal.SIGKILL)
        if not known:
            real = state.snapshot
            state.snapshot = lambda prepared, at, *rest: real(prepared, replace(at, here=None), *rest)
        run("grpo", {**sums, **changes}, "cut")

    folder = Path(sums["out"]) / "cut"
    assert in_child(cut) == -signal.SIGKILL
    assert not (folder / "final").exists()

    def finish():
        if known:  # the second time, no weights are evaluated again
            Evaluation.__call__ = lambda self, keep: os.kill(os.getpid(), signal.SIGKILL)
        resume.resume(folder, {}, make_reporter(quiet=True))

    assert in_child(finish) == 0
    assert content(folder).metrics == content(straight).metrics
    assert (folder / "answers.jsonl").read_bytes() == (straight / "answers.jsonl").read_bytes()
    one, other = ((each / "final/actor/model.safetensors").read_bytes() for each in (folder, straight))
    assert one == other


def test_a_second_ctrl_c_stops_at_once(sums):
    def stop():
        signal_at("critic.update", 1, signal.SIGINT)
        signal_at("actor.update", 1, signal.SIGINT)
        run("ppo", sums, "stopped")

    assert in_child(stop) == 130
    folder = Path(sums["out"]) / "stopped"
    assert load_latest(folder).snapshot.iteration == 1


def test_resume_refuses_a_changed_stage_and_a_fork_accepts_it(sums, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(Path(ADAPTIVE).read_text().replace("adaptive(", "mine("))
    first = rlflow.run(str(path), **{**sums, "iterations": 2}).folder
    path.write_text(path.read_text().replace("> 1e-4, 1.5, 0.9", "> 1e-4, 1.25, 0.9"))
    load_flow.__globals__["load"].cache_clear()
    with pytest.raises(PlanError, match="adapt: the body changed"):
        resume.resume(first, {"iterations": 4}, Quiet())
    forked = resume.fork(first, {"iterations": 4}, Quiet())
    assert forked.folder != first
    assert load_latest(forked.folder).snapshot.iteration == 4
    assert load_latest(first).snapshot.iteration == 2


def test_resume_refuses_other_settings_and_a_fork_accepts_them(straight, copied):
    first = copied(straight("grpo", iterations=2))
    with pytest.raises(PlanError, match="keeps its settings"):
        resume.resume(first, {"hp.clip": "0.1"}, Quiet())
    with pytest.raises(PlanError, match="has finished all its iterations"):
        resume.resume(first, {}, Quiet())
    assert (
        resume.fork(first, {"iterations": 3, "hp.clip": "0.1", "name": "other"}, Quiet()).folder.name
        == "other"
    )


def test_a_fork_drops_settings_its_new_backends_lack(sums):
    tried = {
        **sums,
        "generator": "null",
        "iterations": 1,
        "tensor_parallel": 2,
        "actor.max_num_seqs": 8,
        "actor.batch_tokens": 6400,
    }
    first, said = run("grpo", tried, "tried").folder, []

    class Notes(Quiet):
        def note(self, text):
            said.append(text)

    # a given flag is meant
    with pytest.raises(PlanError, match="role 'actor' has no setting 'max_num_seqs'"):
        resume.fork(first, {"iterations": 2, "generator": "local", "actor.max_num_seqs": 8}, Quiet())
    assert (
        resume.fork(first, {"iterations": 2, "generator": "local", "name": "meant"}, Notes()).folder.name
        == "meant"
    )
    assert (
        said[0]
        == "dropped, because the new backends have no such setting: --actor.max_num_seqs 8, --tensor_parallel 2"
    )


@pytest.mark.parametrize(("before", "after"), [("null", "local"), ("local", "null")])
def test_a_fork_to_a_backend_with_other_weights_names_the_mismatch(sums, before, after):
    first = run("grpo", {**sums, "backend": before, "iterations": 1}, "first").folder
    with pytest.raises(
        PlanError, match="weights of 'actor' in the checkpoint do not fit the model"
    ) as refused:
        resume.fork(first, {"iterations": 2, "backend": after, "name": "other"}, Quiet())
    assert "steps" in refused.value.problems[0].found
    assert not (first.parent / "other").exists()
    # the remedy
    assert (
        resume.fork(first, {"iterations": 2, "backend": before, "name": "other"}, Quiet()).folder.name
        == "other"
    )


def test_a_locked_run_is_not_resumed(straight, copied):
    first = copied(straight("grpo", iterations=2))
    with Lock(first), pytest.raises(RunHeld, match=str(os.getpid())):
        resume.resume(first, {"iterations": 3}, Quiet())


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(sums):
    first = run("grpo", {**sums, "iterations": 4}, "first").folder
    newest = load_latest(first).path
    shard = min(newest.glob("actor.parameters*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    said = []
    reporter = type("Said", (Quiet,), {"note": lambda self, text: said.append(text)})()
    resume.resume(first, {"iterations": 5}, reporter)
    assert any(newest.name in text and "damaged" in text for text in said)
    assert load_latest(first).snapshot.iteration == 5


def test_a_folder_without_a_run_is_reported(tmp_path):
    (tmp_path / "ppo-1").mkdir()
    (tmp_path / "ppo-1" / "settings.json").write_text("{}")
    with pytest.raises(PlanError) as caught:
        resume.resume(tmp_path / "ppo-2", {}, Quiet())
    assert caught.value.problems[0].nearest == str(tmp_path / "ppo-1")
