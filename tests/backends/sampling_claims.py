"""Claims about a Generator, compared with a plain forward of transformers and a local trainer whose weights
it receives.
"""

import re
from dataclasses import replace

import pytest
import torch
from contract import Ground
from transformers import AutoConfig, AutoModelForCausalLM

from rlflow.author.batch import Batch
from rlflow.author.columns import standard_kind
from rlflow.author.methods import GENERATE_GIVES
from rlflow.backends.local import Trainer
from rlflow.backends.local.sampling import truncated
from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.errors import PlanError
from rlflow.training.protocols import GivesChunks, ModelSpec, Sampling, ScoresTokens

TEXTS = ["2+2=", "a", "the quick brown fox", "x = y"]
SAMPLINGS = [
    Sampling(3, 16),
    Sampling(3, 16, 0.7),
    Sampling(3, 16, 0.0),
    Sampling(3, 16, 0.9, 0.8),
    Sampling(3, 16, 0.8, 0.9, 6),
]
EOS = {1, 20, 21}  # from the models' generation configs
BOS = 2
TOLERANCE = 2e-5  # for a float32 log-prob; a wrong weight is off by 0.1 and more
# Lengths of prompts, as far as a model has positions. Four rows of each exceed any budget of the contract's
# generators; the first prompts alone exceed the tokens that vLLM reads in a step (2,048).
LENGTHS = (2100, 1500, 900, 560, 340, 220, 150, 110, 80, 60, 45, 35, 25, 18, 13, 10)


def pieces(batch, name="tokens"):
    return torch.split(batch.data[name].value, batch.data[name].lengths.tolist())


def tokens(batch):
    return [row.tolist() for row in pieces(batch)]


class Subject:
    """A generator with prompts of this rank. Ranks that share an engine have the same prompts."""

    def __init__(self, ground: Ground, case: str, **settings):
        self.ground, self.folder = ground, ground.models / case.split()[0]
        known = ground.backend.Generator.Settings.__dataclass_fields__
        self.team = ground.ranks if "tensor_parallel" in known else 1
        self.spec = ModelSpec(self.folder)
        self.one = ground.made("Generator", self.spec, tensor_parallel=self.team, **settings)
        encode = load_tokenizer(self.folder)
        own = 0 if self.team > 1 else ground.rank
        texts = TEXTS[own:] + TEXTS[:own]
        self.prompts = Batch.of(prompt=texts, prompt_tokens=[encode(text).input_ids for text in texts])

    @property
    def modelless(self):
        return self.ground.modelless

    def of_real_lengths(self, room):
        """Return prompts of ``LENGTHS`` that leave room for ``room`` tokens."""
        chance, positions = (
            torch.Generator().manual_seed(1),
            AutoConfig.from_pretrained(self.folder).max_position_embeddings,
        )
        fitting = [length for length in LENGTHS if length + room <= positions]
        return Batch.of(
            prompt_tokens=[torch.randint(3, 60, (length,), generator=chance) for length in fitting]
        )

    def generate(self, sampling, seeds=None, prompts=None):
        prompts = self.prompts if prompts is None else prompts
        return self.one.generate(
            prompts.select("prompt_tokens"), sampling, seeds or range(len(prompts) * sampling.samples)
        )

    def trained(self, factor):
        """Return a trainer whose weights differ from the folder's."""
        trainer = Trainer(ModelSpec(self.folder, trained=True))
        trainer.peers = self.ground.peers()
        with torch.no_grad():
            for parameter in trainer.network.module.parameters():
                parameter.mul_(factor)
        return trainer

    def mismatch(self, trainer, out):
        return float((trainer.forward(out | self.prompts)["logprobs"] - out["sampled_logprobs"]).abs().max())


def response_texts(subject, out, **options):
    """Return the text of each response, without its end token."""
    decode = load_tokenizer(subject.folder).decode
    return [decode(row[:-1] if row[-1] in EOS else row, **options) for row in tokens(out)]


