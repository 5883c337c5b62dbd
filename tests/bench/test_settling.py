"""How long a benchmark waits for a tuner."""

from typing import Any

import pytest

from mgwfbp import MeasureError
from mgwfbp.bench.arena import settle
from mgwfbp.runtime.tune.tuning import Tuning


class Trained:
    """What is trained, with a tuner that works for so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    @property
    def tuning(self) -> Tuning:
        return Tuning("working" if self.left else "settled", "by hand")

    def step(self) -> None:
        self.left -= 1


def settled(steps: int, tune_steps: int) -> str:
    model: Any = Trained(steps)
    return settle(model, model.step, tune_steps).state


def test_a_tuner_has_the_steps_in_which_it_may_compare_and_some_to_observe() -> None:
    assert settled(1400, 1200) == settled(3000, 3000) == settled(200, 0) == "settled"


def test_a_tuner_that_is_still_at_work_is_an_error_and_not_measured() -> None:
    with pytest.raises(MeasureError, match=r"^the tuner is still at work after 425 steps: "):
        settled(3000, 100)
