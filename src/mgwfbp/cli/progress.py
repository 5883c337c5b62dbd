"""Progress bars, on a terminal's stderr."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

__all__ = ["progress_bar", "show_progress"]

_PATIENCE_S = 1.0

_Item = TypeVar("_Item")


def show_progress(items: Iterable[_Item], total: int, what: str) -> Iterator[_Item]:
    """Pass the items on; once they have taken a second, show on a terminal's stderr how many there have been."""
    if not sys.stderr.isatty():
        yield from items
        return
    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=total)
    timer = threading.Timer(_PATIENCE_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        for item in items:
            bar.advance(task)
            yield item
    finally:
        timer.cancel()
        timer.join()  # it may just be starting the bar
        bar.stop()


@contextmanager
def progress_bar(what: str, total: float, *, shown: bool) -> Iterator[Callable[[float], object]]:
    """Show from the start how far something is that calls what this gives with every amount done."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not (shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)
