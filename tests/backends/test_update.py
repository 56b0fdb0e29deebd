"""Updates: steps and their metrics, skipped rows, broken gradients, schedules, state."""

import copy
import math

import pytest
import torch

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.author.settings import override
from rlflow.backends.local import Trainer
from rlflow.errors import FlowError, PlanError
from rlflow.training.protocols import ModelSpec


def rows(count=6, **more):
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 7, (count,), generator=random).tolist()
    return Batch.of(
        prompt_tokens=[[5, 6, 7]] * count,
        tokens=[torch.randint(3, 60, (n,), generator=random) for n in lengths],
        mask=[[True] * n for n in lengths],
        **more,
    )


def trainer(folders, head="logprobs", updates=0, **settings):
    spec = ModelSpec(folders["llama"], head=head, trained=True, updates=updates)
    return Trainer(spec, Trainer.Settings(**{"lr": 1e-3} | settings))


def weights(trainer):
    return torch.cat([tensor.flatten().double() for _, tensor in trainer.weights()])


@loss
def likelihood(new, mask):
    return -new.logprobs, {}


@loss
def weighted(new, scores):
    return -new.logprobs * scores[:, None], {}


@loss(new="values")
def regression(new, returns, mask):
    return (new.values - returns).square(), {"error": (new.values - returns).abs()}


@loss(new="scores", rows="group")
def ranking(new, chosen, mask):
    better, worse = new.scores[0::2], new.scores[1::2]
    return -torch.nn.functional.logsigmoid(better - worse).repeat_interleave(2), {"accuracy": better > worse}


def test_learning_raises_the_likelihood_and_reports_it(folders):
    learner, batch = trainer(folders), rows()
    before = learner.forward(batch)["logprobs"].sum()
    metrics = learner.update(batch, likelihood, epochs=5, minibatch=4)
    assert learner.forward(batch)["logprobs"].sum() > before
    assert metrics["steps"] == 10
    assert metrics["rows"] == 30
    assert metrics["lr"] == 1e-3
    assert metrics["left_out"] == metrics["skipped_steps"] == 0
    assert metrics["loss"] > 0
    assert metrics["grad_norm"] > 0


def test_a_critic_learns_from_zero(folders):
    batch = rows()
    batch |= Batch(batch.axis, {"returns": copy.copy(trainer(folders).forward(batch).data["logprobs"])})
    learner = trainer(folders, "values", lr=3e-3)
    first = learner.update(batch, regression)["loss"]
    learner.update(batch, regression, epochs=30)
    assert learner.update(batch, regression)["loss"] < 0.5 * first


def test_a_reward_model_learns_pairs(folders):
    learner = trainer(folders, "scores", lr=1e-2)
    batch = rows(chosen=[True, False] * 3, group=[0, 0, 1, 1, 2, 2])
    assert learner.update(batch, ranking, mean="rows")["loss"] == pytest.approx(math.log(2))
    learner.update(batch, ranking, mean="rows", epochs=20, minibatch=2)
    assert learner.update(batch, ranking, mean="rows")["accuracy"] == 1.0


def test_a_row_with_a_missing_value_has_no_effect(folders):
    scores = torch.tensor([1.0, torch.nan, -1.0, 0.5, torch.inf, 2.0])
    one, other = trainer(folders), trainer(folders)
    metrics = one.update(rows(scores=scores), weighted, minibatch=2, seed=3)
    assert metrics["left_out"] == 2
    assert metrics["steps"] == 2
    other.update(rows(scores=scores).rows([0, 2, 3, 5]), weighted, minibatch=2, seed=3)
    assert torch.equal(weights(one), weights(other))


def test_skipping_all_rows_takes_no_step(folders):
    learner = trainer(folders)
    before = weights(learner)
    metrics = learner.update(rows(scores=[torch.nan] * 6), weighted)
    assert metrics == {"lr": 0.0, "rows": 0, "steps": 0, "skipped_steps": 0, "left_out": 6} | {
        "lr": metrics["lr"]
    }
    assert torch.equal(weights(learner), before)


def test_a_broken_gradient_skips_its_step_and_the_schedule_waits(folders):
    @loss
    def breaks(new, scores, mask):
        return -new.logprobs * scores[
            :, None
        ].exp(), {}  # exp(1000) is infinite, although the column is finite

    learner = trainer(folders, schedule="linear", updates=10)
    before = weights(learner)
    metrics = learner.update(rows(scores=[1000.0] * 6), breaks, epochs=2)
    assert metrics["skipped_steps"] == 2
    assert metrics["steps"] == 0
    assert torch.equal(weights(learner), before)
    assert learner.steps == 0
    assert learner.update(rows(), likelihood)["lr"] == 1e-3


