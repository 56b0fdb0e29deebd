"""A .json file is an array of records or JSON Lines, and is read piece by piece."""

import json

import pytest

from rlflow.data import json_files
from rlflow.data.json_files import json_rows
from rlflow.errors import PlanError, Problem

ROWS = [{"prompt": f"{n} + 1 =\n", "more": [{"a": "],["}, n, 'é\\"'], "n": -1.5e3} for n in range(9)]


def read(path):
    return [item if isinstance(item, Problem) else item[0] for item in json_rows(path)]


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 16])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_read_in_pieces_of_any_size(tmp_path, monkeypatch, chunk, indent):
    monkeypatch.setattr(json_files, "CHUNK", chunk)
    path = tmp_path / "d.json"
    path.write_text("\ufeff " + json.dumps(ROWS, indent=indent, ensure_ascii=False) + "\n")
    assert read(path) == ROWS


def test_a_record_has_the_line_on_which_it_begins(tmp_path):
    path = tmp_path / "d.json"
    path.write_text('[\n {"a":\n 1},\n\n {"a": 2}, {"a": 3}\n]')
    assert [place.line for _, place in json_rows(path)] == [2, 5, 5]


def test_json_lines_may_have_the_suffix_of_json(tmp_path):
    path = tmp_path / "d.json"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    assert read(path) == ROWS


@pytest.mark.parametrize("text", ["[]", " [ ] \n", ""])
def test_an_empty_file_has_no_records(tmp_path, text):
    path = tmp_path / "d.json"
    path.write_text(text)
    assert read(path) == []


def test_a_value_that_is_no_object_is_a_problem_of_its_line(tmp_path):
    path = tmp_path / "d.json"
    path.write_text('[{"a": 1},\n2345, [1],\n{"a": 2}]')
    first, number, array, last = read(path)
    assert (first, last) == ({"a": 1}, {"a": 2})
    assert [(problem.found, problem.place.line) for problem in (number, array)] == [("int", 2), ("list", 2)]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('[{"a": 1}\n{"a": 2}]', 2, "found '{' instead of ','"),
        ('[{"a": 1},\n{"a": }]', 2, "Expecting value"),
        ('[{"a": 1},\n{"a"', 2, "Expecting ':' delimiter"),
        ('[{"a": 1},\n', 2, "Expecting value"),
        ('[{"a": 1}\n', 2, "found 'the end of the file' instead of ','"),
        ('[{"a": 1},\n]', 2, "Expecting value"),
        ("[]\n[]", 2, "text after the end of the array"),
        ("[" * 100_000, 1, "recursion"),
        (b'[{"a": "\xff"}]', 1, "can't decode byte"),
    ],
)
def test_a_broken_array_is_refused_with_its_line(tmp_path, text, line, says):
    path = tmp_path / "d.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError, match=says) as error:
        read(path)
    (problem,) = error.value.problems
    assert (problem.place.line, problem.remedy != "") == (line, True)
