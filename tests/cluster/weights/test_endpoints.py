"""Weights between two pools by a plan: each end alone, and both on real workers."""

import hashlib
from pathlib import Path

import pytest
import ray
import torch

import rlflow
import rlflow.data.tasks
from rlflow.backends.local import Generator, Trainer
from rlflow.cluster.weights.endpoints import Offers, Receiver, Sender
from rlflow.cluster.weights.transfer import Route, WeightTransfer
from rlflow.errors import PlanError
from rlflow.execution.role_model import Model
from rlflow.training.protocols import ModelSpec
from rlflow.training.weight_sync.segment import ROOT, check_machines
from rlflow.training.weight_sync.transport import TransferError

FOLDER = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"
BUCKET = 1 << 18  # a small size for a model of 3.8 MB, so that there are many buckets


@pytest.fixture(scope="module")
def ends():
    """A trainer, and two generators that need the same weights."""
    sender = Sender(Model(Trainer(ModelSpec(FOLDER, "logprobs", True))), "cpu")
    receivers = [Receiver(Model(None, Generator(ModelSpec(FOLDER))), "cpu") for _ in range(2)]
    assert all(receiver.begin() for receiver in receivers)
    offered = [sender.begin()]
    return sender, receivers, Offers(offered, [receiver.offer(offered) for receiver in receivers], BUCKET)


def bound(ends, run):
    sender, receivers, offers = ends
    place = sender.bind(0, offers, run)
    for number, receiver in enumerate(receivers):
        receiver.bind(1 + number, offers, [place])
    sender.hide()
    return Route(offers.plan(), 1, "segment" if run else "store")


def moved(ends, route, version, sent_version=None):
    """Move the weights bucket by bucket; return the messages."""
    sender, receivers, _ = ends
    made = []
    for index in range(len(route.plan.buckets)):
        done, *messages = sender.pack(index, sent_version if sent_version is not None else version, False)
        made += messages
        assert done == (sent_version if sent_version is not None else version)
        for receiver, recipients in route.incoming(index).items():
            firsts = list(route.recipients[index][0])
            receivers[receiver - 1].take(
                index, [0] * len(recipients), *(messages[firsts.index(first)] for _, first in recipients)
            )
    return made


@pytest.mark.parametrize("run", [None, "test-passing"])
def test_ranks_with_equal_needs_share_one_message(ends, run):
    sender, receivers, _ = ends
    route = bound(ends, run)
    assert list(ROOT.glob("rlflow-test-passing-*")) == []  # unlinked as soon as all have it open
    weights = dict(sender.trainer.weights())
    for tensor in weights.values():
        tensor.data.add_(torch.randn(tensor.shape) * 0.01)
    sent = sum(
        len(message.raw) if run is None else message.raw[1] - message.raw[0]
        for message in moved(ends, route, 3)
    )
    terms = sender.terms()
    size = sum(tensor.nbytes for tensor in weights.values())
    assert len(route.plan.buckets) > 5
    assert size <= sent < 1.3 * size  # not twice; a tensor cut into pieces need not go to both in one bucket
    for receiver in receivers:
        assert receiver.finish(3, terms) == {"inbound": size, "bound": size}
        assert receiver.generator.version == 3
        assert all(
            torch.equal(tensor, weights[names[0]]) for names, tensor in receiver.generator.network.own()
        )
    assert route.plan.stats.extra(route.transport) <= 3 * BUCKET
    sender.close()


def test_missing_and_unrequested_messages_are_noticed(ends):
    route, receiver = bound(ends, None), ends[1][0]
    moved(ends, route, 4, sent_version=5)
    with pytest.raises(
        TransferError, match=r"rank 1 expects weights of version 4, but ranks sent other versions: {0: 5}"
    ):
        receiver.finish(4)
    moved(ends, route, 6)
    name, tensor = next((names[0], tensor) for names, tensor in receiver.generator.network.own())
    tensor.view(-1)[7] += 1
    with pytest.raises(TransferError, match=f"rank 1 does not hold the trainers' weights: {name}"):
        receiver.finish(6, ends[0].terms())
    with pytest.raises(TransferError, match="received 0 bytes, the plan says"):
        receiver.finish(7)
    with pytest.raises(PlanError, match="shared memory does not work across machines"):
        check_machines(["one 1", "two 2"])


def bits(pool):
    """Return for each rank a digest of the weights it samples with."""

    def digest_of(host):
        own = host.instance.engine.models["actor"].generator.network.own()
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in own)).hexdigest()

    return ray.get([actor.__ray_call__.remote(digest_of) for actor in pool.actors], timeout=240)


def scaled(state, factor):
    return {
        name: tensor * factor if name.startswith("parameters/") else tensor for name, tensor in state.items()
    }


@pytest.mark.slow
def test_every_way_between_pools_moves_equal_bits_once(ray_address):
    """Also for weights frozen before the version that was last used for sampling."""
    roles = rlflow.roles(
        "grpo",
        prompts=4,
        iterations=2,
        held_out=0,
        threads=1,
        pools="train=2,rollout=2",
        ray_address=ray_address,
        **{"actor.trainer": "fsdp"},
    )
    model = roles.prepared.engine.models["actor"]
    try:
        state, found, sizes = model.trainer.state(), [], []
        for how, transport in (("gather", None), ("auto", "segment"), ("alltoall", "store")):
            model.transfer = (
                WeightTransfer("actor", model.trainer.pool, model.generator, how, 1, BUCKET)
                if transport
                else None
            )
            model.trainer.restore(scaled(state, 0.5))
            model.version += 1
            frozen = model.frozen()
            model.trainer.restore(scaled(state, 1.5))
            model.version += 1
            for kind, bring in (
                (transport, lambda: model.synchronise(60.0)),
                ("frozen", lambda frozen=frozen: model.use(frozen, 60.0)),
            ):
                bring()
                found.append(bits(model.generator))
                sizes.append(model.arrived())
                if transport:
                    assert model.moved["transport"] == kind
                    assert model.moved["inbound"] == model.moved["bound"] > 10 * BUCKET
                    assert (model.moved["extra"] <= 3 * BUCKET) == (kind != "frozen")
        newest, older = found[:2]
        assert found == [newest, older] * 3
        assert len({*newest, *older}) == 2
        assert 10 * BUCKET < min(sizes) <= max(sizes) < 1.05 * min(sizes)  # to both ranks, by either way
        assert model.arrived() == 0
        assert list(ROOT.glob("rlflow-between-*")) == []
    finally:
        roles.close()
