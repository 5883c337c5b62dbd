"""How far something is that takes long: a bar on a terminal, a line now and then where stderr is none."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from mgwfbp.cli.output import talk

__all__ = ["progress_bar", "show_progress"]

# On a terminal nothing is shown of what takes no longer than this; elsewhere a line comes after so long, and then on.
PATIENCE_S, FIRST_LINE_S, LINE_EVERY_S = 1.0, 10.0, 20.0

_Item = TypeVar("_Item")


def show_progress(items: Iterable[_Item], total: int, what: str) -> Iterator[_Item]:
    """Pass the items on and show how many there have been."""
    with progress_bar(what, total, shown=True) as advance:
        for item in items:
            advance(1)
            yield item


@contextmanager
def progress_bar(what: str, total: float, *, shown: bool) -> Iterator[Callable[[float], object]]:
    """Show how far something is that calls what this gives with every amount done, of ``total`` in all."""
    console = Console(stderr=True)
    if not shown:
        yield lambda _: None
    elif not console.is_terminal:
        yield _Lines(what, total, time.monotonic()).advance
    else:
        bar = Progress(console=console, transient=True)
        task = bar.add_task(what, total=total)
        timer = threading.Timer(PATIENCE_S, bar.start)
        timer.daemon = True
        timer.start()
        try:
            yield lambda amount: bar.advance(task, amount)
        finally:
            timer.cancel()
            timer.join()  # it may just be starting the bar
            bar.stop()


class _Lines:
    """Says now and then how far it is and how long it will take, in lines of their own."""

    def __init__(self, what: str, total: float, now_s: float) -> None:
        self._what, self._total, self._done = what, total, 0.0
        self._began_s, self._next_s = now_s, now_s + FIRST_LINE_S

    def advance(self, amount: float) -> None:
        self._done += amount
        now_s = time.monotonic()
        if now_s < self._next_s or not 0 < self._done < self._total:
            return
        self._next_s = now_s + LINE_EVERY_S
        left_s = (now_s - self._began_s) * (self._total / self._done - 1)
        talk(f"{self._what}: {100 * self._done / self._total:.0f} % done, about {_duration(left_s)} left")


def _duration(seconds: float) -> str:
    """Say roughly how long.

    >>> _duration(42.3), _duration(600)
    ('42 s', '10 min')
    """
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
