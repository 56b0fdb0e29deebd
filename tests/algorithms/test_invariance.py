"""Properties of every algorithm file, found by name. Stages and losses are called like in the engine.

Their results do not depend on the order of rows, on padding and its values, on other rows, or on
micro-batches.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import ROOT
from waits import DEVICE, counted

import rlflow
from rlflow import DP_COMPUTE
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, flatten, pad, padding
from rlflow.author.columns import Level
from rlflow.author.joint import terms
from rlflow.author.load import load_flow
from rlflow.author.loss import Loss
from rlflow.author.settings import variants
from rlflow.author.stage import Stage
from rlflow.backends.null import Generator, Trainer, numbers, token_numbers
from rlflow.execution.apply import split_metrics
from rlflow.execution.row_ledger import UpdateRows
from rlflow.training.learning import OptimizerStep, Passes, learn
from rlflow.training.objective import New
from rlflow.training.peers import Peers
from rlflow.training.protocols import ModelSpec

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not

NAMES = sorted(path.stem for path in (ROOT / "algorithms").glob("[!_]*.py"))
SMALL = {"samples": 3, "max_tokens": 7, "groups": 4, "tries": 20, "overlong": 3, "share": 0.3, "cov_low": 0.0}
SMALL |= {"threshold": 0.5}  # for about half of the scores
ALSO = {"beta": 0.3, "dual_clip": 1.5}  # features that are off by default and that a number turns on
WHOLE = 10**9
# these learn from the data's own responses and have no stages
UPDATES_ALONE = {"dpo", "reward_model", "sft", "tr_dpo"}
STAGED = [name for name in NAMES if name not in UPDATES_ALONE]


@dataclass(frozen=True)
class Call:
    """A call of a stage or a loss: its rows and settings."""

    of: Stage | Loss
    batch: Batch
    settings: dict[str, Any]

    def __repr__(self):
        return f"{self.of.name}({', '.join(self.batch.data)}, {self.settings})"


class Holed(Generator):
    """A generator that masks out tokens of its rows, like tools."""

    def generate(self, prompts, sampling, seeds):
        rows = super().generate(prompts, sampling, seeds)
        holes = numbers("holes", rows, sampling.max_tokens) < 0.25
        holes[:, 0] = False
        mask = rows.data["mask"]
        return Batch(
            rows.axis,
            rows.data | {"mask": dataclasses.replace(mask, value=mask.value & ~flatten(holes, mask.lengths))},
        )


class Role(Trainer):
    """A role whose columns differ from those of any other role."""

    def __init__(self, name):
        super().__init__(ModelSpec(None))
        self.name = name

    def _column(self, name, batch):
        return (
            super()._column(name, batch) if name == "scores" else token_numbers(f"{self.name}.{name}", batch)
        )


def scored(batch):
    """Return scores with ties, groups with equal scores, and some missing scores."""
    scores = (numbers("scores", batch, 1)[:, 0] * 4).round() / 4
    return torch.where(numbers("missing", batch, 1)[:, 0] < 0.1, torch.nan, scores), {}


def uneven(batch):
    """Cut rows of the data's responses, which all have one length, to several lengths. Prompts stay
    unchanged.
    """
    if "tokens" not in batch:
        return batch
    lengths = batch.data["tokens"].lengths
    shorter = lengths - torch.arange(len(batch)) % 3
    places = torch.arange(int(lengths.max()))
    kept = (places < shorter[:, None])[places < lengths[:, None]]
    cut = {
        name: dataclasses.replace(data, value=data.value[kept], lengths=shorter)
        for name, data in batch.data.items()
        if data.kind.level is Level.TOKEN
    }
    return Batch(batch.axis, batch.data | cut)


def watched(flow, hp, calls):
    """Return the roles of a flow on the null backend. Their engine records each call of a stage or loss and
    runs no update.
    """
    prompts = 8 if hasattr(hp, "samples") else 24  # a similar number of rows
    roles = rlflow.roles(flow, hp, backend="null", prompts=prompts)
    engine = roles.prepared.engine
    for name, model in engine.models.items():
        model.trainer = model.trainer and Role(name)
        model.generator = model.generator and Holed(ModelSpec(None))
    engine.scorers = dict.fromkeys(engine.scorers, scored)
    stage = engine.stage

    def kept_stage(of, batch, given, call):
        calls.append(Call(of, batch, given))
        return stage(of, batch, given, call)

    def kept_update(role, batch, loss, options, given, call, fresh):
        calls.append(Call(loss, batch, given | {"mean": options.mean}))
        return {}, UpdateRows(torch.zeros(len(batch), dtype=torch.int64), (), waits=True)

    engine.stage, engine.update = kept_stage, kept_update
    return roles


def settings_of(flow):
    """Return settings with every optional feature on, small defaults, and each variant that `check` checks."""
    hp = flow.parameters.hp
    known = {field.name for field in dataclasses.fields(hp)}
    small, full = (
        {name: value for name, value in values.items() if name in known} for values in (SMALL, SMALL | ALSO)
    )
    hp = dataclasses.replace(hp, **small)
    return [dataclasses.replace(hp, **full), hp, *(other for _, other in variants(hp))]


@lru_cache
def recorded(name):
    """Return each distinct call of a stage or loss by the algorithm, from an eager iteration per setting."""
    flow, found, calls = load_flow(name), {}, []
    every = settings_of(flow)
    roles = watched(flow, every[0], calls)
    for hp in every:
        # in the order of the flow: *rewards have no keyword
        bound = [role for key, role in roles.items() if key != "hp"]
        flow(uneven(roles.take()), *bound, hp=hp)
    roles.close()
    for call in calls:
        found.setdefault(repr(call), call)
    return list(found.values())


def stages(name, drawing=True):
    """Return the calls of stages; optionally without stages that draw, because their draws depend on the
    order of rows.
    """
    return [call for call in recorded(name) if isinstance(call.of, Stage) and (drawing or not call.of.draws)]


def updates(name):
    return [call for call in recorded(name) if isinstance(call.of, Loss)]


# -- stages
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_has_checked_stages_or_none(name):
    whole = [call for call in stages(name) if call.of.dispatch == DP_COMPUTE]
    assert bool(whole) == bool(stages(name, drawing=False)) == (name not in UPDATES_ALONE)
    assert updates(name)


def results(call, batch, extra=0):
    """Return the stage's results for these rows, in float64: token results under the mask only, texts as
    checksums.

    Float padding and masked-out values are NaN; all token columns are ``extra`` wider than needed.
    """
    ragged = [data for data in batch.data.values() if data.kind.level is Level.TOKEN]
    width = int(ragged[0].lengths.max()) + extra if ragged else 0
    inside = torch.arange(width) < ragged[0].lengths[:, None] if ragged else None
    if "mask" in batch:
        inside = torch.nn.functional.pad(batch["mask"], (0, extra))
    columns = [
        column(batch, name, inside, width) if name in batch else None
        for name in call.of.signature.column_names
    ]
    one, each = (
        torch.Generator().manual_seed(0),
        tuple(torch.Generator().manual_seed(hash(tuple(key))) for key in batch.axis.keys.tolist()),
    )
    chance = {"generator": each if call.of.dispatch == DP_COMPUTE else one} if call.of.draws else {}
    values, _ = split_metrics(call.of.function(*columns, **call.settings, **chance), len(call.of.gives))
    values = [
        torch.tensor([crc32(text.encode()) for text in value]) if isinstance(value, list) else value
        for value in values
    ]
    for value in values:
        assert value.dim() < 2 or value.shape == inside.shape, f"{call}: {list(value.shape)}"
    return [torch.where(inside, value, 0) if value.dim() == 2 else value for value in values]


def column(batch, name, inside, width):
    value = batch[name]
    if not isinstance(value, torch.Tensor):
        return value
    value = value.double() if value.is_floating_point() else value
    if batch.columns[name].level is not Level.TOKEN:
        return value
    wide = torch.nn.functional.pad(value, (0, width - value.shape[1]))
    return torch.where(inside, wide, torch.nan) if wide.is_floating_point() else wide


def per_row(values):
    """Return whether a stage gave rows, and not numbers for the full batch."""
    return all(value.dim() for value in values)


def same(call, got, want):
    for name, one, other in zip(call.of.gives, got, want, strict=True):
        width = min(one.shape[-1], other.shape[-1]) if one.dim() == 2 else None
        one, other = (x[:, :width] if width is not None else x for x in (one, other))
        assert torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-12, equal_nan=True), (
            f"{call}: {name}"
        )


def of_groups(batch, order):
    """Reorder the rows by complete groups."""
    return torch.cat([(batch.axis.slots == slot).nonzero()[:, 0] for slot in order])


@pytest.mark.parametrize("name", STAGED)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(data=st.data())
def test_reordering_groups_reorders_the_results(name, data):
    for call in stages(name, drawing=False):
        order = of_groups(call.batch, data.draw(st.permutations(range(call.batch.axis.groups))))
        whole, moved = results(call, call.batch), results(call, call.batch.rows(order))
        same(call, moved, [value[order] for value in whole] if per_row(whole) else whole)


@pytest.mark.parametrize("name", STAGED)
def test_wider_padding_changes_nothing(name):
    for call in stages(name):
        same(call, results(call, call.batch, extra=3), results(call, call.batch))


@pytest.mark.parametrize("name", STAGED)
def test_other_rows_do_not_change_a_row(name):
    """A stage that may be split gives each row, or each group, the same result as alone."""
    for call in stages(name):
        if call.of.dispatch == DP_COMPUTE:
            whole = results(call, call.batch)
            count = call.batch.axis.groups if call.of.rows == "group" else len(call.batch)
            slots = call.batch.axis.slots if call.of.rows == "group" else torch.arange(count)
            for slot in range(count):
                rows = (slots == slot).nonzero()[:, 0]
                same(call, results(call, call.batch.rows(rows)), [value[rows] for value in whole])


def twice(batch):
    """Return the rows, and the same rows again as other groups."""
    path = torch.zeros(batch.axis.keys.shape[1], dtype=torch.int64)
    path[-2] = 10_000
    again = Axis(batch.axis.keys + path, grouped=batch.axis.grouped)
    data = dict(batch.data)
    if "group" in data:
        data["group"] = dataclasses.replace(data["group"], value=data["group"].value + 10_000)
    return Batch.concat([batch, Batch(again, data)])


@pytest.mark.parametrize("name", STAGED)
def test_a_doubled_batch_doubles_the_results(name):
    """Statistics over the full batch are an exception, because their deviations divide by n - 1: they agree
    up to one factor, near 1.
    """
    for call in stages(name, drawing=False):
        whole, double = results(call, call.batch), results(call, twice(call.batch))
        if per_row(whole):
            half = len(call.batch)
            same(call, [value[half:] for value in double], [value[:half] for value in double])
            scale = factor(whole, double, half) if call.of.dispatch != DP_COMPUTE else 1.0
            assert 0.95 < scale < 1.05, f"{call}: {scale}"
            same(
                call,
                [value[:half] for value in double],
                [value * scale if value.is_floating_point() else value for value in whole],
            )


def factor(whole, double, half):
    first, again = whole[0].nan_to_num(0.0), double[0][:half].nan_to_num(0.0)
    return float(again.norm() / first.norm()) if first.any() else 1.0


# -- losses
# ------------------------------------------------------------------------------------------------------------


class Learner:
    """A model with six parameters behind every output, each a function of its row's tokens only. It keeps the
    gradient of its single step.
    """

    device = torch.device("cpu")
    peers = Peers()

    def __init__(self):
        self.parameters = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).requires_grad_()

    def compute(self, rows, want):
        lengths = rows.data["tokens"].lengths
        tokens, place = rows["tokens"].double(), torch.arange(int(lengths.max()))
        angle = (tokens + 1)[..., None] * torch.arange(1, 7) * 0.7 + place[:, None] * 0.3
        x = angle.sin() @ self.parameters
        token = {
            "logprobs": -torch.nn.functional.softplus(x),
            "entropy": torch.nn.functional.softplus(-x),
            "values": x,
        }
        padded = {name: pad(flatten(token[name], lengths), lengths) for name in want if name in token}
        return New(**padded, **({"scores": x[:, 0] * lengths} if "scores" in want else {}))

    def backward(self, objective):
        objective.backward()

    def step(self):
        self.gradient, self.parameters.grad = self.parameters.grad, None
        return OptimizerStep(True, float(self.gradient.norm()), 0.0)


def gradient(call, batch, micro_tokens=WHOLE):
    """Return the gradient of one step over all rows, with NaN in the padding and at masked-out tokens."""
    data = dict(batch.data)
    for name, column in batch.data.items():
        if column.kind.level is Level.TOKEN and column.value.is_floating_point():
            data[name] = dataclasses.replace(
                column, value=torch.where(batch.data["mask"].value, column.value, torch.nan)
            )
    mean = call.settings.get("mean", "tokens")
    own = {name: value for name, value in call.settings.items() if name != "mean"}
    learner = Learner()
    with padding(torch.nan):
        metrics = learn(
            learner, Batch(batch.axis, data), call.of, own, Passes(mean=mean, micro_tokens=micro_tokens)
        )
    assert metrics["steps"] == 1
    return learner.gradient


def close(call, got, want):
    assert want.norm() > 0, call
    assert (got - want).norm() <= 1e-9 * want.norm(), call


CUTS: dict[str, Callable[[Call], torch.Tensor]] = {
    "micro-batches of one row or group": lambda call: gradient(call, call.batch, micro_tokens=1),
    "groups in another order": lambda call: gradient(
        call, call.batch.rows(of_groups(call.batch, reversed(range(call.batch.axis.groups))))
    ),
    "the batch twice": lambda call: gradient(call, twice(call.batch)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_does_not_depend_on_micro_batches(name, cut):
    assert updates(name)
    for call in updates(name):
        close(call, CUTS[cut](call), gradient(call, call.batch))


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_rows_are_diverse_enough(name):
    """Rows have different lengths. Sampled rows also have masked-out tokens, ties and a missing score;
    otherwise the tests above would show little.
    """
    batch = updates(name)[-1].batch
    lengths = batch.data["tokens"].lengths
    assert len(batch) >= 6
    assert int(lengths.min()) < int(lengths.max())
    if any("scores" in call.batch for call in stages(name)):
        scores = next(call.batch["scores"] for call in stages(name) if "scores" in call.batch)
        assert scores.isnan().any()
        assert len(scores.unique()) < len(scores)
        assert not batch.data["mask"].value.all()


class Elsewhere(Learner):
    """A model whose parameters are on another device than the rows."""

    device = DEVICE

    def __init__(self):
        super().__init__()
        self.parameters = self.parameters.detach().to(DEVICE).requires_grad_()

    def compute(self, rows, want):
        lengths = rows.data["tokens"].lengths
        shape = rows["tokens"].shape
        token = {name: self.parameters.sum().expand(shape) for name in want if name != "scores"}
        return New(
            **token, **({"scores": self.parameters.sum().expand(len(lengths))} if "scores" in want else {})
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_stays_on_the_device_of_its_model(name):
    """The host sends only its columns, the mask, the weights of rows, and which rows belong to a loss if
    there are several; also the columns that count clipped tokens. The host reads nothing except metrics.
    """
    for call in updates(name):
        own = {setting: value for setting, value in call.settings.items() if setting != "mean"}
        learner = Elsewhere()
        with counted() as waits:
            learn(learner, call.batch, call.of, own, Passes(mean=call.settings.get("mean", "tokens")))
        parts = terms(call.of, own, "tokens")
        read = [name for part in parts for name in part.loss.signature.column_names if name in call.batch]
        own_rows = [part.where for part in parts if part.where]
        counted_by = [
            name for name in ("logprobs", "advantages") if name in call.batch and call.batch[name].dim() == 2
        ]
        assert waits.count(f"to {DEVICE.type}") == 1 + len(read) + len(own_rows) + len(parts) + len(
            counted_by
        )
        assert set(waits) <= {f"to {DEVICE.type}", "index", "_local_scalar_dense", "to cpu"}
