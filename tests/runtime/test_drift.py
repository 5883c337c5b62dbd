"""Steps that change for long, and ranks that begin again together: simulated clocks, stores and collectives."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mgwfbp import MergePlan
from mgwfbp.runtime.tune.drift import AHEAD, ASK_EVERY, LASTING, WINDOW, Drift, StepLengths
from mgwfbp.runtime.tune.tuning import Candidate, Tuning


def steps_until_changed(lengths_s: list[float]) -> int | None:
    judge = StepLengths()
    return next((number for number, length_s in enumerate(lengths_s, 1) if judge.add(length_s)), None)


@pytest.mark.parametrize("seed", range(5))
def test_quiet_steps_never_count_as_changed(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [0.1 * rng.lognormvariate(0, 0.05) * (1.5 if rng.random() < 0.05 else 1) for _ in range(20_000)]
    assert steps_until_changed(lengths) is None


@pytest.mark.parametrize("factor", [1.3, 0.7])
def test_steps_that_stay_longer_or_shorter_count_after_some_windows(factor: float) -> None:
    lengths = [0.1] * (4 * WINDOW) + [0.1 * factor] * (10 * WINDOW)
    assert steps_until_changed(lengths) == (4 + LASTING) * WINDOW


def test_a_slow_spell_that_ends_does_not_count() -> None:
    lengths = ([0.1] * (4 * WINDOW) + [0.2] * (LASTING - 1) * WINDOW) * 3
    assert steps_until_changed(lengths) is None


@dataclass
class MemoryStore:
    """A store that all simulated ranks share."""

    values: dict[str, str] = field(default_factory=dict)
    asked: int = 0

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])


class Rank:
    """A rank whose group counts so many collectives a step."""

    def __init__(self, store: MemoryStore, rank: int, world: int, *, per_step: int = 5) -> None:
        self.count, self.now_s, self.steps, self.per_step = 0, 0.0, 0, per_step
        self.began_at: int | None = None
        self.drift = Drift(store, rank, world, lambda: self.count, self._begin, lambda: self.now_s)

    def _begin(self) -> None:
        self.began_at = self.steps

    def step(self, length_s: float, collectives: int | None = None, *, forwards: int = 1) -> None:
        """Run a step, whose length is that of its messages, after so many forward passes that send buffers."""
        for _ in range(forwards):
            self.drift.before_forward()
            self.count += forwards > 1
            self.drift.after_forward()
        self.steps += 1
        self.now_s += length_s
        self.count += self.per_step if collectives is None else collectives


def train(ranks: list[Rank], lengths_s: list[float], rng: random.Random) -> None:
    """Let ranks step together, in any order within a step."""
    for length_s in lengths_s:
        for rank in rng.sample(ranks, len(ranks)):
            if rank.began_at is None:
                rank.step(length_s)


@pytest.mark.parametrize("seed", range(10))
def test_all_ranks_begin_again_at_the_same_step(seed: int) -> None:
    store = MemoryStore()
    ranks = [Rank(store, rank, 4) for rank in range(4)]
    train(ranks, [0.1] * 400 + [0.2] * 1000, random.Random(seed))
    (began,) = {rank.began_at for rank in ranks}
    assert began is not None
    assert 400 + LASTING * WINDOW <= began <= 400 + (LASTING + 2) * WINDOW + ASK_EVERY + 2 * AHEAD


def test_while_nothing_changes_the_store_is_asked_once_in_a_while_and_nothing_is_written() -> None:
    store = MemoryStore()
    ranks = [Rank(store, rank, 4) for rank in range(4)]
    train(ranks, [0.1] * 2000, random.Random(1))
    assert {rank.began_at for rank in ranks} == {None}
    assert store.values == {}
    assert store.asked == 4 * (2000 // ASK_EVERY)


@pytest.mark.parametrize("offset", [1, 5, 10])
def test_ranks_that_count_collectives_differently_do_not_begin_and_say_so(offset: int) -> None:
    # One rank has sent messages to another that the rest knows nothing of: some, or as many as a step has.
    store = MemoryStore()
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    ranks[1].count += offset
    train(ranks, [0.1] * 400 + [0.2] * 1500, random.Random(1))
    assert {rank.began_at for rank in ranks} == {None}
    assert all("count their messages differently" in rank.drift.problem for rank in ranks)


def test_a_step_of_one_rank_that_comes_to_nothing_is_none() -> None:
    store = MemoryStore()
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    ranks[2].step(0.1, collectives=0)
    train(ranks, [0.1] * 400 + [0.2] * 1500, random.Random(1))
    began = {rank.drift._steps for rank in ranks}
    assert len(began) == 1
    assert all(rank.began_at is not None for rank in ranks)


def test_forward_passes_that_share_a_reduction_are_one_step_whose_length_is_seen() -> None:
    # Three forward passes take nothing beside the messages: the median forward pass would tell nothing of the link.
    store = MemoryStore()
    ranks = [Rank(store, rank, 2) for rank in range(2)]
    for length_s in [0.1] * 400 + [0.2] * 1000:
        for rank in ranks:
            if rank.began_at is None:
                rank.step(length_s, forwards=3)
    assert ranks[0].began_at == ranks[1].began_at is not None


def test_a_model_whose_forward_passes_are_not_seen_says_so() -> None:
    rank = Rank(MemoryStore(), 0, 2)
    assert rank.drift.problem == ""
    rank.count += 1000  # messages of steps
    assert rank.drift.problem == "steps are not watched for change: none was seen to begin since tuning ended"


class FailingStore:
    """A rank's connection to a store, some of whose calls fail, before or after the store has taken them in."""

    def __init__(self, store: MemoryStore, first: int, times: float, *, is_taken_in: bool) -> None:
        self._store, self._failing, self._calls = store, range(first, int(first + times)), 0
        self._is_taken_in = is_taken_in

    def _call(self, name: str, *arguments: Any) -> Any:
        self._calls += 1
        fails = self._calls in self._failing
        result = getattr(self._store, name)(*arguments) if self._is_taken_in or not fails else None
        if fails:
            raise RuntimeError("no connection")
        return result

    def set(self, key: str, value: str) -> Any:
        return self._call("set", key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._call("get", key)
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))


