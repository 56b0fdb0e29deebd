"""Text between turns, for templates in the forms of eight model families.

Prompt, reply and follow-up have the ids that the template gives the conversation, wherever the reply ended.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlflow import PlanError
from rlflow.data.encode import TokenizerEncoder, Wording
from rlflow.data.ends import ends_of


@dataclass(frozen=True)
class Family:
    template: str
    tokens: tuple[str, ...]  # the first is the end of text
    ends: tuple[str, ...]  # ends of replies
    own: str | None = None  # the end written by the template
    named: tuple[str, ...] = ()  # ends in the generation config; (): all
    inserted: tuple[str, ...] = ()  # ends placed before the template's own end, not instead of it
    lead: str = ""  # written by the template before a reply
    thought: str = ""  # opening of the requested reply, written by the template
    strips: bool = False  # whether tokens absorb the white space after them
    more: dict[str, str] = field(default_factory=dict)


FAMILIES = {
    "chatml": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% "
        "endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<|endoftext|>", "<|im_end|>"),
        "<|im_end|>",
        named=("<|endoftext|>",),
    ),
    "gemma": Family(
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' "
        "else m['role']) + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if "
        "add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        ("<eos>", "<end_of_turn>"),
        "<end_of_turn>",
        more={"bos_token": "<bos>"},
    ),
    "llama 3": Family(
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
        "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if "
        "add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        (
            "<|end_of_text|>",
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        more={"bos_token": "<|begin_of_text|>"},
    ),
    "phi": Family(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ("<|endoftext|>", "<|end|>"),
        "<|end|>",
        strips=True,
    ),
    "mistral": Family(
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + "
        "'[/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}",
        ("</s>", "<s>", "[INST]", "[/INST]"),
        ("</s>",),
        "</s>",
        lead=" ",
        more={"bos_token": "<s>"},
    ),
    "glm": Family(
        "[gMASK]<sop>{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "<|user|>",
        inserted=("<|endoftext|>", "<|observation|>"),
    ),
    "thought": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% "
        "endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        ("<|endoftext|>", "<|im_end|>"),
        "<|im_end|>",
        thought="<think>\n",
    ),
    "no end": Family(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
        ("<eos>",),
        ("<eos>",),
        inserted=("<eos>",),
    ),
}


def make_folder(family, folder):
    """Return a folder with a tokenizer of the family, a token for each byte, and the configs of a model."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    inner.add_special_tokens(
        [AddedToken(token, special=True, rstrip=family.strips) for token in family.tokens]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=family.tokens[0], **family.more)
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(folder)
    named = [tokenizer.convert_tokens_to_ids(token) for token in family.named or family.ends]
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": tokenizer.eos_token_id})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    return TokenizerEncoder(folder)


@pytest.fixture(scope="module")
def family_of(tmp_path_factory):
    """Return a function from a name to a family and its encoder, made once."""
    made_by_name = {}

    def of(name):
        if name not in made_by_name:
            made_by_name[name] = make_folder(FAMILIES[name], tmp_path_factory.mktemp("family"))
        return FAMILIES[name], made_by_name[name]

    return of


ASK, AGAIN = [{"role": "user", "content": "2+2?"}], [{"role": "user", "content": "why"}]
QUICK = ("gemma", "phi", "glm", "no end")  # each starts a rendering process
CASES = [
    pytest.param(name, end, id=f"{name} {end or 'cut'}", marks=[] if name in QUICK else pytest.mark.slow)
    for name, family in FAMILIES.items()
    for end in (*family.ends, "")
]
EACH = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]


def conversation(family, encoder, *later):
    """Return the ids of a question, a reply and later messages from the template in transformers."""
    reply = {"role": "assistant", "content": f"{family.thought}so 4"}
    return encoder.tokenizer.apply_chat_template(
        [*ASK, reply, *later], add_generation_prompt=True, return_dict=False
    )


def without_end(family, encoder):
    return encoder.tokenizer.encode(f"{family.lead}so 4", add_special_tokens=False)


@pytest.mark.parametrize(("name", "end"), CASES)
def test_prompt_reply_and_follow_up_have_the_ids_of_the_template(family_of, name, end):
    family, encoder = family_of(name)
    ids = encoder.tokenizer.convert_tokens_to_ids
    prompt, reply, wanted = (
        encoder.prompts([ASK])[0],
        without_end(family, encoder),
        conversation(family, encoder, *AGAIN),
    )
    place = len(prompt + reply)
    if end in family.inserted:
        wanted.insert(place, ids(end))
    elif end:
        assert wanted[place] == ids(family.own)
        wanted[place] = ids(end)  # the sampled end replaces the template's end
    reply = reply + [ids(end)] * bool(end)
    assert prompt + reply + encoder.following([AGAIN], [reply], Wording(chat=True))[0] == wanted


