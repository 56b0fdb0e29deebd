"""Flows whose rows have a history: follow-ups, choices, joins, and columns merged up to the rows of the
follow-ups.
"""

import torch

from rlflow import (
    ask,
    choose,
    concat,
    encode,
    flow,
    group,
    group_mean,
    loss,
    repeat,
    row,
    stage,
    text,
    token,
    truncated_weights,
)


@loss
def policy_loss(new, logprobs, advantages, weights):
    return -weights * (new.logprobs - logprobs).exp() * advantages, {}


@loss
def likelihood(new, mask):
    return -new.logprobs, {}


@stage(gives={"question": text})
def ask_verifier(prompt, completion):
    """Ask as a chat of several messages."""
    return [
        [
            {"role": "user", "content": p},
            {"role": "assistant", "content": c},
            {"role": "user", "content": "Is that right?"},
        ]
        for p, c in zip(prompt, completion, strict=True)
    ]


@stage(gives={"question": text})
def ask_again(completion, *, word):
    return [f"{word} {c}" for c in completion]


@stage(gives={"believed": group("float32")}, rows="group")
def mean_verdict(scores, group):
    return group_mean(scores, group)


@stage(gives={"told": row("float32")})
def told(prompt_id, iteration, progress):
    """Return a number that identifies the record of a row and the time."""
    return prompt_id + 0.1 * iteration + progress, {
        "prompt_id": prompt_id.float(),
        "iteration": iteration,
        "progress": progress,
    }


@stage(gives={"paid": row("float32")})
def paid(scores, believed, told):
    return scores + believed + 0.01 * told


@stage(gives="advantages")
def per_token(paid, mask):
    return torch.where(mask, paid[:, None], 0.0)


@stage(gives="advantages", rows="group")
def centred(scores, group, mask):
    return torch.where(mask, (scores - group_mean(scores, group))[:, None], 0.0)


@stage(gives={"hard": row("bool")})
def hard_enough(prompt_tokens):
    return prompt_tokens[:, 0] % 3 != 0


@stage(gives={"liked": row("bool")})
def liked(scores, *, bar):
    return scores > bar


@flow
def critique(prompts, solver, verifier, reward):
    """A trained verifier judges a solver's answers to the harder prompts; both learn."""
    prompts = choose(prompts | hard_enough(prompts), "hard")
    first = solver.generate(prompts, samples=4, max_tokens=5)
    first |= reward(first)
    asked = ask(first | ask_verifier(first), "question")
    second = verifier.generate(asked, samples=2, max_tokens=4)
    second |= reward(second)
    second |= mean_verdict(second)
    first |= second.select("believed")
    first |= told(first)
    told(second)
    first |= paid(first)
    first |= per_token(first)
    first |= solver.logprobs(first)
    first |= truncated_weights(first, cap=2.0)
    second |= centred(second)
    second |= verifier.logprobs(second)
    second |= truncated_weights(second, cap=2.0)
    solver.update(first, policy_loss)
    verifier.update(second, policy_loss, minibatch=3)


def second_attempt(prompts, actor, reward):
    """The evaluation of two attempts: the score of the last one."""
    first = actor.generate(prompts, samples=2, max_tokens=4)
    first = choose(first | reward(first), top="scores", count=1, per="group")
    last = actor.generate(
        ask(first | ask_again(first, word="again"), "question"), max_tokens=4, temperature=0.5
    )
    return last | reward(last)


@flow(evaluate=second_attempt)
def correction(prompts, actor, reward):
    """Self-correction: the second attempt is rewarded for its improvement, and both attempts learn in one
    update.
    """
    first = actor.generate(prompts, samples=2, max_tokens=4)
    first |= reward(first)
    second = actor.generate(ask(first | ask_again(first, word="again"), "question"), max_tokens=4)
    second |= reward(second)
    first |= centred(first)
    second |= second_pay(second)
    both = concat(
        first.select(
            "prompt_tokens", "tokens", "mask", "sampled_logprobs", "advantages", "policy_version", "prompt_id"
        ),
        second,
    )
    told(both)
    both |= actor.logprobs(both)
    both |= truncated_weights(both, cap=2.0)
    actor.update(both, policy_loss, minibatch=5)


