"""Exact shares of devices, and the check that bundles can fit."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow import PlanError
from rlflow.cluster.job.rank_layout import (
    GRAIN,
    Layout,
    Need,
    RoleNeeds,
    check_room,
    counted,
    laid,
    parts,
    shares,
)


@given(st.integers(1, 4 * GRAIN), st.integers(1, 12))
def test_shares_add_up_and_differ_by_at_most_one_part(whole, count):
    found = shares(whole, count)
    assert sum(found) == whole
    assert max(found) - min(found) <= 1


@given(st.integers(2, 9))
def test_roles_without_a_number_share_a_gpu_evenly_and_use_all_of_it(count):
    layout = laid(
        [RoleNeeds("first", 8, gpus=GRAIN), *(RoleNeeds(f"role{number}", 8) for number in range(1, count))]
    )
    # 6 times 0.17 would be more than a GPU, 3 times 0.33 less
    assert sum(need.gpus for need in layout.needs.values()) == GRAIN
    assert layout.bundle == Need(count * GRAIN, GRAIN)
    assert sum(Fraction(str(need.resources()["GPU"])) for need in layout.needs.values()) == 1


@given(st.lists(st.integers(1, GRAIN - 1), min_size=2, max_size=4), st.integers(0, 2))
def test_given_shares_are_kept_and_the_rest_is_shared(named, unnamed):
    roles = [
        *(RoleNeeds(f"named{number}", 2, gpus=part) for number, part in enumerate(named)),
        *(RoleNeeds(f"other{number}", 2) for number in range(unnamed)),
    ]
    if sum(named) > GRAIN or GRAIN - sum(named) < unnamed:
        with pytest.raises(PlanError, match="shares of one GPU add up to more than 1"):
            laid(roles)
        return
    layout = laid(roles)
    assert [layout.needs[f"named{number}"].gpus for number in range(len(named))] == named
    assert sum(need.gpus for need in layout.needs.values()) == (GRAIN if unnamed else sum(named))
    assert layout.bundle.gpus == GRAIN


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        ([RoleNeeds("a", 2), RoleNeeds("b", 3)], "a: 2, b: 3"),
        ([RoleNeeds("a", 4, per_node=2), RoleNeeds("b", 4, per_node=4)], "a: 2, b: 4"),
        ([RoleNeeds("a", 2, gpus=2 * GRAIN), RoleNeeds("b", 2)], "a: 2 GPUs"),
    ],
)
def test_roles_that_cannot_share_are_refused_with_their_requests(roles, told):
    with pytest.raises(PlanError, match=told):
        laid(roles)


@pytest.mark.parametrize(
    ("amount", "expected"), [(1, GRAIN), (0.5, 5000), (0.1, 1000), (Fraction(1, 4), 2500), (3, 3 * GRAIN)]
)
def test_amounts_are_exact(amount, expected):
    assert parts(amount, "gpus") == expected


@pytest.mark.parametrize("amount", [Fraction(1, 3), 1.5, -1, 0.00001])
def test_amounts_that_ray_cannot_count_are_refused(amount):
    with pytest.raises(PlanError, match="gpus of 'a' cannot be allocated"):
        parts(amount, "gpus of 'a'")


@pytest.mark.parametrize(
    ("amount", "text"), [(GRAIN, "1 CPU"), (2 * GRAIN, "2 CPUs"), (5000, "0.5 CPU"), (3333, "0.3333 CPU")]
)
def test_amounts_are_shown_in_words(amount, text):
    assert counted(amount, "CPU") == text


def room(ranks, per_node, nodes, cpus=1, gpus=0):
    bundle = Need(cpus * GRAIN, gpus * GRAIN)
    check_room(
        [Layout({"actor": bundle}, bundle, ranks, per_node)], [{"CPU": cpu, "GPU": gpu} for cpu, gpu in nodes]
    )


@given(st.integers(1, 8), st.integers(0, 4), st.lists(st.integers(0, 4), max_size=4))
def test_ranks_fit_exactly_if_a_search_finds_nodes_for_them(ranks, per_node, nodes):
    blocks = (
        [per_node] * (ranks // per_node) + [ranks % per_node] * bool(ranks % per_node)
        if per_node
        else [1] * ranks
    )

    def placed(left, free):
        if not left:
            return True
        return any(
            placed(left[1:], [*free[:node], -1 if per_node else have - left[0], *free[node + 1 :]])
            for node, have in enumerate(free)
            if have >= left[0]
        )

    fits = sum(nodes) >= ranks if not per_node else placed(blocks, nodes)
    if fits:
        room(ranks, per_node, [(cpus, 0) for cpus in nodes])
    else:
        with pytest.raises(PlanError, match="no-room|needs? more|does not fit on"):
            room(ranks, per_node, [(cpus, 0) for cpus in nodes])


def test_a_bundle_has_to_fit_on_one_node():
    room(2, 0, [(2, 1), (2, 1)], cpus=2, gpus=1)
    with pytest.raises(PlanError, match="role 'actor' does not fit on nodes of this size") as refused:
        room(1, 0, [(2, 1), (2, 1)], cpus=2, gpus=2)
    assert "a node with 2 CPUs and 1 GPU; a node with 2 CPUs and 1 GPU" in str(refused.value)
    assert "1 times 2 CPUs and 2 GPUs" in str(refused.value)
