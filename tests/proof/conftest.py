"""Proofs of small runs of the packaged model."""

import json
import sys
import types
from pathlib import Path

import pytest

import rlflow.tasks
from rlflow.author.load import load_flow
from rlflow.backends import local
from rlflow.cli.prove import whole
from rlflow.proof.flow_claims import FlowClaims
from rlflow.runs.api import resolve_config
from rlflow.runs.prepare import prepare
from rlflow.runs.proving import rehearsals

MODEL = f"{next(iter(rlflow.tasks.__path__))}/arithmetic_model"


@pytest.fixture
def proven(tmp_path, monkeypatch):
    """``proven(file, backend, flow_only, **settings)``: the claims about a run. ``backend``: a trainer or generator in place of a local
    one, with the half that it is."""

    def proven(file, half=None, kind=None, flow_only=False, **settings):
        sums = [(f"{a} + {b} =", str(a + b)) for a in range(10, 30) for b in range(10, 20)]
        more = {"dpo": {"chosen": " 1", "rejected": " 22"}, "sft": {"completion": " 1"}}.get(Path(file).stem, {"answer": "1"})
        rows = [{"prompt": prompt, **{name: value.replace("1", answer) for name, value in more.items()}} for prompt, answer in sums]
        (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if kind is not None:
            module = types.ModuleType("planted_backends.one")
            module.Trainer, module.Generator = (kind, local.Generator) if "trainer" in half else (local.Trainer, kind)
            monkeypatch.setitem(sys.modules, "planted_backends", types.ModuleType("planted_backends"))
            monkeypatch.setitem(sys.modules, module.__name__, module)
            settings |= {"trainer" if half == "every_trainer" else f"actor.{half}": module.__name__}
        config, hp = resolve_config(load_flow(file), None, {"model": MODEL, "data": (str(tmp_path / "sums.jsonl"),), "held_out": 0,
                                                            "threads": 1, **settings})
        context = prepare(load_flow(file), hp, config, judge=None)
        try:
            return list(FlowClaims(rehearsals(context)).claims() if flow_only else whole(context))
        finally:
            context.close()

    return proven
