"""A backend that takes the mean of its ranks' means, however many tokens each of them has. Workers import it
by its name."""

from dataclasses import replace

import torch

from rlflow.backends import local
from rlflow.training.loss_rows import mask_counts

Generator = local.Generator


class Trainer(local.Trainer):
    """A local trainer each of whose ranks divides by its own tokens and by the number of ranks."""

    @classmethod
    def capabilities(cls, settings, device):
        return replace(super().capabilities(settings, device), threads=True)

    def update_shares(self, batch, loss, shares, mean, settings):
        return super().update_shares(
            batch, loss, [self.own(share, mask_counts(batch)) for share in shares], mean, settings
        )

    def own(self, share, counts):
        """The share as if all ranks had as many tokens as this one."""
        tokens = int(counts[torch.cat(list(share.units))].sum()) if len(share.units) else 0
        return replace(share, totals=replace(share.totals, tokens=tokens * self.peers.ranks))
