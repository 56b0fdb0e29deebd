"""Proofs of small runs of the packaged model."""

import contextlib
import sys
import types

import pytest
from small_runs import prepared

from rlflow.backends import local
from rlflow.cli.prove import whole
from rlflow.runs.proof.flow_claims import FlowClaims
from rlflow.runs.proof.proving import dry_runs


@pytest.fixture
def proven(tmp_path, monkeypatch):
    """``proven(file, backend, flow_only, **settings)``: the claims about a run. ``backend``: a trainer or
    generator to use instead of the local one, with its side."""

    def proven(file, half=None, kind=None, flow_only=False, **settings):
        if kind is not None:
            module = types.ModuleType("planted_backends.one")
            module.Trainer, module.Generator = (
                (kind, local.Generator) if "trainer" in half else (local.Trainer, kind)
            )
            monkeypatch.setitem(sys.modules, "planted_backends", types.ModuleType("planted_backends"))
            monkeypatch.setitem(sys.modules, module.__name__, module)
            settings |= {"trainer" if half == "every_trainer" else f"actor.{half}": module.__name__}
        with contextlib.closing(prepared(tmp_path, file, **settings)) as context:
            return list(FlowClaims(dry_runs(context)).claims() if flow_only else whole(context))

    return proven


@pytest.fixture(scope="module")
def prepared_grpo(tmp_path_factory):
    """A GRPO run with a reference on four prompts, ready for a dry run."""
    settings = {"hp.max_tokens": 4, "hp.samples": 4, "hp.beta": 0.1, "prompts": 4}
    with contextlib.closing(prepared(tmp_path_factory.mktemp("grpo"), "grpo", **settings)) as context:
        yield context


@pytest.fixture
def grpo(prepared_grpo):
    """The claims about its flow, none checked yet."""
    return FlowClaims(dry_runs(prepared_grpo, 4), 2)
