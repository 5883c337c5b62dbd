"""Notices, after tuning, that steps have changed for long: `Drift`, and has all ranks look again at the same step.

[Note: how ranks begin again]
While nothing happens each rank reads a clock when a step begins, and asks the group's store every `ASK_EVERY` steps
whether rank 0 calls. Nothing else: no hook, no message, no wait. Only rank 0 judges; steps are as long on all. While
ranks tally, each waits for its GPU when a step begins: a host may be many steps ahead of that, but no rank is more than
one reduction ahead of another.

Tuning must begin on all ranks after the same reduction, and once settled nobody counts reductions. But every group
counts its collectives, and where all ranks call the same ones, as they must, these counts agree step by step. So when
rank 0 calls, each rank tallies in the store where it is when a step begins: how many collectives and how many steps it
has seen since tuning ended. Once all ranks have been at the same places in three steps in a row they are known to
agree, and rank 0 names a place some steps ahead at which all begin. Where they never are (messages between two ranks
count on these two alone), nobody begins, and `tuning` says so.
"""

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Literal, Protocol

__all__ = ["Drift", "StepLengths", "Store"]

WINDOW = 64  # steps whose median is looked at
LASTING = 3  # windows in a row that must differ
CHANGED = 0.10  # from what was settled on, to either side
ASK_EVERY = 64  # steps between two looks into the store
AGREEING = 3  # steps in a row in which all ranks must have been at the same place
AHEAD = 8  # steps from rank 0's answer to the beginning
PATIENCE = 4 * ASK_EVERY  # steps after which rank 0 takes a call back that not all ranks have answered


class StepLengths:
    """Judges by their lengths whether steps have changed for long; a pure function of what it is told."""

    def __init__(self) -> None:
        self._window: list[float] = []
        self._usual_s: float | None = None
        self._settling = 2  # windows from which the usual length is taken, the first of which does not count
        self._different = 0

    def add(self, seconds: float) -> bool:
        """Take the length of one more step; return whether steps have changed for long."""
        self._window.append(seconds)
        if len(self._window) < WINDOW:
            return False
        middle_s, self._window = median(self._window), []
        if self._usual_s is None:
            self._settling -= 1
            if self._settling <= 0:
                self._usual_s = max(middle_s, 1e-9)
            return False
        is_different = abs(math.log(max(middle_s, 1e-9) / self._usual_s)) > math.log(1 + CHANGED)
        self._different = self._different + 1 if is_different else 0
        return self._different >= LASTING


class Store(Protocol):
    """What is used of a store of torch."""

    def set(self, key: str, value: str) -> Any:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Read a value that is there."""

    def check(self, keys: list[str]) -> bool:
        """Say whether all keys are there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""


class Drift:
    """Lets all ranks tune again, at the same step, when steps have changed for long. See [Note: how ranks begin again].

    Args:
        store: shared by all ranks of the group, and by no other `Drift`.
        rank: of this process in the group.
        world: the number of ranks.
        count: returns how many collectives the group has called.
        begin: called on all ranks when the same step begins.
        clock: seconds.
        wait: returns when the device has done what it was given.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        count: Callable[[], int],
        begin: Callable[[], object],
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self._rank, self._world, self._count, self._begin = store, rank, world, count, begin
        self._clock, self._wait = clock, wait
        self._since = count()  # at the same reduction on all ranks
        self._lengths = StepLengths()
        self._last_s: float | None = None
        self._steps = 0
        self._phase: Literal["watching", "tallying", "ended"] = "watching"
        self._places: list[tuple[int, int]] = []  # collectives and steps, when each step began
        self._called_at: int | None = None  # as rank 0
        self.problem = ""  # why ranks could not begin together

    def before_step(self) -> None:
        """Note that a step begins whose gradients will be averaged."""
        now_s, last_s = self._clock(), self._last_s
        self._last_s = now_s
        self._steps += 1
        try:
            is_due = self._look(None if last_s is None else now_s - last_s)
        except RuntimeError as error:  # of the store: watching ends, training does not
            self._phase, self.problem, is_due = "ended", f"the group's store does not answer: {error}", False
        if is_due:
            self._begin()

    def _look(self, length_s: float | None) -> bool:
        """Judge the last step, and say whether tuning begins with this one."""
        if self._phase == "watching":
            if self._rank == 0 and length_s is not None and self._called_at is None and self._lengths.add(length_s):
                self._called_at = self._steps
                self._store.set("call", "yes")
            if self._steps % ASK_EVERY == 0 and self._store.check(["call"]):
                self._phase = "tallying"
        return self._phase == "tallying" and self._tally()

    def _tally(self) -> bool:
        self._wait()
        place = (self._count() - self._since, self._steps)
        self._places.append(place)
        self._store.add(_key(place), 1)
        if self._rank == 0 and not self._store.check(["answer"]):
            self._answer(*place)
        if not self._store.check(["answer"]):
            return False
        answer = self._store.get("answer").decode()
        if answer == "no":
            self._phase, self.problem = "ended", "steps have changed, but ranks count their messages differently"
        elif place[0] >= int(answer):
            self._phase = "ended"
            return True
        return False

    def _answer(self, count: int, steps: int) -> None:
        """As rank 0, name the place at which all begin, once all were at the same ones; or take the call back."""
        # The others may not have begun this step yet, nor tallied it.
        earlier = self._places[-AGREEING - 1 : -1]
        if len(earlier) == AGREEING and all(self._store.add(_key(place), 0) >= self._world for place in earlier):
            spacing = max(1, count - self._places[-2][0])
            self._store.set("answer", str(count + AHEAD * spacing))
        elif self._called_at is not None and steps - self._called_at > PATIENCE:
            self._store.set("answer", "no")


def _key(place: tuple[int, int]) -> str:
    return f"at/{place[0]}/{place[1]}"
