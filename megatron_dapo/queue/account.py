"""The places of all draws of a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Account:
    """The places of all draws of a run, in groups."""

    num_drawn: int
    num_handed: int  # to the trainer
    num_filtered: int  # dropped without signal
    num_discarded: int  # too old, or beyond a step's need
    num_ready: int  # with signal, waiting for their step
    num_open: int  # not decided yet

    @property
    def is_closed(self) -> bool:
        """Return whether every draw is in exactly one place."""
        out = self.num_handed + self.num_filtered + self.num_discarded
        return self.num_drawn == out + self.num_ready + self.num_open
