"""Runs of flows that keep rows across iterations in a buffer."""

import dataclasses
import signal

import pytest
import torch
from run_faults import content, differences, in_child, metrics, resumed, signal_at
from sources import TESTS

import rlflow
from rlflow import compare, flow, truncated_weights
from rlflow.author.load import load_flow
from rlflow.checkpoints.reading import load_latest
from rlflow.compiler.check.staleness import stale_problems
from rlflow.compiler.preview.sizes import Assumed, Sizes, buffer_sizes
from rlflow.compiler.trace.compile import compile_flow
from rlflow.execution.account import RowOutcome
from rlflow.runs.outcomes import outcomes_text, run_account

POOLS = "train=2@threads,rollout=2@threads"
FLOW = load_flow(str(TESTS / "runs" / "flows" / "replayed.py"))
SPREAD, LOSS = FLOW.function.__globals__["spread"], FLOW.function.__globals__["policy_loss"]


@flow
def fresh(prompts, actor, reward, hp=FLOW.parameters.hp):
    """The same flow without a buffer."""
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=4)
    batch |= reward(batch)
    spread = SPREAD(batch)
    both = batch | spread
    both |= compare(both)
    both |= actor.logprobs(both)
    both |= truncated_weights(both, cap=2.0)
    actor.update(both, LOSS, minibatch=4)


@pytest.fixture
def run(tmp_path):
    def ran(name, flow=FLOW, before=lambda: None, expected=0, hp=None, **keywords):
        fixed = {"prompts": 3, "iterations": 7, "held_out": 0, "prove": "off", "save_every": 2}
        keywords = {"backend": "null", **fixed, **keywords, "out": str(tmp_path), "name": name}

        def action():
            before()
            rlflow.run(flow, hp, quiet=True, **keywords)

        assert in_child(action) == expected
        return tmp_path / name

    return ran


