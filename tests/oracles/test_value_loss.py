"""The clipped loss of a critic."""

from pathlib import Path

import torch

from rlflow.algorithms import ppo
from rlflow.author.load import load
from rlflow.training.objective import New

registry = load(Path(__file__).with_name("registry.py"))
as_is, averaged = registry.as_is, registry.averaged
MEANS = {
    "verl-value-1": "tokens",
    "verl-value-3": "row-tokens",
    "verl-value-5": "tokens",
    "areal-value-mse": "tokens",
    "orlhf-value-1": "tokens",
    "orlhf-value-3": "row-tokens",
}


@as_is(*MEANS)
def test_value_loss(case):
    now = case.inputs["vpreds"].clone().requires_grad_()
    clip = next(
        case.settings[name]
        for name in ("cliprange_value", "clip_eps", "value_eps_clip")
        if name in case.settings
    )
    value, _ = ppo.value_loss(New(values=now), case.inputs["values"], case.inputs["returns"], clip=clip)
    loss = averaged(value, case.mask, MEANS[case.id])
    case.agrees(loss=loss, grad_vpreds=torch.autograd.grad(loss, now)[0])
