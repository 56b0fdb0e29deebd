"""Chance: a seed for every draw, from the run's seed, the iteration, the call and the row's key."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.batch import Axis
from rlflow.execution import chance

KEYS = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**20)), min_size=1, max_size=20, unique=True)


@given(st.integers(0, 2**63 - 1), KEYS)
def test_a_rows_seed_depends_on_its_key_alone(base, keys):
    table = torch.tensor(keys, dtype=torch.int64)
    together = chance.row_seeds(base, table)
    assert together == [chance.row_seeds(base, table[i : i + 1])[0] for i in range(len(keys))]
    assert len(set(together)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in together)


def test_seeds_of_neighbouring_rows_and_calls_are_unlike():
    seeds = [chance.row_seeds(chance.derived(0, i, c), Axis.fresh(50).repeat(4).keys) for i in range(4) for c in range(4)]
    flat = [seed for call in seeds for seed in call]
    assert len(set(flat)) == len(flat)
    bits = sum(bin(seed).count("1") for seed in flat) / len(flat)
    assert 31 < bits < 32


def test_derived_seeds_tell_their_parts_apart():
    assert len({chance.derived(1, 23), chance.derived(12, 3), chance.derived("1", "23", ""), chance.derived(123)}) == 4
    assert chance.derived(1, "a") == chance.derived(1, "a")


def test_a_repeated_prompt_is_sampled_afresh():
    first, again = Axis.fresh(3, 0).repeat(2), Axis.fresh(3, 3).repeat(2)
    assert not set(chance.row_seeds(7, first.keys)) & set(chance.row_seeds(7, again.keys))
