"""Every format gives the same records, and every fault of a file is reported with its line."""

import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlflow import PlanError
from rlflow.author.columns import row, text, token
from rlflow.data import gym, open_data

ROWS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(6)]


def questions(data):
    return [record.question for record in data.records]


def test_jsonl_skips_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \n{"prompt": "b"}')
    assert questions(open_data(path)) == ["a", "b"]


CALLS = [
    {"function": {"name": "add", "arguments": {"a": 1}}},
    {"function": {"name": "look", "arguments": {"at": "x"}}},
]
MESSAGES = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "2", "name": "add"},
]


@pytest.mark.parametrize(
    "rows", [ROWS, [{"prompt": MESSAGES, "answer": "2"}, {"prompt": MESSAGES[:1], "answer": "3"}]]
)
def test_all_formats_give_the_same_records(tmp_path, jsonl, rows):
    import datasets

    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"), num_proc=None)
    (tmp_path / "d.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "hub").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "hub" / "train-00000-of-00001.parquet")
    pyarrow.parquet.write_table(table.slice(0, 2), tmp_path / "hub" / "test-00000-of-00001.parquet")
    of_all = [
        open_data(path)
        for path in (jsonl(*rows), *(tmp_path / name for name in ("d.json", "d.parquet", "saved", "hub")))
    ]
    assert {data.digest for data in of_all} == {of_all[0].digest}
    assert len(open_data(tmp_path / "hub", split="test")) == 2


def test_a_folder_of_json_files_is_read_unless_it_has_other_data(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps(ROWS))
    (tmp_path / "test.json").write_text(json.dumps(ROWS[:2]))
    (tmp_path / "dataset_infos.json").write_text('{"default": {}}')
    assert [len(open_data(tmp_path, split=split)) for split in ("train", "test")] == [6, 2]
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]))
    assert len(open_data(tmp_path)) == 1


def test_a_saved_dictionary_gives_the_requested_split_or_train(tmp_path):
    import datasets

    parts = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:2])
    )
    parts.save_to_disk(str(tmp_path / "saved"))
    assert len(open_data(tmp_path / "saved")) == 6
    assert len(open_data(tmp_path / "saved", split="test")) == 2
    assert len(open_data(tmp_path / "saved", evaluates=True)) == 2
    with pytest.raises(PlanError, match=r"no split 'tset'(.|\n)*nearest: +test"):
        open_data(tmp_path / "saved", split="tset")


