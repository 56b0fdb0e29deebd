"""Dynamic sampling: several calls of `generate` in an iteration, until there are enough mixed groups."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import rlflow
from rlflow.algorithms import dapo
from rlflow.author.load import load_flow


@pytest.fixture
def dapo_roles(tmp_path):
    hp = dataclasses.replace(
        load_flow("dapo").parameters.hp, max_tokens=6, samples=2, groups=6, tries=20, overlong=2, minibatch=12
    )
    roles = rlflow.roles("dapo", hp, prompts=6, out=str(tmp_path))
    yield roles
    roles.close()


@pytest.mark.slow
def test_an_iteration_generates_until_it_has_its_groups(dapo_roles):
    model = dapo_roles.prepared.engine.models["actor"]
    generate, update = model.generator.generate, model.trainer.update
    generated, learned = [], []
    model.generator.generate = lambda prompts, *rest: (
        generated.append(len(prompts)) or generate(prompts, *rest)
    )
    model.trainer.update = lambda batch, *rest, **named: (
        learned.append(batch["group"]) or update(batch, *rest, **named)
    )
    load_flow("dapo")(dapo_roles.take(), **dapo_roles)
    assert len(generated) > 1
    assert set(generated) == {6}
    assert [len(set(groups.tolist())) for groups in learned] == [6]
    assert [len(groups) for groups in learned] == [12]


def test_a_group_is_kept_by_its_deviation():
    scores = torch.tensor(
        [1.0, 0.0, 0.5, 0.5, -1.0, 1.0, 0.3, 0.3 + 1e-7, torch.nan, 1.0], dtype=torch.float64
    )
    assert dapo.mixed(scores, torch.arange(5).repeat_interleave(2))[::2].tolist() == [
        True,
        False,
        True,
        False,
        False,
    ]


def test_the_penalty_grows_over_the_last_tokens():
    mask = torch.arange(10) < torch.tensor([5, 6, 7, 8, 10])[:, None]
    shaped = dapo.shorten(torch.ones(5), mask, max_tokens=8, overlong=2, penalty=0.5)
    assert shaped.tolist() == [1.0, 1.0, 0.75, 0.5, 0.5]


def test_the_penalty_of_scores_in_float64_is_a_float64():
    mask = torch.ones(1, 8, dtype=torch.bool)
    shaped = dapo.shorten(torch.zeros(1, dtype=torch.float64), mask, max_tokens=10, overlong=3, penalty=1.0)
    assert shaped.tolist() == [-1 / 3]


def test_only_ratios_beyond_the_trust_region_are_clipped():
    ratio = torch.tensor([[0.79, 0.81, 1.27, 1.29]])
    columns = (torch.zeros(1, 4), torch.ones(1, 4), torch.ones(1, 4))
    _, metrics = dapo.policy_loss(SimpleNamespace(logprobs=ratio.log()), *columns, low=0.2, high=0.28)
    assert metrics["clipped"].tolist() == [[True, False, False, True]]
