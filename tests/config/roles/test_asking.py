"""Follow-up prompts use the tokenizer and the chat template of the role that samples from them."""

import json
import math
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import TASKS, TESTS

from rlflow import ask, flow, loss, stage
from rlflow.author.columns import text
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.flags import sort_values
from rlflow.config.roles.asking import asking
from rlflow.config.roles.bound import bind_roles
from rlflow.data import open_data
from rlflow.data.encode import TokenizerEncoder
from rlflow.errors import PlanError
from rlflow.rewards.environments.environment_spec import parse_environment

MODEL = TASKS / "arithmetic_model"


@stage(gives={"question": text})
def again(completion):
    return [f"{said}+1=" for said in completion]


@loss
def gain(new, scores):
    return -new.logprobs * scores[:, None], {}


@flow
def both(prompts, solver, critic, reward):
    first = solver.generate(prompts, max_tokens=4)
    asked = ask(first | again(first), "question")
    mine = solver.generate(asked, max_tokens=4)
    its = critic.generate(asked, max_tokens=4)
    mine |= reward(mine)
    its |= reward(its, gives="scores")
    solver.update(mine, gain)
    critic.update(its, gain)


def encoder(solver, critic, **data):
    values = {"model": str(MODEL), "solver.model": str(solver), "critic.model": str(critic), **data}
    config = sort_values(values, ["solver", "critic", "reward"])
    graph = compile_flow(both).graph
    return asking(graph, bind_roles(graph, config), config)


@pytest.fixture
def other(tmp_path):
    """Return a model folder with another tokenizer configuration than the packaged model's."""
    folder = shutil.copytree(MODEL, tmp_path / "other")
    file = folder / "tokenizer_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "padding_side": "right", "model_max_length": 7})
    )
    return folder


def test_a_follow_up_is_encoded_like_a_prompt_of_the_data():
    texts = ["1+2=", "7"]
    asked = encoder(MODEL, MODEL)
    assert asked.encode(("solver",), texts) == TokenizerEncoder(MODEL).prompts(texts)
    assert asked.longest == math.inf


def test_a_follow_up_has_the_length_limit_of_the_data():
    assert encoder(MODEL, MODEL, **{"data.max_prompt": "12"}).longest == 12


def test_roles_with_different_tokenizers_do_not_share_follow_ups(other):
    with pytest.raises(PlanError) as caught:
        encoder(MODEL, other)
    assert "ask once for each role" in str(caught.value)
    assert str(other) in str(caught.value)


def test_a_copy_of_a_tokenizer_is_the_same_tokenizer(tmp_path):
    copy = shutil.copytree(MODEL, tmp_path / "copy")
    assert encoder(MODEL, copy).encode(("critic",), ["1+2="]) == encoder(MODEL, MODEL).encode(
        ("critic",), ["1+2="]
    )


def test_a_text_after_a_response_is_not_encoded_as_a_prompt():
    asked = encoder(MODEL, MODEL)
    ids, first = asked.encode(("solver",), ["1+2="])[0], TokenizerEncoder(MODEL).tokenizer.bos_token_id
    assert asked.follow(("solver",), ["1+2="], [[5]])[0] == [number for number in ids if number != first]


def test_ids_decode_to_their_text():
    asked = encoder(MODEL, MODEL)
    assert asked.decode(("solver",), asked.encode(("solver",), ["1+2=", "7"])) == ["1+2=", "7"]


def test_a_role_whose_template_lacks_tools_is_refused_at_once():
    values = {"model": str(MODEL), "solver.model": str(MODEL)}
    config, graph = sort_values(values, ["solver", "critic", "reward"]), compile_flow(both).graph
    tools = parse_environment(f"{TESTS / 'rewards' / 'environments' / 'calculator.py'}:Calculator", {})
    with pytest.raises(
        PlanError,
        match=r"calculator\.py:\d+: tools require a chat template, and the tokenizer of .* has none",
    ):
        asking(graph, bind_roles(graph, config), config, {"solver": tools})


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}{% if add_generation_prompt "
    "%}assistant={% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "1+2="},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "7-4="},
]


@pytest.fixture
def chatting(tmp_path):
    """Return a model folder whose tokenizer has a chat template."""
    folder = shutil.copytree(MODEL, tmp_path / "chatting")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return folder


