"""The row accounting of an iteration: every sampled row and token has one outcome, and the sums close."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from keyed import keyed

from rlflow import ask, choose, flow, loss, repeat, row, stage
from rlflow.author.load import load
from rlflow.compiler.passes import plan
from rlflow.compiler.trace.compile import compile_flow
from rlflow.errors import SkipIteration
from rlflow.execution.account import Count, End, RowAccount, RowOutcome
from rlflow.execution.executor import Executor
from rlflow.execution.follow_ups import Asking

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not

generated = load(Path(__file__).parent / "generated.py")


@loss
def likelihood(new, worth):
    return -new.logprobs * worth[:, None], {}


@loss(rows="group")
def likelihood_of_groups(new, worth):
    return -new.logprobs * worth[:, None], {}


@stage(gives={"worth": row(torch.float32)})
def some_missing(scores, *, modulus):
    number = (scores * 1e6).long()
    return torch.where(number % modulus == 0, torch.nan, scores)


@stage(gives="keep", rows="group")
def some_groups(scores, group, *, bar):
    first = (
        torch.cat([torch.ones(1, dtype=torch.bool), group[1:] != group[:-1]]) if len(group) else group.bool()
    )
    return (scores[first] > bar)[torch.cumsum(first.long(), 0) - 1]


@stage(gives="mask")
def first_token(mask):
    kept = torch.zeros_like(mask)
    kept[:, :1] = mask[:, :1]
    return kept


@stage(gives="tokens")
def others(tokens, scores):
    return torch.where((scores > 0.5)[:, None], tokens + 1, tokens)


def flow_of(samples, modulus, of_groups, after, baseline, bar, groups, tries, masks=False, puts=False):
    """Return a flow of the given shape."""

    @flow
    def generated(prompts, actor, reward):
        def body(fresh):
            rows = actor.generate(fresh, samples=samples, max_tokens=4)
            rows |= reward(rows)
            return rows | some_groups(rows, bar=bar)

        if groups:
            batch = repeat(body, prompts, groups=groups, tries=tries)
        else:
            batch = actor.generate(prompts, samples=samples, max_tokens=4)
            batch |= reward(batch)
        if baseline:
            greedy = actor.generate(prompts, max_tokens=3, temperature=0)
            reward(greedy, gives="baseline")
        batch |= some_missing(batch, modulus=modulus)
        if masks:
            batch |= first_token(batch)
        if puts:
            batch |= others(batch)
        actor.update(batch, likelihood_of_groups if of_groups else likelihood, after=after)

    return generated


FLOWS = {
    "samples": st.integers(2, 3),
    "modulus": st.integers(1, 5),
    "of_groups": st.booleans(),
    "after": st.integers(0, 1),
    "baseline": st.booleans(),
    "bar": st.sampled_from([0.0, 0.5, 0.9]),
    "groups": st.integers(0, 4),
    "tries": st.integers(1, 3),
    "masks": st.booleans(),
    "puts": st.booleans(),
}


def iteration(run, count):
    """Return the outcome, or None and the account of a skipped iteration."""
    try:
        outcome = run.compiled(count)
        return outcome, outcome.account
    except SkipIteration as skip:
        return None, skip.account


@settings(max_examples=25)
@given(shape=st.fixed_dictionaries(FLOWS), prompts=st.integers(1, 5))
def test_sums_close_in_any_flow(world, shape, prompts):
    run = world(flow_of(**shape))
    outcome, account = iteration(run, prompts)
    assert account.closes
    if outcome is None:
        assert account.of(RowOutcome.TRAINED).rows == 0
        return
    assert account.of(RowOutcome.TRAINED, "actor.update").rows == keyed(outcome.metrics).get(
        "actor.update/rows", 0
    )
    cause = [
        count.rows
        for (_, end), count in account.ends.items()
        if end.node == "actor.update" and end.fate is RowOutcome.LEFT_OUT
    ]
    if not shape["after"]:
        assert sum(cause) == keyed(outcome.metrics)["actor.update/left_out"]
    if shape["baseline"]:
        assert account.of(RowOutcome.READ).rows == prompts
    if shape["groups"]:
        sampled = account.sampled["actor.generate"]
        assert sampled.rows == shape["samples"] * sampled.groups
        assert sampled.groups == keyed(outcome.metrics)["repeat.body/seen"]


def test_each_cause_names_its_node_and_its_setting(world):
    run = world(flow_of(2, 1, False, 0, True, 0.0, 0, 1))
    account = run.compiled(3).account
    ends = {source: [end for (name, end) in account.ends if name == source] for source in account.sampled}
    assert ends["actor.generate"] == [End(RowOutcome.LEFT_OUT, "actor.update", "worth is not finite")]
    assert ends["actor.generate#2"] == [End(RowOutcome.READ, "reward#2")]
    run = world(flow_of(2, 10**9, False, 1, False, 0.0, 0, 1))
    (end,) = (end for _, end in run.compiled(3).account.ends)
    assert end == End(RowOutcome.LEFT_OUT, "actor.update", "the update is not due yet", "after=1")
    run = world(flow_of(2, 10**9, False, 0, False, 0.0, 2, 3))
    assert run.compiled(5).account.of(RowOutcome.SURPLUS, "repeat.body").rows == 6


@flow
def second_only(prompts, actor, reward):
    first = actor.generate(prompts, samples=2, max_tokens=3)
    second = actor.generate(ask(first | generated.again(first), "question"), max_tokens=3)
    second |= reward(second)
    actor.update(second | some_missing(second, modulus=10**9), likelihood)


def test_a_row_counts_as_skipped_if_its_follow_up_is_too_long(world):
    run = world(second_only)
    run.engine.asking = Asking(longest=len(b"again 9.1"))
    account = run.compiled(12).account  # two of these have a longer number
    assert {
        end: count.rows for (source, end), count in account.ends.items() if source == "actor.generate"
    } == {
        End(RowOutcome.READ, "again"): 20,
        End(RowOutcome.LEFT_OUT, "ask", "asked too long", "data.max_prompt=9"): 4,
    }
    assert account.closes


def picking(prompts, actor, reward):
    def body(fresh):
        rows = actor.generate(fresh, samples=2, max_tokens=4)
        rows |= reward(rows)
        rows |= some_groups(rows, bar=0.3)
        return choose(rows | generated.of_rows(rows, modulus=3), "coin")

    batch = repeat(body, prompts, groups=2, tries=3)
    actor.update(batch | some_missing(batch, modulus=10**9), likelihood)


def test_rows_left_by_a_repeat_are_counted_once_with_their_groups(world):
    run = world(flow(picking))
    outcome = run.compiled(4)
    account, metrics = outcome.account, keyed(outcome.metrics)
    sampled = account.sampled["actor.generate"]
    assert (sampled.rows, sampled.groups) == (2 * run.stream.position, run.stream.position)
    assert metrics["repeat.body/seen"] == run.stream.position
    assert metrics["repeat.body/kept"] == 2
    assert account.of(RowOutcome.LEFT_OUT, "choose").rows > 0
    assert account.closes


def test_rows_are_trained_by_the_update_of_their_sampling_role(world, flows):
    run = world(flows.warm)
    run.engine.iteration = 2
    found = run.compiled(4).account
    assert {end.node for _, end in found.ends} == {"actor.update", "actor.update#3"}
    assert found.closes


def test_an_account_survives_a_round_trip_through_json(world, flows):
    account = world(flows.adaptive).compiled(5).account
    assert RowAccount.from_json(account.as_json()) == account
    assert account.as_json() == RowAccount.from_json(account.as_json()).as_json()


def test_an_account_with_an_extra_row_does_not_close():
    account = RowAccount()
    account.sample("actor.generate", Count(1, 2, 9))
    account.end("actor.generate", End(RowOutcome.READ), Count(1, 2, 8))
    assert not account.closes
    account.end("actor.generate", End(RowOutcome.READ), Count(0, 1, 1))
    assert not account.closes


def test_a_second_run_of_a_plan_starts_a_new_account(world, flows, queues):
    run = world(flows.remax)
    made = plan(compile_flow(flows.remax))
    executor = Executor(run.engine, queues)
    one, other = (executor.run(made, run.stream.take(3)).account for _ in range(2))
    assert one.sampled["actor.generate"].rows == other.sampled["actor.generate"].rows == 9
    with pytest.raises(KeyError):
        one.sampled["reward"]


@settings(max_examples=15)
@given(shape=st.fixed_dictionaries(generated.SHAPES), prompts=st.integers(2, 4), delays=st.integers(0, 99))
def test_sums_close_for_any_history_and_any_delays(world, shape, prompts, delays):
    flow = generated.drawn(**shape)
    compiled, eager = world(flow), world(flow)
    generated.slowed(compiled.engine, delays)
    seen, accounts = generated.Seen(compiled.engine), []
    for number in range(2):
        compiled.engine.iteration = number  # also after a skipped iteration
        accounts.append(iteration(compiled, prompts)[1])
        eager.eager(prompts)
    generated.assert_counted(accounts, seen)
    for batch, _ in seen.batches:
        generated.assert_numbered(batch)
    assert compiled.learned == eager.learned
    if not {"join", "joined"} & set(shape["steps"]):  # a joined row is sampled under another path
        assert generated.total(account.of(RowOutcome.TRAINED) for account in accounts) == (
            len(seen.learned),
            sum(seen.learned.values()),
        )
