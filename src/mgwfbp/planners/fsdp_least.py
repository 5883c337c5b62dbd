"""Which groups of FSDP2 to reshard so that a rank holds the least: `least_reshard`.

[Note: the least memory]
To keep a group adds it to what is held behind it, and takes it off its own backward pass, where it is not copied out of
a gather once more. That saves something where its gradient is smaller than itself, as of a large frozen module before
small ones. What a group needs depends on whether it and the one before it are resharded, and on those further before it
only by a sum that is the same for all behind: so the best choice for the last groups, for each of what may be the one
before, is found from the last one on.

Prefetching further ahead only needs more, and nearly always so do larger groups: the exception found is a frozen module
in one group with a trained one behind it, whose gradient is sent in more bytes than it is gathered in, which needs no
gather beside that message. Of small models all groups are tried, of others units by themselves: what these need is then
the least at most.
"""

from collections.abc import Sequence

from mgwfbp.memory import GroupBytes, Schedule, whole_bytes

__all__ = ["least_reshard"]


def least_reshard(groups: Sequence[GroupBytes], *, has_root: bool) -> tuple[bool, ...]:
    """Return for each group but the root's, which is the first, whether to reshard it, see [Note: the least memory].

    >>> trained, frozen = GroupBytes(10, 10, 10, 10, 10, 10), GroupBytes(90, 0, 90, 90, 0, 0)
    >>> least_reshard([trained] * 5, has_root=False)
    (True, True, False, False, False)
    >>> least_reshard([GroupBytes(50, 50, 50, 50, 50, 50), frozen, trained], has_root=True)
    (False, False)
    """
    number, first = len(groups), int(has_root)

    def least(
        place: int, before: bool, behind: dict[bool, tuple[int, tuple[bool, ...]]]
    ) -> tuple[int, tuple[bool, ...]]:
        found = []
        for gone in (False, True):
            held, rest = behind[gone]
            schedule = Schedule((*[before] * place, *[gone] * (number - place)), has_root=has_root)
            own = 0 if gone else groups[place].gathered
            found.append((max(whole_bytes(groups, schedule, place), own + held), (gone, *rest)))
        return min(found)

    best: dict[bool, tuple[int, tuple[bool, ...]]] = dict.fromkeys((False, True), (0, ()))
    for place in reversed(range(first, number)):
        best = {before: least(place, before, best) for before in (False, True)}
    return best[False][1]
