"""The floor of bare calls, on the small model that the suites make."""

import pytest

from rlflow.bench.cells import PEERS
from rlflow.bench.child import load_system
from rlflow.bench.suites.fixed_shape import make


@pytest.mark.slow
def test_bare_calls_sample_as_many_tokens_as_the_list_says_and_train(tmp_path):
    make(tmp_path)
    flags = {"model": str(tmp_path / "model"), "data": str(tmp_path / "data.jsonl"), "prompts": 2, "samples": 2, "lr": 1e-3,
             "lengths": str(tmp_path / "own.json"), "iterations": 3}
    (tmp_path / "own.json").write_text('{"lengths": [5, 1, 9, 2, 3, 4]}')
    system = load_system(str(PEERS / "bare.py"))
    assert system.prepare({"flags": flags}, str(tmp_path), 0)["iterations"] == 3
    before = [parameter.detach().clone() for parameter in system.model.parameters()]
    first, last = system.iterate(2), system.iterate(2)
    assert [row["iteration"] for row in (*first["iterations"], *last["iterations"])] == [0, 1, 2]
    assert [row["tokens"] for row in (*first["iterations"], *last["iterations"])] == [17, 13, 18]
    assert (first["ended"], last["ended"]) == (False, True)
    assert any((one != other).any() for one, other in zip(before, system.model.parameters(), strict=True))
