"""ZeRO 1, 2 and 3 on one rank and on two train as the local backend does; what ``zero_ranks`` measured is judged here."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.backends import deepspeed
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec

SECONDS = 500
STAGES = ("1", "2", "3")
SHAPES = ("llama 1", "llama 2", "llama 3", "gpt2 3", "qwen3 3", "gemma3 3")
pytestmark = pytest.mark.timeout(2 * SECONDS + 60)  # the first test waits for all processes
on_ranks = pytest.mark.parametrize("ranks", [1, 2])
needed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the package deepspeed")


def environment(out):
    """That of this process, where nothing can be compiled."""
    return os.environ | {"CC": "/nonexistent", "CXX": "/nonexistent", "TORCH_EXTENSIONS_DIR": str(out / "compiled"), "OMP_NUM_THREADS": "1"}


def ran(ranks, folders, out):
    """What the first of ``ranks`` processes measured; what they printed; what they compiled."""
    script, models = Path(__file__).with_name("zero_ranks.py"), folders["llama"].parent
    processes = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(ranks), str(models), str(out)], env=environment(out), text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(printed)
    return json.loads((out / f"{ranks}.json").read_text()) | {"printed": printed, "compiled": (out / "compiled").exists()}


@pytest.fixture(scope="module")
def measured(folders, tmp_path_factory):
    """Number of ranks → what was measured. One rank goes on from a state that two left."""
    out = tmp_path_factory.mktemp("zero")
    return {ranks: ran(ranks, folders, out) for ranks in (2, 1)}


def slow(test):
    return pytest.mark.slow(needed(test))


@slow
@on_ranks
def test_three_steps_are_those_of_the_local_backend(measured, ranks):
    found = measured[ranks]["equality"]
    assert set(found) == set(SHAPES if ranks == 2 else SHAPES[:3])
    for name, one in found.items():
        assert one["apart"] <= 1e-5, name
        assert one["steps"] == 3
        assert one["norm_before"] > 2 * 0.5  # what is cut to max_grad_norm
        assert one["norm"] <= 1e-6  # relative
        assert one["loss"] <= 1e-6
        assert one["forward"]
        assert one["names"]


@slow
def test_of_stage_3_a_rank_holds_its_part_alone_before_and_after_forwards_and_updates(measured):
    shares = [one["share"] for name, one in measured[2]["equality"].items() if name.endswith("3")]
    shares += [measured[2]["frozen"]["share"], measured[2]["recomputed"]["share"]]
    assert len(shares) == 6
    assert all(0.5 <= share <= 0.6 for share in shares)


@slow
@pytest.mark.parametrize("zero", STAGES)
def test_a_state_goes_from_local_to_a_stage_and_back_in_every_bit(measured, zero):
    found = measured[2]["states"][zero]
    assert found["taken"]
    assert found["back"]
    assert found["fresh"]
    assert found["apart"] <= 1e-6


@slow
@on_ranks
def test_a_state_goes_between_stages_and_numbers_of_ranks_in_every_bit(measured, ranks):
    assert measured[ranks]["between stages"]


@slow
@on_ranks
def test_a_gradient_that_is_not_finite_changes_nothing(measured, ranks):
    found = measured[ranks]["skipped"]
    assert list(found) == (list(STAGES) if ranks == 2 else ["3"])
    for one in found.values():
        assert one == {"kept": True, "after": True, "steps": 4}


@slow
def test_a_saved_folder_and_the_weights_are_those_of_the_local_backend(measured):
    assert measured[2]["files"]


@slow
def test_shards_cover_each_weight_once(measured):
    assert measured[2]["parts"]


@slow
def test_a_frozen_model_is_cut_and_computes_as_the_local_one(measured):
    assert measured[2]["frozen"]["equal"]
    assert measured[2]["frozen"]["state"]


@slow
@pytest.mark.parametrize("zero", STAGES)
def test_sleep_changes_nothing(measured, zero):
    assert measured[2]["asleep"][zero]["same"]


@slow
@pytest.mark.parametrize("zero", STAGES)
def test_what_sleeps_frees_what_is_planned_for_it(measured, zero):
    told, ranks = measured[2]["asleep"][zero], 2
    (weights, optimizer, gradient), asleep, awake = told["freed"]
    assert asleep == [0, 0, 0]
    assert awake == [weights, optimizer, gradient]
    assert weights == pytest.approx(told["whole"] / (ranks if zero == "3" else 1), rel=0.05)
    assert optimizer == pytest.approx(3 * told["whole"] / ranks, rel=0.05)  # two moments, and a float32 copy
    assert gradient == (pytest.approx(told["whole"] / ranks, rel=0.05) if zero == "3" else 0)


@slow
@pytest.mark.parametrize("head", ["values", "scores"])
def test_heads_learn_and_are_kept(measured, head):
    found = measured[2]["heads"][head]
    assert found["apart"] <= 1e-5
    assert found["saved"] <= 1e-6
    assert found["names"]
    assert found["restored"]


@slow
@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 1e-3)])
def test_adapters_learn_and_are_kept(measured, dtype, near):
    found = measured[2]["adapters"][dtype]
    assert found["apart"] <= near  # of a bfloat16 base the merged weights are rounded
    assert all(found[name] for name in ("names", "restored", "back", "learning"))


@slow
def test_bfloat16_computes_low_and_learns_in_float32(measured):
    found = measured[2]["low"]
    assert found["apart"] <= 1e-5
    assert found["gap"] <= 0.02
    assert found["float32"]


@slow
def test_layers_and_logits_computed_again_change_nothing(measured):
    assert measured[2]["recomputed"]["apart"] <= 1e-5
    assert measured[2]["recomputed"]["gap"] <= 1e-5


@slow
@on_ranks
def test_it_starts_and_ends_without_a_word_and_compiles_nothing(measured, ranks):
    said = [text.partition("nanobind: leaked")[0] for text in measured[ranks]["printed"]]  # bindings of triton, as Python ends
    assert said == [""] * ranks
    assert not measured[ranks]["compiled"]


@slow
def test_a_run_in_one_process_needs_no_group(tmp_path):
    command = [sys.executable, "-m", "rlflow.cli.main", "run", "algorithms/grpo.py", "--actor.trainer", "deepspeed", "--actor.zero", "2",
               "--reference.trainer", "deepspeed", "--hp.beta", "0.01", "--iterations", "3", "--prompts", "16", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment(tmp_path), text=True, capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[INFO]" not in done.stdout
    assert "[WARNING]" not in done.stdout
    lines = [json.loads(line) for line in next(tmp_path.glob("*/metrics.jsonl")).read_text().splitlines()]
    assert len([line for line in lines if any(name.endswith("grad_norm") for name in line)]) == 3


def test_without_the_package_the_remedy_is_said(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(PlanError, match=r"pip install 'rlflow-dag\[deepspeed\]'"):
        deepspeed.Trainer(ModelSpec(folders["llama"]))
