"""Distillation: a teacher's scores of the student's tokens."""

from pathlib import Path

import torch

from rlflow import masked_mean
from rlflow.algorithms import distill
from rlflow.author.load import load
from rlflow.training.objective import New

registry = load(Path(__file__).with_name("registry.py"))
as_is, transformed, not_ours, averaged = (
    registry.as_is,
    registry.transformed,
    registry.not_ours,
    registry.averaged,
)


@as_is("nemo-opd-1")
def test_the_advantage_is_minus_the_reverse_kl(case):
    inputs = case.inputs
    case.agrees(
        advantages=distill.judge(inputs["student_logprobs"], inputs["teacher_logprobs"], case.mask)[0]
    )


@transformed(
    "The peer multiplies the negative reverse KL by a KL coefficient and adds it to other advantages. Its "
    "list of teacher log-probs has one more entry at the start",
    "tinker-opd-1",
)
def test_the_reverse_kl_next_to_other_advantages(case):
    inputs = case.inputs
    judged, metrics = distill.judge(inputs["sampled_logprobs"], inputs["teacher_logprobs"][:, 1:], case.mask)
    case.agrees(
        advantages=inputs["advantages"] + case.settings["kl_penalty_coef"] * judged,
        teacher_kl=masked_mean(metrics["reverse_kl"], case.mask),
    )


SUMMED = (
    "The peer's loss is a sum over the vocabulary; rlflow's loss is the policy gradient of the sampled "
    "token. The test compares the gradient of rlflow's expected loss"
)


@transformed(
    f"{SUMMED}, and the expected loss itself",
    "trl-gkd-1.0",
)
def test_the_expected_gradient_equals_the_reverse_kl_gradient(case):
    """Compare the loss, summed over the vocabulary with the student's probabilities as weights, and the
    gradient of this sum, at a policy ratio of 1.
    """
    logits, mask = case.inputs["student_logits"].clone().requires_grad_(), case.inputs["labels"] != -100
    student, teacher = logits.log_softmax(-1), case.inputs["teacher_logits"].log_softmax(-1)
    advantages, _ = distill.judge(
        student.detach().flatten(1), teacher.flatten(1), torch.ones_like(teacher.flatten(1), dtype=torch.bool)
    )
    fixed = student.detach().flatten(1)
    value, _ = distill.policy_loss(
        New(logprobs=student.flatten(1)), fixed, advantages, torch.ones_like(fixed), clip=0.2
    )
    expected = (value.reshape(student.shape) * student.detach().exp()).sum(-1)
    loss = averaged(expected, mask, "tokens")
    case.agrees(loss=loss, grad_student_logits=torch.autograd.grad(loss, logits)[0])


@transformed(
    f"{SUMMED}. The peer's loss value is compared with the expectation of rlflow's metric `divergence`",
    "trl-gkd-0.0",
    "trl-gkd-0.1",
    "trl-gkd-0.5",
)
def test_the_expected_gradient_equals_the_generalised_jsd_gradient(case):
    logits, mask = case.inputs["student_logits"].clone().requires_grad_(), case.inputs["labels"] != -100
    student, teacher = logits.log_softmax(-1), case.inputs["teacher_logits"].log_softmax(-1)
    fixed, all_of_them = student.detach().flatten(1), torch.ones(student.flatten(1).shape, dtype=torch.bool)
    advantages, metrics = distill.judge(fixed, teacher.flatten(1), all_of_them, jsd=case.settings["beta"])
    value, _ = distill.policy_loss(
        New(logprobs=student.flatten(1)), fixed, advantages, torch.ones_like(fixed), clip=0.2
    )

    def over_vocabulary(numbers):
        return averaged((numbers.reshape(student.shape) * student.detach().exp()).sum(-1), mask, "tokens")

    gradient = torch.autograd.grad(over_vocabulary(value), logits)[0]
    case.agrees(loss=over_vocabulary(metrics["divergence"]), grad_student_logits=gradient)


not_ours(
    "A loss that rlflow does not have: the forward KL over only the teacher's most probable tokens",
    "verl-opd-topk-1",
)
not_ours(
    "A loss that rlflow does not have: it weights a token by the share of the disagreement between teacher "
    "and student that follows the token",
    "trl-iwopd-1",
)