@stage(gives="advantages")
def second_pay(scores, mask):
    return torch.where(mask, scores[:, None], 0.0)


@flow
def debate(prompts, one, other, reward):
    """Two players alternate, twice each."""
    first = one.generate(prompts, samples=2, max_tokens=3)
    reply = other.generate(ask(first | ask_again(first, word="no:"), "question"), max_tokens=3)
    last = one.generate(ask(reply | ask_again(reply, word="but:"), "question"), samples=2, max_tokens=3)
    last |= reward(last)
    last |= mean_verdict(last)
    last |= centred(last)
    last |= one.logprobs(last)
    last |= truncated_weights(last, cap=2.0)
    reply |= last.select("believed")
    reply |= reply_pay(reply)
    reply |= other.logprobs(reply)
    reply |= truncated_weights(reply, cap=2.0)
    one.update(last, policy_loss)
    other.update(reply, policy_loss)


@stage(gives="advantages")
def reply_pay(believed, mask):
    return torch.where(mask, -believed[:, None], 0.0)


@flow
def raft(prompts, actor, reward):
    """The best row of each group, then maximum likelihood."""
    batch = actor.generate(prompts, samples=4, max_tokens=5)
    batch |= reward(batch)
    best = choose(batch, top="scores", count=1, per="group")
    actor.update(best, likelihood)


@flow
def marked(prompts, actor, reward):
    """Columns of chosen rows merge up to all rows, with NaN for the others."""
    batch = actor.generate(prompts, samples=3, max_tokens=5)
    batch |= reward(batch)
    some = choose(batch | liked(batch, bar=0.4), "liked")
    some |= doubled(some)
    batch |= some.select("double")
    batch |= double_pay(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=2.0)
    actor.update(batch, policy_loss)


@stage(gives={"double": row("float32"), "noise": token("float32")})
def doubled(scores, mask, *, generator):
    drawn = torch.stack([torch.rand((), generator=one) for one in generator]) if generator else scores
    return 2 * scores + drawn, mask.float()


@stage(gives="advantages")
def double_pay(double, mask):
    return torch.where(mask, double[:, None], 0.0)


