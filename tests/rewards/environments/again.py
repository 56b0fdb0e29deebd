"""An environment that rejects a wrong answer and lets the model try again."""

from rlflow import Turn

OPENED = []


class Again:
    def __init__(self, *, word: str = "no"):
        self.word, self.said = word, []
        OPENED.append(self)

    def reset(self, answer, *, seed):
        self.answer = answer

    def step(self, said):
        self.said.append(said)
        right = said.strip() == self.answer
        return Turn(says=f" {self.word}. ", reward=float(right), done=right, log={"tries": len(self.said)})


class Broken(Again):
    def step(self, said):
        if len(self.said) == 1 and len(OPENED) % 3 == 0:
            raise ConnectionError("the service is away")
        return super().step(said)


class Quiet:
    repeatable = False

    def step(self, said):
        return Turn()
