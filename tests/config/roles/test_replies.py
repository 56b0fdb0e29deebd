"""End tokens of replies are checked in each model folder that a flow samples with, and in the data's
tokenizer.
"""

import inspect
import json
import shutil
from types import MappingProxyType

import pytest
from sources import TASKS

from rlflow import ask, flow, loss, stage, text
from rlflow.author.load import load_flow
from rlflow.cli.check import check_flow
from rlflow.compiler.trace.compile import TraceOptions, compile_flow
from rlflow.config.roles.replies import reply_problems, stop_problems
from rlflow.rewards.environments.environment_spec import parse_environment
from rlflow.runs.assemble import kept_files

MODEL = TASKS / "arithmetic_model"


@pytest.fixture
def other(tmp_path):
    """Return a model folder whose generation config lacks the tokenizer's end of text, 1."""
    folder = shutil.copytree(MODEL, tmp_path / "other")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    return folder


def test_only_sampling_folders_are_named_and_only_once(other):
    graph = compile_flow(load_flow("ppo")).graph
    assert list(reply_problems(graph, MODEL, {"critic": other})) == []
    assert (
        len(list(reply_problems(graph, MODEL, {"actor": other})))
        == len(list(reply_problems(graph, other, {"actor": other})))
        == 1
    )


def test_check_warns_about_end_tokens_and_continues(other):
    report = check_flow("grpo", ["--model", str(other), "--data", "chain_sum"])
    assert report.ok
    assert [str(other) in problem.message for problem in report.problems if problem.code == "model-ends"] == [
        True
    ]


def test_a_saved_sampling_folder_names_every_end_token(other):
    assert json.loads(kept_files(other, replies=True)["generation_config.json"])["eos_token_id"] == [1, 7]
    assert (
        kept_files(other, replies=False)["generation_config.json"]
        == (other / "generation_config.json").read_bytes()
    )
    assert kept_files(MODEL, replies=True) == kept_files(MODEL, replies=False)


TURNS = {
    "kept": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}assistant: {% endif %}",
    "thinks": "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>\n{% endif %}",
    "rewrites": "{% for m in messages %}{{ messages | length }}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}


@pytest.fixture
def templated(tmp_path):
    """Return a function from a template's name to a model folder with that template."""

    def of(name):
        folder = shutil.copytree(MODEL, tmp_path / name)
        (folder / "chat_template.jinja").write_text(TURNS[name])
        return folder

    return of


def test_a_token_beyond_the_vocabulary_is_refused_with_flag_and_range():
    report = check_flow("grpo", [f"--actor.generate.stop_token_ids={token}" for token in (319, 320, 900)])
    (problem,) = report.errors
    assert (problem.found, problem.expected) == (
        "--actor.generate.stop_token_ids 320, 900",
        "ids from 0 to 319",
    )
    assert problem.remedy == "correct --actor.generate.stop_token_ids"
    assert check_flow("grpo", ["--actor.generate.stop_token_ids", "319"]).ok


def test_the_vocabulary_comes_from_the_folder_and_may_be_unknown(other):
    program = compile_flow(
        load_flow("grpo"), options=TraceOptions(sampling={"actor.generate": {"stop_token_ids": (7, 320)}})
    )
    (other / "config.json").write_text(json.dumps({"vocab_size": 9, "text_config": {"vocab_size": 321}}))
    assert [
        len(list(stop_problems(program, MODEL, own))) for own in ({}, {"actor": other}, {"reference": other})
    ] == [1, 0, 1]
    (other / "config.json").write_text("{}")
    assert list(stop_problems(program, other, {})) == list(stop_problems(program, None, {})) == []


@stage(gives={"question": text})
def again(completion):
    return ["again"] * len(completion)


@loss
def gain(new, scores):
    return -new.logprobs * scores[:, None], {}


@flow
def twice(prompts, actor, reward):
    first = actor.generate(prompts, max_tokens=4)
    second = actor.generate(ask(first | again(first), "question", after="tokens"), max_tokens=4)
    second |= reward(second)
    actor.update(second, gain)


