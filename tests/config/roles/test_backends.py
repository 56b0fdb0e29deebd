"""Backends that only train or only sample, and settings of the trainer or the generator."""

import subprocess
import sys

import pytest
import torch

from rlflow.backends.vllm.surroundings import imported
from rlflow.cli.check import check_flow as judged_file
from rlflow.compiler.graph.model import RoleUse
from rlflow.config.flags import sort_values
from rlflow.config.roles.backends import backend, disable_tf32
from rlflow.config.roles.bound import Sides, bind
from rlflow.errors import PlanError

FROZEN, TRAINED = RoleUse("reference"), RoleUse("actor", trained=True, generates=True)


@pytest.fixture
def checked(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def call(use, **values):
        needs = Sides(use.trained or not use.generates, use.generates)
        return bind({use: needs}, sort_values({"model": str(tmp_path)} | values, [use.name]))[use.name]

    return call


def test_a_generator_and_a_trainer_may_have_different_backends(checked):
    checked(
        TRAINED,
        **{
            "actor.generator": "vllm",
            "actor.lr": "1e-3",
            "actor.tensor_parallel": "2",
            "actor.max_num_seqs": "8",
        },
    )
    with pytest.raises(PlanError, match="max_num_seqs"):
        checked(TRAINED, **{"actor.generator": "vllm", "actor.max_num_seqs": "0"})


@pytest.mark.parametrize("values", [{"trainer": "vllm"}, {"backend": "vllm"}])
@pytest.mark.parametrize("use", [FROZEN, TRAINED])
def test_a_backend_without_a_trainer_is_refused_as_a_trainer(checked, use, values):
    with pytest.raises(PlanError, match="the backend 'vllm' has no Trainer") as refused:
        checked(use, **values)
    assert f"--{use.name}.trainer local" in str(refused.value)
    with pytest.raises(PlanError) as alone:
        checked(use, lr="1e-3", **values)  # a setting that the requested side would have
    assert len(alone.value.problems) == 1


def test_an_unused_side_of_a_role_may_be_missing(checked):
    checked(RoleUse("sampler", generates=True), trainer="vllm", generator="vllm")


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
def test_a_missing_engine_is_refused_with_its_install_command(
    checked, monkeypatch, half, name, device, install
):
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"the package '{name}' is not installed(.|\n)*remedy: +{install}"
    with pytest.raises(PlanError, match=message):
        checked(TRAINED, **{f"actor.{half}": name, "device": device})
    with pytest.raises(PlanError, match=message):
        judged_file("ppo", [f"--actor.{half}", name, "--device", device])


def test_a_missing_vllm_is_named_with_its_install_command(monkeypatch):
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
def test_float32_on_a_gpu_stays_float32(device, dtype, kept):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        disable_tf32(device, dtype)
        assert torch.get_float32_matmul_precision() == kept
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_missing_dependency_is_not_reported_as_a_missing_backend(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "needy.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        backend("own.needy")
    with pytest.raises(PlanError):
        backend("own.other")
