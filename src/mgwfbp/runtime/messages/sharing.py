"""What messages that share the link would take one after another: `spread_out`."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Queue", "spread_out"]


class Queue(NamedTuple):
    """Messages that are sent in the order in which they are asked for, some at once."""

    name: str = ""
    at_once: int = 1


def spread_out(
    asked_s: Sequence[float], arrived_s: Sequence[float], queues: Sequence[Queue]
) -> list[tuple[float, float]]:
    """Return when each message would have begun and arrived had all been sent one after another, as the model does.

    A message begins when it was asked for and its queue has room. Those in flight are taken to share the link evenly,
    so each is charged its part of every moment; what all are charged is the time in which some were in flight, and the
    last one of a busy spell arrives when it did. One that overtakes the one before it in a queue that sends one at a
    time is taken to arrive with it.

    >>> spread_out([0.0, 0.0, 5.0], [4.0, 4.0, 6.0], [Queue(at_once=2)] * 3)
    [(0.0, 2.0), (2.0, 4.0), (5.0, 6.0)]
    >>> spread_out([0.0, 1.0], [4.0, 3.0], [Queue("as they are"), Queue("low")])  # the first is alone for 2 of 4
    [(0.0, 3.0), (3.0, 4.0)]
    """
    begun_s, ended_s = _in_flight(asked_s, arrived_s, queues)
    found, free_s = list[tuple[float, float]](), 0.0
    for ready_s, taken_s in zip(asked_s, _charged(begun_s, ended_s), strict=True):
        start_s = max(ready_s, free_s)
        free_s = start_s + taken_s
        found.append((start_s, free_s))
    return found


def _in_flight(
    asked_s: Sequence[float], arrived_s: Sequence[float], queues: Sequence[Queue]
) -> tuple[list[float], list[float]]:
    """Return when each message was begun, and when it had arrived."""
    begun_s, ended_s = list[float](), list[float]()
    busy: dict[str, list[float]] = {}  # of each queue, when its places are free again
    for ready_s, arrival_s, queue in zip(asked_s, arrived_s, queues, strict=True):
        places = busy.setdefault(queue.name, [0.0] * queue.at_once)
        begun_s.append(max(ready_s, heapq.heappop(places)))
        ended_s.append(max(begun_s[-1], arrival_s))
        heapq.heappush(places, ended_s[-1])
    return begun_s, ended_s


def _charged(begun_s: Sequence[float], ended_s: Sequence[float]) -> list[float]:
    """Return each message's part of the moments in which it was in flight, each shared evenly."""
    events = sorted(
        [(moment_s, 1, place) for place, moment_s in enumerate(begun_s)]
        + [(moment_s, -1, place) for place, moment_s in enumerate(ended_s)],
        key=lambda event: event[0],  # what begins and ends at once began first
    )
    charged_s, in_flight, before_s = [0.0] * len(begun_s), set[int](), 0.0
    for moment_s, change, place in events:
        for one in in_flight:
            charged_s[one] += (moment_s - before_s) / len(in_flight)
        before_s = moment_s
        (in_flight.add if change > 0 else in_flight.remove)(place)
    return charged_s
