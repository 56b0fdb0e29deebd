"""Rows sampled turn by turn: model text is trained on, environment text is masked out, and rows respect their
budgets.
"""

import json
from contextlib import ExitStack, closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenarios import script, spec_of

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.author.methods import EPISODE_GIVES
from rlflow.author.seeds import row_seeds
from rlflow.backends.null import Generator
from rlflow.execution.episodes import Episodes, Speech
from rlflow.execution.follow_ups import Asking
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.training.protocols import ModelSpec, Sampling

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not

ASKING = Asking()
SPEECH = Speech(
    lambda texts, sampled: ASKING.speak((), texts, sampled),
    lambda text: ASKING.encode((), [text])[0],
    lambda rows: ASKING.decode((), rows),
)
BLANK = {"reward": 0.0, "done": False, "says": ""}


@pytest.fixture(scope="module")
def pools():
    """Return a function from bounds to a pool, each started once."""
    known = {}
    with ExitStack() as open_pools:

        def pool(name="Scripted", **bounds):
            key = (name, *sorted(bounds.items()))
            if key not in known:
                known[key] = open_pools.enter_context(
                    closing(EnvironmentPool(spec_of(name, parallel=1, seconds=5, **bounds)))
                )
            return known[key]

        yield pool


def prompts_of(scripts):
    """Return prompts whose tokens have different lengths."""
    batch = Batch.of(
        prompt=list(scripts), prompt_tokens=[[7] * (1 + place % 3) for place in range(len(scripts))]
    )
    return Batch(Axis.fresh(len(scripts)), batch.data)


def sampled(pool, prompts, sampling, seed=5, longest=6):
    backend = Generator(ModelSpec(None), Generator.Settings(longest=longest, tail=1.0))
    seeds = row_seeds(seed, prompts.axis.repeat(sampling.samples).keys)
    return Episodes(backend.generate, pool, sampling, SPEECH).sampled(prompts, seeds, seed)


def pieces(rows, row):
    """Return (turn, ids) of each segment of a row."""
    tokens, turns = rows.rows([row])["tokens"][0].tolist(), rows.rows([row])["turn"][0].tolist()
    stretches = []
    for token, turn in zip(tokens, turns, strict=True):
        if not stretches or stretches[-1][0] != turn:
            stretches.append((turn, []))
        stretches[-1][1].append(token)
    return stretches


