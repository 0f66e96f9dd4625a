"""`PendingGradients`: what backward passes left for the row optimizer."""

from __future__ import annotations

import logging

from terarec.ops.row_update import BagGradient

WARNS_AT = 100
"""Gradients of one arena that wait without a step, at which a warning is logged. A lookup leaves one for each kind of
pooling; gradients that are gathered on purpose are those of a few lookups."""

_LOGGER = logging.getLogger(__name__)


class PendingGradients(list[BagGradient]):
    """The gradients of an arena's rows since the last step. Threads may put and take them at the same time.

    Args:
        owner: whose rows they are, for the warning.
    """

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner
        self._has_warned = False

    def put(self, gradient: BagGradient) -> None:
        """Keep `gradient` until `take`; many of them without it are logged once as a warning."""
        self.append(gradient)
        if len(self) == WARNS_AT and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "%s: %d gradients, %s bytes, wait for a row optimizer's step() or zero_grad(), and more come with each "
                "backward pass; look tables that are not to learn up in eval() or under torch.no_grad()",
                self.owner,
                len(self),
                f"{sum(held.grad.nbytes for held in self):,}",
            )

    def take(self) -> list[BagGradient]:
        """Hand over, and forget, those that are there."""
        taken = list(self)
        del self[: len(taken)]  # another thread may have put some by now
        return taken