def of_turns(graph, folder, specs=MappingProxyType({}), **more):
    """Return (severity, message) of each problem that is not about end tokens."""
    return [
        (each.severity, each.message)
        for each in reply_problems(graph, folder, {}, specs, **more)
        if each.code != "model-ends"
    ]


def test_a_follow_up_after_a_reply_needs_a_template_with_turns(templated):
    graph, rewrites = compile_flow(twice).graph, templated("rewrites")
    assert of_turns(graph, templated("kept")) == []
    ((severity, message),) = of_turns(graph, rewrites)
    assert (severity, message.endswith("changes earlier turns when later ones follow")) == (
        "error",
        True,
    )
    assert of_turns(graph, rewrites, chat=False) == [], "text that goes on as it is needs no template"
    assert of_turns(compile_flow(load_flow("grpo")).graph, rewrites) == []


def test_a_template_that_drops_earlier_turns_is_reported(templated):
    ((severity, message),) = of_turns(compile_flow(twice).graph, templated("thinks"))
    assert severity == "note"
    assert r"drops '<think>\n', with which it opens a reply, and thoughts when later turns follow" in message


def test_an_environment_may_send_text_if_no_message_can_follow(templated):
    graph, says = compile_flow(load_flow("grpo")).graph, parse_environment("retry", {})
    ((severity, _),) = of_turns(graph, templated("rewrites"), {"": says})
    assert severity == "warning"


VARIES = TURNS["rewrites"].replace("messages | length", "messages | length if count")


def test_check_gives_templates_their_variables(templated, monkeypatch):
    monkeypatch.setitem(TURNS, "varies", VARIES)
    folder = str(templated("varies"))
    checked = {
        count: check_flow(
            "grpo", ["--model", folder, "--env", "retry", f"--data.template_kwargs.count={count}"]
        )
        for count in ("true", "false")
    }
    assert {
        count: [each.code for each in report.problems if each.code == "turns-template"]
        for count, report in checked.items()
    } == {"true": ["turns-template"], "false": []}


@pytest.mark.parametrize(
    ("name", "says"), [("coun", "does not read 'coun'"), ("tools", "which rlflow sets itself")]
)
def test_check_refuses_template_variables_like_a_run(templated, name, says):
    report = check_flow("grpo", ["--model", str(templated("kept")), f"--data.template_kwargs.{name}", "1"])
    assert [says in problem.message for problem in report.errors] == [True]


def test_a_tokenizer_that_cannot_write_foreign_text_is_reported(templated):
    folder = templated("kept")
    words = {"type": "WordLevel", "vocab": {"<pad>": 0, "<eos>": 1, "a": 2}, "unk_token": "<pad>"}
    state = json.loads((folder / "tokenizer.json").read_text()) | {"model": words, "decoder": None}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    asking, plain, retry = (
        compile_flow(twice).graph,
        compile_flow(load_flow("grpo")).graph,
        parse_environment("retry", {}),
    )
    allowed = parse_environment("retry", {"control_tokens": "allow"})
    found = [
        [
            (each.severity, each.found)
            for each in reply_problems(graph, folder, {}, specs)
            if each.code == "control-tokens"
        ]
        for graph, specs in ((asking, {}), (plain, {"": retry}), (plain, {"": allowed}), (plain, {}))
    ]
    assert found == [[("warning", "<pad>, <eos>")], [("warning", "<pad>, <eos>")], [], []]
    assert not [each for each in reply_problems(asking, MODEL, {}) if each.code == "control-tokens"]


def test_rlflow_refuses_such_a_flow_before_loading(templated, tmp_path):
    file = tmp_path / "twice.py"
    file.write_text(
        "from rlflow import ask, flow, loss, stage, text\n"
        + "\n\n".join(inspect.getsource(getattr(each, "function", each)) for each in (again, gain, twice))
    )
    report = check_flow(str(file), ["--model", str(templated("rewrites"))])
    assert [problem.code for problem in report.errors] == ["turns-template"]
