"""`--env retry`: after a wrong answer, the model may answer again."""

from __future__ import annotations

from rlflow.author.turn import Turn


class Retry:
    """Compares the model's reply with the field ``answer``, ignoring spaces around both.

    If they are equal, the episode ends with reward 1.
    """

    def __init__(self, *, wrong: str = " no. ", less: str = "", more: str = "", cost: float = 0.0) -> None:
        """Store the settings.

        wrong: the message after a wrong answer. less: the message after a number that is too large. more: the
        message after a number that is too small. Both default to wrong. cost: subtracted from the reward for
        each wrong turn.
        """
        self.wrong, self.less, self.more, self.cost = wrong, less or wrong, more or wrong, cost
        self.answer = ""
        self.tries = 0

    def reset(self, answer: str, *, seed: int) -> None:
        """Start an episode with the correct answer."""
        self.answer = answer.strip()

    def step(self, text: str) -> Turn:
        """Compare a reply with the answer. A wrong reply gets a message and the reward ``-cost``."""
        self.tries += 1
        if text.strip() == self.answer:
            return Turn(reward=1.0, done=True, log={"tries": self.tries})
        try:
            far = float(text) - float(self.answer)
        except ValueError:
            return Turn(says=self.wrong, reward=-self.cost)
        return Turn(says=self.less if far > 0 else self.more, reward=-self.cost)
