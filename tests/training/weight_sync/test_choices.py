"""Layouts that save bytes, and how many."""

from rlflow.training.weight_sync.choices import Choice, Choices, choices, cut_dims, shard_dims
from rlflow.training.weight_sync.kinds import tensor_parallel

SHAPES = {f"layers.{i}.{name}.weight": shape for i in range(3) for name, shape in
          {"q_proj": (512, 512), "o_proj": (512, 512), "up_proj": (1024, 512), "down_proj": (512, 1024)}.items()}  # fmt: skip
BYTES = 2 * 3 * (2 * 512 * 512 + 2 * 1024 * 512)


def test_matched_dimensions_and_outer_order_reach_the_least_that_any_layout_can():
    found = {(c.dims, c.order): c.inbound for c in choices(SHAPES, "bfloat16", 8, 4).by_cost}
    assert found["matched", "outer"] == BYTES // 4 - BYTES // 8  # M (1/t - 1/n)
    assert found["matched", "outer"] < found["first", "outer"] < found["first", "inner"]
    assert {(c.dims, c.inbound) for c in choices(SHAPES, "bfloat16", 8, 8).by_cost} >= {("matched", 0)}


def test_with_the_outer_order_alone_a_third_less_moves_and_half_to_the_rank_that_receives_most():
    rows = {"q_proj.weight": (512, 512)}  # cut along the first dimension by both
    found = {c.order: c for c in choices(rows, "bfloat16", 4, 2).by_cost}
    whole = 2 * 512 * 512
    assert (found["inner"].inbound, found["inner"].total) == (whole / 2, 1.5 * whole)
    assert (found["outer"].inbound, found["outer"].total) == (whole / 4, whole)


MATCHED = "  the trainer shards 6 of 12 tensors along the dimension that the rollout cuts, not the first: down_proj.weight, o_proj.weight"
OUTER = "  on one machine rank r of the sampler has part r // 2 of 4, not r % 4: ranks with the same part are side by side"


def test_what_is_done_and_what_else_would_save_is_told_with_its_bytes():
    found, less = choices(SHAPES, "bfloat16", 8, 4), "1.12 MiB to the rank that receives most, not"
    assert (found.best.dims, found.best.order) == ("matched", "outer")
    assert found.told("matched", "outer") == [f"so that a transfer brings {less} 2.11 MiB:", MATCHED, OUTER]
    assert found.told("first", "inner") == [f"a transfer can bring {less} 2.11 MiB, where", MATCHED, OUTER]
    assert found.told("first", "outer") == ["so that a transfer brings 1.55 MiB to the rank that receives most, not 2.11 MiB:", OUTER,
                                            f"a transfer can bring {less} 1.55 MiB, where", MATCHED]
    assert choices(SHAPES, "bfloat16", 8, 1).told("first", "inner") == []


def test_an_order_that_was_asked_for_and_costs_more_is_told_so():
    found = Choices(SHAPES, 8, 4, {}, (Choice("first", "inner", 4096, 16384, 0), Choice("first", "outer", 4096, 32768, 0)))
    assert found.told("first", "outer") == [
        "a transfer can bring 16.00 KiB to all ranks together, not 32.00 KiB, where",
        "  rank r of the sampler has part r % 4 of 4, not r // 2: ranks of one replica are side by side"]
    assert found.told("first", "inner") == []


def test_dimensions_are_read_off_the_layout_of_an_engine():
    found = cut_dims(tensor_parallel({**SHAPES, "norm.weight": (512,)}, "bfloat16", 2, 4))
    assert {name.split(".")[-2]: dim for name, dim in found.items()} == {"q_proj": 0, "o_proj": 1, "up_proj": 0, "down_proj": 1}
    uneven = {"o_proj.weight": (4, 10), "down_proj.weight": (4, 12)}
    assert shard_dims(uneven, 4) == {"down_proj.weight": 1}
