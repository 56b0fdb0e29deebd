"""A worker that dies during any work is replaced, and the run ends as without the death: bit for bit, with
nothing written twice."""

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
REPLAY = Path(__file__).with_name("dying_replay.py")
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
AHEAD = {"pools": "train=1,rollout=1", "staleness": 1, "prompts_by": "seen.worth"}
TIMES = ("seconds", "response/tokens_per_second")


class Notes(Quiet):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


AT = ("forward of critic", "reward of reward", "stage of judge")  # the requests to a worker


class Ended:
    """An ended run: its folder, its notes, and the processes of all its workers."""

    @classmethod
    def read(cls, folder):
        """Read a run of another process."""
        self = cls.__new__(cls)
        self.folder, (self.notes, self.failure) = (
            folder / "run",
            json.loads((folder / "said.json").read_text()),
        )
        return self

    def __init__(self, folder, faults, keywords, source=DYING):
        folder.mkdir()
        file = Path(shutil.copy(DYING, folder))
        (folder / "fault.json").write_text(json.dumps(faults))
        flow, said = load_flow(shutil.copy(source, folder)), Notes()
        values = {**SMALL, "out": str(folder), "name": "run", "reward": (f"{file}:length",), **keywords}
        given, hp = resolve_config(flow, None, flat(values))
        prepared = prepare(flow, hp, given)
        self.folder, self.notes, self.failure = folder / "run", said.notes, ""
        try:
            start_run(prepared, said)
        except StageError as error:
            self.failure = str(error)
        (folder / "said.json").write_text(json.dumps([self.notes, self.failure]))
        run_workers = prepared.workers.run_workers if prepared.workers else None
        self.processes = [worker.presence.process for worker in run_workers.watched] if run_workers else []
        self.rendezvous_points = (
            [Path(rendezvous) for rendezvous in run_workers.rendezvous_points.values()] if run_workers else []
        )

    def lines(self, name):
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    @property
    def reported(self):
        """Return the metrics without times, samples, and the nodes that ran in each iteration."""
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
        # not of carried-over rows
        return metrics, self.lines("samples.jsonl"), [each for each in ran if each[1] != "actor.generate"]

    @property
    def tensors(self):
        """Return parameters and optimizer of the last checkpoint, and the final model."""
        groups = load_latest(self.folder).snapshot.tensors
        return {**groups, "final": load_file(self.folder / "final" / "actor" / "model.safetensors")}

    def same(self, other):
        """Return True if both ended equal, bit for bit."""
        one, two = self.tensors, other.tensors
        names = {group: set(members) for group, members in one.items()}
        return (
            self.reported == other.reported
            and names == {group: set(members) for group, members in two.items()}
            and all(
                torch.equal(tensor, two[group][name])
                for group, members in one.items()
                for name, tensor in members.items()
            )
        )


@pytest.fixture(scope="module")
def straight(ray_address, tmp_path_factory):
    """The run on these pools without a death."""
    found = {}

    def of(**keywords):
        name = keywords["pools"]
        if name not in found:
            found[name] = Ended(
                tmp_path_factory.mktemp("straight") / "whole", {}, {"ray_address": ray_address, **keywords}
            )
        return found[name]

    return of


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_worker_may_die_in_any_forward_reward_or_stage(tmp_path, ray_address):
    """One death in each iteration, at the first call of its kind, while parts of models are offloaded; these
    are lost with the worker."""
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
    # one finished, and one in progress
    assert [(first, last) for first, last in back if last and int(last) - int(first) > 1] == []
    assert_nothing_left(run)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_rows_that_a_flow_keeps_survive_the_worker_that_stores_them(tmp_path, ray_address):
    options = {"ray_address": ray_address, "pools": "train=1,rollout=1", "iterations": 5, "save_every": 1}
    whole = Ended(tmp_path / "whole", {}, options, REPLAY)
    for name, fault in (("trainer", {"update, 3": [1]}), ("sampler", {"generate, 2": [1]})):
        run = Ended(tmp_path / name, fault, options, REPLAY)
        assert_same(run, whole)
        assert any("Recovered in" in note for note in run.notes)
        one, other = (load_latest(each.folder).snapshot for each in (run, whole))
        assert (one.files, one.state) == (other.files, other.state)
        assert (run.folder / "fates.jsonl").read_text() == (whole.folder / "fates.jsonl").read_text()


def assert_same(run, whole):
    assert (run.failure, whole.failure) == ("", "")
    assert run.reported == whole.reported
    assert run.same(whole)


def assert_nothing_left(run):
    assert [process for process in run.processes if process.alive()] == []
    assert [path for path in run.rendezvous_points if path.exists()] == []


@pytest.mark.timeout(900)  # a restarted pool loads its models, here three times
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
        # while iteration 1 trains, and while the rows of the next one are present or being sampled
        pytest.param(
            AHEAD,
            {"generate": [3], "update": [6]},
            ["iterations? [01]", "iterations? [123]"],
            id="sampling ahead",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_ends_unchanged_after_deaths_of_workers(straight, tmp_path, ray_address, pools, faults, back):
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
    assert len(run.processes) == ranks * (1 + len(faults))  # each time, all workers are watched anew


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_repeated_deaths_end_a_run_that_can_be_resumed(tmp_path, ray_address):
    small = {"pools": "all=1", "backend": "null", "save_every": 1, "ray_address": ray_address}
    run = Ended(tmp_path / "died", {"stage of judge": list(range(2, 100))}, small)
    assert f"the run gives up: {DEATHS} deaths without a finished iteration in between" in run.failure
    assert re.search(
        r"stage '(judge|critic\.update|seen\.write)' failed in iteration 1", run.failure
    )  # both run then
    assert len(run.notes) == DEATHS - 1
    assert_nothing_left(run)
    (tmp_path / "died" / "fault.json").write_text("{}")
    assert resume.resume(run.folder, {}, Quiet()).iterations == SMALL["iterations"]
