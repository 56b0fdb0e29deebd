"""A solver and a verifier that learn together (after RL Tango, Zha et al. 2025, "Reinforcing Generator and
Verifier Together").

The verifier samples several verdicts on each answer: right or wrong. A verdict's reward is 1 if it is
correct. An answer's reward combines its score with the share of verdicts that call it right. Answers are
compared with the prompt's other answers, verdicts with the answer's other verdicts. Differences from the
paper: the verifier checks complete answers, not steps. The two parts of the solver's reward have fixed
weights. Truncated importance weights correct the mismatch between sampler and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from rlflow import (
    ask,
    clipped_gain,
    compare,
    flow,
    group,
    group_mean,
    loss,
    row,
    stage,
    text,
    truncated_weights,
)


@dataclass(frozen=True)
class Critique:
    samples: Annotated[int, Ge(2)] = 8  # answers per prompt
    verdicts: Annotated[int, Ge(2)] = 4  # verdicts on each answer
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest answer
    max_verdict: Annotated[int, Ge(1)] = 512  # longest verdict, in tokens
    request: str = "Is this answer right? End with RIGHT or WRONG."  # comes after the question and an answer
    right: str = "RIGHT"  # the verifier's word for a right answer
    wrong: str = "WRONG"  # and for a wrong one; the last of the two words in a verdict counts
    correct: float = 0.5  # an answer with at least this score is right
    trust: Annotated[float, Ge(0), Le(1)] = 0.2  # weight of the verdicts in the solver's reward
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives={"question": text})
def ask_verifier(prompt, completion, *, request):
    return [f"{asked} {said}\n{request}" for asked, said in zip(prompt, completion, strict=True)]


@stage(gives={"agrees": row("float32"), "believes": row("float32")})
def judge(completion, scores, *, right, wrong, correct):
    """Return, for each verdict, whether it is correct and whether it calls the answer right, as 1.0 or 0.0.
    Both are 0.0 for a string without a verdict."""
    places = [(said.rfind(right), said.rfind(wrong)) for said in completion]
    yes, no = torch.tensor([y > n for y, n in places]), torch.tensor([n > y for y, n in places])
    agrees = torch.where(scores >= correct, yes, no).to(scores)
    return torch.where(scores.isnan(), torch.nan, agrees), yes.to(scores), {"agrees": agrees}


@stage(gives={"believed": group("float32")}, rows="group")
def mean_belief(believes: row("float32"), group):
    return group_mean(believes, group)


@stage(gives="scores")
def pay(scores, believed: row("float32"), *, trust):
    return (1 - trust) * scores + trust * believed


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


@flow
def critique(prompts, solver, verifier, reward, hp=Critique()):
    answers = solver.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    answers |= reward(answers)
    asked = ask(answers | ask_verifier(answers, request=hp.request), "question")
    readings = verifier.generate(asked, samples=hp.verdicts, max_tokens=hp.max_verdict)
    readings |= judge(readings, right=hp.right, wrong=hp.wrong, correct=hp.correct)
    answers |= mean_belief(readings)
    answers |= compare(pay(answers, trust=hp.trust) | answers.select("group", "mask"))
    readings |= compare(readings.rename(agrees="scores"))
    for player, rows in ((solver, answers), (verifier, readings)):
        rows |= player.logprobs(rows)
        rows |= truncated_weights(rows, cap=hp.is_cap)
        player.update(rows, policy_loss, clip=hp.clip, epochs=hp.epochs, minibatch=hp.minibatch)