def test_rows_are_stored_drawn_and_evicted_as_the_account_says(run):
    folder = run("straight")
    account = run_account(folder)
    assert account.closes
    assert account.stored["past"].rows == account.sampled["actor.generate"].rows == 42
    drawn = account.opened["past.draw"]
    assert account.left("past.draw") == (0, 0, 0)
    ends = {(source, end.fate, end.cause): count for (source, end), count in account.ends.items()}
    assert ends["past.draw", RowOutcome.TRAINED, ""] == drawn
    kept = load_latest(folder).snapshot.state["memory"]["past"]["totals"]
    gone = {"too old": "age", "no room": "room", "not chosen": "choice"}
    for cause, name in gone.items():
        assert list(ends.get(("past", RowOutcome.EVICTED, cause), (0, 0, 0))) == kept[name]
    assert f"past: 42 rows, {account.stored['past'].tokens} tokens stored" in outcomes_text(account)
    assert f"past.draw: {drawn.rows} rows, {drawn.tokens} tokens of earlier ones" in outcomes_text(account)
    last = metrics(folder)[-1]
    assert last["past.put/rows"] == 42 - sum(kept[name][1] for name in gone.values()) == 10
    assert [line["past.draw/rows"] for line in metrics(folder)] == [0, 4, 4, 4, 4, 4, 4]
    assert max(line.get("past.draw/age", 0) for line in metrics(folder)) <= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"pools": POOLS}, marks=pytest.mark.long),
        pytest.param({"pools": POOLS, "staleness": 1}, marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_killed_and_resumed_ends_on_the_same_bits(run, options):
    straight = run("straight", **options)
    for node in ("past.draw", "past.put", "actor.update"):
        name = f"cut-{node}"
        cut = run(name, before=lambda node=node: signal_at(node, 5, signal.SIGKILL), expected=-9, **options)
        assert load_latest(cut).snapshot.iteration in (2, 4)  # written in the background
        assert resumed(cut) == 0
        assert list(differences(content(cut), content(straight))) == []
        assert run_account(cut) == run_account(straight)
    assert any(name.startswith("memory/past.") for name in content(straight).files)


@pytest.mark.slow
def test_the_same_rows_are_drawn_on_other_ranks(run):
    straight = run("straight")
    for pools in ("all=1@threads", "all=3@threads", POOLS):
        other = run(pools.partition("@")[0].replace("=", ""), pools=pools)
        keys = [name for name in metrics(straight)[0] if name.startswith(("past.", "fates/"))]
        assert [[line.get(k) for k in keys] for line in metrics(other)] == [
            [line.get(k) for k in keys] for line in metrics(straight)
        ]
        assert rows_of(other) == rows_of(straight)


def rows_of(folder):
    """Return the entries of the stored rows in the last checkpoint."""
    return load_latest(folder).snapshot.files["memory/past.rows"]


@pytest.mark.long
def test_a_draw_of_no_rows_changes_nothing(run):
    """Neither the draw nor the put nor joining with no rows changes a random draw, an update or a metric."""
    none = dataclasses.replace(FLOW.parameters.hp, replayed=0)
    for options in ({}, {"pools": POOLS}):
        kept = run(f"kept-{len(options)}", hp=none, backend="local", iterations=3, **options)
        plain = run(f"fresh-{len(options)}", flow=fresh, hp=none, backend="local", iterations=3, **options)
        one, other = content(kept), content(plain)
        for group, tensors in other.tensors.items():
            assert all(torch.equal(tensor, one.tensors[group][name]) for name, tensor in tensors.items())


def test_an_eager_flow_draws_the_same_rows(tmp_path):
    keywords = {"backend": "null", "prompts": 3, "held_out": 0}
    with (
        rlflow.roles(FLOW, **keywords) as eager,
        rlflow.roles(FLOW, **keywords) as planned,
    ):
        for iteration in range(5):
            FLOW(eager.take(), **eager)
            prepared = planned.prepared
            prepared.engine.iteration = iteration
            outcome = prepared.executor.run(prepared.plan, prepared.prompts.take(3))
            prepared.engine.keep(outcome.state, outcome.memory)
            one, other = (roles.prepared.engine.buffer("past") for roles in (eager, planned))
            assert one.totals == other.totals
            for name in ("row", "sampled", "drawn", "tokens", "numbers"):
                assert torch.equal(getattr(one.entries, name), getattr(other.entries, name))
        assert int(one.entries.drawn.sum()) > 0
        assert eager.prepared.engine.models["actor"].version == 5


def test_drawn_rows_in_a_ratio_need_their_sampled_logprobs():
    @rlflow.loss
    def uncorrected(new, logprobs, advantages):
        return -(new.logprobs - logprobs).exp() * advantages, {}

    def replaying(loss):
        @flow(keeps=FLOW.keeps)
        def replay(prompts, actor, reward, past, hp=FLOW.parameters.hp):
            old = past.draw(groups=hp.replayed)
            batch = actor.generate(prompts, samples=2, max_tokens=4)
            batch |= reward(batch)
            past.put(batch | SPREAD(batch), also=("spread",))
            both = rlflow.concat(batch, old)
            both |= compare(both)
            both |= actor.logprobs(both)
            both |= truncated_weights(both, cap=2.0)
            actor.update(both, loss)

        return compile_flow(replay)

    (problem,) = stale_problems(replaying(uncorrected), 0)
    assert (problem.code, problem.severity) == ("drawn-uncorrected", "error")
    assert "past.draw" in problem.message
    assert "truncated_weights" in problem.remedy
    assert list(stale_problems(replaying(LOSS), 0)) == []


@pytest.mark.long
def test_drawn_rows_are_in_no_summary_of_the_sampled_rows(run):
    """Older weights sampled them, so they would look like a sampler that differs from the trainer."""
    folder = run("trained", backend="local", iterations=3, lr=0.1)
    lines = metrics(folder)
    assert lines[-1]["past.draw/rows"] > 0
    assert all(line["funnel/rows_scored"] == line["funnel/rows_sampled"] for line in lines)
    assert max(line["policy/mismatch_max"] for line in lines) < 1e-3


def test_the_plan_bounds_the_bytes_of_a_buffer():
    program = compile_flow(FLOW)
    sizes = Sizes.of(program.graph, Assumed(prompts=3, prompt_tokens=10))
    (found,) = buffer_sizes(sizes)
    assert (found.buffer, found.rows) == ("past", 10)
    put = sizes.put_of("past")
    one = sum(sizes.read(put, item) for item in put.inputs)  # of 6 rows
    assert found.bytes == 2 * one * 10 // 6 + one
    draw = program.graph.by_name["past.draw"]
    assert (sizes.rows[draw.makes], sizes.tokens[draw.makes]) == (4, 4)