turns = st.builds(
    lambda says, reward, done: {**({"says": says} if says else {}), "reward": reward, "done": done},
    st.text("ab", max_size=9),
    st.sampled_from([0.0, 1.0, -0.5]),
    st.booleans(),
)
scripts = st.builds(
    lambda played, reset: script(*played, **({"reset": reset} if reset else {})),
    st.lists(turns, max_size=4),
    st.sampled_from(["", "", "hi"]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(scripts, min_size=1, max_size=4),
    st.integers(1, 24),
    st.integers(1, 3),
    st.sampled_from([3, 512]),
    st.integers(1, 2),
)
def test_rows_contain_every_message_and_respect_their_budgets(pools, texts, max_tokens, most, says, samples):
    pool = pools(turns=most, says=says)
    rows = sampled(pool, prompts_of(texts), Sampling(samples, max_tokens))
    assert {*EPISODE_GIVES, "tokens", "mask", "sampled_logprobs", "policy_version", "group"} <= set(
        rows.columns
    )
    lengths = rows.data["tokens"].lengths.tolist()
    for row, length in enumerate(lengths):
        one, record = rows.rows([row]), json.loads(texts[row // samples])
        played, stretches = record["turns"], pieces(rows, row)
        episode = json.loads(one["episode"][0])
        assert 1 <= length <= max_tokens
        assert one["mask"].tolist() == (one["turn"] >= 0).tolist()
        holes = one["turn"][0] < 0
        assert (one["sampled_logprobs"][0][holes] == 0).all()
        assert (one["policy_version"][0][holes] == -1).all()
        turns_spoken = [turn for turn, _ in stretches if turn >= 0]
        assert turns_spoken == list(range(int(one["turns"][0])))
        assert len(turns_spoken) == len(episode["turns"]) <= most
        assert stretches[-1][0] >= 0  # a message without a reply is omitted
        messages = ([record["reset"]] if "reset" in episode else []) + [
            turn["says"] for turn in episode["turns"] if "says" in turn
        ]
        assert [ids for turn, ids in stretches if turn < 0] == [
            list(text.encode())[:says] for text in messages
        ]
        assert one["said"][0] == episode["turns"][-1]["said"]
        done = [{**BLANK, **turn} for turn in played[: len(turns_spoken)]] + [BLANK] * (
            len(turns_spoken) - len(played)
        )
        assert float(one["episode_score"][0]) == sum(turn["reward"] for turn in done)
        assert float(one["turn_rewards"].sum()) == sum(turn["reward"] for turn in done)
        ends = [
            place
            for place, turn in enumerate(one["turn"][0].tolist())
            if turn >= 0 and (place + 1 == length or one["turn"][0, place + 1] != turn)
        ]
        rewards = one["turn_rewards"][0]
        assert [float(rewards[place]) for place in ends] == [turn["reward"] for turn in done]
        last = done[-1]
        finish = one["finish"][0]
        assert finish in ("env", "turns", "stop", "length")
        if finish == "env":
            assert last["done"]
        if finish == "turns":
            assert len(turns_spoken) == most
            assert last["says"]
        if finish == "stop":
            assert not last["says"]
            assert not last["done"]


@settings(max_examples=20, deadline=None)
@given(st.lists(scripts, min_size=2, max_size=4), st.integers(2, 24))
def test_a_row_does_not_depend_on_other_rows(pools, texts, max_tokens):
    pool, prompts = pools(turns=3), prompts_of(texts)
    together = sampled(pool, prompts, Sampling(2, max_tokens))
    for place in range(len(texts)):
        alone = sampled(pool, prompts.rows([place]), Sampling(2, max_tokens))
        beside = together.rows([2 * place, 2 * place + 1])
        for name in together.columns:
            # the null backend's texts do not match its tokens
            if name not in ("episode", "said", "completion"):
                assert (
                    alone.data[name].value == beside.data[name].value
                    if isinstance(alone.data[name].value, tuple)
                    else torch.equal(alone.data[name].value, beside.data[name].value)
                ), name


def test_a_silent_environment_changes_no_bit(pools):
    prompts, sampling = prompts_of([script()] * 5), Sampling(2, 9)
    rows = sampled(pools("Silent"), prompts, sampling)
    plain = Generator(ModelSpec(None), Generator.Settings(longest=6, tail=1.0)).generate(
        prompts.select("prompt_tokens"), sampling, row_seeds(5, prompts.axis.repeat(2).keys)
    )
    assert set(plain.columns) <= set(rows.columns)
    for name in plain.columns:
        one, other = plain.data[name], rows.data[name]
        assert (
            one.value == other.value if isinstance(one.value, tuple) else torch.equal(one.value, other.value)
        ), name
    assert rows["turns"].tolist() == [1] * 10
    assert set(rows["failed"]) == {""}


def test_the_samples_of_a_prompt_share_the_environment_seed(pools):
    rows = sampled(pools(turns=2), prompts_of([script({"echo": True})] * 2), Sampling(3, 40))
    seeds = [json.loads(text)["turns"][0]["says"].partition("|")[2] for text in rows["episode"]]
    assert seeds[0] == seeds[1] == seeds[2] != seeds[3] == seeds[4] == seeds[5]


def test_a_failed_episode_has_its_cause_and_no_score(pools):
    rows = sampled(
        pools(turns=3),
        prompts_of(
            [
                script({"says": "x", "reward": 1.0}, {"raise": "no"}),
                script({"reward": 1.0}),
                script(reset={"raise": "no"}),
            ]
        ),
        Sampling(1, 40),
    )
    assert rows["failed"] == ["raised", "", "raised"]
    assert rows["finish"] == ["failed", "stop", "failed"]
    assert rows["episode_score"].isnan().tolist() == [True, False, True]
    assert "raised: " in json.loads(rows["episode"][0])["failed"]
    assert rows["turns"].tolist() == [2, 1, 1]
    assert rows["turn_rewards"].isnan().any(1).tolist() == [True, False, True]


def test_a_score_of_the_environment_replaces_the_rewards(pools):
    rows = sampled(
        pools("Judged", turns=2), prompts_of([script({"reward": 1.0}, score=0.25)]), Sampling(1, 40)
    )
    assert rows["episode_score"].tolist() == [0.25]
    assert float(rows["turn_rewards"].sum()) == 1.0


def test_long_messages_are_shortened_before_encoding(pools):
    """As bytes, a message is its text under its role."""
    message = [{"role": "tool", "content": "abcdefgh" * 8}]
    rows = sampled(pools(turns=2, says=40), prompts_of([script({"says": message})]), Sampling(1, 200))
    (turns_spoken,) = [bytes(ids).decode() for turn, ids in pieces(rows, 0) if turn < 0]
    assert len(turns_spoken) <= 40
    assert turns_spoken.startswith("abcdefgh")


@pytest.mark.parametrize("characters", [1, 100])
@pytest.mark.parametrize("shape", [str, lambda text: [{"role": "tool", "content": text}]])
def test_encoding_a_long_text_stops_after_the_kept_part(pools, characters, shape):
    """``characters``: per token."""
    turns_spoken = []

    def speak(texts, sampled):
        content = [text if isinstance(text, str) else text[-1]["content"] for text in texts]
        turns_spoken.extend(map(len, content))
        return [list(text[::characters].encode()) for text in content]

    def encode(text):
        return list(text[::characters].encode())

    def decode(rows):
        return [bytes(ids).decode("latin-1").replace("x", "x" * characters) for ids in rows]

    speech = Speech(speak, encode, decode)
    pool, prompts = pools(turns=2, says=4), prompts_of([script({"says": shape("x" * 10_000)})])
    seeds = row_seeds(5, prompts.axis.keys)
    backend = Generator(ModelSpec(None), Generator.Settings(longest=6, tail=1.0))
    rows = Episodes(backend.generate, pool, Sampling(1, 200), speech).sampled(prompts, seeds, 5)
    assert [ids for turn, ids in pieces(rows, 0) if turn < 0] == [list(b"xxxx")]
    assert json.loads(rows["episode"][0])["turns"][0]["log"] == {"cut": 1.0}
    assert (max(turns_spoken) <= 16 * 4) == (characters == 1)


def test_changes_to_environment_text_are_logged(pools):
    played = script({"says": "\ud83c\0"}, {"says": "abcdefgh"}, reset="\udc80")
    rows = sampled(pools(turns=3, says=4), prompts_of([played]), Sampling(1, 200))
    assert rows["failed"] == [""]
    assert [turn.get("log", {}) for turn in json.loads(rows["episode"][0])["turns"]] == [
        {"replaced": 3.0, "cut": 1.0},
        {"cut": 1.0},
        {},
    ]


def test_budgets_of_rows_respect_the_positions_of_the_model(pools):
    """No call may use more positions than the longest prompt and max_tokens: a row with a long context has
    few tokens left.
    """
    asked = []
    backend = Generator(ModelSpec(None), Generator.Settings(longest=30, tail=0.3))

    def generate(prompts, sampling, seeds):
        asked.append(int(prompts.data["prompt_tokens"].lengths.max()) + sampling.max_tokens)
        return backend.generate(prompts, sampling, seeds)

    prompts = prompts_of(
        [script({"says": "a" * 20}, {"says": "b"}), script({"says": "c"}, {"says": "d"}), script()]
    )
    sampling = Sampling(2, 60)
    rows = Episodes(generate, pools(turns=3), sampling, SPEECH).sampled(
        prompts, row_seeds(1, prompts.axis.repeat(2).keys), 1
    )
    assert max(asked) <= 3 + 60
    assert rows["turns"].tolist()[:2] == [3, 3] or "length" in rows["finish"]
