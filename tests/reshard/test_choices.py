"""Layouts that save bytes, and how many."""

from rlflow.reshard.choices import advice, choices, cut_dims, shard_dims
from rlflow.reshard.kinds import tensor_parallel

SHAPES = {f"layers.{i}.{name}.weight": shape for i in range(3) for name, shape in
          {"q_proj": (512, 512), "o_proj": (512, 512), "up_proj": (1024, 512), "down_proj": (512, 1024)}.items()}  # fmt: skip
BYTES = 2 * 3 * (2 * 512 * 512 + 2 * 1024 * 512)


def test_matched_dimensions_and_outer_order_reach_the_least_that_any_layout_can():
    found = {(c.dims, c.order): c.inbound for c in choices(SHAPES, "bfloat16", 8, 4)}
    assert found["matched", "outer"] == BYTES // 4 - BYTES // 8  # M (1/t - 1/n)
    assert found["matched", "outer"] < found["first", "outer"] < found["first", "inner"]
    assert {(c.dims, c.inbound) for c in choices(SHAPES, "bfloat16", 8, 8)} >= {("matched", 0)}


def test_advice_names_the_tensors_and_the_bytes():
    assert advice(SHAPES, "bfloat16", 8, 4) == [
        "a transfer can bring 1.12 MiB to the rank that receives most, not 2.11 MiB:",
        "  shard 6 of 12 tensors along the dimension that the rollout cuts, not the first: down_proj.weight, o_proj.weight",
        "  put ranks that hold the same part of the model side by side: rank r has part r // 2 of 4, not r % 4, "
        "which engines here do not offer",
    ]
    assert advice(SHAPES, "bfloat16", 8, 1) == []


def test_dimensions_are_read_off_the_layout_of_an_engine():
    found = cut_dims(tensor_parallel({**SHAPES, "norm.weight": (512,)}, "bfloat16", 2, 4))
    assert {name.split(".")[-2]: dim for name, dim in found.items()} == {"q_proj": 0, "o_proj": 1, "up_proj": 0, "down_proj": 1}
    uneven = {"o_proj.weight": (4, 10), "down_proj.weight": (4, 12)}
    assert shard_dims(uneven, 4) == {"down_proj.weight": 1}
