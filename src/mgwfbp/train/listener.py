"""Who is told how a run goes."""

from mgwfbp.run import LoggedEpoch, LoggedStep

__all__ = ["Listener"]


class Listener:
    """Hears how a run goes; this one does not care."""

    def say(self, text: str) -> None:
        """Hear something that people should know."""

    def step(self, line: LoggedStep, num_steps: int) -> None:
        """Hear of a line of the log; the run has so many steps."""

    def epoch(self, line: LoggedEpoch, num_epochs: int) -> None:
        """Hear of an epoch that is over; the run has so many."""
