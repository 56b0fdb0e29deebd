"""Runs that draw their prompts by the numbers of a table."""

import dataclasses
import json
import signal

import numpy as np
import pytest
from run_faults import content, differences, in_child, resumed, signal_at
from sources import TESTS

import rlflow
from rlflow.author.load import load_flow
from rlflow.checkpoints.reading import load_latest
from rlflow.cli.main import exit_code
from rlflow.data.prompts import by_weight
from rlflow.errors import SkipIteration, StageError

FILE = str(TESTS / "runs" / "flows" / "least_drawn.py")
FLOW = load_flow(FILE)
RECORDS, PROMPTS, ITERATIONS = 7, 3, 7
POOLS = "train=2@threads,rollout=2@threads"


def with_hp(**settings):
    return dataclasses.replace(FLOW.parameters.hp, **settings)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(RECORDS))
    )
    return path


@pytest.fixture
def keywords(data, tmp_path):
    return {
        "backend": "null",
        "prompts": PROMPTS,
        "iterations": ITERATIONS,
        "held_out": 0,
        "prove": "off",
        "prompts_by": "seen.gain",
        "data": str(data),
        "out": str(tmp_path),
    }


@pytest.fixture
def run(keywords, tmp_path):
    def ran(name, hp=None, **changes):
        call = {**keywords, **changes, "name": name}
        assert in_child(lambda: rlflow.run(FLOW, hp, quiet=True, **call)) == 0
        return tmp_path / name

    return ran


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def drawn(folder):
    """Return how often each iteration sampled from each record, in two samples each."""
    means = [line["visited/drawn"] for line in metrics(folder) if "visited/drawn" in line]
    sums = ([f"{round(mean * 2 * prompts):0{RECORDS}d}" for prompts in (1, 2, 3)] for mean in means)
    return [next(each for each in of if set(each) == {"0", "2"})[::-1] for of in sums]


def expected(lag=0, bar=np.inf):
    """Return the same from an independent computation: iteration i reads the visits of iterations before i - lag."""
    sets, visits = [], np.zeros((ITERATIONS + 1, RECORDS), dtype=np.float32)
    for iteration in range(ITERATIONS):
        seen = visits[max(iteration - lag, 0)]
        weights = np.where(seen < bar, 1 / (1 + seen), 0).astype(np.float64)
        chosen = by_weight(weights, 0, sum(map(len, sets)))[:PROMPTS].tolist()
        sets.append(chosen)
        visits[iteration + 1] = visits[iteration]
        visits[iteration + 1, chosen] += 2
    return ["".join("2" if i in chosen else "0" for i in range(RECORDS)) for chosen in sets if chosen]


def test_each_iteration_draws_by_what_earlier_ones_wrote(run):
    assert drawn(run("straight")) == expected()
    assert len(set(expected())) > 2


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_iterations_ahead_draw_by_exactly_what_they_may_read(run, staleness):
    assert drawn(run("ahead", pools=POOLS, staleness=staleness)) == expected(staleness)


