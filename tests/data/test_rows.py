"""Records as rows: encoding, chat, completions, pairs."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from rlflow import PlanError
from rlflow.author.columns import MODEL_PROMPT, TABLE, row
from rlflow.data import open_data
from rlflow.data.encode import TokenizerEncoder, Wording
from rlflow.data.json_fields import Wanted
from rlflow.data.mixed import mixed

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not


def decoded(folder, batch, column="prompt_tokens", row=0):
    piece = torch.split(batch.data[column].value, batch.data[column].lengths.tolist())[row]
    return AutoTokenizer.from_pretrained(folder, local_files_only=True).decode(piece)


def test_plain_text_gets_a_first_token_and_no_last_one(jsonl, tokenizer):
    data = open_data(jsonl({"prompt": "2+2="}), tokenizer=tokenizer, chat=False)
    assert decoded(tokenizer, data.batch([0])) == "<bos>2+2="
    assert data.worded == ""


def test_a_prompt_is_a_chat_if_the_tokenizer_has_a_template(jsonl, tokenizer, tmp_path, make_tokenizer):
    bare, path = make_tokenizer(tmp_path / "bare", chat=False), jsonl({"prompt": "2+2="})
    assert decoded(tokenizer, open_data(path, tokenizer=tokenizer).batch([0])) == "<user>2+2=\n<assistant>"
    assert decoded(bare, open_data(path, tokenizer=bare).batch([0])) == "<bos>2+2="
    assert str(tokenizer) in open_data(path, tokenizer=tokenizer).worded


def test_a_system_message_is_added_to_prompts_without_one(jsonl, tokenizer):
    own, ask = {"role": "system", "content": "Own."}, {"role": "user", "content": "hi"}
    data = open_data(jsonl({"prompt": [ask]}, {"prompt": [own, ask]}), tokenizer=tokenizer, system="Add.")
    worded = [decoded(tokenizer, data.batch([index])) for index in (0, 1)]
    assert worded == ["<system>Add.\n<user>hi\n<assistant>", "<system>Own.\n<user>hi\n<assistant>"]


def test_a_template_changes_the_prompt_and_not_the_column(jsonl, tokenizer):
    path = jsonl({"prompt": "2+2="})
    plain = open_data(path, tokenizer=tokenizer, chat=False, template="Q: {prompt}\nA:").batch([0])
    assert decoded(tokenizer, plain) == "<bos>Q: 2+2=\nA:"
    chat = open_data(path, tokenizer=tokenizer, system="Add.", template="{prompt}?").batch([0])
    assert decoded(tokenizer, chat) == "<system>Add.\n<user>2+2=?\n<assistant>"
    assert plain["prompt"] == chat["prompt"] == ["2+2="]


def test_messages_always_go_through_the_chat_template(jsonl, tokenizer):
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "2+2"},
    ]
    data = open_data(jsonl({"prompt": turns}, {"prompt": turns[:1]}), tokenizer=tokenizer)
    batch = data.batch([0, 1])
    assert decoded(tokenizer, batch) == "<user>hi\n<assistant>yes?\n<user>2+2\n<assistant>"
    assert batch["prompt"] == ["user: hi\n\nassistant: yes?\n\nuser: 2+2", "hi"]


def test_the_model_prompt_is_the_decoded_text_of_its_ids(jsonl, tokenizer):
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    wanted = Wanted(model_prompt=True)
    chats = [
        open_data(jsonl({"prompt": prompt}), tokenizer=tokenizer, wanted=wanted) for prompt in (turns, "2+2=")
    ]
    plain = open_data(
        jsonl({"prompt": "2+2="}), tokenizer=tokenizer, chat=False, template="Q: {prompt}\nA:", wanted=wanted
    )
    both = mixed(
        {"a": chats[0], "b": open_data(jsonl({"prompt": "3+3="}, name="b.jsonl"), tokenizer=tokenizer)}
    )
    assert chats[0].batch([0])[MODEL_PROMPT] == ["<system>Add.\n<user>2+2=\n<assistant>"]
    assert [data.batch([0])[MODEL_PROMPT][0] for data in (*chats, both)] == [
        decoded(tokenizer, data.batch([0])) for data in (*chats, both)
    ]
    assert f"<bos>{plain.batch([0])[MODEL_PROMPT][0]}" == decoded(tokenizer, plain.batch([0]))
    assert both.batch([1])[MODEL_PROMPT] == ["<user>3+3=\n<assistant>"]
    assert open_data(jsonl({"prompt": turns}), wanted=wanted).batch([0])[MODEL_PROMPT] == [
        "system: Add.\nuser: 2+2=\nassistant: "
    ]
    for data in (*chats, plain, both):
        assert set(data.columns) == set(data.batch([0]).columns)
    assert MODEL_PROMPT not in open_data(jsonl({"prompt": turns}), tokenizer=tokenizer).batch([0])


def test_a_single_message_is_plain_text_without_a_chat_template(jsonl, tmp_path, make_tokenizer):
    bare = make_tokenizer(tmp_path / "bare", chat=False, eos=False)
    ask = {"role": "user", "content": "2+2="}
    path = jsonl({"prompt": [ask]}, {"prompt": "3+3="})
    data = open_data(path, tokenizer=bare)
    assert data.alone == 1
    assert "plain text, since the tokenizer of" in data.worded
    texts = open_data(jsonl({"prompt": "2+2="}, {"prompt": "3+3="}), tokenizer=bare)
    assert data.batch([0, 1])["prompt_tokens"].tolist() == texts.batch([0, 1])["prompt_tokens"].tolist()
    for conversation in (
        [{"role": "system", "content": "Add."}, ask],
        [{"role": "assistant", "content": "hi"}],
    ):
        with pytest.raises(PlanError, match="has no chat template"):
            open_data(jsonl({"prompt": conversation}), tokenizer=bare)


def test_a_missing_feature_of_the_tokenizer_is_reported(jsonl, tmp_path, tokenizer, make_tokenizer):
    bare = make_tokenizer(tmp_path / "bare", chat=False, eos=False)
    with pytest.raises(PlanError, match="has no chat template"):
        open_data(jsonl({"prompt": "p"}), tokenizer=bare, chat=True)
    with pytest.raises(PlanError, match="no end-of-sequence token"):
        open_data(jsonl({"prompt": "p", "completion": "c"}), tokenizer=bare).batch([0])
    with pytest.raises(PlanError, match="refuses a prompt: no tools here"):
        open_data(jsonl({"prompt": [{"role": "tool", "content": "x"}]}), tokenizer=tokenizer)
    with pytest.raises(PlanError, match="no such model folder"):
        open_data(jsonl({"prompt": "p"}), tokenizer=tmp_path / "none")
    with pytest.raises(PlanError, match="cannot load the tokenizer"):
        open_data(jsonl({"prompt": "p"}), tokenizer=tmp_path)


def test_prompts_are_bytes_without_a_tokenizer(jsonl):
    batch = open_data(jsonl({"prompt": "né", "completion": "o"})).batch([0])
    assert batch["prompt_tokens"].tolist() == [list("né".encode())]
    assert batch["tokens"].tolist() == [[ord("o"), 256]]


def test_completions_become_trainable_rows(jsonl, tokenizer):
    path = jsonl(
        {"prompt": "a", "completion": "bcd"},
        {"prompt": "a", "completion": [{"role": "assistant", "content": ""}]},
    )
    data = open_data(path, tokenizer=tokenizer)
    batch = data.batch([0, 1], start=5)
    assert [decoded(tokenizer, batch, "tokens", row) for row in (0, 1)] == ["bcd<eos>", "<eos>"]
    assert batch.data["mask"].value.all()
    assert batch["finish"] == ["stop", "stop"]
    assert batch["completion"] == ["bcd", ""]
    assert batch.axis.keys.tolist() == [[5, 0], [6, 0]]
    assert not batch.axis.grouped
    assert batch.columns == data.columns


def test_pairs_become_two_adjacent_rows_chosen_first(jsonl):
    data = open_data(
        jsonl(*({"prompt": f"p{n}", "chosen": f"good{n}", "rejected": f"b{n}"} for n in range(3)))
    )
    batch = data.batch([2, 0], start=7)
    assert len(data) == 3
    assert batch["completion"] == ["good2", "b2", "good0", "b0"]
    assert batch["prompt"] == ["p2", "p2", "p0", "p0"]
    assert batch["chosen"].tolist() == [True, False, True, False]
    assert batch["group"].tolist() == [7, 7, 8, 8]
    assert batch.axis.keys.tolist() == [[7, 0], [7, 1], [8, 0], [8, 1]]
    assert batch.axis.grouped
    assert batch.axis.slots.tolist() == [0, 0, 1, 1]
    assert batch.columns == data.columns
    assert all(batch.columns[name] == TABLE[name].kind for name in batch.columns)


def test_pairs_of_full_conversations_contain_their_prompt(jsonl, tokenizer):
    ask = {"role": "user", "content": "why?"}
    pair = {side: [ask, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    batch = open_data(jsonl(pair), tokenizer=tokenizer).batch([0])
    assert batch["prompt"] == ["why?", "why?"]
    assert batch["completion"] == ["chosen", "rejected"]
    with pytest.raises(PlanError, match="different conversations"):
        open_data(jsonl({**pair, "rejected": [{"role": "user", "content": "how?"}, pair["rejected"][1]]}))


SAYS = [
    {"role": "assistant", "content": "look"},
    {"role": "user", "content": "seen 3"},
    {"role": "assistant", "content": "three"},
]


def test_messages_of_others_within_a_response_are_masked_out(jsonl, tokenizer):
    records = jsonl({"prompt": "how many?", "completion": SAYS}, {"prompt": "p", "completion": "plain"})
    batch = open_data(records, tokenizer=tokenizer).batch([0, 1])
    decode = AutoTokenizer.from_pretrained(tokenizer).decode
    tokens, mask = batch["tokens"][0], batch["mask"][0]
    assert decode(tokens) == "look<eos>\n<user>seen 3\n<assistant>three<eos>"
    assert decode(tokens[mask]) == "look<eos>three<eos>"
    assert batch["completion"] == ["assistant: look\n\nuser: seen 3\n\nassistant: three", "plain"]
    assert decode(batch["tokens"][1][batch["mask"][1]]) == "plain<eos>"


def test_turns_are_bytes_without_a_tokenizer(jsonl):
    batch = open_data(jsonl({"prompt": "p", "completion": SAYS})).batch([0])
    tokens, mask = batch["tokens"][0], batch["mask"][0]
    assert bytes(tokens[~mask].tolist()) == b"\nuser: seen 3\nassistant: "
    assert tokens[mask].tolist() == [*b"look", 256, *b"three", 256]


CALLING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}[{{ c.name "
    "}} {{ c.arguments | tojson }}]{% endfor %}{{ '(' ~ m.name ~ ')' if m.name is defined else '' }}<eos>{% "
    "endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}


def test_a_template_gets_full_messages_of_prompts_and_responses(jsonl, make_tokenizer, tmp_path):
    folder = make_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(CALLING)
    asked, last = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    result = {"role": "tool", "content": "2", "name": "add"}
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def wanted(*messages, opens=False):
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=opens, tokenize=False)

    prompt = open_data(jsonl({"prompt": [asked, CALLS, result]}), tokenizer=folder).batch([0])
    assert decoded(folder, prompt) == wanted(asked, CALLS, result, opens=True)
    for record, responses in (
        ({"completion": [CALLS, result, last]}, [[CALLS, result, last]]),
        ({"completion": [CALLS]}, [[CALLS]]),
        ({"chosen": [CALLS], "rejected": "2"}, [[CALLS], [last]]),
    ):
        batch = open_data(jsonl({"prompt": [asked], **record}), tokenizer=folder).batch([0])
        for at, messages in enumerate(responses):
            assert decoded(folder, batch, row=at) + decoded(folder, batch, "tokens", at) == wanted(
                asked, *messages
            )


def test_a_tool_call_rendered_unlike_a_reply_is_refused(jsonl, make_tokenizer, tmp_path):
    folder = make_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(
        CALLING.replace("<eos>", "{{ '<call>' if m.tool_calls else '<eos>' }}")
    )
    with pytest.raises(
        PlanError,
        match=r"ends a message with content, role, tool_calls differently than a plain reply\n(.*)<call>",
    ):
        open_data(jsonl({"prompt": "p", "completion": [CALLS]}), tokenizer=folder).batch([0])


THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{{ '<think>' if "
    "thinking else '<think></think>' }}"
)


@pytest.mark.parametrize(("thinking", "end"), [(True, "<think>"), (False, "<think></think>")])
def test_a_template_gets_variables(jsonl, make_tokenizer, tmp_path, thinking, end):
    folder, variables = make_tokenizer(tmp_path), {"thinking": thinking}
    (folder / "chat_template.jinja").write_text(THINKING)
    data = open_data(jsonl({"prompt": "p"}), tokenizer=folder, template_kwargs=variables)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    wanted = tokenizer.apply_chat_template(
        [{"role": "user", "content": "p"}], add_generation_prompt=True, tokenize=False, **variables
    )
    assert decoded(folder, data.batch([0])) == wanted == f"<user>p<assistant>{end}"
    assert f", thinking = {str(thinking).lower()} (" in data.worded


@pytest.mark.parametrize(
    ("variables", "chat", "says"),
    [
        (
            {"thinkin": False},
            None,
            "'template_kwargs' has no effect: the chat template of (.*) does not read 'thinkin'",
        ),
        (
            {"thinking": False},
            False,
            "'template_kwargs' has no effect on this data: its prompts are plain text and chat is off",
        ),
        (
            {"messages": []},
            None,
            "'template_kwargs' has 'messages', which rlflow sets itself",
        ),
    ],
)
def test_variables_without_an_effect_are_refused(jsonl, make_tokenizer, tmp_path, variables, chat, says):
    folder = make_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(THINKING)
    with pytest.raises(PlanError, match=says):
        open_data(jsonl({"prompt": "p"}), tokenizer=folder, template_kwargs=variables, chat=chat)


def test_turns_that_the_tokenizer_cannot_encode_are_reported(jsonl, tmp_path, tokenizer, make_tokenizer):
    records = jsonl({"prompt": "p", "completion": SAYS})
    with pytest.raises(PlanError, match="needs a chat template"):
        open_data(records, tokenizer=make_tokenizer(tmp_path / "plain", chat=False)).batch([0])
    forgetful = make_tokenizer(tmp_path / "forgetful")
    template = "{% for m in messages[-1:] %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
    (forgetful / "chat_template.jinja").write_text(template)
    with pytest.raises(PlanError, match="changes earlier turns"):
        open_data(records, tokenizer=forgetful).batch([0])


def test_a_conversation_that_repeats_its_prompt_gives_the_last_reply(jsonl, tokenizer):
    whole = [{"role": "user", "content": "p"}, *SAYS]
    assert open_data(jsonl({"prompt": "p", "completion": whole}), tokenizer=tokenizer).batch([0])[
        "completion"
    ] == ["three"]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"prompt": "p", "chosen": "c"}, "needs both"),
        ({"prompt": "p", "chosen": "c", "rejected": "r", "completion": "x"}, "both a completion and a pair"),
        ({"prompt": "p", "completion": [{"role": "user", "content": "x"}]}, "is not a response"),
        ({"chosen": "c", "rejected": "r"}, "no field 'prompt'"),
    ],
)
def test_responses_without_a_valid_row_are_refused(jsonl, record, says):
    with pytest.raises(PlanError, match=says):
        open_data(jsonl(record))


@pytest.mark.parametrize("record", [{"answer": "a"}, {"completion": "c"}, {"chosen": "c", "rejected": "r"}])
def test_an_empty_batch_has_the_usual_columns(jsonl, record):
    data = open_data(jsonl({"prompt": "p", "level": 1, **record}), columns={"level": row("int64")})
    assert data.batch([]).columns == data.batch([0]).columns
    assert len(data.batch([])) == 0


@pytest.mark.parametrize(
    ("sampled", "between"), [([5, 6], "\n<user>why\n<assistant>"), ([5, 1], "\n<user>why\n<assistant>")]
)
def test_a_turn_after_a_response_has_the_text_of_the_template(tokenizer, sampled, between):
    encoder = TokenizerEncoder(tokenizer)
    chat = encoder.following(["why"], [sampled], Wording(chat=True))
    assert encoder.texts(chat) == [between]
    assert encoder.texts(encoder.following(["why"], [sampled], Wording())) == ["why"]


def test_the_end_token_of_a_response_is_not_written_twice(make_tokenizer, tmp_path):
    folder = make_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% "
        "endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    encoder = TokenizerEncoder(folder)
    stopped, cut = encoder.following(["why"] * 2, [[5, 1], [5, 6]], Wording(chat=True))
    assert cut == [1, *stopped]


def test_a_template_that_rewrites_earlier_turns_refuses_follow_ups(make_tokenizer, tmp_path):
    folder = make_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ messages | length }}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(PlanError, match="changes earlier turns"):
        TokenizerEncoder(folder).following(["why"], [[5]], Wording(chat=True))


def test_the_text_of_a_response_excludes_its_end(make_tokenizer, tmp_path):
    encoder = TokenizerEncoder(make_tokenizer(tmp_path))
    seven, comma = (encoder.tokenizer.convert_tokens_to_ids(letter) for letter in "7,")
    responses = [[0, seven, 1], [seven, comma], [seven]]
    assert encoder.texts(responses) == ["<bos>7", "7,", "7"]
    assert encoder.texts(responses, bare=True) == ["7", "7,", "7"]
    LlamaConfig(eos_token_id=comma).save_pretrained(
        tmp_path
    )  # the tokenizer's end remains an end of the model
    assert TokenizerEncoder(tmp_path).texts(responses) == ["<bos>7", "7", "7"]


def test_already_templated_prompts_are_reported_once(jsonl, tokenizer):
    path = jsonl({"prompt": "2+2="}, {"prompt": "<bos><user>2+3=\n<assistant>"}, {"prompt": "<bos>3+3="})
    problem = open_data(path, tokenizer=tokenizer).templated()
    assert problem.message.startswith("2 of 3 prompts")
    assert problem.place.line == 2
    assert "<bos> in" in problem.found
    assert open_data(path, tokenizer=tokenizer, chat=False).templated() is None
    assert open_data(jsonl({"prompt": "2 < 3"}, name="sound.jsonl"), tokenizer=tokenizer).templated() is None
