"""Parts of each role on each rank, and the parts that may be offloaded, as inputs of the memory plan."""

from pathlib import Path

import pytest
from planned import planned_as  # noqa: F401, a fixture

import rlflow.data.tasks
from rlflow.config.inputs import within_memory
from rlflow.config.options import Options

FOLDER = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"
SMALL = f"--model {FOLDER} --data chain_sum --held-out 0 --batch_tokens 1024 --device cpu"


def parts(schedule):
    """Return (role and kind of part: bytes) of the movable parts, and of the fixed parts."""
    return tuple(
        {str(part): size for part, size in sizes.items()} for sizes in (schedule.sizes, schedule.fixed)
    )


@pytest.fixture(scope="module")
def listed(planned_as):  # noqa: F811
    """Return the parts listed by `rlflow plan`, which the memory plan uses: pool → role, side and kind →
    bytes.
    """
    found = {}
    for item in planned_as(f"ppo {SMALL} --pools train=1,rollout=1 --memory 1GB").memory:
        found.setdefault(item.pool, {})[f"{item.role}.{item.half} {item.what.partition(',')[0]}"] = item.bytes
    return found


def test_a_pool_has_the_parts_of_its_roles(planned_as, listed):  # noqa: F811
    for schedule in planned_as(f"ppo {SMALL} --pools train=1,rollout=1 --memory 1GB").residency:
        moving, staying = parts(schedule)
        passing = {str(part) for moment in schedule.moments for part in moment.passing}
        assert {
            name: size for name, size in listed[schedule.pool].items() if name in moving | staying
        } == moving | staying
        assert set(listed[schedule.pool]) == set(moving) | set(staying) | passing


def test_a_reward_model_with_its_own_folder_is_never_offloaded(planned_as):  # noqa: F811
    [schedule] = planned_as(f"grpo {SMALL} --reward {FOLDER} --memory 1GB").residency
    weights = parts(schedule)[0]["actor.trainer weights"]
    assert parts(schedule)[1] == {f"{FOLDER.name}.reward weights": pytest.approx(weights, rel=0.1)}


@pytest.mark.parametrize(
    ("flags", "beside"),
    [
        ("", {"saving actor", "saving critic"}),
        ("--pools all=1 --commit-every 1", set()),
        ("--pools all=1 --commit-every 2", {"saving actor", "saving critic"}),
    ],
)
def test_a_role_with_in_memory_checkpoints_is_saved_from_its_copy(planned_as, flags, beside):  # noqa: F811
    [schedule] = planned_as(f"ppo {SMALL} {flags} --memory 1GB").residency
    assert {moment.step for moment in schedule.beside} >= beside
    assert any(moment.step == "the in-memory checkpoint of critic" for moment in schedule.moments) == (
        not beside
    )


def test_a_plan_without_a_limit_is_unchanged(planned_as):  # noqa: F811
    explanation = planned_as(f"ppo {SMALL}")
    assert within_memory(explanation, {}, None, None, Options(), None) is explanation
