"""A backend whose ranks never add up their gradients: each learns from the last pass over its own rows.

Workers import it by its name.
"""

from dataclasses import replace

from rlflow.backends import local
from rlflow.training.peers import Peers

Generator = local.Generator


class Alone(Peers):
    """Ranks that do not add up their gradients."""

    def add_gradients(self, parameters):
        pass


class Trainer(local.Trainer):
    """A local trainer with these ranks."""

    @classmethod
    def capabilities(cls, settings, device):
        return replace(super().capabilities(settings, device), threads=True)

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.peers = Alone(self.peers.group)

    def backward(self, objective):
        self.optimizer.zero_grad()
        objective.backward()
