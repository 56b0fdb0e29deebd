"""Backends that train or sample alone, and settings of either half."""

import subprocess
import sys

import pytest
import torch

from rlflow.backends.vllm.surroundings import imported
from rlflow.cli.check import check_flow as judged_file
from rlflow.compiler.graph.model import RoleUse
from rlflow.config.flags import sort_values
from rlflow.config.roles.backends import backend, disable_tf32
from rlflow.config.roles.bound import Halves, bind
from rlflow.errors import PlanError

FROZEN, TRAINED = RoleUse("reference"), RoleUse("actor", trained=True, generates=True)


@pytest.fixture
def judged(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def call(use, **values):
        needs = Halves(use.trained or not use.generates, use.generates)
        return bind({use: needs}, sort_values({"model": str(tmp_path)} | values, [use.name]))[use.name]

    return call


def test_a_generator_of_one_backend_goes_with_a_trainer_of_another(judged):
    judged(
        TRAINED,
        **{
            "actor.generator": "vllm",
            "actor.lr": "1e-3",
            "actor.tensor_parallel": "2",
            "actor.max_num_seqs": "8",
        },
    )
    with pytest.raises(PlanError, match="max_num_seqs"):
        judged(TRAINED, **{"actor.generator": "vllm", "actor.max_num_seqs": "0"})


@pytest.mark.parametrize("values", [{"trainer": "vllm"}, {"backend": "vllm"}])
@pytest.mark.parametrize("use", [FROZEN, TRAINED])
def test_a_backend_that_does_not_train_is_refused_as_a_trainer(judged, use, values):
    with pytest.raises(PlanError, match="the backend 'vllm' has no Trainer") as refused:
        judged(use, **values)
    assert f"--{use.name}.trainer local" in str(refused.value)
    with pytest.raises(PlanError) as alone:
        judged(use, lr="1e-3", **values)  # which the half that is wanted would have
    assert len(alone.value.problems) == 1


def test_a_half_that_a_role_does_not_use_may_be_missing(judged):
    judged(RoleUse("sampler", generates=True), trainer="vllm", generator="vllm")


def test_naming_the_vllm_backend_loads_no_engine():
    code = (
        "import sys, rlflow.backends.vllm as b; print(hasattr(b, 'Trainer'), sorted({'torch', 'vllm'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "[]"]


@pytest.mark.parametrize(
    ("half", "name", "device", "install"),
    [
        ("generator", "vllm", "cpu", "python -m rlflow.backends.vllm.install"),
        ("generator", "vllm", "cuda", r"pip install 'rlflow-dag\[vllm\]'"),
        ("trainer", "deepspeed", "cpu", r"pip install --no-build-isolation 'rlflow-dag\[deepspeed\]'"),
    ],
)
def test_a_missing_engine_is_named_with_what_installs_it_before_anything_is_loaded(
    judged, monkeypatch, half, name, device, install
):
    monkeypatch.setitem(sys.modules, name, None)
    told = rf"the package '{name}' is not installed(.|\n)*remedy: +{install}"
    with pytest.raises(PlanError, match=told):
        judged(TRAINED, **{f"actor.{half}": name, "device": device})
    with pytest.raises(PlanError, match=told):
        judged_file("ppo", [f"--actor.{half}", name, "--device", device])


def test_a_missing_vllm_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(PlanError, match="not installed") as missing:
        imported("cpu")
    assert "python -m rlflow.backends.vllm.install" in str(missing.value)
    with pytest.raises(PlanError, match="rlflow-dag\\[vllm\\]"):
        imported("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "kept"),
    [
        ("cuda", "float32", "highest"),
        ("cuda", "bfloat16", "high"),
        ("cpu", "float32", "high"),
    ],
)
def test_float32_on_a_gpu_is_float32(device, dtype, kept):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        disable_tf32(device, dtype)
        assert torch.get_float32_matmul_precision() == kept
    finally:
        torch.set_float32_matmul_precision(before)


def test_what_a_backend_lacks_is_not_taken_for_the_backend(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "needy.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        backend("own.needy")
    with pytest.raises(PlanError):
        backend("own.other")
