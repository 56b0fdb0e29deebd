"""`rlflow.run` takes the flow's settings as an object, as a dict, or as keywords named like the flags.

`rlflow check` refuses the configurations that a run refuses before it loads a model.
"""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_server import NOWHERE, reach

import rlflow.data.tasks
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


@pytest.fixture
def folder_of_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, records in DATA.items():
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    # no record is usable among the first that a check reads
    (tmp_path / "long.jsonl").write_text('{"text": "x"}\n' * 1000 + '{"prompt": "1 =", "answer": "1"}\n')
    (tmp_path / "judge.py").write_text("def judge(completion, level): return 1.0\n")
    (tmp_path / "good.txt").touch()
    return tmp_path


def accept(*about):
    raise Accepted


def refused_by_run(flags, name="grpo", judge=accept):
    """Return the problems for which a run is refused before it loads anything; empty if it would start.

    ``judge``: as for ``prepare``; with None, also problems that the run finds when it has loaded its models.
    """
    flow = load_flow(name)
    values = read_flags(flags)
    try:
        config, hp = resolve_config(flow, None, values)
        check_place(config.options)
        check_model_folders(values)
        prepare(flow, hp, config, judge=judge).close()
    except (FlowError, PlanError) as error:
        return [str(problem) for problem in error.problems]
    except Accepted:
        return []
    raise AssertionError("the run is neither refused nor accepted")


def refused_by_check(flags, name="grpo"):
    try:
        return [str(problem) for problem in check_flow(name, flags).problems if problem.severity == "error"]
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


TINY = Path(rlflow.data.tasks.__path__[0]) / "arithmetic_model"
RECORDS = [{"prompt": f"{n} =", "answer": str(n)} for n in range(8)]
DATA = {
    "good.jsonl": RECORDS,
    "questions.jsonl": [{"prompt": record["prompt"]} for record in RECORDS],
    "late.jsonl": [{"prompt": "no answer"}, *RECORDS],
    "lines.jsonl": [*RECORDS, "no object"],
    "other.jsonl": [{"text": "x"}] * 8,
    "empty.jsonl": [],
}
OF_DATA = {
    "missing file": "--data god.jsonl",
    "missing folder": "--data ./folder/train",
    "format": "--data good.txt",
    "no records": "--data empty.jsonl",
    "no prompt": "--data other.jsonl",
    "wrong field": "--data good.jsonl --data.answer solutoin",
    "unknown setting": "--data good.jsonl --data.promt prompt",
    "no object": "--data lines.jsonl",
    "record without an answer": "--data late.jsonl --data.answer answer",
    "skipped, but none usable": "--data other.jsonl --bad-records skip",
    "no answer for the default reward": "--data questions.jsonl",
    "a field that the reward needs": "--data good.jsonl --reward judge.py:judge",
    "a field in one source only": "--data a=good.jsonl --data b=questions.jsonl",
    "missing set": "--data good.jsonl --eval test=gone.jsonl",
    "set without records": "--data good.jsonl --eval test=empty.jsonl",
    "set without answers": "--data good.jsonl --eval test=questions.jsonl",
    "flow without pairs": "dpo --data good.jsonl",
}


@pytest.mark.parametrize("flags", OF_DATA.values(), ids=OF_DATA)
def test_check_opens_data_and_refuses_like_a_run_with_the_same_message(folder_of_data, flags):
    flow, *words = flags.split() if not flags.startswith("--") else ("grpo", *flags.split())
    words += ["--model", str(TINY), "--threads", "1"] + ["--hp.max_tokens", "8"] * (flow == "grpo")
    found = refused_by_check(words, flow)
    assert found
    assert found == refused_by_run(words, flow, judge=None)


@pytest.mark.parametrize(
    "flags",
    [
        "--data good.jsonl",
        "--data late.jsonl --data.answer answer --bad-records skip",
        "--data long.jsonl --bad-records skip",
        "",
    ],
)
def test_check_accepts_usable_data_and_a_flow_without_data(folder_of_data, flags):
    assert refused_by_check([*flags.split(), "--model", str(TINY)]) == []


def test_missing_data_is_a_warning_if_the_model_is_missing_too(folder_of_data):
    report = check_flow("grpo", ["--data", "gone.jsonl", "--model", "nowhere"])
    assert report.ok
    codes = [problem.code for problem in report.problems if problem.severity == "warning"]
    assert codes == ["model-folder", "data-missing"]


def test_check_reads_only_the_first_records(folder_of_data):
    lines = (folder_of_data / "good.jsonl").read_text().splitlines() * 125
    (folder_of_data / "broken.jsonl").write_text("\n".join([*lines, "no record"]))
    assert refused_by_check(["--data", "broken.jsonl", "--model", str(TINY)]) == []


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
