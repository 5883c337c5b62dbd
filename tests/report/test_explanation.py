"""What an explanation says, of steps made by hand, and its page in a real browser."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgwfbp import FormatError, LinearCost, MergePlan, ResultError, find_plan, predict
from mgwfbp.report.explanation import PARTS, Choice, Explanation, RankParts, advise
from mgwfbp.report.explanation_page import build_explanation_page
from tests.report.browser import open_tab
from tests.report.records import TRACE

COST = LinearCost(4, 1e-3, 2e-9)


def rank(**parts_s: float) -> RankParts:
    """A step of 100 ms, 40 of them backward, unless told otherwise."""
    found = {
        "between": 0.005,
        "forward": 0.03,
        "backward": 0.04,
        "waiting": 0.0,
        "communication": 0.02,
        "other": 0.0,
        "optimizer": 0.005,
        **parts_s,
    }
    step_s = sum(found.values())
    return RankParts(*[*(found[part] for part in PARTS), step_s, step_s])


def explained(*ranks: RankParts, **others: Any) -> Explanation:
    choices = (
        Choice(None, "as it is", 2, 0.100, 0.02),
        Choice(1, "bucket_cap_mb=1", 9, 0.105, 0.025),
        Choice(5, "bucket_cap_mb=5", 4, 0.090, 0.01),
        Choice(25, "bucket_cap_mb=25", 1, 0.110, 0.03),
        Choice(None, "optimal", 3, 0.085, 0.005),
    )
    step = predict(TRACE, COST, find_plan(TRACE, COST))
    known = {
        "messages_s": 0.03,
        "hidden_s": 0.01,
        "last_backward_s": 0.04,
        "choices": choices,
        "bound_s": 0.08,
        "error": 0.02,
        "timeline": step,
        "wrapper": "torch",
        **others,
    }
    return Explanation(model="toy", has_optimizer=True, steps=20, ranks=ranks or (rank(), rank()), **known)


def test_the_answer_names_shares_the_bucket_size_and_our_class_and_marks_predictions() -> None:
    assert str(explained()) == (
        "a step takes 100 ms (measured, 2 ranks, mean of 20 steps): 40% backward pass, 30% forward pass, 20% exposed "
        "communication, 5% between steps (loading data), 5% optimizer; set bucket_cap_mb=5 (predicted 1.11 times as "
        "fast: 90 ms where it is 100 ms), or use mgwfbp.DistributedDataParallel (predicted 1.18 times as fast: 85 ms "
        "where it is 100 ms)"
    )
    assert "all predicted: bucket_cap_mb=5: 90 ms" in " ".join(advise(explained()))


def test_the_rank_that_works_longest_is_the_slowest_with_the_part_it_loses_most_in() -> None:
    fast, slow = rank(waiting=0.05), rank(forward=0.075, optimizer=0.01)
    found = explained(fast, slow, fast)
    assert (found.slowest, found.behind_part) == (1, "forward")
    assert found.behind_s == pytest.approx(0.05)
    assert "slowest rank 1 (33% of the step behind the others)" in str(found)
    (words,) = [words for words in advise(found) if words.startswith("Rank 1 holds the others up")]
    assert "most: forward pass, 75 ms, the others 30 ms (measured)" in words


def test_ranks_that_take_turns_at_being_late_are_not_blamed_one_by_one() -> None:
    words = " ".join(advise(explained(rank(waiting=0.03), rank(waiting=0.03))))
    assert "Ranks take turns at being late" in words
    assert "holds the others up" not in words


@pytest.mark.parametrize(
    ("parts_s", "words"),
    [({"between": 0.05}, "num_workers="), ({"optimizer": 0.05}, "fused=True"), ({"communication": 0.05}, "Exposed")],
)
def test_each_large_part_has_its_advice(parts_s: dict[str, float], words: str) -> None:
    assert words in " ".join(advise(explained(rank(**parts_s), rank(**parts_s))))


def test_small_parts_have_none_and_computation_is_said_to_be_all() -> None:
    told = advise(explained(rank(communication=0.0005), rank(communication=0.0005)))
    assert "nothing to gain from other buckets" in told[0]
    assert "there is little else to win" in told[1]
    assert len(told) == 2
    assert "bucket_cap_mb" not in str(explained(rank(communication=0.0005), rank(communication=0.0005)))


def test_messages_that_take_longer_than_the_backward_pass_cannot_be_hidden() -> None:
    words = advise(explained(messages_s=0.05))[-1]
    assert words.startswith("Buckets alone cannot hide the messages: these take 50 ms, the backward pass in")
    assert "No buckets give a step below 80 ms (predicted)" in words
    assert not any("cannot hide" in words for words in advise(explained(messages_s=0.039)))


def test_who_sends_in_low_precision_is_not_told_to_and_the_page_says_where_the_other_cost_is_from() -> None:
    plan = MergePlan.of_sizes(TRACE, [len(TRACE.layers)])
    step = predict(TRACE, COST, replace(plan, wire=("float16",)))
    found = explained(messages_s=0.05, timeline=step, wrapper="mgwfbp")
    words, page = " ".join(advise(found)), build_explanation_page(found)
    assert found.wire == "float16"
    assert "Send fewer bytes (several batches a step with no_sync)" in words
    assert "No buckets in either precision give a step below 80 ms (predicted)" in words
    assert "What messages in float16 would take as they are was measured on the idle network" in page
    other = explained(messages_s=0.05)
    assert "bf16_compress_hook" in " ".join(advise(other))
    assert "either precision" not in " ".join(advise(other))
    assert "idle network" not in build_explanation_page(other)


def test_predictions_that_are_far_off_are_not_repeated() -> None:
    found = explained(error=0.4)
    assert found.best_bucket is found.best_plan is None
    assert "predicted" not in str(found)
    assert "off by +40%" in " ".join(advise(found))
    assert "bucket_cap_mb" not in build_explanation_page(found)


def test_what_a_tuner_has_chosen_is_left_alone() -> None:
    found = explained(wrapper="tuned")
    assert found.best_bucket is found.best_plan is None
    assert "The tuner has chosen" in " ".join(advise(found))


def test_why_messages_are_not_known_is_said() -> None:
    found = explained(messages_s=None, choices=(), bound_s=None, error=None, timeline=None, unknown="a hook sends them")
    assert "no buckets are predicted: a hook sends them" in " ".join(advise(found))
    assert "a hook sends them" in build_explanation_page(found)


def test_an_explanation_survives_its_file_and_a_bad_one_does_not_get_in(tmp_path: Path) -> None:
    for found in (explained(), explained(rank(), choices=(), timeline=None, error=None)):
        found.save(tmp_path / "found.json")
        assert Explanation.load(tmp_path / "found.json") == found
    data = explained().to_json()
    data["ranks"][0]["forward_s"] = -1.0
    with pytest.raises(FormatError, match=r"forward_s is -1\.0"):
        Explanation.from_json(json.loads(json.dumps(data)))
    with pytest.raises(ResultError, match="ranks: empty"):
        replace(explained(), ranks=())


def test_the_page_opens_without_a_complaint_and_shows_every_rank_and_choice(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "slow.html"
    found = explained(*(rank(between=0.01 * place) for place in range(20)))
    path.write_text(build_explanation_page(found), encoding="utf-8")
    for width in (1440, 390):
        with open_tab(browser, viewport={"width": width, "height": 900}) as tab:
            tab.open(path)
            tab.check()
            assert tab.page.locator("main > p.lead span").all_inner_texts()[1].startswith("Rank 19 holds the others up")
            # Of many ranks those that work longest are drawn, and the table has all.
            assert tab.page.locator("#ranks svg.chart text.bar-label").count() == 16
            assert tab.page.locator("#buckets svg.chart text.bar-label").count() == len(found.choices)
            assert tab.page.locator(".measured svg.timeline").count() == 1
            assert tab.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
