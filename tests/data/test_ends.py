"""End tokens of replies from chat template, configs and tokenizer, and contradictions between them."""

import json
from pathlib import Path

import pytest

from rlflow.data.data_preview import preview
from rlflow.data.encode import TokenizerEncoder
from rlflow.data.ends import CHAT, TEXT, ends_of
from rlflow.data.source import open_data


@pytest.fixture
def folder(make_tokenizer, tmp_path):
    """Return a model folder with a tokenizer that has a BOS, 0, and an end of text, 1."""

    def write(template=None, generation=None, config=1):
        make_tokenizer(tmp_path, chat=False)
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "llama", "eos_token_id": config, "pad_token_id": 0})
        )
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(
                json.dumps({"top_k": 7, "eos_token_id": generation})
            )
        return tmp_path

    return write


ENDED = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %} <bos>{% endif %}{% endfor %}"
UNENDED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_each_source_adds_its_ends_and_a_reply_uses_the_right_one(folder):
    ends = ends_of(folder(ENDED, [1, 7], config=[9]))
    assert ends.named == {CHAT: (0,), "generation_config.json": (1, 7), "config.json": (9,), TEXT: (1,)}
    assert ends.ids == (0, 1, 7, 9)
    assert (ends.of_chat, ends.space, ends.of_text) == (0, " ", 1)


def test_a_changed_file_is_read_again(folder):
    assert ends_of(folder(generation=[1])).ids == (1,)
    assert ends_of(folder(generation=[1, 200])).ids == (1, 200)


@pytest.mark.parametrize(
    ("config", "generation", "served"), [(1, [1, 7], (1, 7)), ([1, 5], None, (1, 5)), (None, None, (1,))]
)
def test_agreeing_sources_give_no_problem_and_no_file(folder, config, generation, served):
    ends = ends_of(folder(None, generation, config))
    assert ends.served == served
    assert ends.problems == []
    assert ends.written(files(ends.folder)) == {}


def test_files_and_tokenizer_use_the_template_variables_of_the_run(folder):
    path = folder(ENDED.replace("<bos>", "{{ '<bos>' if marked else '<eos>' }}"), [1])
    assert [ends_of(path, {"marked": marked}).of_chat for marked in (True, False, True)] == [0, 1, 0]
    assert TokenizerEncoder(path, {"marked": True}).ends.ids == ends_of(path, {"marked": True}).ids == (0, 1)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.json")}


def test_an_unknown_end_is_reported_with_a_working_remedy(folder):
    ends = ends_of(folder(ENDED, [1, 7]))
    (problem,) = ends.problems
    assert problem.severity == "warning"
    assert (
        problem.found
        == "chat template: <bos> (0); generation_config.json: <eos> (1), 7; config.json: <eos> (1); "
        "tokenizer: <eos> (1)"
    )
    assert f'"eos_token_id": [0, 1, 7] in {ends.folder / "generation_config.json"}' in problem.remedy
    assert ends_of(folder(ENDED, [0, 1, 7])).problems == []


def test_the_written_file_names_every_end_and_keeps_the_rest(folder):
    ends = ends_of(folder(ENDED, [1, 7]))
    assert json.loads(ends.written(files(ends.folder))["generation_config.json"]) == {
        "pad_token_id": 0,
        "top_k": 7,
        "eos_token_id": [0, 1, 7],
    }


def test_a_template_without_an_end_is_reported(folder):
    (problem,) = ends_of(folder(UNENDED, [1])).problems
    assert "writes no token that ends a reply" in problem.message


def test_rlflow_data_shows_the_contradiction(folder, jsonl):
    shown = preview(open_data(jsonl({"prompt": "p", "completion": "c"}), tokenizer=folder(ENDED, [1])), 1)
    assert "name different tokens as the end of a reply" in shown.warnings[0]
    assert shown.rows[0].response.ids[-1] == 0


def test_a_folder_without_a_tokenizer_names_nothing(tmp_path):
    assert ends_of(tmp_path).ids == ()


def test_a_folder_is_recognised_under_any_path(folder, monkeypatch):
    path = folder(ENDED, [1])
    monkeypatch.chdir(path.parent)
    assert ends_of(Path(path.name)) is ends_of(path)


def test_the_tool_template_is_read_if_there_is_no_default(folder, jsonl):
    path = folder()
    config = json.loads((path / "tokenizer_config.json").read_text())
    templates = [{"name": "rag", "template": UNENDED}, {"name": "tool_use", "template": ENDED}]
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates}))
    data = open_data(jsonl({"prompt": "p", "completion": "c"}), tokenizer=path, chat=False)
    assert data.encoder.ends.of_chat == 0
    assert data.batch([0])["tokens"][0].tolist()[-1] == 1