def raised(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


# -- claims
# ------------------------------------------------------------------------------------------------------------


def rows_have_their_columns(subject):
    out = subject.generate(Sampling(3, 5, 0.5))
    assert set(out.columns) == {*GENERATE_GIVES, "group"}
    for name, data in out.data.items():
        assert data.kind == standard_kind(name), name
    assert (out | subject.prompts)["prompt"] == [text for text in subject.prompts["prompt"] for _ in range(3)]
    assert out["group"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    lengths = out.data["tokens"].lengths
    assert all(
        torch.equal(out.data[name].lengths, lengths)
        for name in ("mask", "sampled_logprobs", "policy_version")
    )
    assert 1 <= int(lengths.min()) <= int(lengths.max()) <= 5
    assert bool(out.data["mask"].value.all())
    assert not any(
        data.value.is_inference() for data in out.data.values() if isinstance(data.value, torch.Tensor)
    )
    assert set(out["finish"]) <= {"stop", "length"}
    assert out["temperature"].tolist() == [0.5] * 12
    assert subject.generate(Sampling(1, 1, 0.0))["temperature"].tolist() == [1.0] * 4  # greedy
    if not subject.modelless:
        assert list(out["completion"]) == response_texts(subject, out)


def no_prompts_give_no_rows(subject):
    none = subject.prompts.rows([])
    assert len(subject.generate(Sampling(2), [], none)) == 0
    if isinstance(subject.one, GivesChunks):
        assert [len(chunk) for chunk in subject.one.generate_chunks(none, Sampling(2), [], 3)] == [0, 0, 0]


def a_row_depends_only_on_its_prompt_and_its_seed(subject):
    """Other draws of the process have no effect."""
    seeds, sampling = [2**62 + i for i in range(8)], Sampling(2, 24)
    together = tokens(subject.generate(sampling, seeds))
    if subject.modelless:
        assert tokens(subject.generate(sampling, seeds)) == together
        return
    apart = [
        tokens(subject.generate(Sampling(1, 24), [seed], subject.prompts.rows([i // 2])))[0]
        for i, seed in enumerate(seeds)
    ]
    torch.rand(3)
    assert together == apart == tokens(subject.generate(sampling, seeds))
    assert together != tokens(subject.generate(sampling, range(20, 28)))
    assert together[0] != together[1]


def sampled_logprobs_match_a_forward(subject):
    """Log-probs agree with transformers row by row, under the same truncation; greedy rows have the likeliest
    tokens.
    """
    if subject.modelless:
        return
    for sampling in SAMPLINGS:
        check_logprobs(subject, subject.prompts, subject.generate(sampling), sampling)


def check_logprobs(subject, prompts, out, sampling):
    model = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=torch.float32).eval()
    prompts = [prompt for prompt in pieces(prompts, "prompt_tokens") for _ in range(sampling.samples)]
    for prompt, row, sampled in zip(prompts, pieces(out), pieces(out, "sampled_logprobs"), strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, row])[None]).logits[0, len(prompt) - 1 : -1] / (
                sampling.temperature or 1.0
            )
        if sampling.temperature:
            logits[: sampling.min_tokens, sorted(EOS)] = -torch.inf
            logits = truncated(logits, sampling.top_k, sampling.top_p)
        else:
            assert torch.equal(logits.argmax(-1), row)
        expected = logits.log_softmax(-1).gather(-1, row[:, None])[:, 0]
        torch.testing.assert_close(sampled, expected, atol=TOLERANCE, rtol=0)


def rows_end_at_the_right_token(subject):
    """A row ends at any end-of-sequence token of the model, at its length, or at a stop string, which it
    keeps.
    """
    if subject.modelless:
        return
    free = subject.generate(Sampling(8, 40))
    assert {"stop", "length"} == set(free["finish"])
    for row, why in zip(tokens(free), free["finish"], strict=True):
        assert row[-1] in EOS if why == "stop" else len(row) == 40
        assert not EOS & set(row[:-1])
    assert len({row[-1] for row, why in zip(tokens(free), free["finish"], strict=True) if why == "stop"}) > 1
    stop = max((letters for text in free["completion"] for letters in re.split(r"<\w+>", text)), key=len)[
        10:12
    ]
    cut = subject.generate(Sampling(8, 40, stop=(stop, "never there")))
    for i, before in enumerate(free["completion"]):
        if stop in before:
            assert cut["completion"][i] == before[: before.index(stop) + len(stop)]
            assert cut["finish"][i] == "stop"
        else:
            assert tokens(cut)[i] == tokens(free)[i]
    check_least(subject, Sampling(8, 40, stop=(stop,), min_tokens=12), free)


def check_least(subject, sampling, free):
    """The first ``min_tokens`` end no row. Their log-probs cover the allowed tokens only, and later tokens
    may end it.
    """
    assert min(map(len, tokens(free))) <= sampling.min_tokens
    out = subject.generate(sampling)
    ended = [row for row, why in zip(tokens(out), out["finish"], strict=True) if why == "stop"]
    assert min(map(len, tokens(out))) > sampling.min_tokens
    assert ended
    assert not any(EOS & set(row[:-1]) for row in tokens(out))
    check_logprobs(subject, subject.prompts, out, sampling)


def special_tokens_inside_a_response_are_kept(subject):
    """They are part of the text, a stop string matches them by id, and a call may name more end tokens."""
    if subject.modelless:
        return
    free = subject.generate(Sampling(8, 40))
    ends = [row[: row.index(BOS) + 1] if BOS in row else row for row in tokens(free)]
    assert len(free) > sum(BOS in row for row in tokens(free)) > 0
    for how in (
        {"stop": ("<bos>",)},
        {"stop_token_ids": (BOS,)},
        {"stop": ("<bos>",), "skip_special_tokens": True},
    ):
        out = subject.generate(Sampling(8, 40, **how))
        assert tokens(out) == ends
        assert list(out["finish"]) == ["stop" if row[-1] in EOS | {BOS} else "length" for row in ends]
        assert list(out["completion"]) == response_texts(
            subject, out, skip_special_tokens="skip_special_tokens" in how
        )
    late = subject.generate(Sampling(8, 40, stop_token_ids=(BOS,), min_tokens=12))
    assert not any(BOS in row[:12] for row in tokens(late))
    assert BOS in {row[-1] for row in tokens(late)}
    with pytest.raises(PlanError, match=r"found: +64\n(.*)ids from 0 to 63"):
        subject.generate(Sampling(1, 4, stop_token_ids=(64,)))


def rows_have_the_recorded_lengths(subject):
    """A row's length is the listed one, by its number in the data stream. No end token is sampled, and no
    stop string ends it.
    """
    if subject.modelless:
        return
    free = subject.generate(Sampling(8, 24))
    stop, sampling = free["completion"][0][:1], Sampling(8, 24, lengths=(24, 1, 7, 13, 2))
    out = subject.generate(replace(sampling, stop=(stop,), stop_token_ids=(BOS,)))
    assert list(map(len, tokens(out))) == [sampling.lengths[number % 5] for number in range(len(out))]
    assert set(out["finish"]) == {"length"}
    assert not any(EOS & set(row) for row in tokens(out))
    check_logprobs(subject, subject.prompts, out, replace(sampling, min_tokens=24))


def fewer_tokens_are_a_prefix_of_more(subject):
    """A row with a smaller ``max_tokens`` is the same row, truncated."""
    most, seeds = Sampling(8, 24), range(100, 132)
    whole = subject.generate(most, seeds)
    assert len(set(map(len, tokens(whole)))) > 1
    for count in (1, 2, 7, 23):
        check_beginnings(subject.generate(replace(most, max_tokens=count), seeds), whole, count)


def check_beginnings(cut, whole, count):
    assert tokens(cut) == [row[:count] for row in tokens(whole)]
    for row, beginning in zip(
        pieces(whole, "sampled_logprobs"), pieces(cut, "sampled_logprobs"), strict=True
    ):
        torch.testing.assert_close(beginning, row[:count], atol=TOLERANCE, rtol=0)
    ended = zip(cut["finish"], whole["finish"], tokens(cut), tokens(whole), strict=True)
    assert all(one == other for one, other, row, before in ended if len(row) == len(before) < count)


def rows_of_real_lengths_are_sampled(subject):
    """Prompts of ten to thousands of tokens in one call, beyond every budget.

    Log-probs agree with a forward, and a repeated call gives the same bits. A row is the same among other
    rows, in another order, with fewer tokens, and alone.
    """
    if subject.modelless:
        return
    sampling = Sampling(4, 24)
    prompts = subject.of_real_lengths(sampling.max_tokens)
    seeds = [2**61 + row for row in range(len(prompts) * 4)]
    out = subject.generate(sampling, seeds, prompts)
    check_logprobs(subject, prompts, out, sampling)
    if isinstance(subject.one, GivesChunks):
        check_whole(list(subject.one.generate_chunks(prompts, sampling, seeds, 5)), out)
    else:
        assert tokens(subject.generate(sampling, seeds, prompts)) == tokens(out)
    assert len(set(map(len, tokens(out)))) > 8
    turned = list(range(len(prompts)))[::-1]
    rows = [4 * prompt + sample for prompt in turned for sample in range(4)]
    other = subject.generate(
        replace(sampling, max_tokens=5), [seeds[row] for row in rows], prompts.rows(turned)
    )
    check_beginnings(other, out.rows(rows), 5)
    some = [0, len(prompts) // 2, len(prompts) - 1]
    for prompt in some:
        assert (
            tokens(subject.generate(Sampling(1, 24), [seeds[4 * prompt]], prompts.rows([prompt])))[0]
            == tokens(out)[4 * prompt]
        )
    if isinstance(subject.one, ScoresTokens):
        scored = (out | prompts).rows([4 * prompt for prompt in some])
        torch.testing.assert_close(
            subject.one.logprobs(scored)["logprobs"], scored["sampled_logprobs"], atol=TOLERANCE, rtol=0
        )


def chunks_contain_the_rows_of_one_call(subject):
    """Rows have the same bits and come in the order in which they end; rows sampled after others come after
    them.
    """
    if not isinstance(subject.one, GivesChunks):
        return
    sampling, seeds, prompts = Sampling(12, 30), range(48), subject.prompts.select("prompt_tokens")
    whole = subject.one.generate(prompts, sampling, seeds)
    for count in (4, 100):
        parts = list(subject.one.generate_chunks(prompts, sampling, seeds, count))
        check_whole(parts, whole)
        at_once = getattr(subject.one.settings, "max_num_seqs", len(whole))
        lengths, finish = whole.data["tokens"].lengths.tolist(), whole["finish"]
        order = sorted(
            range(48), key=lambda row: (row // at_once, lengths[row], finish[row] == "length", row)
        )
        expected = [sorted(order[i] for i in part.tolist()) for part in torch.arange(48).tensor_split(count)]
        assert [part.axis.index.tolist() for part in parts] == expected


def check_whole(parts, whole):
    """Check that sizes differ by at most one, and that the bits equal ``whole``."""
    assert [len(part) for part in parts] == [
        len(part) for part in torch.arange(len(whole)).tensor_split(len(parts))
    ]
    taken = torch.cat([part.axis.index for part in parts])
    assert len({part.axis.parent for part in parts}) == 1
    joined = Batch.concat([part for part in parts if len(part)]).rows(taken.argsort())
    for name, data in whole.data.items():
        again = joined.data[name].value
        assert again == data.value if isinstance(data.value, tuple) else torch.equal(again, data.value), name


def received_weights_are_used(subject):
    """No earlier weights or values computed from them remain."""
    if subject.modelless:
        subject.one.receive(iter([("steps", torch.tensor(7))]), 7)
        assert set(subject.generate(Sampling()).data["policy_version"].value.tolist()) == {7}
        return
    trainer, versions = subject.trained(1.1), []
    before = subject.generate(Sampling(1, 8))
    subject.one.receive(trainer.weights(), 7)
    after = subject.generate(Sampling(1, 8))
    versions += [set(out.data["policy_version"].value.tolist()) for out in (before, after)]
    assert versions == [{0}, {7}]
    assert subject.mismatch(trainer, before) > 100 * TOLERANCE
    assert subject.mismatch(trainer, after) < TOLERANCE
    if isinstance(subject.one, ScoresTokens):
        scored, wanted = (
            one(after | subject.prompts)["logprobs"] for one in (subject.one.logprobs, trainer.forward)
        )
        torch.testing.assert_close(scored, wanted, atol=TOLERANCE, rtol=0)


def unsupported_calls_are_refused(subject):
    assert subject.modelless or "found 1 seeds, expected one per row: 8" in raised(
        lambda: subject.generate(Sampling(2), [1])
    )
    if subject.modelless:
        return
    weights = dict(subject.trained(1.0).weights())
    last = [name for name in weights if "norm" in name or "ln_f" in name][-1]
    empty = Batch.of(prompt_tokens=[[5], []])
    assert "found an empty prompt" in raised(lambda: subject.generate(Sampling(), None, empty))
    with pytest.raises(
        PlanError,
        match=r"a prompt of 19 tokens and max_tokens 5000\n(.*)positions of the model in "
        r"(.*)\n(.*)max_tokens",
    ):
        subject.generate(Sampling(1, 5000))
    assert "nonsense" in raised(lambda: subject.one.receive(iter([("nonsense", torch.zeros(1))]), 9))
    missing = ((name, x) for name, x in weights.items() if name != last)
    assert last in raised(lambda: subject.one.receive(missing, 9))
    assert "[3]" in raised(lambda: subject.one.receive(((name, torch.zeros(3)) for name in weights), 9))
    subject.one.receive(iter(weights.items()), 9)
    assert set(subject.generate(Sampling(1, 4)).data["policy_version"].value.tolist()) == {9}


def sleep_changes_nothing(subject):
    before = tokens(subject.generate(Sampling(1, 8)))
    subject.one.sleep()
    subject.one.wake()
    assert tokens(subject.generate(Sampling(1, 8))) == before


def ranks_share_rows_or_sample_alone(subject):
    """Ranks that share an engine sample the same rows, each with its part of the weights. Other ranks sample
    any rows or none.
    """
    if subject.team == 1:
        share = subject.prompts.rows([] if subject.ground.rank else [0, 1])
        assert len(subject.generate(Sampling(2, 4), prompts=share)) == 2 * len(share)
        assert sum(subject.ground.together(1)) == subject.ground.ranks  # the group of all ranks is unchanged
        return
    first, *others = subject.ground.together(tokens(subject.generate(Sampling(2, 24))))
    assert all(rows == first for rows in others)
    part_bytes = sum(parameter.nbytes for parameter in subject.one.module.parameters())
    whole = sum(tensor.nbytes for _, tensor in subject.trained(1.0).weights())
    assert part_bytes <= 0.6 * whole, part_bytes / whole


CLAIMS = {
    "rows have their columns": rows_have_their_columns,
    "no prompts give no rows": no_prompts_give_no_rows,
    "a row depends only on its prompt and its seed": a_row_depends_only_on_its_prompt_and_its_seed,
    "sampled log-probs match a forward": sampled_logprobs_match_a_forward,
    "rows end at the right token": rows_end_at_the_right_token,
    "special tokens inside a response are kept": special_tokens_inside_a_response_are_kept,
    "rows have the recorded lengths": rows_have_the_recorded_lengths,
    "fewer tokens are a prefix of more": fewer_tokens_are_a_prefix_of_more,
    "rows of real lengths are sampled": rows_of_real_lengths_are_sampled,
    "chunks contain the rows of one call": chunks_contain_the_rows_of_one_call,
    "received weights are used": received_weights_are_used,
    "unsupported calls are refused": unsupported_calls_are_refused,
    "sleep changes nothing": sleep_changes_nothing,
    "ranks share rows or sample alone": ranks_share_rows_or_sample_alone,
}
