"""The fsdp trainer does what the local one does, on one, two and four ranks. The checks are in ``fsdp_rank.py``, which each rank runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.backends import fsdp, local
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec

RANK = Path(__file__).with_name("fsdp_rank.py")
SECONDS = 600  # for all checks of some ranks
CHECKS = {
    1: ["qwen3"],
    2: ["gpt2", "llama", "gemma3", "qwen3", "values", "scores", "adapters", "transposed_adapters", "frozen",
        "matched", "experts", "low", "skipped", "data_parallel", "split_llama", "split_qwen3", "split_gemma3", "split_heads", "unsplit"],
    4: ["uneven", "split_qwen3"],
}  # fmt: skip


@pytest.fixture(scope="module")
def found(folders, tmp_path_factory):
    """Number of ranks → check → what each rank has to say against it. All checks of some ranks run in the same processes."""
    kept = {}

    def of(ranks):
        if ranks not in kept:
            kept[ranks] = run(ranks, tmp_path_factory.mktemp(f"ranks{ranks}"), next(iter(folders.values())).parent)
        return kept[ranks]

    return of


def run(ranks, folder, models):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", str(RANK)]
    begun = [subprocess.Popen([*command, str(rank), str(ranks), str(folder), str(models), *CHECKS[ranks]], env=environment)
             for rank in range(ranks)]  # fmt: skip
    try:
        assert [process.wait(SECONDS) for process in begun] == [0] * ranks
    finally:
        for process in begun:
            process.kill()
    said = [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [each.get(name, "not run: an earlier check failed") for each in said] for name in CHECKS[ranks]}


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in CHECKS.items() for name in names])
def test_it_does_what_the_local_trainer_does(found, ranks, name):
    assert found(ranks)[name] == [""] * ranks


def test_alone_it_is_the_local_trainer(folders):
    spec = ModelSpec(folders["gpt2"], "logprobs", True)
    one, other = fsdp.Trainer(spec), local.Trainer(spec)
    assert [name for name, _ in one.shards()] == [name for name, _ in other.weights()] == [name for name, _ in one.weights()]
    assert one.state().keys() == other.state().keys()
    with pytest.raises(PlanError, match="one process without a torch group"):
        fsdp.Trainer(spec, fsdp.Trainer.Settings(tensor_parallel=2))
