"""The files of a model folder show whether its template supports tools, with the same result as its loaded
tokenizer.
"""

import json

import pytest

from rlflow.data.encode import TokenizerEncoder
from rlflow.data.tool_template import check_folder
from rlflow.errors import PlanError
from rlflow.training import pretrained

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not

TEMPLATE = """{%- if tools %}{{ bos_token + eos_token }}{{ tools | tojson }} Call as <tool_call>{...}</tool_call>.
{% endif %}{%- for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
PARSES = {
    "start_anchor": "<assistant>",
    "fields": {
        "content": {},
        "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True},
    },
}


def in_jinja(folder, text):
    (folder / "chat_template.jinja").write_text(text)


def in_config(folder, text, **more):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": text, **more}))


def several_in_config(folder, text):
    in_config(folder, [{"name": "default", "template": "none"}, {"name": "tool_use", "template": text}])


def several_in_files(folder, text):
    in_jinja(folder, "none")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(text)


def file_before_config(folder, text):
    in_config(folder, "none")
    in_jinja(folder, text)


@pytest.fixture
def plain(make_tokenizer, tmp_path):
    """Return a folder with a tokenizer without a chat template."""
    return make_tokenizer(tmp_path / "model", chat=False)


@pytest.mark.parametrize(
    "written", [in_jinja, in_config, several_in_config, several_in_files, file_before_config]
)
def test_the_template_of_the_files_equals_that_of_the_tokenizer(plain, written):
    written(plain, TEMPLATE)
    tool_encoder = TokenizerEncoder(plain).with_tools(TOOLS)
    templates = pretrained.read_templates(plain)
    assert tool_encoder._template.text == (templates.get("tool_use") or templates["default"]) == TEMPLATE
    special = {name: text for name, text in pretrained.read_special_tokens(plain).items() if text}
    assert (
        special == tool_encoder.tokenizer.special_tokens_map == {"bos_token": "<bos>", "eos_token": "<eos>"}
    )
    check_folder(plain, TOOLS)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (TEMPLATE.replace("if tools", "if false"), "does not describe tools"),
        (TEMPLATE.replace("<tool_call>", "[call]"), "it is not known how models of .* write a tool call"),
        (
            TEMPLATE.replace("{%- for", "{{ messages | length }}{%- for"),
            "changes earlier turns when later ones follow",
        ),
        (
            TEMPLATE.replace("}}</", "}}{{ raise_exception('no tools') if message.role == 'tool' }}</"),
            "refuses a prompt: no tools",
        ),
        (
            TEMPLATE.replace(">{{ message.content", ">{{ message.content if message.role != 'tool' "),
            "does not write a tool's answer",
        ),
    ],
)
def test_files_and_tokenizer_are_refused_alike(plain, template, says):
    in_jinja(plain, template)
    with pytest.raises(PlanError, match=says) as by_files:
        check_folder(plain, TOOLS)
    with pytest.raises(PlanError) as by_tokenizer:
        TokenizerEncoder(plain).with_tools(TOOLS)
    assert str(by_files.value) == str(by_tokenizer.value)


def test_the_files_are_checked_with_the_template_variables_of_the_run(plain):
    in_jinja(plain, TEMPLATE.replace("if tools", "if tools and telling"))
    check_folder(plain, TOOLS, {"telling": True})
    with pytest.raises(PlanError, match="does not describe tools"):
        check_folder(plain, TOOLS)


def test_a_folder_without_a_template_is_refused(plain):
    with pytest.raises(
        PlanError, match="tools require a chat template, and the tokenizer of .*model has none"
    ):
        check_folder(plain, TOOLS)


def test_a_tokenizer_that_parses_calls_needs_no_known_family(plain):
    in_config(plain, TEMPLATE.replace("<tool_call>", "[call]"), response_template=PARSES)
    check_folder(plain, TOOLS)
    encoder = TokenizerEncoder(plain).with_tools(TOOLS)
    (said,) = encoder.responses(['So <call>{"name": "add", "arguments": {"a": 1}}</call><call>{</call>'])
    assert [call.problem[:10] for call in encoder.calls(said)] == ["ValueError"]
    (said,) = encoder.responses(['So <call>{"name": "add", "arguments": {"a": 1}}</call>'])
    assert [(call.name, call.arguments) for call in encoder.calls(said)] == [("add", {"a": 1})]
    assert encoder.calls(encoder.responses(["No."])[0]) == []


def test_the_chosen_template_depends_on_whether_there_are_tools(plain):
    several_in_config(plain, TEMPLATE)
    encoder = TokenizerEncoder(plain)
    question = [[{"role": "user", "content": "2 + 3"}]]
    assert encoder.worded(question) == ["none"]
    assert '"add"' in encoder.with_tools(TOOLS).worded(question)[0]
