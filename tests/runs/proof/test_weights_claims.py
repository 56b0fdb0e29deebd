"""Claims about real weights: how each claim is checked, on synthetic states, and that the run restores
everything."""

from dataclasses import replace

import pytest
import torch

from rlflow.author.batch import Batch
from rlflow.runs.proof import weights_claims
from rlflow.runs.proof.directions import Direction, learned_rows
from rlflow.runs.proof.dry_run import uneven
from rlflow.runs.proof.sampler_claims import SMALL, copied, shaken
from rlflow.runs.proof.weights_claims import WeightsClaims, distance, modules, moments_distance
from rlflow.training.objective import New

STATE = {
    "parameters/a.weight": torch.tensor([[3.0, 4.0], [0.0, 0.0]]),
    "parameters/a.bias": torch.zeros(2),
    "parameters/ids": torch.ones(2).long(),
    "adapters/b.weight": torch.full((2, 2), 2.0),
    "exp_avg/a.weight": torch.ones(2, 2),
    "steps": torch.tensor(3),
}
OF_UPDATE = [
    "weights-move",
    "weights-direction",
    "parameters",
    "frozen",
    "micro-batches",
    "row-order",
    "weights-scores",
]


def changed(**tensors):
    return STATE | {
        name.replace("__", "/").replace("_weight", ".weight"): tensor for name, tensor in tensors.items()
    }


@pytest.fixture
def claims(grpo):
    return WeightsClaims(grpo, resizing=frozenset({"actor"}))


@pytest.fixture
def update(grpo):
    return learned_rows(grpo.base.updates[0])


def test_a_copy_shares_no_memory():
    copy = copied(STATE)
    copy["parameters/a.bias"] += 1
    assert not STATE["parameters/a.bias"].any()
    assert all(
        torch.equal(copy[name], tensor) for name, tensor in STATE.items() if name != "parameters/a.bias"
    )


@pytest.mark.parametrize(
    ("directions", "logprob", "reason"),
    [
        ([1.0, 1.0], -1.0, None),
        ([1.0, -1.0], -1.0, "rows with equal tokens are pushed up and down equally"),
        ([1.0, 1.0], -1e-6, "the model is certain of every token"),
    ],
)
def test_a_gradient_of_rounding_errors_is_unproved_with_the_reason(directions, logprob, reason):
    rows = Batch.of(prompt_tokens=[[1], [1]], tokens=[[5], [5]])
    claim = weights_claims.only_rounding(
        "actor.update",
        Direction(rows, {"logprobs": torch.tensor(directions)[:, None]}),
        New(logprobs=torch.full((2, 1), logprob)),
    )
    assert (claim and claim.verdict, claim and claim.sentence) == (
        (None, None) if reason is None else ("unproved", f"the gradient is only rounding, because {reason}")
    )


def test_the_distance_of_states_is_relative_to_the_first():
    moved = changed(
        parameters__a_weight=torch.tensor([[3.0, 4.0], [3.0, 0.0]]), exp_avg__a_weight=torch.zeros(2, 2)
    )
    assert distance(STATE, STATE) == 0.0
    assert distance(STATE, moved) == pytest.approx(3 / 41**0.5)
    assert distance(moved, STATE) == pytest.approx(3 / 50**0.5)
    assert (
        distance({"parameters/ids": torch.ones(2).long()}, STATE)
        == distance({"parameters/a.bias": torch.zeros(2)}, STATE)
        == 0.0
    )


def test_the_distance_of_moments_is_relative_to_the_first():
    other = changed(
        exp_avg__a_weight=torch.tensor([[1.0, 1.0], [1.0, -3.0]]), parameters__a_weight=torch.zeros(2, 2)
    )
    assert moments_distance(STATE, STATE) == 0.0
    assert moments_distance(STATE, other) == pytest.approx(4 / 4**0.5)
    assert moments_distance(other, STATE) == pytest.approx(4 / 12**0.5)
    assert moments_distance({"parameters/a.weight": torch.ones(1)}, STATE) == 0.0


def test_shaking_moves_matrices_by_a_fifth_of_their_deviation():
    state = STATE | {
        "parameters/large.weight": 5 + 3 * torch.randn(200, 200, generator=torch.Generator().manual_seed(0)),
        "parameters/flat.weight": torch.ones(200, 200),
    }
    result = shaken(state)
    step, flat = (
        result[name] - state[name] for name in ("parameters/large.weight", "parameters/flat.weight")
    )
    assert (float(step.std()), float(step.mean())) == pytest.approx((0.6, 0.0), abs=0.02)
    assert float(flat.std()) == pytest.approx(0.2 * SMALL, rel=0.1)
    assert all(
        torch.equal(result[name], state[name])
        for name in ("parameters/a.bias", "parameters/ids", "exp_avg/a.weight", "steps")
    )
    assert not torch.equal(result["adapters/b.weight"], state["adapters/b.weight"])
    assert all(
        torch.equal(one, other) for one, other in zip(result.values(), shaken(state).values(), strict=True)
    )


def test_modules_are_named_once():
    assert modules(["a.b.weight", "a.b.bias", "scale"]) == ["a.b", "scale"]


def test_a_sound_run_proves_all_claims_about_its_weights(claims):
    claims.flow.rescored = [claims.flow.pushed_by(uneven(1), 1.0)]
    found = list(claims.claims())
    assert [claim.name for claim in found] == [*OF_UPDATE, "sampler", "sampler", "sampler-follows"]
    assert [claim.subject for claim in found] == ["actor.update"] * 3 + ["reference"] + [
        "actor.update"
    ] * 3 + ["actor"] * 3
    assert {claim.verdict for claim in found} == {"proved"}
    assert all(claim.place is not None for claim in found)
    assert found[2].number == "24 parameters"
    assert [claim.sentence.rpartition(" ")[2] for claim in found[7:9]] == ["1", "0.6"]


