"""How a training run goes, line by line on stderr."""

import sys
from contextlib import suppress

from mgwfbp.cli.output import talk
from mgwfbp.run import LoggedEpoch, LoggedStep
from mgwfbp.train.listener import Listener
from mgwfbp.units import format_seconds

__all__ = ["ProgressLines"]


class ProgressLines(Listener):
    """Says what a run says; on a terminal the line of a step gives way to the next."""

    def __init__(self) -> None:
        self._width = 0  # of the line that gives way

    def say(self, text: str) -> None:
        """Show something that people should know."""
        self._clear()
        talk(text)

    def step(self, line: LoggedStep, num_steps: int) -> None:
        """Show a line of the log."""
        exposed = "" if line.exposed_s is None else f"  exposed {format_seconds(line.exposed_s)}"
        text = (
            f"step {line.step}/{num_steps}  loss {line.loss:.4f}  lr {line.lr:.4g}  "
            f"{line.samples_per_s:.0f} samples/s  {format_seconds(line.step_s)} a step{exposed}"
        )
        self._clear()
        if sys.stderr is None or not sys.stderr.isatty():
            talk(text)
            return
        self._width = len(text)
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def epoch(self, line: LoggedEpoch, num_epochs: int) -> None:
        """Show the end of an epoch."""
        self._clear()
        talk(
            f"epoch {line.epoch + 1}/{num_epochs}  train loss {line.train_loss:.4f}  valid loss {line.valid_loss:.4f}  "
            f"top-1 {line.top1:.2%}  top-5 {line.top5:.2%}  {format_seconds(line.seconds)}"
        )

    def _clear(self) -> None:
        if self._width:
            with suppress(OSError):
                sys.stderr.write("\r" + " " * self._width + "\r")
            self._width = 0