def test_an_eager_flow_draws_the_same_prompts(keywords, run):
    with rlflow.roles(FLOW, **keywords) as roles:
        eager = []
        for _ in range(ITERATIONS):
            prompts = roles.take()
            ids = [int(prompt.partition("+")[0]) for prompt in prompts["prompt"]]
            eager.append("".join("2" if i in ids else "0" for i in range(RECORDS)))
            FLOW(prompts, **roles)
    assert eager == expected()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"pools": POOLS}, marks=pytest.mark.long),
        pytest.param({"pools": POOLS, "staleness": 2}, marks=pytest.mark.long),
    ],
)
def test_a_killed_run_draws_the_same_prompts(run, keywords, tmp_path, options):
    """With iterations ahead, the checkpoint has rows of prompts that were drawn by older visits than it has."""
    straight = run("straight", **options)

    def cut():
        signal_at("visited", 4, signal.SIGKILL)
        rlflow.run(FLOW, quiet=True, **{**keywords, **options, "save_every": 1, "name": "cut"})

    assert in_child(cut) == -signal.SIGKILL
    assert resumed(tmp_path / "cut") == 0
    assert list(differences(content(tmp_path / "cut"), content(straight))) == []


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"pools": POOLS, "staleness": 1}, marks=pytest.mark.slow)]
)
def test_records_without_weight_are_used_up(run, options):
    """At a bar of 2, each record is drawn once: 3, 3 and 1 of 7. The other iterations have no prompts."""
    folder = run("short", with_hp(bar=2.0), **options)
    found, notes = drawn(folder), (folder / "notes.txt").read_text()
    assert found == expected(options.get("staleness", 0), bar=2.0)
    assert notes.count("takes 3 prompts, but only") == 1
    skipped = ITERATIONS - len(found)
    assert notes.count("no record has a weight above 0 (--prompts-by seen.gain)") == skipped > 0


def test_a_negative_weight_ends_the_run_after_the_last_whole_iteration(keywords, tmp_path):
    """The first iteration draws each record with the same weight; then those that it drew weigh less than 0."""
    first = expected()[0].index("2")
    message = (
        rf"stage 'gain' failed in iteration 1 on 7 rows: record {first} of the data has the weight -0\.5"
    )
    with pytest.raises(StageError, match=message) as raised:
        rlflow.run(FLOW, with_hp(bar=2.0, late=-0.5), quiet=True, **keywords, name="negative")
    assert raised.value.place.path == FILE
    assert load_latest(tmp_path / "negative").snapshot.iteration == 1


def test_a_repeat_draws_no_record_twice_in_an_iteration(keywords):
    """Each try keeps a third of its groups, so it goes on until all 7 records are used up: 3, 3 and 1."""
    for compiled in (False, True):
        with rlflow.roles(FLOW, with_hp(tries=9), **keywords) as roles:
            engine, taken = roles.prepared.engine, []
            take = engine.draws.records.draw

            def recorded(*arguments, take=take, taken=taken):
                batch = take(*arguments)
                taken.append(batch["prompt_id"].tolist())
                return batch

            engine.draws.records.draw = recorded
            if compiled:
                roles.prepared.executor.run(roles.plan, roles.take())
            else:
                FLOW(roles.take(), **roles)
        assert [len(ids) for ids in taken] == [3, 3, 1, 0]
        assert sorted(sum(taken, [])) == list(range(RECORDS))


@pytest.mark.slow
def test_a_repeat_that_runs_ahead_draws_as_one_that_does_not(run):
    hp = with_hp(tries=2)
    one, other = (
        [
            line["repeat.sampled/seen"]
            for line in metrics(run(name, hp, pools=POOLS, staleness=staleness))
            if "repeat.sampled/seen" in line
        ]
        for name, staleness in (("now", 0), ("ahead", 1))
    )
    assert one == other == [6.0] * ITERATIONS


def test_eager_takes_are_skipped_without_weights(keywords):
    with (
        rlflow.roles(FLOW, with_hp(bar=0.0), **keywords) as roles,
        pytest.raises(SkipIteration, match="no record has a weight above 0"),
    ):
        roles.take()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts-by", "seen.gian"], "nearest:  seen.gain"),
        (["--prompts-by", "sen.gain"], "the flow has no table 'sen'"),
        (
            ["--prompts-by", "seen.gain", "--data", "a=sums.jsonl", "--data", "b=sums.jsonl"],
            "several sources of data share the prompts",
        ),
    ],
)
def test_check_plan_and_run_refuse_alike(data, flags, message, capsys, monkeypatch):
    monkeypatch.chdir(data.parent)
    for command in ("check", "plan", "run"):
        code = exit_code([command, FILE, "--backend", "null", *flags])
        assert code == 2
        said = "".join(capsys.readouterr())
        assert message in said, command