def test_a_folder_with_several_configurations_needs_a_choice(tmp_path):
    for name in ("main", "socratic"):
        (tmp_path / name).mkdir()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / name / "train.parquet")
    with pytest.raises(PlanError, match="several configurations"):
        open_data(tmp_path)
    assert len(open_data(tmp_path / "main")) == 6


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"question": 5}', "no field 'prompt'"),
        ('{"prompt": 5}', "is not a prompt: int 5"),
        ('{"prompt": []}', "is not a prompt: list"),
        ('{"prompt": ["hello"]}', "message 1 of the field 'prompt' is invalid: str instead of a message"),
        (
            '{"prompt": [{"role": "user"}]}',
            "message 1 of the field 'prompt' is invalid: its 'content' is missing, expected a text",
        ),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}',
            "its 'content' is list, expected a text",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": 7, "content": "a"}]}',
            "message 2 (.*) its 'role' is int, expected a text",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a", "name": "\\ud800"}]}',
            "its 'name' cannot be stored: it is not valid Unicode",
        ),
        ('{"prompt": "\\ud800"}', "not valid Unicode"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(jsonl, line, says):
    path = jsonl({"prompt": "fine"}, line)
    with pytest.raises(PlanError, match=says) as error:
        open_data(path)
    assert error.value.problems[0].place is not None
    assert (error.value.problems[0].place.path, error.value.problems[0].place.line) == (str(path), 2)


def test_bytes_that_are_not_text_are_reported_with_their_line(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(PlanError, match="d.jsonl:2: not valid JSON"):
        open_data(path)


def test_missing_empty_and_unknown_files_are_refused(tmp_path, jsonl):
    path = jsonl(name="empty.jsonl")
    with pytest.raises(PlanError, match="no records"):
        open_data(path)
    for wrong in ("emtpy.jsonl", "emtpy.jsonl/x"):
        with pytest.raises(
            PlanError, match=rf"no such data(.|\n)*nearest: +{path}\n +remedy: +correct the path"
        ):
            open_data(tmp_path / wrong)
    (tmp_path / "data.xls").write_text("a,b")
    with pytest.raises(PlanError, match=r"found: +.xls"):
        open_data(tmp_path / "data.xls")
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(PlanError, match="not a readable Parquet"):
        open_data(tmp_path / "bad.parquet")
    (tmp_path / "bare").mkdir()
    with pytest.raises(PlanError, match="contains no data"):
        open_data(tmp_path / "bare")


def test_a_missing_package_is_reported_with_its_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "d.parquet").write_text("")
    with pytest.raises(PlanError, match=r"pip install 'rlflow-dag\[tasks\]'"):
        open_data(tmp_path / "d.parquet")


def test_fields_are_found_by_mapping_by_usual_name_and_nested(jsonl):
    path = jsonl({"question": "q", "reward_model": {"ground_truth": 7}, "tests": ["assert f(1)"], "level": 3})
    data = open_data(
        path, fields={"answer": "reward_model.ground_truth"}, columns={"tests": text, "level": row("int64")}
    )
    batch = data.batch([0])
    assert data.fields["prompt"] == "question"
    assert batch["answer"] == ["7"]
    assert batch["tests"] == ['["assert f(1)"]']
    assert batch["level"].tolist() == [3]
    assert batch.columns == data.columns


def test_numbers_without_a_dtype_are_float32(jsonl):
    data = open_data(jsonl({"prompt": "p", "level": 3}), columns={"level": row})
    assert data.batch([0]).columns["level"] == row("float32") == data.columns["level"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"fields": {"prompt": "questoin"}},
            r"no field 'questoin'(.|\n)*nearest: +question(.|\n)*--data\.prompt question",
        ),
        ({"fields": {"promt": "question"}}, r"'promt' is not a column(.|\n)*nearest: +prompt"),
        ({"columns": {"tests": text}}, r"no field 'tests'(.|\n)*found: +fields question, answer, level"),
        ({"columns": {"level": row("bool")}}, "is int 3"),
        ({"columns": {"level": token("int64")}}, "of kind token int64"),
        ({"template": "Q: {question}"}, "must contain {prompt}"),
        ({"template": "put it in \\boxed{}: {prompt}"}, "write other braces twice"),
        ({"system": "Be brief."}, "'system' has no effect"),
        ({"task": {"min_terms": 2}}, "'min_terms' has no effect"),
        ({"stream": True}, r"'stream' has no effect(.|\n)*on this machine"),
        ({"task": {"max_record": 2}}, r"'max_record' has no effect(.|\n)*nearest: +max_records"),
        ({"max_prompt": 0}, r"longer than max_prompt(.|\n)*at least 1"),
    ],
)
def test_settings_unsuitable_for_the_file_are_refused(jsonl, options, says):
    with pytest.raises(PlanError, match=says):
        open_data(jsonl({"question": "q", "answer": "a", "level": 3}), **options)


def test_a_field_may_be_absent(jsonl):
    path = jsonl({"prompt": "p", "completion": "c", "answer": "a"})
    assert open_data(path).shape == "completions"
    data = open_data(path, fields={"completion": None, "answer": ""})
    assert (data.shape, data.scorer, set(data.columns)) == ("prompts", None, {"prompt", "prompt_tokens"})


def test_long_prompts_are_dropped_and_counted(jsonl):
    data = open_data(jsonl(*({"prompt": "x" * n} for n in range(1, 9))), max_prompt=5)
    assert (len(data), data.dropped) == (5, 3)
    assert "3 too long" in repr(data)