@pytest.mark.parametrize("name", EACH)
def test_data_rows_end_like_a_reply_of_the_template(family_of, name):
    family, encoder = family_of(name)
    ids, wanted = encoder.tokenizer.convert_tokens_to_ids, conversation(family, encoder, *AGAIN)
    prompt, reply = encoder.prompts([ASK])[0], f"{family.lead}so 4"
    (row,) = encoder.responses([reply])
    if family.own:
        assert prompt + row == wanted[: len(prompt + row)]
    assert row[-1] == ids(family.own or family.tokens[0])
    assert encoder.responses([reply], chat=False)[0][-1] == ids(family.tokens[0]), (
        "plain text ends in the tokenizer's end of text"
    )


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("chat", [True, False])
def test_a_reply_from_a_flow_ends_like_one_of_the_data(family_of, name, chat):
    family, encoder = family_of(name)
    reply, wording = f"{family.lead}so 4", Wording(chat=chat)
    ((turn,),) = encoder.replies([reply], wording)
    assert turn == (encoder.responses([reply], chat)[0], True)
    # text can't end a turn: its control tokens are ordinary tokens
    end = family.tokens[0]
    ((ids, _),) = encoder.replies([f"so{end} 4"], wording)[0]
    number = encoder.tokenizer.convert_tokens_to_ids(end)
    assert number not in ids[:-1]
    assert encoder.tokenizer.decode(ids[:-1]).startswith(f"so{end} 4")


@pytest.mark.parametrize("name", QUICK)
def test_turns_from_a_flow_equal_turns_of_the_data(family_of, name):
    _, encoder = family_of(name)
    replies = [{"role": "assistant", "content": "so 4"}, {"role": "assistant", "content": "add"}]
    turns = [replies[0], *AGAIN, replies[1]]
    assert encoder.replies([turns, "add"], Wording(chat=False)) == [
        encoder.turns(ASK, turns),
        [(encoder.responses(["add"], chat=False)[0], True)],
    ]


@pytest.mark.parametrize("name", QUICK)
def test_data_turns_equal_sampled_turns(family_of, name):
    _, encoder = family_of(name)
    replies = [{"role": "assistant", "content": "so 4"}, {"role": "assistant", "content": "add"}]
    first, between, last = encoder.turns(ASK, [replies[0], *AGAIN, replies[1]])
    assert [first[0], last[0]] == encoder.responses(["so 4", "add"])
    assert between[0] == encoder.following([AGAIN], [first[0]], Wording(chat=True))[0]
    assert [by_policy for _, by_policy in (first, between, last)] == [True, False, True]


def test_the_start_of_the_next_turn_may_end_a_reply(family_of):
    _, encoder = family_of("glm")
    tool, observed = (
        [{"role": "observation", "content": "4"}],
        encoder.tokenizer.convert_tokens_to_ids("<|observation|>"),
    )
    cut, ended, other = encoder.following(
        [tool] * 3, [[5], [5, observed], [5, encoder.ends.of_chat]], Wording(chat=True)
    )
    assert cut == other == [observed, *ended]


@pytest.mark.parametrize("name", EACH)
def test_all_ends_of_a_folder_form_one_set(family_of, name):
    family, encoder = family_of(name)
    ends = ends_of(Path(encoder.folder))
    assert ends.ids == tuple(sorted(encoder.tokenizer.convert_tokens_to_ids(list(family.ends))))
    assert ends.problems == [] or name in ("chatml", "no end")


def test_a_template_that_alters_a_reply_refuses_rows_of_several_turns(family_of):
    _, encoder = family_of("gemma")
    with pytest.raises(PlanError, match="changes earlier turns") as caught:
        encoder.turns(
            ASK, [{"role": "assistant", "content": " 4 "}, *AGAIN, {"role": "assistant", "content": "add"}]
        )
    assert "a completion of its own" in str(caught.value)


@pytest.fixture(scope="module")
def bracketed(make_tokenizer, tmp_path_factory):
    """Return an encoder whose tokenizer puts <bos>, 0, before a text and <eos>, 1, after it."""
    return TokenizerEncoder(make_tokenizer(tmp_path_factory.mktemp("bracketed"), chat=False))


def test_a_text_gets_the_leading_tokens_once(bracketed):
    plain, with_bos = bracketed.prompts(["hi", "<bos>hi"])
    assert plain == with_bos == [0, *bracketed.tokenizer.encode("hi", add_special_tokens=False)]
    assert bracketed.asked(["hi"], Wording()) == [plain]


def test_an_end_in_the_text_stays_and_an_added_one_is_removed(bracketed):
    reply, ended = bracketed.prompts(["hi", "hi<eos>"])
    assert ended == [*reply, 1]


def test_a_refused_text_is_named(tmp_path, make_tokenizer):
    encoder = TokenizerEncoder(make_tokenizer(tmp_path, chat=False))
    with pytest.raises(PlanError, match=r"found: .*ud800 odd"):
        encoder.asked(["sound", "\ud800 odd", "sound too"], Wording(False, None))
