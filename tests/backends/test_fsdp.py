"""The fsdp trainer beyond the contract, on two and four ranks (``own_fsdp.py``), and alone."""

import pytest

from rlflow.backends import fsdp, local
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec

CHECKS = {
    2: ("frozen", "follows", "experts", "low", "split_heads", "sleep_frees_part_by_part", "unsplit"),
    4: ("uneven", "both_ways"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", CHECKS)
def test_its_own_checks_pass(checked, subtests, ranks):
    checked.check(subtests, "fsdp", ranks, CHECKS[ranks])


def test_a_single_rank_equals_the_local_trainer(folders):
    spec = ModelSpec(folders["gpt2"], "logprobs", True)
    one, other = fsdp.Trainer(spec), local.Trainer(spec)
    assert (
        [name for name, _ in one.shards()]
        == [name for name, _ in other.weights()]
        == [name for name, _ in one.weights()]
    )
    assert one.state().keys() == other.state().keys()
    with pytest.raises(PlanError, match="one process without a torch group"):
        fsdp.Trainer(spec, fsdp.Trainer.Settings(tensor_parallel=2))
