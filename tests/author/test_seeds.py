"""Numbers from seeds. Every draw has a seed from the run's seed, the iteration, the call and the row's key."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.author.axis import Axis
from rlflow.author.seeds import (
    derived,
    mixed,
    permutation,
    row_seeds,
    signed,
    splitmix,
    turn_seeds,
    uniforms,
    uniforms_at,
)

KEYS = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**20)), min_size=1, max_size=20, unique=True)


def reference(x):
    """Compute splitmix64 as published (Vigna's C code), on Python integers."""
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("x", [0, 1, 12345, 2**63 - 1, -1, -(2**63)])
def test_splitmix_matches_the_published_code(x):
    assert int(splitmix(torch.tensor(x))) % 2**64 == reference(x % 2**64)


def test_uniforms_depend_only_on_seed_and_step():
    a = uniforms([3, 2**64 - 1, 5], 10)
    assert torch.equal(a[2], uniforms([5], 4 + 6)[0])
    assert torch.equal(a[:, :4], uniforms([3, -1, 5], 4))
    assert a.dtype is torch.float64


def test_each_row_may_have_its_own_step():
    seeds, steps = [3, 2**64 - 1, 5, 3], [0, 9, 2, 7]
    assert torch.equal(uniforms_at(seeds, steps), uniforms(seeds, 10)[range(4), steps])


def test_uniforms_look_uniform_and_independent():
    a = uniforms(range(2000), 50)
    assert a.min() >= 0
    assert a.max() < 1
    counts = torch.histc(a.flatten(), 20, 0, 1)
    # chi-square with 19 degrees: 45 has probability 0.0007
    assert ((counts - 5000).square() / 5000).sum() < 45
    assert abs(np.corrcoef(a[:-1].flatten(), a[1:].flatten())[0, 1]) < 0.012
    assert abs(np.corrcoef(a[:, :-1].flatten(), a[:, 1:].flatten())[0, 1]) < 0.012
    assert len(a.unique()) == a.numel()


def test_permutations_depend_on_all_seeds():
    assert sorted(permutation(100, 1, 2).tolist()) == list(range(100))
    assert torch.equal(permutation(100, 1, 2), permutation(100, 1, 2))
    assert not torch.equal(permutation(100, 1, 2), permutation(100, 2, 1))
    assert permutation(0, 1).tolist() == []
    first = torch.bincount(torch.tensor([int(permutation(5, seed)[0]) for seed in range(2000)]))
    assert first.min() > 320


def test_mixing_depends_on_the_order_of_numbers():
    assert len({mixed(1, 2), mixed(2, 1), mixed(1), mixed(1, 2, 0), mixed(0, 1, 2)}) == 5


@given(st.integers(0, 2**63 - 1), KEYS)
def test_the_seed_of_a_row_depends_only_on_its_key(base, keys):
    table = torch.tensor(keys, dtype=torch.int64)
    together = row_seeds(base, table)
    assert together == [row_seeds(base, table[i : i + 1])[0] for i in range(len(keys))]
    assert len(set(together)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in together)


def test_seeds_of_neighbouring_rows_and_calls_differ():
    seeds = [row_seeds(derived(0, i, c), Axis.fresh(50).repeat(4).keys) for i in range(4) for c in range(4)]
    flat = [seed for call in seeds for seed in call]
    assert len(set(flat)) == len(flat)
    bits = sum((seed).bit_count() for seed in flat) / len(flat)
    assert 31 < bits < 32


def test_derived_seeds_keep_their_parts_distinct():
    assert len({derived(1, 23), derived(12, 3), derived("1", "23", ""), derived(123)}) == 4
    assert derived(1, "a") == derived(1, "a")


def test_a_repeated_prompt_gets_a_new_sample():
    first, again = Axis.fresh(3, 0).repeat(2), Axis.fresh(3, 3).repeat(2)
    assert not set(row_seeds(7, first.keys)) & set(row_seeds(7, again.keys))


def test_the_first_turn_has_the_seed_of_its_row_and_later_turns_others():
    seeds = [3, 4, 2**62]
    assert turn_seeds(seeds, 0) == seeds
    later = [turn_seeds(seeds, turn) for turn in (1, 2)]
    assert len({*seeds, *later[0], *later[1]}) == 9
    assert turn_seeds(seeds[1:2], 2) == later[1][1:2]
    assert all(0 <= seed < 2**63 for row in later for seed in row)


@given(st.integers(-(2**80), 2**80))
def test_an_oversized_seed_becomes_its_lowest_64_bits(seed):
    number = signed(seed)
    assert -(2**63) <= number < 2**63
    assert (number - seed) % 2**64 == 0
