"""What messages in flight at once would take one after another, beside a link that is simulated as it is shared."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp.runtime.messages.sharing import Queue, spread_out

NAMES = ("as they are", "low")
MESSAGES = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 20), st.sampled_from(NAMES)), min_size=1, max_size=8
)  # when each is asked for after the one before, how long it takes alone, and its queue


def shared(asked: list[float], alone: list[float], queues: list[Queue]) -> list[float]:
    """Return when messages arrive over a link that those in flight share evenly."""
    arrived, left, now = [0.0] * len(asked), dict(enumerate(alone)), 0.0
    while left:
        flying: list[int] = []
        for name in NAMES:
            waiting = [one for one in left if queues[one].name == name and asked[one] <= now]
            flying += waiting[: next((queue.at_once for queue in queues if queue.name == name), 0)]
        asks = [asked[one] - now for one in left if asked[one] > now]
        ends = [left[one] * len(flying) for one in flying]
        passed = min(asks + ends)
        now += passed
        for one in flying:
            left[one] -= passed / len(flying)
            if left[one] < 1e-9:
                arrived[one] = now
                del left[one]
    return arrived


@given(MESSAGES, st.integers(1, 3), st.integers(1, 2))
def test_messages_that_share_a_link_are_charged_what_each_takes_alone(
    messages: list[tuple[int, int, str]], at_once: int, beside: int
) -> None:
    asked, now = list[float](), 0.0
    for after, _, _ in messages:
        now += after
        asked.append(now)
    alone = [float(one) for _, one, _ in messages]
    widths = dict(zip(NAMES, (at_once, beside), strict=True))
    queues = [Queue(name, widths[name]) for _, _, name in messages]
    arrived = shared(asked, alone, queues)
    spans = spread_out(asked, arrived, queues)
    assert [end - start for start, end in spans] == pytest.approx(alone, abs=1e-6)
    assert all(start >= ready for (start, _), ready in zip(spans, asked, strict=True))
    assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))
    assert spans[-1][1] == pytest.approx(max(arrived), abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1))
def test_where_one_is_sent_at_a_time_messages_arrive_when_they_did(messages: list[tuple[int, int]]) -> None:
    asked = sorted(float(one) for one, _ in messages)
    arrived, free_s, expected = list[float](), 0.0, []
    for ready_s, (_, later) in zip(asked, messages, strict=True):
        arrived.append(ready_s + later)
        start_s = max(ready_s, free_s)
        free_s = max(start_s, arrived[-1])  # none overtakes
        expected.append((start_s, free_s))
    assert spread_out(asked, arrived, [Queue()] * len(asked)) == expected
