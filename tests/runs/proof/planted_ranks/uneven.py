"""A backend that averages the means of its ranks and ignores how many tokens each rank has. Workers import it
by its name."""

from dataclasses import replace

import torch

from rlflow.backends import local
from rlflow.training.loss_rows import mask_counts

Generator = local.Generator


class Trainer(local.Trainer):
    """A local trainer whose ranks each divide by their own token count and by the number of ranks."""

    @classmethod
    def capabilities(cls, settings, device):
        return replace(super().capabilities(settings, device), threads=True)

    def update_shares(self, batch, loss, shares, mean, settings):
        return super().update_shares(
            batch, loss, [self.own(share, mask_counts(batch)) for share in shares], mean, settings
        )

    def own(self, share, counts):
        """Return the share as if all ranks had as many tokens as this one."""
        tokens = int(counts[torch.cat(list(share.units))].sum()) if len(share.units) else 0
        return replace(share, totals=replace(share.totals, tokens=tokens * self.peers.ranks))
