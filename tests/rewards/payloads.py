"""Programs as completions, scored by every kind of reward, and a check if any had an effect.

A payload is a Python expression that leaves a mark if it runs: a file outside of its folder, or a connection
to a listener.
"""

import contextlib
import json
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlflow.data import gym
from rlflow.data.frozen import frozen
from rlflow.data.scorer import ScorerSpec
from rlflow.rewards import RewardPool, bind, parse_reward, plain

KEY = "CHAOS_API_KEY"  # in the environment of the process that runs rewards
EXPRESSIONS = {
    "command": "__import__('os').system('touch {mark}')",
    "file": "open('{mark}', 'w').write('x')",
    "module": "exec('import pathlib; pathlib.Path(\"{mark}\").touch()')",
    "program": "__import__('subprocess').run(['touch', '{mark}'])",
    "attribute walk": "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == "
    "'catch_warnings'][0]()._module.__builtins__['open']('{mark}', 'w')",
    "socket": "__import__('socket').create_connection(('127.0.0.1', {port}))",
    "key": "{key!r} in __import__('os').environ and __import__('os').environ[{key!r}]",
    "parent's key": "{key!r} in open('/proc/%d/environ' % __import__('os').getppid()).read()",
    "grandparent's key": "{key!r} in open('/proc/{driver}/environ').read()",
    "signal": "__import__('os').kill({driver}, 30)",
    "scorer": "[setattr(m, '_scored', lambda *a: 1.0) for n, m in "
    "list(__import__('sys').modules.items()) if hasattr(m, '_scored')]",
    "builtin": "setattr(__import__('builtins'), 'eval', lambda *a: exec('raise SystemExit'))",
    "verifier": "[setattr(__import__('math_verify'), n, lambda *a, **k: True) for n in ('verify', 'parse')]",
    "answer": "setattr(__import__('reasoning_gym').dataset.ProceduralDataset, 'score_answer', lambda *a: "
    "1.0)",
    "exit": "exit()",
    "hard exit": "__import__('os')._exit(0)",
    "crash": "__import__('ctypes').string_at(0)",
    "time": "[1 for i in iter(int, 1)]",
    "memory": "bytearray(1 << 45)",
    "power": "9**9**9**9",
    "forged reply": "[__import__('os').write(int(d), b'\\x09\\0\\0\\0\\xcb\\x3f\\xf0' + bytes(6)) for d "
    "in __import__('os').listdir("
    "'/proc/self/fd') if 'pipe' in __import__('os').readlink('/proc/self/fd/' + d)]",
    "forged score": "type('F', (float,), {{'__eq__': lambda *a: True}})(1)",
}
SHAPES = ("{}", "[{}]", "[[{}]]", "sin({!r})", "\\boxed{{{}}}", "${}$", "1 + ({})", "lambda: {}")
USERS = '''
def compared(completion, answer):
    return float(completion == answer)

def evaluated(completion, answer):
    """A reward that does what none should. What its rows score is its own fault; outside it nothing may happen."""
    return float(eval(completion) is True)
'''


@dataclass
class Marks:
    """The places where payloads would leave a mark: a file and a listener."""

    folder: Path
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    @property
    def mark(self) -> Path:
        return self.folder / "acted"

    def payloads(self, names=tuple(EXPRESSIONS), shapes=SHAPES) -> list[str]:
        port = self.listener.getsockname()[1]
        expressions = [
            EXPRESSIONS[name].format(mark=self.mark, port=port, key=KEY, driver=os.getpid()) for name in names
        ]
        return [shape.format(each) for each in expressions for shape in shapes]

    def acted(self) -> bool:
        """Return True if any payload left a mark."""
        self.listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self.listener.accept()
            return True
        return self.mark.exists()


@dataclass(frozen=True)
class Judged:
    """The result of one payload: its score (NaN: missing), whether an answer must earn that score, and
    whether it changed the scores of others."""

    payload: str
    score: float
    scored: bool
    neighbours: bool


@dataclass(frozen=True)
class Row:
    """The inputs of a scorer besides the completion, by name, with a right and a wrong answer. evaluates:
    whether the scorer evaluates text. Such a scorer must score an answer above nonsense; others give partial
    scores for letters in their places."""

    scorer: ScorerSpec
    name: str
    value: str
    right: str
    wrong: str = "wrong"
    evaluates: bool = False


def judge(pool: RewardPool, row: Row, payloads: list[str], timeout: float = 2.0) -> Iterator[Judged]:
    """Score payloads as answers to a row, each between a right answer before it and a right and a wrong
    answer after it."""

    def scores(*answers: str) -> list[float]:
        return pool.score(
            row.scorer, ["completion", row.name], [[answer, row.value] for answer in answers], timeout
        ).values

    before = scores(row.right, row.right, row.wrong, ")")
    for payload in payloads:
        found = scores(row.right, payload, row.right, row.wrong)
        senseless = 0.0 if math.isnan(before[3]) else before[3]
        earned = found[1] > senseless if row.evaluates else found[1] >= before[0] > senseless
        yield Judged(payload, found[1], earned, [found[0], *found[2:]] != before[:3])


def task_row(task: str) -> Row:
    """Return a row of a reasoning-gym task with its own right answer."""
    from reasoning_gym.factory import DATASETS

    kind, config = DATASETS[task]
    entry = kind(config=config(size=1, seed=3))[0]
    answer = entry["answer"] if isinstance(entry["answer"], str) else ""
    return Row(
        gym.scorer(task, {}),
        "entry",
        json.dumps(frozen(entry), ensure_ascii=False),
        answer,
        evaluates=plain.evaluates(task),
    )


def user_row(folder: Path, function: str) -> Row:
    """Return a row of one of the rewards above."""
    (folder / "users.py").write_text(USERS)
    with RewardPool() as pool:
        (reward,) = bind([parse_reward(f"{folder / 'users.py'}:{function}")], pool)
    return Row(reward.scorer, "answer", "True", "True", "False")


MATHS = Row(ScorerSpec("math"), "answer", "42", "42", "41")