def began_with(monkeypatch: pytest.MonkeyPatch, odd: int, first: int, times: float, *, is_taken_in: bool) -> set[Any]:
    """Return when ranks began, one of which has a connection that fails so many times from a call on."""
    monkeypatch.setattr("mgwfbp.runtime.tune.drift.PAUSE_S", 0.0)
    store = MemoryStore()
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    ranks[odd].drift._store = FailingStore(store, first, times, is_taken_in=is_taken_in)
    train(ranks, [0.1] * (4 * WINDOW) + [0.2] * (20 * WINDOW), random.Random(first))
    assert all(rank.drift._phase == "ended" or rank.drift._phase == "watching" for rank in ranks)
    return {rank.began_at for rank in ranks}


CALLS = range(1, 100, 2)  # until all have begun, a rank calls the store about 60 times


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("is_taken_in", [False, True])
def test_a_store_that_fails_for_a_moment_on_one_rank_leaves_no_rank_behind(
    monkeypatch: pytest.MonkeyPatch, odd: int, is_taken_in: bool
) -> None:
    began = [began_with(monkeypatch, odd, first, 1, is_taken_in=is_taken_in) for first in CALLS]
    assert all(len(steps) == 1 for steps in began)
    assert sum(None not in steps for steps in began) > 0.9 * len(began)  # and nearly always all begin


@pytest.mark.parametrize("odd", [0, 1])
def test_a_store_that_one_rank_loses_for_good_leaves_no_rank_behind(monkeypatch: pytest.MonkeyPatch, odd: int) -> None:
    began = [began_with(monkeypatch, odd, first, 1e9, is_taken_in=False) for first in CALLS]
    assert all(len(steps) == 1 for steps in began)
    assert {None not in steps for steps in began} == {True, False}


def test_a_store_that_does_not_answer_ends_watching_and_says_so() -> None:
    class Broken(MemoryStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError(f"no answer for {keys}")

    rank = Rank(Broken(), 0, 2)
    for _ in range(3 * ASK_EVERY):
        rank.step(0.1)
    assert rank.drift.problem == "the group's store does not answer: no answer for ['call']"
    assert rank.began_at is None


def test_while_ranks_tally_each_waits_for_its_device_and_not_before() -> None:
    store, waits = MemoryStore(), [0, 0]
    ranks = [Rank(store, number, 2) for number in range(2)]

    def wait_of(number: int) -> Callable[[], object]:
        def wait() -> None:
            waits[number] += 1

        return wait

    for number, rank in enumerate(ranks):
        rank.drift._wait = wait_of(number)
    train(ranks, [0.1] * (4 * WINDOW), random.Random(0))
    assert waits == [0, 0]
    train(ranks, [0.2] * (10 * WINDOW), random.Random(0))
    assert min(waits) > 3
    assert ranks[0].began_at == ranks[1].began_at is not None


def test_tuning_says_why_it_cannot_look_again() -> None:
    plan = MergePlan("toy", "ddp", (("a",),))
    tuning = Tuning("settled", "ddp was kept", candidates=(Candidate("ddp", plan, 0.1),))
    assert "differently" not in str(tuning)
    problem = "steps have changed, but ranks count their messages differently"
    assert str(replace(tuning, problem=problem)).endswith(f"; {problem})")
    assert replace(tuning, problem=problem).to_json()["problem"] == problem
