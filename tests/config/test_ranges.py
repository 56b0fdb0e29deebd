"""Settings refuse numbers out of their range before the run loads anything."""

import pytest

from rlflow.author.load import algorithms_folder, load_flow
from rlflow.author.settings import described, fields
from rlflow.cli.check import check_flow
from rlflow.cluster.submit.target import JobSettings
from rlflow.compiler.placement import Pools
from rlflow.config.backend_names import SHIPPED, setting_types
from rlflow.config.options import Options
from rlflow.errors import PlanError
from rlflow.processes.declare import ServiceSettings
from rlflow.rewards.environments.environment_spec import Bounds

# numbers without a range: scores and covariances take any value, and staleness has its own rule
ANY = {
    "clip_cov.cov_low",
    "clip_cov.cov_high",
    "critique.correct",
    "curriculum.correct",
    "prime.correct",
    "vapo.correct",
    "selfplay.correct",
    "selfplay.malformed",
    "selfplay.wrong",
    "expert_iteration.threshold",
    "spo.prior",
    "topr.baseline",
    "Options.staleness",
}


def types():
    """Return (where, name, type) of every setting with a flag."""
    for settings in (Options, Bounds, ServiceSettings, JobSettings):
        yield from ((settings.__name__, name, each.type) for name, each in fields(settings).items())
    for backend in SHIPPED:
        yield from ((backend, name, type_) for name, type_ in setting_types(backend).items())
    for path in algorithms_folder().glob("[!_]*.py"):
        hp = load_flow(path.stem).parameters.hp
        yield from ((path.stem, name, each.type) for name, each in fields(type(hp)).items())


def test_every_number_has_a_range():
    numbers = {
        f"{where}.{name}"
        for where, name, type_ in types()
        if {"int", "float"} & set(described(type_).split())
    }
    bounded = {
        f"{where}.{name}" for where, name, type_ in types() if any(sign in described(type_) for sign in "<>")
    }
    assert len(numbers) > 100
    assert numbers - bounded == ANY


@pytest.mark.parametrize(
    "flag",
    [
        "--seed=-1",
        "--prompts=0",
        "--held-out=-1",
        "--lr=inf",
        "--weight-decay=inf",
        "--lora-alpha=inf",
        "--hp.gamma=1.01",
        "--hp.lam=-0.1",
        "--hp.beta=-1",
        "--hp.beta=inf",
        "--hp.beta=nan",
        "--hp.is_cap=inf",
        "--actor.generate.temperature=inf",
        "--actor.generate.top_p=2",
        "--reward=task:nan",
        "--threads=-1",
        "--max-missing=2",
    ],
)
def test_a_number_out_of_range_is_refused_with_its_flag(flag):
    with pytest.raises(PlanError) as caught:
        check_flow("ppo", [flag])
    (problem,) = caught.value.problems
    assert problem.expected
    assert problem.code in ("setting-range", "reward-weight")


def test_limits_may_be_infinite():
    assert check_flow("ppo", ["--max-grad-norm=inf"]).ok


@pytest.mark.parametrize(("pools", "every"), [(None, 0), (Pools(""), 0), (Pools("all=2@threads"), 1)])
def test_copies_are_made_only_where_there_are_pools(pools, every):
    assert Options(pools=pools).copies_every == every