@flow(evaluate=second_attempt)
def harder(prompts, actor, reward):
    """The flow chooses prompts before sampling until it has enough."""

    def body(fresh):
        return choose(fresh | hard_enough(fresh), "hard")

    batch = actor.generate(repeat(body, prompts, groups=4, tries=3), samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= centred(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=2.0)
    actor.update(batch, policy_loss)


@stage(gives={"step": token("bool")})
def steps(mask):
    """Every second token starts a step."""
    return mask & (torch.arange(mask.shape[1]) % 2 == 0)


@stage(gives={"value": group("float32")}, rows="group")
def mean_score(scores, group):
    return group_mean(scores, group)


@stage(gives="advantages")
def gain_of_steps(scores, value, mask):
    """Return the value after a step minus the value before it."""
    known = torch.where(mask & ~value.isnan(), value, 0.0)
    return torch.where(mask, scores[:, None] - known, 0.0)


@flow
def vine(prompts, actor, reward):
    """The value of a prefix is the mean score of its continuations."""
    batch = actor.generate(prompts, samples=2, max_tokens=6)
    batch |= reward(batch)
    rest = actor.generate(ask(batch | steps(batch), tokens_until="step"), samples=3, max_tokens=6)
    rest |= reward(rest)
    rest |= mean_score(rest)
    batch |= rest.select("value")
    batch |= gain_of_steps(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=2.0)
    actor.update(batch, policy_loss)


@stage(gives={"half": row("int64")})
def half(mask):
    return mask.sum(1) // 2


@flow
def redone(prompts, actor, reward):
    """The second half of each answer is sampled again, and then once more after a word that follows the
    complete answer.
    """
    first = actor.generate(prompts, samples=2, max_tokens=6)
    again = actor.generate(ask(first | half(first), tokens_until="half"), samples=2, max_tokens=5)
    last = actor.generate(
        ask(again | ask_again(again, word="check:"), "question", after="tokens"), max_tokens=4
    )
    last |= reward(last)
    last |= second_pay(last)
    last |= actor.logprobs(last)
    last |= truncated_weights(last, cap=2.0)
    actor.update(last, policy_loss)


@stage(gives={"lesson": text})
def lesson(prompt_tokens):
    """Return a lesson for two of three prompts; every third lesson is longer than the flow allows."""
    return ["lesson " * (number % 3) for number in prompt_tokens.sum(1).tolist()]


@stage(gives={"better": text})
def improved(completion, scores):
    return [
        f"better {c}" if score > 0.3 else "" for c, score in zip(completion, scores.tolist(), strict=True)
    ]


@stage(gives={"gain": row("float32")})
def gain(new_scores: row("float32"), scores):
    return new_scores - scores


@stage(gives="advantages")
def gain_pay(gain, mask):
    return torch.where(mask, gain.nan_to_num()[:, None], 0.0)


@flow
def taught(prompts, actor, reward):
    """The model learns from lessons, from its responses, and from rewritten responses."""
    shown = encode(prompts | lesson(prompts), "lesson", actor, max_tokens=9)
    batch = actor.generate(prompts, samples=3, max_tokens=5)
    batch |= reward(batch)
    better = encode(batch | improved(batch), "better", actor)
    better |= reward(better, gives="new_scores")
    better |= gain(better)
    better |= actor.logprobs(better)
    batch |= better.select("gain")
    batch |= gain_pay(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=2.0)
    actor.update(batch, policy_loss)
    better |= centred(better)
    actor.update(better, imitation, minibatch=2)
    actor.update(shown, likelihood)


@loss
def imitation(new, advantages):
    return -new.logprobs * advantages, {}


@flow
def reviewed(prompts, actor, reward):
    """The model answers questions about lessons; both the lessons and the answers are trained on."""
    shown = encode(prompts | lesson(prompts), "lesson", actor, max_tokens=9)
    batch = actor.generate(ask(shown | ask_again(shown, word="why:"), "question"), samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= centred(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=2.0)
    actor.update(batch, policy_loss)
    actor.update(shown, likelihood)


@stage(gives={"off": row("int64")})
def origin(part):
    return part


@stage(gives={"good": row("bool")})
def good(scores):
    return scores > 0.2


@loss
def mixed_loss(new, logprobs, advantages, weights, off):
    ratio = torch.where(off[:, None] == 1, new.logprobs, new.logprobs - logprobs).exp()
    return -weights * ratio * advantages, {}


@flow
def demonstrated(prompts, actor, reward):
    """Lessons and rewritten responses join the groups of the sampled responses to the same prompts."""
    prompts |= lesson(prompts)
    shown = encode(prompts, "lesson", actor)
    shown |= reward(shown)
    batch = actor.generate(prompts, samples=3, max_tokens=5)
    batch |= reward(batch)
    batch = choose(batch | good(batch), "good")
    batch |= improved(batch)
    better = encode(batch, "better", actor)
    both = concat(
        batch.drop("answer"),
        shown,
        better,
        groups="prompts",
        fill={"sampled_logprobs": 0.0, "good": True, "better": "-"},
    )
    both |= origin(both)
    both |= centred(both)
    both |= mean_verdict(both)
    prompts |= both.select("believed")
    prompts |= known(prompts)
    both |= prompts.select("known")
    both |= actor.logprobs(both)
    both |= truncated_weights(both, cap=2.0)
    both = choose(both | counted(both), top="count", count=3, per="group")
    actor.update(both, mixed_loss, minibatch=3)


@stage(gives={"known": row("float32")})
def known(believed):
    return believed.nan_to_num(0.5)


@stage(gives={"count": row("float32")})
def counted(known, good, better, scores):
    return known + scores + good + torch.tensor([len(text) for text in better])
