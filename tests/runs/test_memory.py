"""Runs within a memory limit: the same bits, the planned moves, and memory that is really freed."""

import json

import pytest
import torch
from safetensors.torch import load_file

import rlflow
from rlflow.execution.offload_manager import OffloadManager
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.resume import resume

pytestmark = pytest.mark.slow

SETTINGS = {"batch_tokens": 1024, "threads": 1, "save_every": 2, "eval_every": 2, "hp.max_tokens": 6}
BUFFERS = 4096  # bytes of buffers other than weights


def lines(result):
    found = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in ("seconds", "response/tokens_per_second")}
        for line in found
    ]


def weights(result):
    return {
        (path.parent.name, name): tensor
        for path in result.folder.glob("final/*/model.safetensors")
        for name, tensor in load_file(path).items()
    }


def in_memory(half):
    """Return the bytes of the side's storages, each counted once."""
    moments = getattr(half, "optimizer", None)
    tensors = [
        *half.network.held(),
        *(t for state in (moments.state.values() if moments else ()) for t in state.values() if t.dim()),
    ]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.fixture
def measured(monkeypatch):
    """The bytes in memory and the planned bytes after each step of the offload manager."""
    seen, settle = [], OffloadManager.settle

    def settled(self, needs):
        settle(self, needs)
        if self.offload_plan is not None:
            seen.append(
                (
                    sum(map(in_memory, self._sides.values())),
                    sum(self.offload_plan.sizes[part] for part in self.in_memory),
                    self.offload_plan,
                )
            )

    monkeypatch.setattr(OffloadManager, "settle", settled)
    return seen


def test_a_memory_limit_does_not_change_a_run(task, measured):
    straight = rlflow.run("ppo", **task | {"iterations": 4}, **SETTINGS)
    assert measured == []
    begun = rlflow.run("ppo", **task, **SETTINGS, memory="16MB")
    resume(begun.folder, {"iterations": 4, "memory": "20MB"}, Quiet())
    assert lines(begun) == lines(straight)
    one, other = weights(straight), weights(begun)
    assert one.keys() == other.keys()
    assert {role for role, _ in one} == {"actor", "critic"}
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())
    offload_plans = {offload_plan.limit: offload_plan for _, _, offload_plan in measured}
    assert list(offload_plans) == [16_000_000, 20_000_000]
    moves = offload_plans[20_000_000].moves
    told = {"residency/moves": len(moves), "residency/bytes": sum(move.bytes for move in moves)}
    assert json.loads((begun.folder / "weights.json").read_text()) == told
    for found, planned, offload_plan in measured:
        assert found <= planned + BUFFERS <= offload_plan.limit
    # before the first step there are no moments
    assert sum(found >= planned for found, planned, _ in measured) > len(measured) / 2
    assert min(found for found, _, _ in measured) < 0.5 * offload_plans[16_000_000].peak_without