def test_follow_up_messages_use_the_chat_template_of_the_role(chatting):
    asked, tokenizer = encoder(chatting, chatting), TokenizerEncoder(chatting)
    ids = asked.encode(("solver",), [MESSAGES, MESSAGES[:1], "1+2="])
    expected = [
        tokenizer.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for messages in (MESSAGES, MESSAGES[:1])
    ]
    assert ids[:2] == [tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"] for text in expected]
    assert ids[2] == ids[1], "a text is a user's message where there is a template"
    with_system = encoder(chatting, chatting, **{"data.system": "add"}).encode(("solver",), [MESSAGES])
    assert with_system == tokenizer.prompts([[{"role": "system", "content": "add"}, *MESSAGES]])


def test_follow_ups_get_the_template_variables_of_the_data(chatting):
    file = chatting / "tokenizer_config.json"
    template = TEMPLATE.replace("assistant={% endif %}", "assistant={{ day }}{% endif %}")
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    asked = encoder(chatting, chatting, **{"data.template_kwargs": '{"day": "3"}'})
    assert asked.decode(("solver",), asked.encode(("solver",), ["1+2="])) == ["user=1+2=;assistant=3"]


CONVERSATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.text("0123456789+-=", max_size=5),
        }
    ),
    min_size=1,
    max_size=4,
)


def test_messages_have_the_ids_of_transformers_and_of_the_data(chatting, tmp_path):
    asked, tokenizer = encoder(chatting, chatting), TokenizerEncoder(chatting).tokenizer
    file = tmp_path / "data.jsonl"

    @settings(max_examples=3, deadline=None)  # each starts a rendering process
    @given(st.lists(CONVERSATIONS, min_size=5, max_size=9))
    def equal(conversations):
        rows = asked.encode(("solver",), conversations)
        assert rows == [
            tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)
            for each in conversations
        ]
        questions = {number: each for number, each in enumerate(conversations) if each[-1]["role"] == "user"}
        file.write_text(
            "".join(json.dumps({"prompt": each, "answer": "3"}) + "\n" for each in questions.values())
        )
        data = open_data(file, tokenizer=chatting) if questions else None
        for row, number in enumerate(questions):
            assert rows[number] == data.batch([row]).data["prompt_tokens"].value.tolist()

    equal()


def test_plain_text_next_to_messages_stays_plain_without_chat(chatting):
    asked, tokenizer = encoder(chatting, chatting, **{"data.chat": "false"}), TokenizerEncoder(chatting)
    assert asked.encode(("solver",), ["1+2=", MESSAGES[:1]]) == tokenizer.prompts(["1+2=", MESSAGES[:1]])
    one, other = asked.follow(("solver",), ["7-4=", MESSAGES[2:]], [[5], [5]])
    assert asked.decode(("solver",), [one, other]) == ["7-4=", ";user=7-4=;assistant="]


def test_messages_after_a_response_are_turns_of_the_template(chatting):
    asked = encoder(chatting, chatting)
    later = [{"role": "system", "content": "5"}, {"role": "user", "content": "7-4="}]
    ids = asked.follow(("solver",), ["7-4=", later], [[5], [5]])
    assert asked.decode(("solver",), ids) == [";user=7-4=;assistant=", ";system=5;user=7-4=;assistant="]


def test_responses_are_encoded_like_those_of_the_data(chatting, tmp_path):
    texts = ["7", [{"role": "assistant", "content": "8"}, MESSAGES[2], {"role": "assistant", "content": "4"}]]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1+2=", "completion": text}) + "\n" for text in texts))
    rows = open_data(file, tokenizer=chatting).batch([0, 1])
    expected = [rows.data["tokens"].lists(), rows.data["mask"].lists()]
    replies = encoder(chatting, chatting).reply(("solver",), texts)
    assert [list(part) for part in zip(*replies, strict=True)] == expected
    assert encoder(chatting, chatting).reply(("solver",), [[{"role": "assistant", "content": "7"}]]) == [
        replies[0]
    ]


def test_a_response_is_of_the_assistant(chatting):
    with pytest.raises(ValueError, match=r"found messages of user, assistant, user, expected a response"):
        encoder(chatting, chatting).reply(("solver",), [MESSAGES])


def test_messages_for_a_model_without_a_template_are_refused_with_a_remedy():
    for call in (
        lambda asked: asked.encode(("solver",), ["1", MESSAGES]),
        lambda asked: asked.follow(("solver",), [MESSAGES], [[5]]),
        lambda asked: asked.reply(("solver",), [MESSAGES[1:2]]),
    ):
        with pytest.raises(PlanError) as caught:
            call(encoder(MODEL, MODEL))
        assert "has no chat template" in str(caught.value)
        assert "let the stage return text" in str(caught.value)


def test_environment_text_becomes_control_tokens_only_if_allowed(chatting):
    values = {"model": str(chatting), "solver.model": str(chatting), "critic.model": str(chatting)}
    config, graph = sort_values(values, ["solver", "critic", "reward"]), compile_flow(both).graph
    said, end = ["a<eos>"], TokenizerEncoder(chatting).tokenizer.eos_token_id
    for allowed in (False, True):
        spec = parse_environment("retry", {"control_tokens": "allow"} if allowed else {})
        asked = asking(graph, bind_roles(graph, config), config, {"solver": spec})
        assert (end in asked.speak(("solver",), said, [[5]])[0]) == allowed
        assert end not in asked.encode(("solver",), said)[0]
        assert end not in asked.speak(("critic",), said, [[5]])[0]
