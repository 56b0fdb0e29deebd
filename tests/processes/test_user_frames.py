"""An error names the lines of the user's own files, for any raising code in any process."""

import json
import pickle
import textwrap

import pytest
import torch

import rlflow
from rlflow import StageError
from rlflow.author.batch import Batch
from rlflow.errors import RemoteError, SkipIteration
from rlflow.execution.apply import LESS_MEMORY, failing
from rlflow.processes.user_frames import (
    LAST,
    RaisedElsewhere,
    failure_of,
    own_lines,
    own_place,
    portable,
    whole,
)

DEEP = "def deep(n):\n    return deep(n - 1) if n else {}['no such key']\n"
LIBRARY = "import json\ndef library():\n    return json.loads('{')\n"


def raised(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    return caught.value


def function(path, source, name):
    path.write_text(source)
    names = {"__name__": path.stem}
    exec(compile(source, str(path), "exec"), names)
    return names[name]


def test_the_raising_line_comes_first_with_its_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deep = function(tmp_path / "deep.py", DEEP, "deep")
    assert (
        own_lines(raised(lambda: deep(5)))
        == ("deep.py:2, in deep: return deep(n - 1) if n else {}['no such key']",) * LAST
    )


def test_an_error_in_a_library_names_the_calling_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    library = function(tmp_path / "uses.py", LIBRARY, "library")
    error = raised(library)
    assert own_lines(error)[0] == "uses.py:3, in library: return json.loads('{')"
    assert own_place(error) == f"{tmp_path}/uses.py:3"


class Uncopied(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def uncopied():
    raise Uncopied(1, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: {}["x"], "KeyError: 'x'"),
        # its own pickling drops attributes
        (lambda: json.loads("{"), "JSONDecodeError: Expecting property name"),
        (uncopied, "Uncopied: 1 2"),  # cannot be unpickled
    ],
)
def test_an_error_of_a_worker_keeps_lines_notes_and_traceback(call, says):
    error = raised(call)
    error.add_note("of the user")
    arrived = pickle.loads(pickle.dumps(portable(error)))
    translated = pickle.loads(pickle.dumps(RemoteError(f"{arrived} (rank 1)", arrived.failure)))
    assert str(arrived).startswith(says)
    assert (translated.failure, str(translated)) == (failure_of(error), f"{arrived} (rank 1)")
    assert translated.lines == own_lines(error) != ()
    assert translated.__notes__[0] == "of the user"
    assert "in a worker:" in whole(translated)
    assert f'File "{__file__}"' in whole(translated)


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


def test_a_record_has_the_place_and_a_text_even_if_the_error_has_none(tmp_path):
    library = function(tmp_path / "uses.py", LIBRARY, "library")
    record = failure_of(raised(library), "a hint")
    assert (record.place, record.hint) == (f"{tmp_path}/uses.py:3", "a hint")
    assert failure_of(Unprintable()).message == "Unprintable: <exception str() failed>"


def test_errors_and_records_of_rlflow_cross_unchanged():
    for error in (
        SkipIteration("no rows"),
        RemoteError("gone"),
        RaisedElsewhere(failure_of(ValueError("x"))),
    ):
        assert portable(error) is error


def test_an_error_without_a_user_line_names_none():
    assert own_lines(RemoteError("gone")) == RemoteError("gone").lines == ()
    assert own_place(RemoteError("gone")) == ""


FLOW = textwrap.dedent("""
    import torch
    from rlflow import flow, loss, stage

    def halved(scores):
        return scores / HALF

    @stage(gives="advantages", pure=False)  # which nothing calls before the run
    def spread(scores, mask):
        {stage}

    @loss
    def gain(new, advantages):
        {loss}

    @flow
    def broken(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= spread(batch)
        actor.update(batch, gain)
""")


@pytest.mark.parametrize(
    ("bodies", "line"),
    [
        (
            {"stage": "return halved(scores)[:, None] * mask"},
            "raised by {path}:6, in halved: return scores / HALF",
        ),
        (
            {"stage": "return torch.cat([scores, mask])"},
            "raised by {path}:10, in spread: return torch.cat([scores, mask])",
        ),
    ],
)
def test_a_failed_run_names_the_line_and_keeps_the_full_traceback(tmp_path, bodies, line):
    path = tmp_path / "broken.py"
    source = FLOW.replace("{stage}", bodies["stage"]).replace(
        "{loss}", "return -new.logprobs * advantages, {}"
    )
    path.write_text(source)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n} =", "answer": str(n)}) + "\n" for n in range(8)))
    with pytest.raises(StageError) as caught:
        rlflow.run(
            str(path),
            backend="null",
            data=str(data),
            prompts=2,
            iterations=1,
            held_out=0,
            threads=1,
            out=str(tmp_path / "runs"),
        )
    text = str(caught.value)
    assert line.format(path=path) in text
    assert text.endswith(f"full traceback: {tmp_path}/runs/broken-1/traceback.txt")
    kept = (tmp_path / "runs" / "broken-1" / "traceback.txt").read_text()
    assert line.split(": ")[-1] in kept
    assert 'File "' + str(path) + '"' in kept


@pytest.mark.parametrize(
    ("raised", "advised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RemoteError("OutOfMemoryError: CUDA out of memory (rank 1 of pool 'all')"), True),
        (ValueError("found 3 rows"), False),
        (RemoteError("ValueError: found 3 rows (rank 1 of pool 'all')"), False),
    ],
)
def test_an_out_of_memory_error_names_smaller_settings(raised, advised):
    with pytest.raises(StageError) as caught, failing("update", 3, Batch.of(x=[1.0])):
        raise raised
    assert (LESS_MEMORY in str(caught.value)) is advised
    assert str(raised) in str(caught.value)
