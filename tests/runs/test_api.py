"""`rlflow.run` takes the flow's settings as an object, as a dict, or as keywords named like the flags.

`rlflow check` refuses the configurations that a run refuses before it opens data or loads a model.
"""

from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_server import NOWHERE, reach

from rlflow.author.load import load_flow
from rlflow.cli.check import check_flow
from rlflow.config.flags import read_flags
from rlflow.config.folders import check_model_folders
from rlflow.errors import FlowError, PlanError
from rlflow.runs.api import resolve_config
from rlflow.runs.directory import check_place
from rlflow.runs.prepare import prepare

NULL = {"backend": "null"}


def resolved(hp, **keywords):
    return resolve_config(load_flow("grpo"), hp, {**NULL, **keywords})[1]


def test_a_dict_of_settings_equals_the_flags():
    assert resolved({"samples": 3, "clip": 0.1}) == resolved(None, **{"hp.samples": 3, "hp.clip": 0.1})
    assert resolved({"samples": 3}).samples == 3
    # a keyword sets one setting and wins
    assert resolved({"samples": 3}, **{"hp.samples": 5}).samples == 5


def test_a_misspelt_setting_is_reported_with_the_nearest_name():
    with pytest.raises(PlanError, match="sampels") as refused:
        resolved({"sampels": 3})
    assert "nearest:  --hp.samples" in str(refused.value)


def test_a_dict_keeps_the_settings_of_the_packaged_task():
    flow = load_flow("grpo")
    own = type(flow.parameters.hp)
    assert resolve_config(flow, {"beta": 0.5}, {})[1].samples == resolve_config(flow, None, {})[1].samples
    assert resolve_config(flow, own(), {})[1] == own()


class Accepted(Exception):
    """The run would start and load models."""


def refused_by_run(flags):
    """Return the problems for which a run is refused before it loads anything; empty if it would start."""

    def accept(*about):
        raise Accepted

    flow = load_flow("grpo")
    values = read_flags(flags)
    try:
        config, hp = resolve_config(flow, None, values)
        check_place(config.options)
        check_model_folders(values)
        prepare(flow, hp, config, judge=accept)
    except (FlowError, PlanError) as error:
        return [str(problem) for problem in error.problems]
    except Accepted:
        return []
    raise AssertionError("the run is neither refused nor accepted")


def refused_by_check(flags):
    try:
        return [str(problem) for problem in check_flow("grpo", flags).problems if problem.severity == "error"]
    except (FlowError, PlanError) as error:
        return [str(problem) for problem in error.problems]


REFUSED = {
    "run-exists": "--backend null --name taken",
    "run-folder": "--backend null --out file",
    "resume-name": "--backend null --resume auto",
    "data-range": "--data.max_prompt 0",
    "data-chat": "--data.chat maybe",
    "service-gpus": "--service.x true --service.x.gpus 1 --pools all=2 --ray-address auto",
    "shares": "--backend null --pools all=2@gpu0.5 --device cpu",
    "threads-ray": "--backend null --pools all=2@threads --ray-address auto",
    "threads-weights": "--backend null --pools all=2@threads --weights alltoall",
}


@pytest.mark.parametrize("flags", REFUSED.values(), ids=REFUSED)
def test_check_refuses_like_a_run_with_the_same_message(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    Path("file").touch()
    found = refused_by_check(flags.split())
    assert found
    assert found == refused_by_run(flags.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--actor.trainer deepspeed --pools all=2@threads",
        "--actor.generator fsdp",
        "--memory 10MB",
        "--eval nowhere",
        "--pools a=1@cpu0.7,b=1@cpu0.7 --actor.trainer.pool a --actor.generator.pool b --reference.pool a",
    ],
)
def test_check_and_run_refuse_what_loaded_backends_reveal(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    found = refused_by_check(flags.split())
    assert found == refused_by_run(flags.split())


@pytest.mark.parametrize("flags", ["--actor.model nowhere", "--device cuda"])
def test_a_missing_model_folder_or_gpu_is_a_warning(flags):
    if flags == "--device cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    report = check_flow("grpo", flags.split())
    assert report.ok
    assert [problem.code for problem in report.problems if problem.severity == "warning"] == [
        "model-folder" if "model" in flags else "device"
    ]


def test_check_warns_of_a_model_that_this_machine_cannot_fetch(monkeypatch, tmp_path):
    reach(monkeypatch, NOWHERE)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    report = check_flow("grpo", ["--actor.model", "org/name", "--data", "org/data:main"])
    assert report.ok
    warnings = [problem for problem in report.problems if problem.severity == "warning"]
    assert [problem.code for problem in warnings] == ["hub-unreachable"]
    assert warnings[0].found.startswith(f"no answer from {NOWHERE}")


def test_a_missing_tracker_is_refused():
    assert "unknown tracker 'nonsense'" in refused_by_check(["--track", "nonsense"])[0]
