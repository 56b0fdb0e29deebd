"""What each rank does beside the local trainer: rows, losses, steps of which ranks have uneven shares, and a pair of trainers."""

import sys
from pathlib import Path

import torch

from rlflow import loss
from rlflow.backends import fsdp, local
from rlflow.batch import Batch
from rlflow.training.learning import Share
from rlflow.training.objective import Totals
from rlflow.training.protocols import ModelSpec
from rlflow.training.rows import mask_counts

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
FOLDER, MODELS = Path(sys.argv[3]), Path(sys.argv[4])


@loss(new=("logprobs", "entropy"))
def both(new, mask):
    return -new.logprobs - 0.1 * new.entropy, {"entropy": new.entropy}


@loss(new="values")
def regression(new, mask):
    return (new.values - 1).square(), {}


@loss(new="scores", rows="group")
def ranking(new, mask):
    return -torch.nn.functional.logsigmoid(new.scores[0::2] - new.scores[1::2]).repeat_interleave(2), {}


OBJECTIVES = {"logprobs": (both, "tokens"), "values": (regression, "row-tokens"), "scores": (ranking, "rows")}


def rows(count=12):
    chance = torch.Generator().manual_seed(0)
    draw = lambda low, high: torch.randint(low, high, (count,), generator=chance).tolist()  # noqa: E731
    prompts, lengths = draw(1, 7), draw(1, 9)
    return Batch.of(prompt_tokens=[torch.randint(3, 60, (n,), generator=chance) for n in prompts],
                    tokens=[torch.randint(3, 60, (n,), generator=chance) for n in lengths],
                    mask=[[i != 2 for i in range(n)] for n in lengths], group=[i // 2 for i in range(count)],
                    temperature=[[1.0, 0.7][i % 2] for i in range(count)])


# Of each optimizer step the rows, in pairs, and which share of them each of up to four data-parallel ranks takes.
STEPS = [([0, 1, 2, 3, 4, 5, 6, 7], [3, 1, 0, 0]), ([8, 9], [0, 1, 0, 0]), ([10, 11, 2, 3, 6, 7], [1, 2, 0, 0])]


def shares(batch, rank, ranks, grouped):
    for taken, pairs in STEPS:
        totals = Totals.of(mask_counts(batch)[torch.tensor(taken)])
        counts = pairs[: ranks - 1] + [sum(pairs[ranks - 1 :])]
        begin = 2 * sum(counts[:rank])
        mine = torch.tensor(taken[begin : begin + 2 * counts[rank]], dtype=torch.int64)
        yield Share(list(mine.split(2 if grouped else 1)) if len(mine) else [], totals)


def learn(trainer, head, rank=0, ranks=1):
    objective, mean = OBJECTIVES[head]
    batch = rows()
    return trainer.update_shares(batch, objective, list(shares(batch, rank, ranks, head == "scores")), mean, {})


SETTINGS = {"lr": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.01, "micro_tokens": 40, "logit_tokens": 7, "warmup": 2}


ALONE = []  # peers of this rank alone


class Pair:
    """The local trainer and the sharded one, alike."""

    def __init__(self, model, head="logprobs", *, trained=True, dtype="float32", tensor_parallel=1, dims=(), **settings):
        spec = ModelSpec(MODELS / model, head, trained, dtype=dtype, seed=5, dims=dims)
        self.head, self.data = head, RANKS // tensor_parallel
        alike = {name: value for name, value in settings.items() if name != "shard"}
        self.local = local.Trainer(spec, local.Trainer.Settings(**SETTINGS | alike))
        self.local.peers = ALONE[0]
        self.fsdp = fsdp.Trainer(spec, fsdp.Trainer.Settings(**SETTINGS | settings, tensor_parallel=tensor_parallel))
        self.rank = RANK // tensor_parallel

    def learn(self):
        return learn(self.local, self.head), learn(self.fsdp, self.head, self.rank, self.data)

    def forward(self, atol=1e-5):
        """Each rank with rows of its own, the last with none where there are several."""
        want = ("logprobs", "entropy") if self.head == "logprobs" else (self.head,)
        mine = torch.arange(self.rank, 12, max(self.data - 1, 1))[: 0 if self.rank and self.rank == self.data - 1 else 12]
        found, wanted = self.fsdp.forward(rows().rows(mine), want), self.local.forward(rows().rows(mine), want)
        for name in want:
            torch.testing.assert_close(found[name], wanted[name], atol=atol, rtol=0)

    def close(self, limit=1e-5):
        """The weights of both, which all ranks gather."""
        distance, size = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for (name, found), (same, wanted) in zip(self.fsdp.weights(), self.local.weights(), strict=True):
            assert name == same
            assert found.shape == wanted.shape
            distance += (found.double() - wanted.double()).square().sum()
            size += wanted.double().square().sum()
        assert float((distance / size).sqrt()) <= limit, float((distance / size).sqrt())

    def everything(self):
        self.forward()
        one, other = self.learn()
        assert one.steps["steps"] == other.steps["steps"] == len(STEPS)
        for name in ("loss", "grad_norm", "lr", "skipped_steps"):
            assert abs(one.steps[name] - other.steps[name]) <= 1e-5 * max(1.0, abs(one.steps[name])), (name, one.steps, other.steps)
        self.close()
        self.forward(1e-4)  # by weights that are no longer the same bits
