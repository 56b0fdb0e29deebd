"""`--env retry`: the model is told whether its answer is right, and may answer again."""

from __future__ import annotations

from rlflow.author.turn import Turn


class Retry:
    """Compares what the model says with the field ``answer``, letter by letter. A right answer ends the
    episode with reward 1."""

    def __init__(self, *, wrong: str = " no. ", less: str = "", more: str = "", cost: float = 0.0) -> None:
        """wrong: the words after a wrong answer. less, more: those after a number that is too large, or too
        small. cost: of a wrong answer, taken off the reward of its turn."""
        self.wrong, self.less, self.more, self.cost = wrong, less or wrong, more or wrong, cost
        self.answer = ""
        self.tries = 0

    def reset(self, answer: str, *, seed: int) -> None:
        """Begin with a question whose right answer is known."""
        self.answer = answer.strip()

    def step(self, text: str) -> Turn:
        """Judge an answer."""
        self.tries += 1
        if text.strip() == self.answer:
            return Turn(reward=1.0, done=True, log={"tries": self.tries})
        try:
            far = float(text) - float(self.answer)
        except ValueError:
            return Turn(says=self.wrong, reward=-self.cost)
        return Turn(says=self.less if far > 0 else self.more, reward=-self.cost)
