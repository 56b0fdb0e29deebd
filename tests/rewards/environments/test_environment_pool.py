"""Episodes in processes: a failure affects one episode only, and the others of its process continue
undisturbed."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from scenarios import script, spec_of

from rlflow import Turn
from rlflow.author.messages import CHANGES
from rlflow.errors import PlanError
from rlflow.rewards.environments.environment_pool import EnvironmentPool, Failure
from rlflow.rewards.environments.environment_spec import parse_environment
from rlflow.rewards.environments.environment_worker import Refused, checked, failed

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

TALK = {"echo": True}


def opened(pool, *scripts, seeds=None):
    return pool.open([{"prompt": each} for each in scripts], seeds or range(len(scripts)))


def causes(answers):
    return [answer.cause if isinstance(answer, Failure) else "" for answer in answers]


def test_an_episode_is_reset_stepped_and_ended(pooled):
    pool = pooled(factor="2.0")
    episodes, first = opened(
        pool, script({"says": "more", "reward": 1}, {"done": True, "log": {"a": 1}}, reset="hello")
    )
    assert first == [{"says": "hello"}]
    assert pool.step(episodes, ["x"]) == [{"says": "more", "reward": 2.0, "done": False, "log": {}}]
    assert pool.step(episodes, ["y"]) == [{"says": "", "reward": 0.0, "done": True, "log": {"a": 1.0}}]
    assert pool.end(episodes) == [{}]


def test_a_class_may_score_its_episode(pooled):
    pool = pooled("Judged")
    episodes, _ = opened(
        pool, script(score=0.25), script(score={"raise": "no"}), script(score={"give": "much"})
    )
    assert pool.end(episodes)[0] == {"score": 0.25}
    assert causes(
        pool.end(opened(pool, script(score={"raise": "no"}), script(score={"give": "much"}))[0])
    ) == ["raised", "type"]


def test_an_unusable_message_is_changed_and_counted(pooled):
    pool = pooled()
    long, odd = "x" * (1 << 18), [{"role": "tool", "content": "a\0", "name": "\ud83c"}]
    episodes, first = opened(
        pool,
        script({"says": "\ud83c no"}, {"says": long}, {"says": odd}, reset="\udc80"),
        script({"says": [{"role": "tool", "content": long}]}),
    )
    assert first == [{"says": "\ufffd", "replaced": 1.0}, {"says": ""}]
    answers = [pool.step([episodes[0]], ["x"])[0] for _ in range(3)] + pool.step([episodes[1]], ["x"])
    assert [answer["says"] for answer in answers[:3]] == [
        "\ufffd no",
        "x" * (1 << 17),
        [{"role": "tool", "content": "a\ufffd", "name": "\ufffd"}],
    ]
    assert set(answers[3]["says"][0]["content"]) == {"x"}
    assert [{name: answer.get(name) for name in CHANGES} for answer in answers] == [
        {"replaced": 1.0, "cut": None},
        {"replaced": None, "cut": 1.0},
        {"replaced": 2.0, "cut": None},
        {"replaced": None, "cut": 1.0},
    ]


def test_hanging_calls_end_together_and_others_continue():
    together, most = 0, 0

    def on_output(data):
        nonlocal together, most
        together = together + data.count(b"hangs") if data else together - 1
        most = max(most, together)

    with closing(EnvironmentPool(spec_of("Scripted", parallel=1, seconds=5), on_output=on_output)) as pool:
        episodes, _ = opened(
            pool, *[script(TALK, {"hang": 1}, TALK)] * 4, *[script(TALK, TALK, TALK)] * 6, seeds=range(10)
        )
        before = pool.step(episodes, ["a"] * 10)
        assert causes(pool.step(episodes, ["b"] * 10)) == ["timeout"] * 4 + [""] * 6
        assert [answer["says"] for answer in pool.step(episodes[4:], ["c"] * 6)] == [
            f"c|{seed}" for seed in range(4, 10)
        ]
    assert causes(before) == [""] * 10
    assert most >= 2


def test_messages_keep_all_their_keys(pooled):
    pool = pooled()
    messages = [{"role": "tool", "content": "42", "tool_call_id": "a1"}]
    episodes, first = opened(pool, script({"says": messages}, reset=messages))
    assert [answer["says"] for answer in (*first, *pool.step(episodes, ["x"]))] == [messages] * 2


@pytest.mark.parametrize(
    ("entry", "cause", "says"),
    [
        ({"raise": "bad"}, "raised", "ValueError: bad"),
        ({"give": 3}, "type", "step returned int, not a rlflow.Turn"),
        ({"says": 3}, "type", "Turn.says: found int"),
        ({"reward": float("nan")}, "type", "Turn.reward is nan"),
        ({"exit": 3}, "died", "exited with code 3"),
        ({"kill": 1}, "died", "killed by SIGKILL"),
        ({"hang": 1}, "timeout", "no answer after 0.5 s"),
    ],
)
def test_a_failure_affects_one_episode_only(patient, entry, cause, says):
    pool = patient(seconds=0.5)
    episodes, _ = opened(pool, script(TALK, TALK), script(TALK, entry), script(TALK, TALK), seeds=[7, 8, 9])
    first = pool.step(episodes, ["a", "b", "c"])
    assert [answer["says"] for answer in first] == ["a|7", "b|8", "c|9"]
    second = pool.step(episodes, ["d", "e", "f"])
    assert causes(second) == ["", cause, ""]
    assert says in str(second[1].reason)
    assert [second[0]["says"], second[2]["says"]] == ["d|7", "f|9"]
    assert pool.failures.keys() == {cause}
    assert pool.failed[cause] == 1
    assert [causes([answer]) for answer in pool.end([episodes[0], episodes[2]])] == [[""], [""]]


def test_an_episode_that_fails_at_its_start_is_reported(pooled):
    pool = pooled()
    _, first = opened(pool, script(reset={"raise": "empty"}), script(reset="hello"))
    assert causes(first) == ["raised", ""]


def test_an_episode_that_replays_differently_fails(pooled):
    pool = pooled("Drifting")
    episodes, _ = opened(pool, script(), script(TALK, {"exit": 1}))
    pool.step(episodes, ["a", "b"])
    assert causes(pool.step(episodes[1:], ["c"])) == ["died"]
    answer = pool.step(episodes[:1], ["d"])[0]
    assert causes([answer]) == ["diverged"]
    assert "in a replay, answer 1 differed" in answer.reason


def test_an_episode_without_replay_is_lost_with_its_process(pooled):
    pool = pooled("Once")
    episodes, _ = opened(pool, script(TALK), script({"exit": 1}))
    assert causes(pool.step(episodes[1:], ["b"])) == ["died"]
    assert causes(pool.step(episodes[:1], ["a"])) == ["lost"]


def test_a_process_that_ends_between_two_calls_fails_no_episode(pooled):
    pool = pooled()
    episodes, _ = opened(pool, script(TALK, TALK), script(TALK, TALK), seeds=[1, 2])
    before = pool.step(episodes, ["a", "b"])
    (process,) = pool.pids()
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert [answer["says"] for answer in pool.step(episodes, ["c", "d"])] == ["c|1", "d|2"]
    assert [answer["says"] for answer in before] == ["a|1", "b|2"]


def test_episodes_are_spread_over_the_processes(pooled):
    pool = pooled(parallel=3)
    opened(pool, *[script()] * 5)
    assert len(set(pool.pids())) == 3


@pytest.mark.slow
def test_async_methods_run_together_and_a_late_one_fails_alone(pooled):
    pool = pooled("Later")
    episodes, _ = opened(
        pool,
        *[script(TALK, waits=waits) for waits in ("meets", "meets", "ever", "meets")],
        seeds=[1, 2, 3, 4],
    )
    answers = pool.step(episodes, list("abcd"))
    assert causes(answers) == ["", "", "timeout", ""]
    assert [answer["says"] for answer in (answers[0], answers[1], answers[3])] == ["a|1", "b|2", "d|4"]


@pytest.mark.slow
def test_an_async_method_that_blocks_is_found(patient):
    pool = patient("Later", seconds=5)
    episodes, _ = opened(pool, script(TALK), script({"hang": 1}), script(TALK), seeds=[1, 2, 3])
    answers = pool.step(episodes, list("abc"))
    assert causes(answers) == ["", "timeout", ""]
    assert answers[2]["says"] == "c|3"


def test_a_file_that_cannot_be_loaded_is_reported_with_its_line(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from rlflow import Turn\nraise RuntimeError('no corpus')\nclass Own:\n    def step(self, said): "
        "return Turn()\n"
    )
    pool = EnvironmentPool(parse_environment(f"{file}:Own", {}))
    try:
        with pytest.raises(
            PlanError, match=r"(?s)own.py:2: the environment own.py:Own cannot be loaded: .*no corpus"
        ):
            pool.step(opened(pool, "{}")[0], ["x"])
    finally:
        pool.close()


def test_a_process_that_never_starts_is_reported(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import os\nfrom rlflow import Turn\nos._exit(4)\nclass Own:\n    def step(self, said): return "
        "Turn()\n"
    )
    pool = EnvironmentPool(parse_environment(f"{file}:Own", {}))
    try:
        with pytest.raises(PlanError, match=r"failed to start 3 times in a row: .*exited with code 4"):
            pool.step(opened(pool, "{}")[0], ["x"])
    finally:
        pool.close()


def test_an_episode_without_reset_begins_with_its_first_turn(pooled):
    pool = pooled("Silent")
    episodes, first = opened(pool, "a", "b")
    assert first == [{"says": ""}] * 2
    assert not pool.pids() or len(pool.pids()) == 1
    assert [answer["done"] for answer in pool.step(episodes, ["x", "y"])] == [False, False]
    assert pool.end(episodes) == [{}, {}]
    (slot,) = pool.slots
    assert slot._over == [episode.number for episode in episodes]
    pool.step(opened(pool, "c")[0], ["z"])
    assert slot._over == []


def test_a_closed_pool_is_reported(pooled):
    pool = pooled()
    episodes, _ = opened(pool, script())
    processes = pool.pids()
    pool.close()
    assert not pool.pids()
    assert all(not os.path.exists(f"/proc/{process}") for process in processes)
    with pytest.raises(RuntimeError, match="are closed"):
        pool.step(episodes, ["a"])


def test_a_call_during_the_close_of_a_pool_is_reported(pooled):
    pool, hangs = pooled(seconds=600), threading.Event()
    pool.on_output = lambda data: hangs.set() if b"hangs" in data else None
    episodes, _ = opened(pool, script({"hang": 1}), script(TALK))
    with ThreadPoolExecutor(1) as caller:
        answers = caller.submit(pool.step, episodes, ["a", "b"])
        assert hangs.wait(60)
        pool.close()
        with pytest.raises(RuntimeError, match="are closed"):
            answers.result()
    assert all(episode.failure is None for episode in episodes)


@pytest.mark.parametrize("name", ["Closing", "ClosingLater"])
def test_a_failed_episode_is_closed_too(pooled, name):
    pool = pooled(name)
    episodes, _ = pool.open([{}] * 3, [0] * 3)
    failed = pool.step(episodes[:2], ["fail", "lie"])
    assert [answer.cause for answer in failed] == ["raised", "type"]
    assert pool.step(episodes[2:], ["and now?"])[0]["says"] == "2 closed"
    pool.end(episodes[2:])
    assert pool.step(pool.open([{}], [0])[0], ["and now?"])[0]["says"] == "3 closed"


def test_a_reward_sum_beyond_float32_is_no_score():
    assert Failure.of_sum(3e38) is None
    cause, message = Failure.of_sum(-6e38)
    assert cause == "overflow"
    assert "turns add up to -6e+38, too large for float32" in message


@pytest.mark.parametrize("reward", [1e308, -(10**400)])
def test_a_reward_beyond_float32_fails_its_episode(reward):
    with pytest.raises(Refused, match="Turn.reward is .*too large for float32") as caught:
        checked(["step"], Turn(reward=reward))
    assert failed(caught.value)[0] == "overflow"