@pytest.mark.parametrize("settings", [{}, {"lora": 2}])
def test_a_step_to_non_finite_parameters_is_an_error(folders, settings):
    learner = trainer(folders, lr=1e38, max_grad_norm=1e9, **settings)
    with pytest.raises(
        FloatingPointError, match=r"parameters have NaN or infinities, such as .*learning rate \(1e\+38\)"
    ):
        learner.update(rows(), likelihood)


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "lora_alpha"])
def test_non_finite_settings_are_refused(name):
    with pytest.raises(PlanError, match="expected: float .* < inf"):
        override(Trainer.Settings(), {name: "inf"}, "")


def test_the_schedule_sets_the_rate(folders):
    learner = trainer(folders, schedule="linear", warmup=2, updates=6)
    assert [learner.update(rows(), likelihood)["lr"] for _ in range(7)] == pytest.approx(
        [5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 0]
    )


def test_a_decaying_schedule_needs_its_number_of_steps(folders):
    with pytest.raises(PlanError, match="more updates than warmup"):
        trainer(folders, schedule="cosine")
    # a frozen role, which also gets --schedule without a role
    Trainer(ModelSpec(folders["llama"]), Trainer.Settings(schedule="cosine"))


def test_the_same_seed_gives_the_same_weights(folders):
    after = []
    for seed in (1, 1, 2):
        learner = trainer(folders)
        learner.update(rows(), likelihood, minibatch=2, seed=seed)
        after.append(weights(learner))
    assert torch.equal(after[0], after[1])
    assert not torch.equal(after[0], after[2])


def test_gradient_checkpointing_recomputes_layers_and_changes_nothing(folders):
    after, calls = [], []
    for checkpointing in (False, True):
        spec = ModelSpec(folders["gpt2"], trained=True)  # its config has dropout
        learner = Trainer(spec, Trainer.Settings(lr=1e-3, gradient_checkpointing=checkpointing))
        learner.network.backbone.h[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        learner.update(rows(), likelihood)
        after.append(weights(learner))
    torch.testing.assert_close(after[0], after[1])
    assert len(calls) == 1 + 2


def test_weight_decay_skips_vectors(folders):
    learner = trainer(folders, lr=0.1, weight_decay=0.5, max_grad_norm=1e-30)
    before = dict(copy.deepcopy(learner.network.parameters()))
    learner.update(rows(), likelihood)
    for name, parameter in learner.network.parameters().items():
        shrunk = 0.95 if parameter.dim() >= 2 else 1.0
        torch.testing.assert_close(parameter, before[name] * shrunk, atol=1e-6, rtol=1e-5)


def test_missing_columns_frozen_models_and_wrong_means_are_refused(folders):
    with pytest.raises(FlowError, match="no column 'scores'"):
        trainer(folders).update(rows(), weighted)
    with pytest.raises(FlowError, match="no column 'mask'"):
        trainer(folders).update(rows().drop("mask"), likelihood)
    with pytest.raises(ValueError, match="frozen model"):
        Trainer(ModelSpec(folders["llama"])).update(rows(), likelihood)
    with pytest.raises(ValueError, match="mean='rows' for a loss with one value per token"):
        trainer(folders).update(rows(), likelihood, mean="rows")


def in_memory(learner):
    """Return the bytes of storages, each counted once: of the model, and of its moments."""
    moments = [
        tensor for state in learner.optimizer.state.values() for tensor in state.values() if tensor.dim()
    ]
    return [
        sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
        for tensors in ([*learner.network.module.state_dict().values()], moments)
    ]


def test_parts_sleep_separately_and_free_their_memory(folders):
    learner = trainer(folders)
    learner.update(rows(), likelihood)
    before, state = in_memory(learner), {name: tensor.clone() for name, tensor in learner.state().items()}
    assert min(before) > 0
    learner.sleep("optimizer")
    assert in_memory(learner) == [before[0], 0]
    learner.forward(rows())
    with pytest.raises(ValueError, match="asleep"):
        learner.update(rows(), likelihood)
    learner.sleep("weights")
    assert in_memory(learner) == [0, 0]
    for use in (learner.forward, lambda _: next(learner.weights())):
        with pytest.raises(ValueError, match="asleep"):
            use(rows())
    learner.wake("optimizer")
    assert in_memory(learner) == [0, before[1]]
    learner.wake()
    assert in_memory(learner) == before
    assert all(torch.equal(tensor, learner.state()[name]) for name, tensor in state.items())
