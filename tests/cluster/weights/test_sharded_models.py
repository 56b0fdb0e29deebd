"""The driver's view of a model on pools: when its weights must move, by which way, and the state after a
failed transfer."""

from concurrent.futures import Future

import pytest

from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.thread_pool import ThreadTransport
from rlflow.cluster.weights.sharded_models import Frozen, RemoteModel, RemoteTrainer
from rlflow.cluster.weights.transfer import Route, TransferResult, WeightTransfer
from rlflow.errors import RemoteError


class InThisProcess(Pool):
    """A pool of ranks without processes: it records its calls and answers each with the next of
    ``answers``."""

    def __init__(self, name, ranks=1, answers=()):
        super().__init__(name, range(ranks), ThreadTransport())
        self.asked, self.answers = [], list(answers)

    def send(self, rank, method, *args, group="cpu", answers=1):
        self.asked.append((rank, method, *args))
        return f"{method} of rank {rank}"

    def call(self, method, *args, seconds=0.0, group="cpu"):
        self.asked.append((method if isinstance(method, str) else method.__name__, *args))
        done = Future()
        answer = self.answers.pop(0) if self.answers else [8]
        if isinstance(answer, Exception):
            done.set_exception(answer)
        else:
            done.set_result(answer)
        return done


class Plan(WeightTransfer):
    """A way between two pools that moves nothing."""

    def __init__(self, there):
        super().__init__(
            "actor", Pool("train", (), ThreadTransport()), Pool("rollout", (), ThreadTransport())
        )
        self.there, self.calls, self.failing = there, [], False

    def bind(self, seconds):
        self.calls.append("bind")
        self.bound, self.route = True, Route(None, 0, "store") if self.there else None
        return self.there

    def freeze(self, version):
        return TransferResult((), ())

    def deliver(self, version, row_messages, seconds):
        self.calls.append(("deliver", version))
        return {"inbound": 1.0}

    def move(self, version, seconds):
        self.calls.append(("move", version))
        if self.failing:
            raise RemoteError("half way")
        return {"inbound": 2.0}


def newer_model(transfer=None, version=3):
    """Return a model with its sides on two pools and weights newer than the sampler's."""
    return RemoteModel(
        "actor",
        RemoteTrainer("actor", InThisProcess("train")),
        InThisProcess("rollout"),
        version,
        1,
        transfer=transfer,
    )


def test_every_rank_of_a_sharded_trainer_takes_part():
    whole, shards = InThisProcess("all", 3), InThisProcess("all", 3)
    assert RemoteTrainer("actor", whole).begin("weights", 1) == "weights of rank 0"
    assert whole.asked == [(0, "weights", "actor", 1)]
    assert RemoteTrainer("actor", shards, collective=True).begin("weights") == "weights of rank 0"
    assert shards.asked == [(rank, "weights", "actor") for rank in range(3)]


def test_on_one_pool_the_largest_value_of_all_ranks_is_reported():
    pool = InThisProcess("all", 2, answers=[[{"inbound": 3.0, "extra": 9.0}, {"inbound": 5.0, "extra": 1.0}]])
    model = RemoteModel("actor", RemoteTrainer("actor", pool), pool, version=2, sampled_version=1)
    assert model.frozen() is None  # it has the newest already
    model.synchronise()
    assert pool.asked == [("synchronise", "actor", 2)]
    assert (model.sampled_version, model.moved) == (2, {"inbound": 5.0, "extra": 9.0})
    assert (model.arrived(), model.arrived()) == (8, 0)  # bytes for both are counted once
    model.synchronise()  # nothing is newer
    assert len(pool.asked) == 1


@pytest.mark.parametrize(("trainer", "generator"), [(True, False), (False, True), (False, False)])
def test_a_role_with_one_side_has_nothing_to_transfer(trainer, generator):
    pool = InThisProcess("all")
    model = RemoteModel(
        "actor", RemoteTrainer("actor", pool) if trainer else None, pool if generator else None, version=2
    )
    assert model.frozen() is None
    model.synchronise()
    assert pool.asked == []


def test_without_a_plan_all_weights_go_as_one_object():
    model = newer_model()
    assert model.frozen() == Frozen(3, "weights of rank 0")
    model.synchronise()
    assert model.generator.asked == [("receive", "actor", 3, "weights of rank 0")]
    assert (model.sampled_version, model.arrived()) == (3, 8)
    model.use(Frozen(3, "weights of rank 0"), 1.0)  # it has these already
    assert len(model.generator.asked) == 1
    no_plan = newer_model(Plan(there=False))
    no_plan.synchronise()
    assert no_plan.generator.asked == model.generator.asked


def test_a_plan_is_made_once_and_carries_newer_weights():
    plan = Plan(there=True)
    model = newer_model(plan)
    model.synchronise()
    assert (plan.calls, model.sampled_version, model.moved) == (["bind", ("move", 3)], 3, {"inbound": 2.0})
    model.synchronise()
    assert len(plan.calls) == 2
    model.version = 4
    frozen = model.frozen()
    model.version = 5
    model.use(frozen, 1.0)
    assert (plan.calls[2:], model.sampled_version, model.moved) == ([("deliver", 4)], 4, {"inbound": 1.0})
    assert model.generator.asked == []


@pytest.mark.parametrize("planned", [True, False])
def test_a_failed_transfer_leaves_weights_without_a_version(planned):
    plan = Plan(planned)
    plan.failing = True
    model = newer_model(plan)
    model.generator.answers = [RemoteError("half way")]
    with pytest.raises(RemoteError, match="half way"):
        model.synchronise()
    assert model.sampled_version == -1


def test_a_restored_role_gets_a_new_plan():
    plan = Plan(there=True)
    model = newer_model(plan)
    model.synchronise()
    model.restored(2)
    assert (model.version, model.sampled_version, plan.bound, plan.route) == (2, -1, False, None)
    model.synchronise()
    assert plan.calls[2:] == ["bind", ("move", 2)]