def test_a_proof_restores_the_weights_of_trainer_and_samplers(claims):
    model = claims.engine.models["actor"]
    before, version = copied(claims.trainer("actor").state()), model.version
    sampled = claims.compared("actor", 1.0)[0]["sampled_logprobs"]
    with claims.put_back():
        claims.trainer("actor").restore(shaken(before))
        model.version += 1
        assert not torch.equal(claims.compared("actor", 1.0)[0]["sampled_logprobs"], sampled)
    assert model.version == model.sampled_version == version
    after = claims.trainer("actor").state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert torch.equal(claims.compared("actor", 1.0)[0]["sampled_logprobs"], sampled)


def test_zero_weights_become_small_and_others_stay(claims):
    with claims.put_back():
        state = copied(claims.trainer("actor").state())
        name = next(
            name for name, tensor in state.items() if name.startswith("parameters/") and tensor.dim() == 2
        )
        state[name].zero_()
        claims.trainer("actor").restore(copied(state))
        made = claims.perturbed("actor")
        assert float(made[name].std()) == pytest.approx(SMALL, rel=0.2)
        assert all(torch.equal(tensor, state[each]) for each, tensor in made.items() if each != name)
        assert torch.equal(claims.trainer("actor").state()[name], made[name])


def test_unmoved_weights_are_named_and_have_no_direction(claims, update):
    push, here = claims.flow.directions(claims.flow.base)["actor.update"], claims.now(update)
    still, direction = claims.moves(update, push, here, 0.0)
    assert (still.verdict, still.sentence) == ("falsified", "the update changes no weight")
    assert (direction.name, direction.verdict) == ("weights-direction", "unproved")
    unpushed = replace(push, by={"logprobs": torch.zeros_like(push.main)})
    assert [claim.verdict for claim in claims.moves(update, unpushed, here, 0.5)] == ["proved", "unproved"]


@pytest.mark.parametrize(
    ("after", "verdict", "number"),
    [
        ({"parameters/a.weight": 1, "exp_avg/a.weight": 1}, "proved", "1 parameters"),
        (
            {"parameters/a.weight": 1, "parameters/b.weight": 1, "exp_avg/a.weight": 1},
            "falsified",
            "1 without a gradient: b",
        ),
        (
            {
                "parameters/a.weight": 1,
                "parameters/b.weight": 1,
                "exp_avg/a.weight": 1,
                "exp_avg/b.weight": 0,
            },
            "falsified",
            "1 with a zero gradient: b",
        ),
        ({"parameters/a.weight": 1, "adapters/b.weight": 1, "exp_avg/b.weight": 1}, "proved", "1 parameters"),
        ({"parameters/a.weight": 1}, "unproved", ""),
    ],
)
def test_parameters_without_gradient_are_named(claims, update, after, verdict, number):
    [claim] = claims.parameters(
        update, {}, {name: torch.full((2,), float(value)) for name, value in after.items()}
    )
    assert (claim.verdict, claim.number) == (verdict, number)


def test_an_untrained_model_that_changes_is_named(claims, update):
    frozen = claims.frozen_logprobs(update)
    assert list(frozen) == ["reference"]
    assert [claim.verdict for claim in claims.others(update, frozen)] == ["proved"]
    [changed] = claims.others(update, {"reference": frozen["reference"] + 0.5})
    assert (changed.verdict, changed.subject, changed.number) == (
        "falsified",
        "reference",
        "log-probs differ by 0.5",
    )
    assert list(claims.others(update, {})) == []


def test_an_unproved_claim_states_its_reason(claims, update):
    state = {"parameters/a.weight": torch.ones(2)}
    [order], [cuts] = (
        claims.order(update, state, state),
        replace(claims, resizing=frozenset()).cuts(update, state, state),
    )
    assert (order.verdict, cuts.verdict) == ("unproved", "unproved")
    one = replace(update, batch=update.batch.rows(update.batch.axis.slots == 0))
    assert [claim.verdict for claim in claims.order(one, state, {"exp_avg/a": torch.ones(1)})] == ["unproved"]
    assert list(claims.ranks(update, state, state)) == []
    [ranks] = replace(claims, alone={"actor": lambda: None}).ranks(update, state, state)
    assert (ranks.name, ranks.verdict) == ("ranks", "unproved")


def test_ranks_are_compared_with_one_process_on_the_same_rows(claims, update):
    judge = replace(claims, alone={"actor": lambda: claims.trainer("actor")})
    with claims.put_back():
        start = claims.perturbed("actor")
        after = claims.updated(update, start)
        wrong = {
            name: tensor * 1.01 if name.startswith("exp_avg/") else tensor for name, tensor in after.items()
        }
        [right], [other] = judge.ranks(update, start, after), judge.ranks(update, start, wrong)
        [short] = replace(judge, short=True).ranks(update, start, wrong)
    assert [claim.verdict for claim in (right, other, short)] == ["proved", "falsified", "proved"]


def test_a_backend_without_weights_has_no_weight_claims(proven):
    claims = proven("grpo", backend="null", prompts=4, **{"hp.max_tokens": 4})
    assert [(claim.verdict, claim.subject) for claim in claims if claim.name == "weights"] == [
        ("unproved", "actor.update")
    ]
    assert not {claim.name for claim in claims} & {*OF_UPDATE, "sampler"}
