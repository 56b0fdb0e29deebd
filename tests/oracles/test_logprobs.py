"""Log-probs and entropy from logits, through the local trainer's own code."""

from pathlib import Path
from types import SimpleNamespace

import torch

from rlflow.author.batch import Batch
from rlflow.author.load import load
from rlflow.backends.local import Trainer
from rlflow.backends.local.forward_cache import CachedForward
from rlflow.backends.local.logprobs import logprobs_and_entropy
from rlflow.backends.local.settings import TrainerSettings
from rlflow.training.protocols import ModelSpec

registry = load(Path(__file__).with_name("registry.py"))
as_is, averaged = registry.as_is, registry.averaged


def of(case, tokens=3):
    """Return the log-prob of each label and the entropy, both [rows, T], computed for ``tokens`` tokens at a
    time. The recorded logits take the place of the hidden states.
    """
    logits = case.inputs["logits"]
    labels = case.inputs.get("labels", torch.zeros(logits.shape[:2], dtype=torch.int64))
    temperature = torch.full((labels.numel(),), case.settings.get("temperature", 1.0), dtype=logits.dtype)
    flat = logits.flatten(0, 1), labels.flatten(), temperature
    found = logprobs_and_entropy(lambda hidden: hidden, *flat, tokens=tokens, entropy=True)
    return [x.reshape(labels.shape) for x in found]


@as_is("verl-logprob-1", "orlhf-logprob-1.0", "trl-logprob-2", "inv-temperature")
def test_logprobs(case):
    case.agrees(logprobs=of(case)[0])


@as_is("verl-entropy-1", "trl-entropy-1")
def test_entropy(case):
    case.agrees(entropy=of(case)[1])


@as_is("verl-entropyloss-1")
def test_the_mean_entropy(case):
    case.agrees(loss=averaged(of(case)[1], case.mask, "tokens"))


class Recorded(Trainer):
    """A local trainer without a model: it lays out rows and computes log-probs from recorded logits."""

    def __init__(self, logits):
        self.spec, self.settings, self.cached, self.packs = (
            ModelSpec(None),
            TrainerSettings(),
            CachedForward(),
            False,
        )
        head = torch.nn.Embedding(logits.shape[-1], 1)
        module = SimpleNamespace(get_output_embeddings=lambda: head)
        self.network = SimpleNamespace(
            device=torch.device("cpu"),
            module=module,
            hidden=lambda *_, **__: logits,
            logits=lambda x: x,
            vocabulary=logits.shape[-1],
            transform=None,
            check_row=lambda tokens: None,
        )


@as_is("inv-shift")
def test_the_logits_before_a_token_belong_to_the_token(case):
    ids = case.inputs["input_ids"]
    batch = Batch.of(prompt_tokens=[ids[0, :1]], tokens=[ids[0, 1:]])
    new = Recorded(case.inputs["logits"]).compute(batch, ("logprobs",))
    case.agrees(logprobs=new.logprobs)
