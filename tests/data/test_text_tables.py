"""CSV and TSV files: texts, places and faults."""

import pytest
import torch

from rlflow import PlanError
from rlflow.author.columns import row
from rlflow.data import open_data


def test_values_stay_the_texts_of_the_file(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text('\ufeffquestion,answer\r\n"1 + 1,\n""two""?",007\r\n\r\nb,1.50\r\n', "utf-8", newline="")
    data = open_data(path)
    assert [(record.question, record.answer) for record in data.records] == [
        ('1 + 1,\n"two"?', "007"),
        ("b", "1.50"),
    ]
    assert [str(record.place) for record in data.records] == [f"{path}:2", f"{path}:5"]


def test_tabs_separate_the_values_of_tsv(tmp_path):
    path = tmp_path / "d.tsv"
    path.write_text("prompt\tanswer\na, b\t2\n")
    assert [(record.question, record.answer) for record in open_data(path).records] == [("a, b", "2")]


def test_declared_numbers_and_messages_are_read_from_texts(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text('messages,level,hard\n"[{""role"": ""user"", ""content"": ""hi""}]",3,True\n')
    data = open_data(path, columns={"level": row(torch.int64), "hard": row(torch.bool)})
    (record,) = data.records
    assert record.question == "hi"
    assert record.more == {"level": 3, "hard": True}
    path.write_text("prompt,level\nhi,x\n")
    with pytest.raises(PlanError, match="the field 'level' is str 'x'"):
        open_data(path, columns={"level": row(torch.int64)})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("question,answer\na,1\nb\n", r"d.csv:3: the row has 1 values, and the header names 2 fields"),
        ("question,question\na,1\n", "does not name the fields"),
        ("", "contains no records|does not name the fields"),
        ('question,answer\na,1\n"b,1\n', r"d.csv:\d: not a valid .csv file"),
        ("question;answer\na;1\n", r"no field 'prompt'(.|\n)*question;answer"),
    ],
)
def test_faults_have_a_place(tmp_path, monkeypatch, text, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(PlanError, match=says):
        open_data("d.csv")


def test_bytes_that_are_not_text_are_refused(tmp_path):
    (tmp_path / "d.csv").write_bytes(b"question,answer\na,\xff\n")
    with pytest.raises(PlanError, match="UTF-8"):
        open_data(tmp_path / "d.csv")
