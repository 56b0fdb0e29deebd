"""Tool calls are read in the format of the model's family."""

import json

import pytest

from rlflow.author.messages import ToolCall
from rlflow.data.tool_calls import calls_by, parsed
from rlflow.errors import PlanError

ADD = {"name": "add", "arguments": {"a": 1}}


class Tokenizer:
    """A tokenizer whose ids are characters."""

    def __init__(self, **parsers):
        vars(self).update(parsers)

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens  # marks of calls may be special tokens
        return "".join(map(chr, ids))

    def parse_response(self, text, **more):
        assert more == ({"prefix": "<assistant>", "tools": []} if hasattr(self, "response_template") else {})
        if text == "broken":
            raise ValueError("no match")
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": ADD}]} if text else {}


def calls(template, text, **more):
    return calls_by(Tokenizer(**more), template, "model", "<assistant>")([*map(ord, text)])


@pytest.mark.parametrize(
    ("template", "text", "names"),
    [
        ("… <tool_call> …", "I add.\n<tool_call>\n" + json.dumps(ADD) + "\n</tool_call>", ["add"]),
        (
            "… <tool_call> …",
            f"<tool_call>{json.dumps(ADD)}</tool_call> and <tool_call>{json.dumps(ADD)}</tool_call>",
            ["add", "add"],
        ),
        # the end mark may be the stop string of the turn
        ("… <tool_call> …", f"<tool_call>{json.dumps(ADD)}", ["add"]),
        ("… <tool_call> …", "It is 3.", []),
        ("… [TOOL_CALLS] …", f"[TOOL_CALLS] [{json.dumps(ADD)}, {json.dumps(ADD)}]", ["add", "add"]),
        ("… ipython …", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ["add"]),
        ("… ipython …", 'So {"name": "add"}', []),
    ],
)
def test_each_family_has_its_marks(template, text, names):
    found = calls(template, text)
    assert [call.name for call in found] == names
    assert all(call == ToolCall("add", {"a": 1}) for call in found)


@pytest.mark.parametrize("parser", ["response_template", "response_schema"])
def test_a_parser_of_the_tokenizer_overrides_the_template(parser):
    more = {parser: {"x": 1}}
    assert calls("nothing known", "any", **more) == [ToolCall("add", {"a": 1})]
    assert calls("nothing known", "", **more) == []
    assert calls("nothing known", "broken", **more)[0].problem == "ValueError: no match"


def test_a_family_with_an_unknown_call_format_is_refused():
    with pytest.raises(PlanError, match="it is not known how models of model write a tool call"):
        calls("{{ messages }}", "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "the call is not valid JSON"),
        ("[3]", "a call must be an object with the name of a tool"),
        ('{"name": 3}', "a call must be an object"),
        ('{"name": "add", "arguments": [1]}', "the arguments of add are not an object"),
        ('{"name": "add", "arguments": "{"}', "the arguments of add are not an object"),
    ],
)
def test_an_invalid_call_states_the_reason(text, problem):
    (call,) = parsed(text)
    assert call.problem.startswith(problem)


def test_arguments_may_be_a_json_text_or_missing():
    assert list(parsed('{"name": "add", "arguments": "{\\"a\\": 1}"} and more')) == [
        ToolCall("add", {"a": 1})
    ]
    assert list(parsed('{"name": "now"}')) == [ToolCall("now", {})]


def test_names_and_arguments_survive_every_step_as_text():
    (call,) = parsed(r'{"name": "f\ud800", "arguments": {"a\u0000": ["\udc80"]}}')
    assert (call.name, call.arguments) == ("f\ufffd", {"a\ufffd": ["\ufffd"]})
    (call,) = parsed(r'{"name": "f", "arguments": "{\"a\": \"\\ud800\"}"}')
    assert call.arguments == {"a": "\ufffd"}
