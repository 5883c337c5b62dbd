"""Notices, after tuning, that steps have changed for long: `Drift`, and has all ranks look again at the same step.

[Note: how ranks begin again]
While nothing happens each rank reads a clock and its group's count of collectives when a step begins, and asks the
group's store every `ASK_EVERY` steps whether rank 0 calls. Nothing else: no hook, no message, no wait. Only rank 0
judges; steps are as long on all. A step begins with the first forward pass after collectives were called since the last
one ended: several forward passes may share a reduction, and what they send themselves (buffers) is sent by then.

Tuning must begin on all ranks after the same reduction, and once settled nobody counts reductions. But every group
counts its collectives, and where all ranks call the same ones, as they must, these counts agree step by step. So when
rank 0 calls, each rank tallies in the store where it is when a step begins: how many collectives and how many steps it
has seen since tuning ended. While ranks tally, each waits for its GPU when a step begins: a host may be many steps
ahead of that, but no rank is more than one reduction ahead of another. Once all ranks have been at the same places in
three steps in a row they are known to agree, and rank 0 answers with a place some steps ahead. Where they never are
(messages between two ranks count on these two alone), nobody begins, and `tuning` says so.

Each rank writes into the store that it has read the answer. Some steps before the place rank 0 looks whether all have,
and writes "yes" or "no"; at the place every rank reads that, and where it finds nothing nobody begins: rank 0 would
have written it before it sent its part of the reduction that has just ended. A store that fails on a rank is asked
again: in the next step, at the place itself several times. Who cannot read the word then begins if it has written that
it read the answer, for so have all others, or they could not begin. What remains: a connection that breaks for good
while a rank writes one of these two words, after the store has taken it in, leaves that rank behind; and if one rank
never writes that it has read the answer, another whose connection breaks after it did begins alone. The others then
wait for the group's timeout.
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
LAST = 3  # steps before the beginning in which rank 0 looks whether all ranks have read the answer
TRIES = 3  # times in a row that the store may fail
PAUSE_S = 0.1  # between two tries where all ranks wait
SILENT = 256  # collectives after which it is odd that no step was seen
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
        self._sent = -1  # collectives when the last forward pass ended
        self._lengths = StepLengths()
        self._last_s: float | None = None
        self._steps = 0
        self._phase: Literal["watching", "tallying", "ended"] = "watching"
        self._failures = 0  # in a row
        self._places: list[tuple[int, int]] = []  # collectives and steps, when each step began
        self._called_at: int | None = None  # as rank 0
        self._spacing = 1  # collectives in a step, as rank 0
        self._begins_at: int | None = None  # collectives
        self._has_acknowledged = False
        self._word = ""  # whether all begin, as rank 0
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why ranks could not begin together, or cannot; empty where nothing is known against it."""
        if self._problem or self._steps:
            return self._problem
        try:
            is_silent = self._count() - self._since > SILENT
        except RuntimeError:  # the group is gone
            is_silent = False
        return "steps are not watched for change: none was seen to begin since tuning ended" if is_silent else ""

    def after_forward(self) -> None:
        """Note that a forward pass has ended."""
        self._sent = self._count()

    def before_forward(self) -> None:
        """Note that a forward pass begins, and with it a step where messages were sent since the last one."""
        if self._phase == "ended" or (count := self._count()) == self._sent:
            return
        self._steps += 1
        try:
            now_s, last_s = self._clock(), self._last_s
            self._last_s = now_s
            is_due = self._look(count - self._since, None if last_s is None else now_s - last_s)
            if self._phase == "tallying" or self._steps % ASK_EVERY == 0:  # the store has answered
                self._failures = 0
        except Exception as error:  # watching ends, training does not
            is_due, self._failures = False, self._failures + 1
            if self._failures >= TRIES and not self._has_acknowledged:  # else the others count on this rank
                failed = (
                    "the group's store does not answer" if isinstance(error, RuntimeError) else type(error).__name__
                )
                self._phase, self._problem = "ended", f"{failed}: {error}"
        if is_due:
            self._begin()

    def _look(self, count: int, length_s: float | None) -> bool:
        """Judge the last step, and say whether tuning begins with this one."""
        if self._phase == "watching":
            if self._rank == 0 and length_s is not None and self._called_at is None and self._lengths.add(length_s):
                self._store.set("call", "yes")
                self._called_at = self._steps
            if self._steps % ASK_EVERY == 0 and self._store.check(["call"]):
                self._phase = "tallying"
        return self._phase == "tallying" and self._tally((count, self._steps))

    def _tally(self, place: tuple[int, int]) -> bool:
        self._wait()
        if self._begins_at is not None and place[0] >= self._begins_at:
            self._phase = "ended"
            return self._may_begin()
        if len(self._places) > 2 * PATIENCE:
            self._phase, self._problem = "ended", "steps have changed, but rank 0 does not answer in the group's store"
        self._places.append(place)
        self._store.add(_key(place), 1)
        if self._rank == 0 and not self._store.check(["answer"]):
            self._answer(*place)
        if self._begins_at is None and self._store.check(["answer"]):
            self._read_answer(self._store.get("answer").decode())
        if self._begins_at is not None and not self._has_acknowledged:
            self._store.set(f"read/{self._rank}", "yes")
            self._has_acknowledged = True
        if self._rank == 0 and self._begins_at is not None and place[0] >= self._begins_at - LAST * self._spacing:
            self._decide()
        return False

    def _answer(self, count: int, steps: int) -> None:
        """As rank 0, name the place at which all begin, once all were at the same ones; or take the call back."""
        # The others may not have begun this step yet, nor tallied it.
        earlier = self._places[-AGREEING - 1 : -1]
        if len(earlier) == AGREEING and all(self._store.add(_key(place), 0) >= self._world for place in earlier):
            self._spacing = max(1, count - self._places[-2][0])
            self._store.set("answer", str(count + AHEAD * self._spacing))
        elif self._called_at is not None and steps - self._called_at > PATIENCE:
            self._store.set("answer", "no")

    def _read_answer(self, answer: str) -> None:
        if answer == "no":
            self._phase, self._problem = "ended", "steps have changed, but ranks count their messages differently"
        else:
            self._begins_at = int(answer)

    def _decide(self) -> None:
        """As rank 0, say once whether all ranks have read the answer."""
        if not self._word:
            word = "yes" if self._store.check([f"read/{rank}" for rank in range(self._world)]) else "no"
            self._store.set("go", word)
            self._store.check(["go"])  # which the store answers when it has taken that in
            self._word = word

    def _may_begin(self) -> bool:
        """Say, at the place, whether all ranks begin."""
        may_begin = self._word == "yes" if self._rank == 0 else self._reads_yes()
        if not may_begin:
            self._problem = "steps have changed, but not all ranks read in the group's store when to begin"
        return may_begin

    def _reads_yes(self) -> bool:
        for left in reversed(range(TRIES)):
            try:
                return self._store.check(["go"]) and self._store.get("go") == b"yes"
            except Exception:
                time.sleep(PAUSE_S if left else 0.0)
        return self._has_acknowledged


def _key(place: tuple[int, int]) -> str:
    return f"at/{place[0]}/{place[1]}"
