"""Calls of a role: rows, arguments, and misuse at the line of the call."""

import inspect
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rlflow.cluster
from rlflow import FlowError
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import row
from rlflow.cluster.job.futures import gather
from rlflow.cluster.job.job_roles import Group
from rlflow.cluster.job.job_start import JobMember
from rlflow.cluster.rpc import thread_pool
from rlflow.cluster.rpc.row_messages import RowMailbox
from rlflow.errors import RemoteError


class Policy:
    """The object on a rank."""

    def __init__(self):
        self.calls = []

    def named(self, name, *, times=1, suffix=""):
        return name * times + suffix

    def scaled(self, batch, by=1.0, *, plus=0.0):
        self.calls.append(len(batch))
        return Batch(batch.axis, {"x": Data(row("float32"), batch["x"] * by + plus)})

    def shorter(self, batch):
        return batch.rows(range(max(len(batch) - 1, 0)))

    def listed(self, batch):
        return batch["x"].tolist()

    def failing(self):
        raise LookupError("not here")


class Other(Policy):
    def named(self, name):
        return name


@cache
def threads_of(ranks):
    return thread_pool.thread_pool("actor", ranks)


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    for ranks in range(1, 5):
        thread_pool.close(threads_of(ranks))
    threads_of.cache_clear()


class JobHere:
    """Stands in for a started job: its ranks are threads, with new objects each time."""

    def __init__(self, ranks):
        self.ranks = threads_of(ranks)
        for rank in self.ranks.actors:
            rank.host.instance = object.__new__(JobMember)
            rank.host.instance.instance, rank.host.instance.mailbox = Policy(), RowMailbox()

    def pool(self, role):
        return self.ranks


def actor(ranks, **settings):
    return Group(JobHere(ranks), "actor", Policy, ranks, **settings)


def numbered(count, samples=1):
    axis = Axis.fresh(count).repeat(samples) if samples > 1 else Axis.fresh(count)
    return Batch(axis, {"x": Data(row("float32"), torch.arange(float(len(axis))))})


def calls(group):
    return [rank.host.instance.instance.calls for rank in group.job.ranks.actors]


@given(
    st.integers(1, 4),
    st.integers(0, 9),
    st.floats(-4, 4, width=16),
    st.floats(-4, 4, width=16),
    st.booleans(),
)
def test_every_row_comes_back_in_its_place(ranks, rows, by, plus, together):
    group, batch = actor(ranks, distributed=together), numbered(rows)
    found = group.call_batch(Policy.scaled, batch, by, plus=plus).result()
    # in float32, as the method computes
    assert torch.equal(found["x"], torch.arange(float(rows)) * by + plus)
    assert torch.equal(found.axis.keys, batch.axis.keys)
    called = calls(group)
    assert sum(map(sum, called)) == rows
    with_rows = max(min(ranks, rows), 1)
    # each rank at most once, and all ranks if they compute together
    assert sum(map(len, called)) == (ranks if together else with_rows)
    assert max(map(len, called)) == 1


@given(st.integers(1, 4), st.integers(1, 5), st.integers(2, 3))
def test_rows_of_a_group_stay_on_one_rank_on_request(ranks, groups, samples):
    group, batch = actor(ranks).options(by_group=True), numbered(groups, samples)
    assert group.call_batch(Policy.scaled, batch, 2.0).result()["x"].tolist() == [
        2.0 * number for number in range(len(batch))
    ]
    assert all(rows % samples == 0 for rows in sum(calls(group), []))


@given(st.integers(1, 4), st.text(max_size=5), st.integers(0, 3), st.text(max_size=5))
def test_keyword_arguments_arrive_with_any_name_and_length(ranks, name, times, suffix):
    group = actor(ranks)
    assert (
        group.call(Policy.named, name, times=times, suffix=suffix).result() == [name * times + suffix] * ranks
    )
    assert group.call_rank0(Policy.named, name, suffix=suffix).result() == name + suffix


def test_each_rank_gets_its_own_item_on_request():
    group = actor(2)
    assert group.call_each(Policy.named, ["a", "b"]).result() == ["a", "b"]
    assert group.call(Policy.named, ["a", "b"], suffix=["c"]).result() == [["a", "b", "c"]] * 2
    with pytest.raises(FlowError, match=r"2 ranks, and each takes one item\n  found:    3 items"):
        group.call_each(Policy.named, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("misuse", "told"),
    [
        (
            lambda group: group.call("named", "it"),
            ["role 'actor' has no such method", "text 'named'", "write Policy.named, the function"],
        ),
        (lambda group: group.call(Other.named, "it"), ["Other.named", "nearest:  named"]),
        (lambda group: group.call(Policy().named, "it"), ["role 'actor' has no such method"]),
        (lambda group: group.call(len, "it"), ["role 'actor' has no such method"]),
        (
            lambda group: group.call(Policy.named),
            ["missing a required argument: 'name'", "(self, name, *, times=1, suffix='')", "defined:"],
        ),
        (
            lambda group: group.call(Policy.named, "it", tims=2),
            ["unexpected keyword argument 'tims'", "(str, tims=int)"],
        ),
        (
            lambda group: group.call(Policy.named, "it", seconds=0),
            ["the deadline of 'named' is not a number of seconds", "a number above 0"],
        ),
        (lambda group: group.call(Policy.named, "it", seconds=True), ["not a number of seconds"]),
        (
            lambda group: group.call_batch(Policy.scaled, [1, 2]),
            ["splits the rows of a batch", "a list", "Batch.of"],
        ),
    ],
)
def test_misuse_is_an_error_at_the_call_before_anything_is_sent(misuse, told):
    group = actor(2)
    with pytest.raises(FlowError) as refused:
        misuse(group)
    text = str(refused.value)
    assert all(part in text for part in told), text
    assert f"test_job_roles.py:{inspect.getsourcelines(misuse)[1]}" in text.partition("\n")[0]
    assert calls(group) == [[], []]


def test_a_wrong_result_of_a_method_is_reported():
    with pytest.raises(ValueError, match=r"rank \d returned \d rows, expected"):
        actor(2).call_batch(Policy.shorter, numbered(5)).result()
    with pytest.raises(
        RemoteError, match="'listed' was called with rows and returned a list, expected a Batch"
    ):
        actor(2).call_batch(Policy.listed, numbered(5)).result()


def test_results_of_several_calls_come_together_and_an_error_of_any_names_its_rank():
    group = actor(2)
    assert group.call(Policy.named, "it").result() == ["it", "it"]
    assert gather() == ()
    with pytest.raises(RemoteError, match=r"LookupError: not here \(rank 0 of pool 'actor'\)"):
        group.call(Policy.failing).result()


def test_every_name_of_the_package_can_be_imported():
    assert all(getattr(rlflow.cluster, name) for name in rlflow.cluster.__all__)
