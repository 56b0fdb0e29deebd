"""An OpenEnv server with a guessing game, on a free port that it prints: python openenv_server.py"""

import socket

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.steps = 0

    def reset(self, seed=None, episode_id=None, answer="", **kwargs):
        self.answer = int(answer)
        return Hint(hint="Guess.")

    def step(self, action):
        self.steps += 1
        if not action.message.strip().lstrip("-").isdigit():
            raise ValueError("no number")
        number = int(action.message)
        if number == self.answer:
            return Hint(done=True, reward=1.0)
        return Hint(hint=" less. " if number > self.answer else " more. ")

    @property
    def state(self):
        return State(step_count=self.steps)


listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
