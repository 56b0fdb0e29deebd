"""The pool of a node by the bytes that it reads, and pools that share devices."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow import PlanError
from rlflow.author.columns import row, text, token
from rlflow.compiler.placement import GRAIN, Placement, Pools, typical_bytes


def test_a_column_of_unknown_kind_counts_as_one_number_per_row():
    assert typical_bytes(None) == typical_bytes(row("float32")) == 4


@pytest.mark.parametrize(
    ("heavy", "light"),
    [
        (row("int64"), row("float32")),
        (row("float32"), row("bool")),
        (token("float32"), text),
        (text, row("int64")),
    ],
)
def test_a_larger_kind_of_column_counts_for_more(heavy, light):
    assert typical_bytes(heavy) > typical_bytes(light) > 0


def test_a_pool_names_its_fraction_of_each_device():
    text = "actor=2@gpu0.5, critic=2@gpu=0.25,rest=3@gpus.25,all=1"
    pools = Pools(text)
    assert (pools, list(pools.ranks)) == (text, ["actor", "critic", "rest", "all"])
    assert pools.ranks == {"actor": 2, "critic": 2, "rest": 3, "all": 1}
    assert pools.shares == {"actor": Fraction(1, 2), "critic": Fraction(1, 4), "rest": Fraction(1, 4)}
    assert (pools.kind, Pools("all=2").kind, Pools("a=1@cpus=0.5").kind) == ("gpu", "", "cpu")
    assert Pools("train=2,rollout=2").shares == {}


def test_all_pools_have_thread_ranks_or_none():
    text = "train=2@threads, rollout=1@threads"
    pools = Pools(text)
    assert (pools.threads, pools.ranks, pools.shares, pools.kind) == (
        True,
        {"train": 2, "rollout": 1},
        {},
        "",
    )
    assert not any(Pools(other).threads for other in ("all=2", "a=1@gpu0.5,b=1@gpu0.5", ""))
    with pytest.raises(
        PlanError, match="some pools are threads of this process and others are not"
    ) as refused:
        Pools("train=2@threads,rollout=1,rest=1@cpu0.5")
    assert refused.value.problems[0].remedy == "add @threads to rollout, rest"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a=2@thread", "is not a valid pool"),
        ("a=2@threads0.5", "is not a valid pool"),
        ("a=0@threads", "is not a valid pool"),
        ("a=2@gpu0", "does not give a valid part of a device"),
        ("a=2@gpu1.5", "does not give a valid part of a device"),
        ("a=2@gpu0.00001", "does not give a valid part of a device"),
        ("a=2@tpu0.5", "is not a valid pool"),
        ("a=2@gpu", "is not a valid pool"),
        ("a=0@gpu0.5", "is not a valid pool"),
        ("a=1,a=1@gpu0.5", "is not a valid pool"),
        ("a=1@gpu0.5,b=1@cpu0.5", "devices of several kinds"),
    ],
)
def test_invalid_fractions_of_devices_are_refused(text, told):
    with pytest.raises(PlanError, match=told):
        Pools(text)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, GRAIN)), min_size=1, max_size=6))
def test_pools_on_a_device_share_it_with_equal_ranks(pools):
    names = {f"p{number}": each for number, each in enumerate(pools)}
    placement = Placement(
        {name: ranks for name, (ranks, _) in names.items()},
        shares={name: Fraction(part, GRAIN) for name, (_, part) in names.items()},
    )
    groups = placement.devices()
    assert {*sum(groups, ())} == set(names)
    for group in groups:
        assert sum(placement.shares[name] for name in group) <= 1
        assert len({placement.pools[name] for name in group}) == 1


def test_pools_with_full_devices_share_none():
    placement = Placement({"a": 2, "b": 2, "c": 2, "d": 2}, shares={"b": Fraction(1, 2), "d": Fraction(1, 2)})
    assert placement.devices() == [("a",), ("b", "d"), ("c",)]
