"""Trained tokens: the mask and `finish` of the local generator, and the position of a score."""

from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import GPT2Config

from rlflow import place_last
from rlflow.author.load import load
from rlflow.backends.local.decode import decode
from rlflow.backends.local.endings import Endings
from rlflow.backends.local.generator import _columns
from rlflow.data.turns import joined
from rlflow.training.protocols import Sampling

registry = load(Path(__file__).with_name("registry.py"))
as_is, transformed = registry.as_is, registry.transformed


class Recorded:
    """A network whose likeliest token at each position is the recorded token."""

    device = torch.device("cpu")
    module = SimpleNamespace(config=GPT2Config(n_layer=1))

    def __init__(self, tokens):
        self.tokens = tokens

    def hidden(self, ids, positions, cache, **_):
        cache.update(*(torch.zeros(len(ids), 1, ids.shape[1], 1) for _ in range(2)), 0)
        return positions.expand_as(ids)[..., None].float()

    def logits(self, hidden):
        return torch.nn.functional.one_hot(self.tokens[hidden[:, 0].long()], 100).float()


def generated(ids, eos):
    """Run the local generator's decode loop over recorded tokens, which continue after the end token ``eos``.

    Returns the response's mask, padded to the number of recorded tokens, and whether the response ended with
    ``eos``.
    """
    sampling = Sampling(max_tokens=len(ids), temperature=0.0)
    *_, (drawn, _) = decode(
        Recorded(ids),
        [torch.tensor([5])],
        torch.tensor([0]),
        torch.zeros(1, len(ids)),
        sampling,
        Endings(torch.tensor([eos]), (), None),
        1,
    )
    mask = _columns(drawn, sampling, 0)["mask"]
    return torch.nn.functional.pad(mask.value, (0, len(ids) - len(mask.value))), bool(drawn.stopped)


@as_is("verl-respmask-1", "verl-respmask-3", "inv-mask-eos-is-pad")
def test_a_response_ends_with_its_first_eos(case):
    rows = [generated(ids, case.settings["eos"]) for ids in case.inputs["response_ids"]]
    case.agrees(mask=torch.stack([mask for mask, _ in rows]).long())
    if "truncated" in case.expected:
        case.agrees(truncated=torch.tensor([not stopped for _, stopped in rows]))


@as_is("inv-reward-index")
def test_a_score_is_placed_on_the_last_masked_token(case):
    case.agrees(token_rewards=place_last(case.inputs["scores"], case.mask))


@transformed(
    "The peer's rows begin with the prompt, where the mask is 1, and end with padding; rlflow's rows have "
    "neither",
    "searchr1-mask-1",
)
def test_tool_output_is_masked_out(case):
    names = ("previous", "response", "info", "next_response")
    rows = []
    for number in range(2):
        prompt, *turns = (
            [token for token in case.inputs[name][number].tolist() if token != case.settings["pad_id"]]
            for name in names
        )
        tokens, mask = joined(list(zip(turns, (True, False, True), strict=True)))
        rows.append(
            [(token, True, True) for token in prompt]
            + [(token, counts, True) for token, counts in zip(tokens, mask, strict=True)]
        )
    padded = [
        row + [(case.settings["pad_id"], False, False)] * (case.expected["tokens"].shape[1] - len(row))
        for row in rows
    ]
    tokens, mask, attended = torch.tensor(padded).unbind(2)
    case.agrees(tokens=tokens, loss_mask=mask.bool(), attention_mask=attended.bool())
