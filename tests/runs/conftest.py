"""A small task of real data and the packaged model, so that a run takes seconds."""

import json

import pytest

import rlflow.tasks

MODEL = f"{next(iter(rlflow.tasks.__path__))}/arithmetic_model"


@pytest.fixture
def task(tmp_path):
    """Keywords of a small run on sums from a file."""
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(10, 30) for b in range(10, 20)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": MODEL, "data": str(path), "prompts": 8, "iterations": 2, "held_out": 16, "out": str(tmp_path / "runs"), "lr": 1e-3}
