"""Compiled layers: refused cases, and equality with uncompiled layers."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_packing import rows
from training_claims import check_same, copied
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from rlflow import loss
from rlflow.author.torch_private import missing_compiler
from rlflow.backends.deepspeed.trainer import TrainerSettings as DeepSpeedSettings
from rlflow.backends.fsdp.settings import TrainerSettings as FsdpSettings
from rlflow.backends.local import Trainer
from rlflow.backends.local.settings import TrainerSettings
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec


@pytest.mark.parametrize(("settings", "name"), [(FsdpSettings, "fsdp"), (DeepSpeedSettings, "deepspeed")])
def test_other_trainers_refuse_compilation_by_name(settings, name):
    with pytest.raises(PlanError, match=f"the {name} trainer does not compile layers"):
        settings(compile=True)
    assert not settings().compile


def test_layers_are_compiled_only_on_request():
    assert missing_compiler("cpu") == "" if shutil.which("g++") else missing_compiler("cpu")
    assert not TrainerSettings().compile


WITHOUT = """
from rlflow.backends.local.compiled import check_compiler
from rlflow.errors import PlanError
try:
    check_compiler("cpu")
except PlanError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_missing_compiler_is_reported_with_the_package_to_install():
    """Runs in its own process, whose PATH has no compiler."""
    environment = {"PATH": "/nowhere", "CXX": "/nowhere/g++"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, check=True
    )
    for words in (
        "compile: layers on 'cpu'",
        "found:",
        "no C++ compiler",
        "expected:",
        "such as g++",
        "remedy:",
        "--ROLE.compile",
    ):
        assert words in done.stdout, done.stdout + done.stderr


@loss
def likely(new, mask):
    """Return the log-probs as values of the loss."""
    return -new.logprobs


COMPUTE = """
import sys
import torch
from test_compiled import computed
folder, begun, out = sys.argv[1:]
torch.save(computed(folder, torch.load(begun) if begun else {}), out)
"""


def computed(folder, initial):
    """Return (packed, compiled, number of the step) → log-probs and, for packed rows, the state after the
    step.

    Each way takes two steps. For packed and compiled rows only the second runs, from the state ``initial``.
    Each step has rows of other sizes.
    """
    found = {}
    for packed, compiled in [(True, True)] if initial else itertools.product((True, False), (True, False)):
        torch.compiler.set_stance("default")
        settings = TrainerSettings(lr=1e-2, packed=packed, compile=compiled)
        trainer = Trainer(ModelSpec(Path(folder), trained=packed, dtype="float64"), settings)
        torch.compiler.set_stance("fail_on_recompile")  # all graphs exist by now, whatever the sizes
        if initial:
            trainer.restore(initial)
        for step in (1,) if initial else (0, 1):
            batch = rows(step).rows(torch.arange(10 - 9 * step))
            found[packed, compiled, step] = {"logprobs": trainer.forward(batch)["logprobs"]}
            if packed:
                trainer.update(batch, likely)
                found[packed, compiled, step] |= copied(trainer.state())
    return found


def in_a_process(folder, initial, out):
    """Run ``computed`` in its own process. It has no graphs in memory but finds the output of g++ on disk."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(out.with_name("cache")),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(
        [sys.executable, "-c", COMPUTE, folder, initial, out],
        check=True,
        cwd=Path(__file__).parent,
        env=environment,
    )
    return torch.load(out)


@pytest.mark.long
@pytest.mark.skipif(bool(missing_compiler("cpu")), reason="torch finds no compiler here")
def test_compiled_layers_agree_to_rounding_and_resume_exactly(folders, tmp_path):
    """In float64 (Gemma's norms stay in float32): packed rows, padded rows without a gradient, a sliding
    window, and no new graph for other sizes.

    A process that loads a state computes the same bits as the uninterrupted one. The test skips weights,
    because AdamW's first step has full size also for a gradient of pure rounding.
    """
    folder = tmp_path / "model"
    config = json.loads((folders["gemma3"] / "config.json").read_text())
    # each layer takes half a minute
    one = Gemma3TextConfig(**config | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]})
    AutoModelForCausalLM.from_config(one).save_pretrained(folder)
    whole = in_a_process(folder, "", tmp_path / "whole.pt")
    for packed, step in itertools.product((True, False), (0, 1)):
        plain, compiled = whole[packed, False, step], whole[packed, True, step]
        for name in [name for name in plain if name == "logprobs" or name.startswith("exp_avg/")]:
            torch.testing.assert_close(
                compiled[name],
                plain[name],
                atol=1e-5,
                rtol=1e-5,
                msg=f"{name} of step {step}, packed {packed}",
            )
    initial = {name: tensor for name, tensor in whole[True, True, 0].items() if name != "logprobs"}
    torch.save(initial, tmp_path / "begun.pt")
    check_same(
        in_a_process(folder, tmp_path / "begun.pt", tmp_path / "rest.pt")[True, True, 1], whole[True, True, 1]
    )
