"""Groups of FSDP2 where nothing is resharded and prefetching goes as far as it likes: `best_kept`.

[Note: a pass over cuts]
Without gathers in the backward pass the two passes meet in one moment, the end of the forward pass, so that a step is
what comes before it and what comes after it. Read from the first unit on, the first is a recurrence over groups (when
the link and the processor are free), and so is the second, read backwards in time: how long it takes from the start of
a group's backward pass, or of its reduce-scatter, to the end of the step. A plan is a row of cuts that both share, so
one pass keeps, for every cut, the states (link, processor; three times to the end) that no other is ahead of in all of
them. Prefetching of any distance is a relaxation: no plan that is carried out has a shorter step, and one that
prefetches far enough has this one. Where states become too many those with the largest bound are dropped, and the least
of these bounds counts among what no plan undercuts.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from mgwfbp.fsdp_step import Group

__all__ = ["Kept", "best_kept"]

# States that are kept for a cut at most, and for all cuts together: a second for 64 units.
WIDTH, MOST_KEPT = 40, 1200


class Kept(NamedTuple):
    """Where groups end in the best plan that was found, and what no plan with this root undercuts."""

    ends: tuple[int, ...]
    bound_s: float


class _State(NamedTuple):
    """What is known of the groups before a cut."""

    link_s: float  # when the last gather ends
    done_s: float  # when the last group's forward pass does
    send_tail_s: float  # from the start of the last group's reduce-scatter to the end of the step
    tail_s: float  # from the start of the last group's backward pass
    tail_before_s: float  # and of the group's before it
    ends: tuple[int, ...]

    def after(self, group: Group, end: int) -> "_State":
        """Return the state behind one more group."""
        link_s = self.link_s + group.gather_s
        send_tail_s = group.send_s + max(self.send_tail_s, self.tail_before_s)
        tail_s = group.backward_s + group.copy_in_s + max(self.tail_s, send_tail_s)
        done_s = max(self.done_s, link_s) + group.copy_out_s + group.forward_s
        return _State(link_s, done_s, send_tail_s, tail_s, self.tail_s, (*self.ends, end))

    def is_ahead_of(self, other: "_State") -> bool:
        """Whether it is nowhere behind."""
        return (
            self.link_s <= other.link_s
            and self.done_s <= other.done_s
            and self.send_tail_s <= other.send_tail_s
            and self.tail_s <= other.tail_s
            and self.tail_before_s <= other.tail_before_s
        )


def best_kept(root: Sequence[Group], reaches: Sequence[int], group_of: Callable[[int, int], Group]) -> Kept:
    """Return the best plan that reshards nothing, see [Note: a pass over cuts].

    Args:
        root: the root's group, if it has one.
        reaches: for each unit where a group that begins with it must have ended.
        group_of: makes a group of the units from one place up to another.
    """
    number, start = len(reaches), _State(0.0, 0.0, 0.0, 0.0, 0.0, ())
    for group in root:
        start = start.after(group, 0)._replace(ends=())
    width = max(8, min(WIDTH, MOST_KEPT // number))
    # What is left to compute from each cut on: no state does better.
    left_s = [(0.0, 0.0)]
    for place in reversed(range(number)):
        unit = group_of(place, place + 1)
        left_s.append((left_s[-1][0] + unit.forward_s, left_s[-1][1] + unit.backward_s))
    left_s.reverse()
    fronts: list[list[_State]] = [[start], *([] for _ in range(number))]
    bound_s = inf
    for cut in range(number):
        fronts[cut], dropped_s = _front(fronts[cut], left_s[cut], width)
        bound_s = min(bound_s, dropped_s)
        for end in range(cut + 1, reaches[cut] + 1):
            group = group_of(cut, end)
            fronts[end] += [state.after(group, end) for state in fronts[cut]]
    best = min(fronts[number], key=lambda state: (state.done_s + state.tail_s, len(state.ends)))
    return Kept(best.ends, min(bound_s, best.done_s + best.tail_s))


def _front(states: list[_State], left_s: tuple[float, float], width: int) -> tuple[list[_State], float]:
    """Return the states that no other is ahead of, the most promising ones where they are many; the others' bound."""
    forward_s, backward_s = left_s

    def least_s(state: _State) -> float:
        return state.done_s + forward_s + max(state.tail_s + backward_s, state.send_tail_s)

    states.sort(key=lambda state: (least_s(state), state[:5]))
    found: list[_State] = []
    for state in states:
        if any(other.is_ahead_of(state) for other in found):
            continue
        if len(found) == width:
            return found, least_s(state)
        found.append(state)
    return found, inf
