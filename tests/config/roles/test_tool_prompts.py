"""Tools of an environment: the chat template describes them in the prompt, the model calls them, and messages
answer.
"""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from run_faults import MODEL
from sources import TESTS

import rlflow
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.author.load import load_flow
from rlflow.config.roles.tool_prompts import (
    encoder_with_tools,
    schemas,
    template_problems,
    with_tools,
    with_tools_of,
)
from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder, TokenizerEncoder, Wording
from rlflow.data.fields import Record
from rlflow.errors import PlanError
from rlflow.execution.episodes import Episodes, Speech
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.rewards.environments.environment_spec import parse_environment
from rlflow.training.protocols import Sampling

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not

FILE = TESTS / "rewards" / "environments" / "calculator.py"
TEMPLATE = """{%- if tools %}Tools: {{ tools | tojson }}. Call as <tool_call>{...}</tool_call>.
{% endif %}{%- for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture
def folder(tmp_path):
    """Return a function from a chat template to a folder with a tokenizer that has it."""

    def made(template=TEMPLATE):
        for file in Path(MODEL).iterdir():
            if "token" in file.name or file.name == "config.json":
                shutil.copy(file, tmp_path)
        if template:
            (tmp_path / "chat_template.jinja").write_text(template)
        return tmp_path

    return made


def calculator():
    return parse_environment(f"{FILE}:Calculator", {})


def test_the_prompt_describes_the_tools(folder):
    encoder = TokenizerEncoder(folder())
    asked = [[{"role": "user", "content": "2 + 3"}]]
    (plain,), (told,) = encoder.worded(asked), encoder.with_tools(schemas(calculator())).worded(asked)
    assert "Tools" not in plain
    assert '"name": "add"' in told
    assert '"description": "Add two numbers."' in told
    assert encoder.worded(asked) == [plain]  # the encoder itself is unchanged
    data = Dataset("d", [Record("2 + 3", "5")], encoder, Wording(chat=True))
    assert with_tools(data, calculator()).worded(asked) == [told]
    assert with_tools(data, None) is encoder


def test_tool_descriptions_count_towards_long_prompts(folder, tmp_path):
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    able, file, config = folder(), tmp_path / "sums.jsonl", tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1024}))
    file.write_text(
        "".join(json.dumps({"prompt": f"{n} + 3 =", "answer": str(n + 3)}) + "\n" for n in range(8))
    )
    keywords = {
        "model": str(able),
        "iterations": 1,
        "prompts": 2,
        "threads": 1,
        "out": str(tmp_path / "runs"),
        "hp.max_tokens": 4,
        "reward": ["task"],
    }
    tools = {"env": f"{FILE}:Calculator"}
    short = {"data": str(file), "data.max_prompt": 40, "held_out": 2}
    rlflow.run("grpo", **keywords, **short)
    with pytest.raises(PlanError, match=r"every prompt of .*sums\.jsonl is longer than max_prompt"):
        rlflow.run("grpo", **keywords, **short, **tools)
    with pytest.raises(PlanError, match=r"every prompt of .*sums\.jsonl is longer than max_prompt"):
        rlflow.run(
            "grpo",
            **keywords,
            **tools,
            data=str(file),
            held_out=0,
            eval=[f"small={file}"],
            **{"data.small.max_prompt": 40},
        )


def test_a_template_without_tools_is_refused_at_the_class_of_the_tools(folder):
    encoder = TokenizerEncoder(folder(TEMPLATE.replace("if tools", "if false")))
    with pytest.raises(PlanError, match=rf"{FILE.name}:\d+: the chat template of .* does not describe tools"):
        encoder_with_tools(encoder, calculator())


def test_models_get_the_tools_of_the_first_environment_with_tools():
    other = parse_environment(f"{FILE}:Unused", {})
    assert with_tools_of({"a": other, "b": calculator()}) == calculator()
    assert with_tools_of({"a": other}) is None


def test_the_folders_of_all_roles_with_tools_are_checked(folder, tmp_path):
    graph = load_flow("grpo").graph()
    specs = {"": calculator()}

    def problems(default, own=None, chosen=specs):
        return [str(each) for each in template_problems(graph, default, own or {}, chosen)]

    able = str(folder())
    assert problems(able) == []
    assert [f"{FILE.name}:" in each for each in problems(MODEL)] == [True]
    assert [each.partition("tokenizer of ")[2].split()[0] for each in problems(able, {"actor": MODEL})] == [
        MODEL
    ]
    assert [each.partition("tokenizer of ")[2].split()[0] for each in problems(MODEL, {"actor": MODEL})] == [
        MODEL
    ]
    assert problems(able, {"ref": MODEL}) == []
    assert "no folder at" in problems(str(tmp_path / "nowhere"))[0]
    assert problems(MODEL, chosen={"": parse_environment(f"{FILE}:Unused", {})}) == []
    assert problems(None) == []


def test_prompts_must_go_through_the_template(folder):
    with pytest.raises(
        PlanError,
        match=r"tools are listed by the chat template, but prompts do not use it(?s:.*)--data.chat true",
    ):
        with_tools(Dataset("d", [Record("2 + 3", "5")], TokenizerEncoder(folder())), calculator())
    (folder() / "chat_template.jinja").unlink()
    with pytest.raises(PlanError, match="tools require a chat template, and the tokenizer of .* has none"):
        with_tools(Dataset("d", [Record("2 + 3", "5")], TokenizerEncoder(folder(""))), calculator())
    assert with_tools(Dataset("d", [Record("q", "a")], ByteEncoder()), calculator()).calls([1]) == []


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def acted(folder):
    """Return a function from the model's text per turn and row to the rows."""
    encoder = TokenizerEncoder(folder()).with_tools(schemas(calculator()))
    wording = Wording()

    def speak(texts, sampled):
        return encoder.following(texts, sampled, wording)

    speech = Speech(
        speak,
        lambda text: speak([text], [[]])[0],
        encoder.texts,
        lambda rows: [encoder.calls(row) for row in rows],
    )

    def rows(*scripts, cls="Calculator", max_tokens=4000):
        left = [list(script) for script in scripts]

        def generate(prompts, sampling, seeds):
            """Sample for each row the next text of its script."""
            places = [int(key) for key in prompts.axis.keys[:, 0]]
            ids = encoder.prompts([left[place].pop(0) for place in places])
            logprobs, versions = [[-1.0] * len(row) for row in ids], [[0] * len(row) for row in ids]
            batch = Batch.of(
                tokens=ids, sampled_logprobs=logprobs, policy_version=versions, temperature=[1.0] * len(ids)
            )
            texts = {"completion": tuple(encoder.texts(ids)), "finish": ("stop",) * len(ids)}
            return Batch(
                prompts.axis,
                batch.data | {name: Data(Kind(Level.TEXT), value) for name, value in texts.items()},
            )

        asked = [[{"role": "user", "content": "2 + 3"}]] * len(scripts)
        batch = Batch.of(prompt=["2 + 3"] * len(scripts), prompt_tokens=encoder.prompts(asked))
        with closing(EnvironmentPool(parse_environment(f"{FILE}:{cls}", {"parallel": "1"}))) as pool:
            prompts = Batch(Axis.fresh(len(scripts)), batch.data)
            return Episodes(generate, pool, Sampling(1, max_tokens), speech).sampled(
                prompts, [1] * len(scripts), 1
            )

    return rows


