"""Self-play of a proposer and a solver, after Absolute Zero (Zhao et al. 2025), on sums.

One model plays both roles. As proposer, it reads a sum with a blank and writes a number for it. As solver, it
answers the new sum several times. The proposer is paid by learnability: the share of wrong answers, if some are
right. Advantages are relative to the role and the type of task, addition or subtraction: the reward minus the
mean of such rewards, divided by their deviation (TRR++). Differences from the paper: tasks are sums from the
data instead of programs from a growing set. If a proposal isn't a number, the solver gets the original sum. The
answers that measure learnability also train the solver. Means and deviations are moving averages over the
iterations, as in SPIRAL (Liu et al. 2025), in a table for each role. `decay=0` is the paper's mean over the
batch. Truncated importance weights correct the mismatch between sampler and trainer (Yao et al. 2025).
"""

import re
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt

from rlflow import (
    RANK0,
    ask,
    clipped_gain,
    concat,
    flow,
    group,
    group_mean,
    loss,
    row,
    stage,
    table,
    text,
    token,
    truncated_weights,
)

SUM = re.compile(r"(\d+) ([+-]) (\d+)")


@dataclass(frozen=True)
class SelfPlay:
    samples: Annotated[int, Ge(2)] = 8  # answers to each proposed sum
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest proposal, and longest answer
    request: str = (
        "Write only a number for ? that makes this hard, but not too hard:\n"  # before the blank sum
    )
    digits: Annotated[int, Ge(1)] = 2  # a proposal has at most so many
    correct: float = 0.5  # an answer with at least this score is right
    wrong: float = -0.5  # reward of a wrong answer, and of a sum that is answered always or never
    malformed: float = -1.0  # reward of an answer or a proposal that isn't a number
    decay: Annotated[float, Ge(0), Lt(1)] = 0.95  # of the moving averages, per iteration
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives={"question": text, "original": text, "kind": row("int64")})
def blank(prompt, *, request):
    """Return the proposer's prompts, the original ones, and their type: 0 for +, 1 for -, 2 without a sum."""
    sums = [SUM.search(asked) for asked in prompt]
    blanks = [
        request + (f"{asked[: found.start()]}?{asked[found.end(1) :]}" if found else asked)
        for asked, found in zip(prompt, sums, strict=True)
    ]
    return blanks, prompt, torch.tensor(["+-".index(found[2]) if found else 2 for found in sums])


@stage(gives={"question": text, "answer": text, "valid": row("float32")})
def pose(completion, original: text, answer, *, digits):
    """Return the sums with the proposed numbers, their answers, and 1.0 for each proposal that is a number. For
    other proposals, return the original sum and its answer."""
    posed = []
    for said, asked, known in zip(completion, original, answer, strict=True):
        found, number = SUM.search(asked), said.strip()
        if found and len(number) <= digits and number.isdecimal() and number.isascii():
            first, second = int(number), int(found[3])
            value = first + second if found[2] == "+" else first - second
            posed.append((f"{asked[: found.start()]}{first}{asked[found.end(1) :]}", str(value), 1.0))
        else:
            posed.append((asked, known, 0.0))
    valid = torch.tensor([is_number for _, _, is_number in posed])
    return [question for question, _, _ in posed], [result for _, result, _ in posed], valid, {"valid": valid}


@stage(gives={"scores": row("float32"), "solved": row("float32")})
def grade(completion, scores, *, correct, wrong, malformed):
    """Return the solver's rewards, and 1.0 for each right answer, else 0.0. A missing score (NaN) stays."""
    numbers = torch.tensor([bool(re.fullmatch(r"\s*-?\d+\s*", said)) for said in completion])
    solved = torch.where(scores.isnan(), torch.nan, (scores >= correct).to(scores))
    failed = torch.where(numbers, wrong, malformed).to(scores)
    return torch.where(solved == 0, failed, solved), solved, {"solved": solved}


@stage(gives={"rate": group("float32")}, rows="group")
def solve_rate(solved: row("float32"), group):
    return group_mean(solved, group)


@stage(gives="scores")
def pay(valid: row("float32"), rate: row("float32"), *, wrong, malformed):
    """Return the proposer's rewards: 1 - rate for a sum that is answered right sometimes, not always."""
    learnable = torch.where((rate > 0) & (rate < 1), 1 - rate, torch.where(rate.isnan(), rate, wrong))
    return torch.where(valid > 0, learnable, malformed)


@stage(
    gives={
        "advantages": token("float32"),
        "weight": row("float32"),
        "mean": row("float32"),
        "square": row("float32"),
    },
    dispatch=RANK0,  # the averages are over the complete batch
)
def compare(
    scores,
    kind: row("int64"),
    mask,
    weight: row("float32"),
    mean: row("float32"),
    square: row("float32"),
    *,
    decay,
):
    """Return the advantages, and the new moving averages of each kind: of 1, of the scores and of their squares.
    A row with a missing score (NaN) is excluded from them, and from the update."""
    now = group_mean(scores, kind)
    weight = decay * weight + (1 - decay) * torch.where(now.isnan(), now, 1.0)
    mean = decay * mean + (1 - decay) * now
    square = decay * square + (1 - decay) * group_mean(scores.square(), kind)
    centre = mean / weight
    deviation = (square / weight - centre.square()).clamp(min=0).sqrt()
    advantages = torch.where(mask, ((scores - centre) / (deviation + 1e-4))[:, None], 0.0)
    return advantages, weight, mean, square, {"reward": scores}


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


def answered(prompts, actor, reward, hp):
    """Answer the sums of the data. Evaluation on held-out prompts measures these answers."""
    batch = actor.generate(prompts, max_tokens=hp.max_tokens)
    return batch | reward(batch)


@flow(
    evaluate=answered,
    keeps=lambda hp: {
        "proposer": table(key="kind", weight=0.0, mean=0.0, square=0.0),
        "solver": table(key="kind", weight=0.0, mean=0.0, square=0.0),
    },
)
def selfplay(prompts, actor, reward, proposer, solver, hp=SelfPlay()):
    prompts |= blank(prompts, request=hp.request)
    posed = actor.generate(ask(prompts, "question"), max_tokens=hp.max_tokens)
    posed |= pose(posed, digits=hp.digits)
    tried = actor.generate(ask(posed, "question"), samples=hp.samples, max_tokens=hp.max_tokens)
    tried |= reward(tried)
    tried |= grade(tried, correct=hp.correct, wrong=hp.wrong, malformed=hp.malformed)
    posed |= solve_rate(tried)
    posed |= pay(posed, wrong=hp.wrong, malformed=hp.malformed)
    posed |= compare(posed | proposer.read(posed), decay=hp.decay)
    tried |= compare(tried | solver.read(tried), decay=hp.decay)
    proposer.write(posed, weight="set", mean="set", square="set")
    solver.write(tried, weight="set", mean="set", square="set")
    both = concat(posed, tried)
    both |= actor.logprobs(both)
    both |= truncated_weights(both, cap=hp.is_cap)
    actor.update(both, policy_loss, clip=hp.clip, epochs=hp.epochs, minibatch=hp.minibatch)
