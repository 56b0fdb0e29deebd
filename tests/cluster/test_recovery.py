"""A worker that dies, wherever it is at work, is replaced, and the run ends as if it had lived: bit for bit,
with nothing written twice."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlflow.author.load import load_flow
from rlflow.checkpoints.reading import load_latest
from rlflow.config.flags import flat
from rlflow.errors import StageError
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import resume
from rlflow.runs.api import resolve_config
from rlflow.runs.prepare import prepare
from rlflow.runs.recovery import DEATHS
from rlflow.runs.session import start_run

DYING = Path(__file__).with_name("dying.py")
SMALL = {
    "prompts": 6,
    "iterations": 4,
    "held_out": 0,
    "threads": 1,
    "heartbeat": 12.0,
    "save_every": 0,
    "reward_write": ("/",),
}  # the reward counts its calls, and kills its worker
TWO = {"pools": "all=2", "held_out": 4, "eval_every": 2, "commit_every": 2}
AHEAD = {"pools": "train=1,rollout=1", "staleness": 1}
TIMES = ("seconds", "response/tokens_per_second")


class Said(Quiet):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


AT = ("forward of critic", "reward of reward", "stage of judge")  # what is asked of a worker


class Ended:
    """A run that has ended: its folder, what it said, and the processes of all workers that it ever had."""

    @classmethod
    def read(cls, folder):
        """What another process ran."""
        self = cls.__new__(cls)
        self.folder, (self.notes, self.failure) = (
            folder / "run",
            json.loads((folder / "said.json").read_text()),
        )
        return self

    def __init__(self, folder, faults, keywords):
        folder.mkdir()
        file = Path(shutil.copy(DYING, folder))
        (folder / "fault.json").write_text(json.dumps(faults))
        flow, said = load_flow(str(file)), Said()
        values = {**SMALL, "out": str(folder), "name": "run", "reward": (f"{file}:length",), **keywords}
        given, hp = resolve_config(flow, None, flat(values))
        prepared = prepare(flow, hp, given)
        self.folder, self.notes, self.failure = folder / "run", said.notes, ""
        try:
            start_run(prepared, said)
        except StageError as error:
            self.failure = str(error)
        (folder / "said.json").write_text(json.dumps([self.notes, self.failure]))
        fleet = prepared.workers.fleet if prepared.workers else None
        self.processes = [worker.presence.process for worker in fleet.watched] if fleet else []
        self.rendezvous_points = (
            [Path(rendezvous) for rendezvous in fleet.rendezvous_points.values()] if fleet else []
        )

    def lines(self, name):
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    @property
    def told(self):
        """Metrics without times, samples, and which nodes ran in which iteration."""
        metrics = [
            {name: value for name, value in line.items() if name not in TIMES}
            for line in self.lines("metrics.jsonl")
        ]
        events = [
            event
            for event in json.loads((self.folder / "timeline.json").read_text())
            if "waits for" in event["args"]
        ]
        ran = sorted((event["args"]["iteration"], event["name"]) for event in events)
        assert len(set(ran)) == len(ran)
        # not of rows that were kept
        return metrics, self.lines("samples.jsonl"), [each for each in ran if each[1] != "actor.generate"]

    @property
    def tensors(self):
        """Parameters and optimizer of the last checkpoint, and the final model."""
        groups = load_latest(self.folder).snapshot.tensors
        return {**groups, "final": load_file(self.folder / "final" / "actor" / "model.safetensors")}

    def same(self, other):
        """Whether both ended alike, bit for bit."""
        one, two = self.tensors, other.tensors
        names = {group: set(members) for group, members in one.items()}
        return (
            self.told == other.told
            and names == {group: set(members) for group, members in two.items()}
            and all(
                torch.equal(tensor, two[group][name])
                for group, members in one.items()
                for name, tensor in members.items()
            )
        )


@pytest.fixture(scope="module")
def straight(ray_address, tmp_path_factory):
    """The run on these pools of which no worker dies."""
    found = {}

    def of(**keywords):
        name = keywords["pools"]
        if name not in found:
            found[name] = Ended(
                tmp_path_factory.mktemp("straight") / "whole", {}, {"ray_address": ray_address, **keywords}
            )
        return found[name]

    return of


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_may_die_in_any_forward_reward_or_stage(tmp_path, ray_address):
    """A death in each iteration, at the first call of its kind there; with parts of models out of memory,
    which go with the worker."""
    faults, small = (
        {f"{place}, {i}": [1] for i, place in enumerate(AT)},
        {"iterations": len(AT), "batch_tokens": 1024},
    )
    run = Ended(
        tmp_path / "died", faults, {"ray_address": ray_address, "pools": "all=1", "memory": "20MB", **small}
    )
    assert_same(run, Ended(tmp_path / "whole", {}, small))  # in one process
    back = [re.search(r"iterations? (\d)(?: to (\d) are| is) repeated$", note).groups() for note in run.notes]
    assert [int(last or first) for first, last in back] == list(range(len(AT)))
    # one finished, and that under way
    assert [(first, last) for first, last in back if last and int(last) - int(first) > 1] == []
    assert_nothing_left(run)


def assert_same(run, whole):
    assert (run.failure, whole.failure) == ("", "")
    assert run.told == whole.told
    assert run.same(whole)


def assert_nothing_left(run):
    assert [process for process in run.processes if process.alive()] == []
    assert [path for path in run.rendezvous_points if path.exists()] == []


@pytest.mark.timeout(900)  # a pool that is started anew loads its models, and here three times
@pytest.mark.parametrize(
    ("pools", "faults", "back"),
    [
        # in a collective; in the evaluation after two iterations
        pytest.param(
            TWO,
            {"update": [6], "generate": [16]},
            ["iterations 0 to 1"] * 2,
            id="two ranks",
            marks=pytest.mark.long,
        ),
        # while iteration 1 trains, and while the rows of the next one are there or being sampled
        pytest.param(
            AHEAD,
            {"generate": [3], "update": [6]},
            ["iterations? [01]", "iterations? [123]"],
            id="sampling ahead",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_whose_workers_died_ends_as_if_they_had_not(
    straight, tmp_path, ray_address, pools, faults, back
):
    run = Ended(tmp_path / "died", faults, {"ray_address": ray_address, **pools})
    whole = straight(**pools)
    assert_same(run, whole)
    assert len(run.notes) == len(back)
    for note, repeated in zip(run.notes, back, strict=True):
        assert re.search(
            r"^rank [01] of pool '(\w+)' \(pid \d+ on .*, node \w+, actor[^)]*\) has died; at its "
            r"last heartbeat it ran .*; "
            rf"noticed in .*iteration \d\. Recovered in .* s: restarted pool '\1', .* {repeated} "
            r".*repeated$",
            note,
        )
    assert_nothing_left(run)
    ranks = len(whole.processes)
    assert len(run.processes) == ranks * (1 + len(faults))  # each time all are watched anew


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_that_dies_again_and_again_is_given_up_and_the_run_can_be_resumed(tmp_path, ray_address):
    small = {"pools": "all=1", "backend": "null", "save_every": 1, "ray_address": ray_address}
    run = Ended(tmp_path / "died", {"stage of judge": list(range(2, 100))}, small)
    assert f"the run gives up: {DEATHS} deaths without a finished iteration in between" in run.failure
    assert re.search(r"stage '(judge|critic\.update)' failed in iteration 1", run.failure)  # both run then
    assert len(run.notes) == DEATHS - 1
    assert_nothing_left(run)
    (tmp_path / "died" / "fault.json").write_text("{}")
    assert resume.resume(run.folder, {}, Quiet()).iterations == SMALL["iterations"]