@pytest.mark.parametrize("size", [-5, 0, 1.5, "many"])
def test_a_task_has_at_least_one_question(size):
    with pytest.raises(PlanError, match=f"size = {size}"):
        open_data("reasoning_gym:chain_sum", task={"size": size})


def test_reasoning_gym_draws_by_seed_and_keeps_each_question_once():
    one, other, same = (open_data("chain_sum", task={"size": 40}, seed=seed) for seed in (1, 2, 1))
    assert one.digest == same.digest != other.digest
    # the last draw's questions are not drawn again
    assert open_data("chain_sum", task={"size": 40}, seed=1).records is same.records
    small = open_data(
        "reasoning_gym:chain_sum", task={"size": 300, "min_terms": 2, "max_terms": 2, "max_digits": 1}
    )
    assert len(set(questions(small))) == len(small) < 300
    assert len(small) + small.doubles == 300
    assert set(small.columns) == {"prompt", "answer", "prompt_tokens", "entry"}


def test_only_the_first_records_of_each_split_are_read(tmp_path, jsonl):
    data = open_data(jsonl(*ROWS, "not JSON"), max_records=4)
    assert questions(data) == [row["prompt"] for row in ROWS[:4]]
    for split in ("train", "test"):
        (tmp_path / "parts").mkdir(exist_ok=True)
        (tmp_path / "parts" / f"{split}.json").write_text(json.dumps(ROWS))
    data = open_data(tmp_path / "parts", max_records=2)
    assert (len(data), len(data.test)) == (2, 2)
    with pytest.raises(PlanError, match=r"'max_records' has no effect(.|\n)*reasoning-gym task"):
        open_data("chain_sum", max_records=4)


def test_a_column_missing_from_a_task_is_refused():
    with pytest.raises(
        PlanError, match=r"has no column 'level'(.|\n)*found: +prompt, answer, entry(.|\n)*a field 'level'"
    ):
        open_data("chain_sum", columns={"level": row("int64")})
    assert open_data("chain_sum", task={"size": 2}, columns={"entry": text}).columns["entry"] == text


@pytest.mark.parametrize(
    ("spec", "task", "says"),
    [
        ("chain_sun", {}, r"named 'chain_sun'(.|\n)*nearest: +chain_sum"),
        ("chain_sum", {"min_term": 2}, r"no parameter 'min_term'(.|\n)*nearest: +min_terms"),
        ("chain_sum", {"min_terms": -1}, "refuses the parameters"),
        ("chain_sum", {"min_terms": "many"}, "refuses the parameters"),
        ("", {}, "no data is named"),
    ],
)
def test_an_unknown_task_and_refused_parameters_are_reported(spec, task, says):
    with pytest.raises(PlanError, match=says):
        open_data(spec, task=task)


def test_a_misspelt_task_is_refused_without_importing_reasoning_gym(run_python):
    code = """
import sys
from rlflow.data.paths import check_path
from rlflow.errors import PlanError
try:
    check_path("chain_sun")
except PlanError as error:
    print(error.problems[0].nearest, "reasoning_gym" in sys.modules)
"""
    assert run_python(code).split() == ["chain_sum", "False"]


def test_the_names_of_all_tasks_are_in_the_source_code():
    from reasoning_gym.factory import DATASETS

    assert gym._names_in_source() == sorted(DATASETS)


def test_importing_the_package_loads_nothing_heavy(run_python):
    loaded = run_python("import rlflow.data, rlflow.rewards, sys; print(*sys.modules)").split()
    assert not {"torch", "transformers", "datasets", "reasoning_gym", "math_verify", "pyarrow"} & set(loaded)


@pytest.fixture
def run_python():
    import subprocess

    def run(code: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path("/")
        ).stdout

    return run


def test_a_misspelt_folder_is_suggested_among_the_tasks(tmp_path, monkeypatch):
    (tmp_path / "lessons").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match=r"nearest: +lessons\n +remedy: +correct the path"):
        open_data("lesons")
