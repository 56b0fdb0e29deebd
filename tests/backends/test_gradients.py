"""The gradient of a minibatch does not depend on its cut, order or padding."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import loss
from rlflow.author.batch import Batch, padding
from rlflow.backends.local import Trainer
from rlflow.training.learning import OptimizerStep
from rlflow.training.protocols import ModelSpec

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not


class Recorder(Trainer):
    """A trainer that keeps the gradient of its last step and skips the step."""

    def step(self):
        self.gradient = torch.cat(
            [p.grad.flatten() for p in self.network.parameters().values() if p.grad is not None]
        )
        self.optimizer.zero_grad()
        return OptimizerStep(True, float(self.gradient.norm()), 0.0)


@pytest.fixture(scope="module")
def recorders(folders):
    return {
        dtype: Recorder(ModelSpec(folders["gpt2"], trained=True, dtype=dtype))
        for dtype in ("float32", "float64")
    }


def random_batch(seed, rows=6):
    """Draw rows of different lengths in groups of two, with masked-out tokens that are NaN and one empty
    mask.
    """
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (rows,), generator=random).tolist()
    mask = [torch.rand(n, generator=random) < 0.8 for n in lengths]
    mask[0][:] = False
    mask[1][0] = True
    advantages = [torch.where(m, torch.randn(len(m), generator=random), torch.nan) for m in mask]
    return Batch.of(
        prompt_tokens=[
            torch.randint(3, 60, (n,), generator=random)
            for n in torch.randint(1, 7, (rows,), generator=random).tolist()
        ],
        tokens=[torch.randint(3, 60, (n,), generator=random) for n in lengths],
        mask=mask,
        logprobs=[-3 + torch.randn(n, generator=random) for n in lengths],
        advantages=advantages,
        scores=torch.randn(rows, generator=random),
        temperature=0.5 + torch.rand(rows, generator=random),
        group=[i // 2 for i in range(rows)],
    )


@loss(new=("logprobs", "entropy"))
def per_token(new, logprobs, advantages, mask, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -torch.min(
        ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    ) - 0.01 * new.entropy, {"ratio": ratio}


@loss
def per_row(new, scores, mask, *, clip):
    return -scores * torch.where(mask, new.logprobs, 0).sum(1) * clip, {}


@loss(rows="group")
def per_pair(new, scores, mask, *, clip):
    sums = torch.where(mask, new.logprobs, 0).sum(1)
    margin = (sums[0::2] - sums[1::2]) * (scores[0::2] - scores[1::2]).sign()
    return -torch.nn.functional.logsigmoid(clip * margin).repeat_interleave(2), {"margin": margin}


def gradient(recorder, batch, objective, mean, micro_tokens):
    recorder.settings = replace(recorder.settings, micro_tokens=micro_tokens)
    metrics = recorder.update(batch, objective, mean=mean, clip=0.2)
    return recorder.gradient, metrics


CASES = [
    (per_token, "tokens"),
    (per_token, "row-tokens"),
    (per_token, 7.5),
    (per_row, "rows"),
    (per_row, 3),
    (per_pair, "rows"),
]
LIMIT = {"float32": 1e-6, "float64": 1e-9}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("objective", "mean"), CASES)
@settings(max_examples=6, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    micro_tokens=st.integers(1, 100),
    fill=st.sampled_from([0.0, float("nan"), 1e30]),
    data=st.data(),
)
def test_gradients_do_not_depend_on_cuts_padding_or_order(
    recorders, dtype, objective, mean, seed, micro_tokens, fill, data
):
    batch = random_batch(seed)
    groups = data.draw(st.permutations(range(3)))
    order = (
        [2 * g + i for g in groups for i in (0, 1)]
        if objective is per_pair
        else data.draw(st.permutations(range(6)))
    )
    whole, metrics = gradient(recorders[dtype], batch, objective, mean, 10**9)
    with padding(fill):
        cut, cut_metrics = gradient(recorders[dtype], batch.rows(order), objective, mean, micro_tokens)
    assert whole.norm() > 0
    assert (whole - cut).norm() <= LIMIT[dtype] * whole.norm()
    assert cut_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)


def test_the_gradient_matches_the_formula_row_by_row(recorders):
    """mean="tokens": the sum over masked tokens, divided by their number; each row is computed alone without
    padding.
    """
    batch, recorder = random_batch(3), recorders["float64"]
    got, metrics = gradient(recorder, batch, per_token, "tokens", 40)
    total, count = 0.0, 0
    for i in range(len(batch)):
        row = batch.rows([i])
        new = recorder.compute(row, ("logprobs", "entropy"))
        value, _ = per_token(new, row["logprobs"], torch.nan_to_num(row["advantages"]), row["mask"], clip=0.2)
        total, count = total + value[row["mask"]].sum(), count + int(row["mask"].sum())
    (total / count).backward()
    recorder.step()
    assert (got - recorder.gradient).norm() <= 1e-12 * got.norm()
    assert metrics["loss"] == pytest.approx(float(total.detach() / count))


def test_minibatches_and_steps_do_not_depend_on_micro_batches(folders):
    after = []
    for micro_tokens in (10**9, 20):
        trainer = Trainer(
            ModelSpec(folders["gpt2"], trained=True, dtype="float64"),
            Trainer.Settings(lr=1e-3, micro_tokens=micro_tokens),
        )
        metrics = trainer.update(random_batch(5), per_token, epochs=3, minibatch=4, seed=9, clip=0.2)
        assert metrics["steps"] == 6
        after.append(torch.cat([tensor.flatten() for _, tensor in trainer.weights()]))
    assert (after[0] - after[1]).norm() <= 1e-9 * after[0].norm()
