"""Which stages one call runs one after another."""

import pytest
import torch

from rlflow import RANK0, flow, loss, row, stage
from rlflow.passes import plan
from rlflow.placement import Placement
from rlflow.trace.compile import compile_flow

SCORE = row(torch.float32)


@stage(gives={"one": SCORE})
def one(scores):
    return scores


@stage(gives={"two": SCORE})
def two(one: SCORE):
    return one


@stage(gives={"three": SCORE})
def three(two: SCORE):
    return two


@stage(gives={"one": SCORE}, rows="group")
def one_by_group(scores):
    return scores


@stage(gives={"two": SCORE}, rows="group")
def two_by_group(one: SCORE):
    return one


@stage(gives={"two": SCORE}, dispatch=RANK0)
def two_at_once(one: SCORE):
    return one


@stage(gives={"two": SCORE}, timeout=5.0)
def two_in_time(one: SCORE):
    return one


@stage(gives={"two": SCORE}, pure=False)
def two_elsewhere(one: SCORE):
    return one


@stage(gives={"two": SCORE})
def two_of_model(one: SCORE, logprobs):
    return one


@stage(gives={"two": SCORE}, on="actor")
def two_on_actor(actor, one: SCORE):
    return one


@stage(gives={"other": SCORE})
def other(one: SCORE):
    return one


@loss
def learn(new, three: SCORE, other: SCORE = None):
    return new.logprobs


def chains(*stages, pools="all=2"):
    """Names of the stages of each chain of a flow with these."""

    @flow
    def made(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= actor.logprobs(batch)
        for each in stages:
            batch |= each(batch)
        actor.update(batch, learn)

    name, _, ranks = pools.partition("=")
    placement = Placement({name: int(ranks)}, {"actor": name}, {"actor": name}) if pools else None
    found = plan(compile_flow(made), placement)
    return [[found.node(i).name for i in ids] for ids in found.chains.values()]


def test_stages_that_follow_one_another_are_a_chain():
    assert chains(one, two, three) == [["one", "two", "three"]]


def test_in_one_process_nothing_is():
    assert chains(one, two, three, pools="") == []


def test_a_stage_of_groups_may_be_the_first():
    assert chains(one_by_group, two, three) == [["one_by_group", "two", "three"]]


@pytest.mark.parametrize("between", [two_at_once, two_in_time, two_elsewhere, two_on_actor], ids=lambda stage: stage.name)
def test_a_stage_of_another_kind_ends_it(between):
    assert chains(one, between, three) == []


def test_a_stage_of_groups_may_not_come_later():
    assert chains(one, two_by_group, three) == [["two_by_group", "three"]]


def test_one_that_others_read_too_is_the_last():
    """They would have to wait for what comes after it."""
    assert chains(one, other, two, three) == [["two", "three"]]


def test_one_that_reads_what_comes_later_begins_anew():
    """The forward runs beside the first stage, which would have to wait for it."""
    assert chains(one, two_of_model, three) == [["two_of_model", "three"]]
