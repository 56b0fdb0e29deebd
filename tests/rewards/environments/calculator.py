"""An environment with tools."""

from rlflow import Turn


class Calculator:
    """Sums, as a tool."""

    def __init__(self):
        self.used = []

    def reset(self, prompt, *, seed):
        self.prompt = prompt

    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers.

        a: the first
        b: the second
        """
        self.used.append((a, b))
        return a + b

    def fail(self, how: str) -> str:
        """Fail in some way."""
        if how == "service":
            raise ConnectionError("no answer")
        raise ValueError(how)

    def score(self) -> float:
        return float(len(self.used))


class Later:
    """The same with async methods."""

    async def add(self, a: int) -> dict:
        """Add one."""
        return {"sum": a + 1}


class Unused:
    def step(self, said):
        return Turn()
