"""The system of bare Hugging Face calls, on the small model of the suites."""

import pytest
import torch

from rlflow.benchmarks.cells import PEERS
from rlflow.benchmarks.child import load_system
from rlflow.benchmarks.suites.fixed_shape import make

LENGTHS = '{"lengths": [5, 1, 9, 2, 3, 4]}'


def prepared(folder, **flags):
    """Prepare bare calls on two prompts × two samples of recorded lengths."""
    (folder / "own.json").write_text(LENGTHS)
    flags = {
        "model": str(folder / "model"),
        "data": str(folder / "data.jsonl"),
        "prompts": 2,
        "samples": 2,
        "lr": 1e-3,
        "lengths": str(folder / "own.json"),
        "iterations": 3,
        **flags,
    }
    system = load_system(str(PEERS / "bare.py"))
    assert system.prepare({"flags": flags}, str(folder), 0)["iterations"] == 3
    return system


@pytest.mark.slow
def test_bare_calls_sample_recorded_lengths_and_train(tmp_path):
    make(tmp_path)
    system = prepared(tmp_path)
    before = [parameter.detach().clone() for parameter in system.model.parameters()]
    first, last = system.iterate(2), system.iterate(2)
    assert [row["iteration"] for row in (*first["iterations"], *last["iterations"])] == [0, 1, 2]
    assert [row["tokens"] for row in (*first["iterations"], *last["iterations"])] == [17, 13, 18]
    assert (first["ended"], last["ended"]) == (False, True)
    assert any((one != other).any() for one, other in zip(before, system.model.parameters(), strict=True))
    split = prepared(tmp_path, rows=1)
    split.iterate(3)
    for complete, part in zip(system.model.parameters(), split.model.parameters(), strict=True):
        torch.testing.assert_close(complete, part, rtol=1e-4, atol=1e-5)
    low = prepared(tmp_path, dtype="bfloat16")
    assert low.iterate(1)["iterations"][0]["tokens"] == 17
    assert {parameter.dtype for parameter in low.model.parameters()} == {torch.bfloat16}