def episode(rows, row):
    return json.loads(rows["episode"][row])


def test_tools_are_called_until_a_turn_has_no_call(acted):
    rows = acted([call("add", a=2, b=3), "It is 5."], ["It is 6."])
    turns = episode(rows, 0)["turns"]
    assert turns[0]["calls"] == [["add", {"a": 2, "b": 3}]]
    assert turns[0]["says"] == [{"role": "tool", "content": "5"}]
    assert (rows["finish"], rows["said"]) == (["stop", "stop"], ["It is 5.", "It is 6."])
    assert "</assistant>\n<tool>5</tool>\n<assistant>It is 5." in rows["completion"][0]
    assert rows["episode_score"].tolist() == [1.0, 0.0]


def test_several_calls_of_a_turn_are_answered_in_order(acted):
    sampled_text = "".join(
        [
            call("add", a=2),
            call("sub", a=1),
            call("add", b=1),
            call("add", a=1, c=2),
            "<tool_call>{</tool_call>",
            call("fail", how="bad"),
        ]
    )
    results = [
        message["content"] for message in episode(acted([sampled_text, "Done."]), 0)["turns"][0]["says"]
    ]
    assert results[0] == "3"
    assert results[1] == "there is no tool 'sub'; there are add, fail"
    assert results[2] == "add takes a, b; look at 'a'"
    assert results[3] == "add takes a, b; look at 'c'"
    assert results[4].startswith("the call is not valid JSON")
    assert results[5] == "ValueError: bad"


def test_a_service_error_fails_only_its_row(acted):
    rows = acted([call("fail", how="service"), "Done."], [call("add", a=1), "It is 2."])
    assert rows["failed"] == ["raised", ""]
    assert "ConnectionError: no answer" in episode(rows, 0)["failed"]


def test_async_tools_return_json(acted):
    assert episode(acted([call("add", a=1), "Two."], cls="Later"), 0)["turns"][0]["says"] == [
        {"role": "tool", "content": '{"sum": 2}'}
    ]
