"""Who trains and validates on what."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp.train.config import TrainConfig
from mgwfbp.train.sampler import TrainBatches, ValidBatches, epoch_order
from mgwfbp.train.schedule import learning_rate

sizes = st.tuples(st.integers(1, 200), st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))


def all_ranks(num_samples: int, batch_size: int, workers: int, epoch: int, first: int = 0) -> list[list[list[int]]]:
    """By rank: its batches of an epoch."""
    found = []
    for rank in range(workers):
        batches = TrainBatches(num_samples, batch_size, rank=rank, workers=workers, seed=7)
        batches.go_to(epoch, first)
        found.append([[index for _, index in batch] for batch in batches])
    return found


@given(sizes)
def test_all_ranks_together_train_on_what_one_worker_with_the_whole_batch_would(
    size: tuple[int, int, int, int],
) -> None:
    num_samples, batch_size, workers, epoch = size
    ranks = all_ranks(num_samples, batch_size, workers, epoch)
    together = [[index for rank in ranks for index in rank[batch]] for batch in range(len(ranks[0]))]
    assert [together] == all_ranks(num_samples, batch_size * workers, 1, epoch)
    flat = [index for batch in together for index in batch]
    assert len(set(flat)) == len(flat) == num_samples // (batch_size * workers) * batch_size * workers


@given(sizes, st.integers(0, 20))
def test_a_run_that_goes_on_in_mid_epoch_sees_what_is_left_of_it(size: tuple[int, int, int, int], first: int) -> None:
    num_samples, batch_size, workers, epoch = size
    whole = all_ranks(num_samples, batch_size, workers, epoch)
    assert all_ranks(num_samples, batch_size, workers, epoch, first) == [rank[first:] for rank in whole]


def test_every_epoch_and_every_seed_has_an_order_of_its_own() -> None:
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)


@given(sizes)
def test_validation_sees_every_sample_once_whatever_the_number_of_ranks(size: tuple[int, int, int, int]) -> None:
    num_samples, batch_size, workers, _ = size
    shares = [ValidBatches(num_samples, batch_size, rank=rank, workers=workers) for rank in range(workers)]
    assert sorted(index for share in shares for batch in share for _, index in batch) == list(range(num_samples))
    assert all(len(share) == len(list(share)) for share in shares)


rates = st.builds(
    TrainConfig,
    lr=st.floats(0.001, 1),
    workers=st.integers(1, 8),
    epochs=st.integers(1, 6),
    warmup_epochs=st.floats(0, 3),
    schedule=st.sampled_from(["cosine", "step"]),
    step_epochs=st.integers(1, 3),
)


@given(rates, st.integers(1, 9))
def test_the_rate_rises_to_its_peak_and_never_again(config: TrainConfig, steps_per_epoch: int) -> None:
    found = [learning_rate(config, step, steps_per_epoch) for step in range(config.epochs * steps_per_epoch)]
    assert all(0 < rate <= config.peak_lr * (1 + 1e-12) for rate in found)
    warmup = [rate for step, rate in enumerate(found) if step + 1 <= config.warmup_epochs * steps_per_epoch]
    assert warmup == sorted(warmup)
    rest = found[len(warmup) :]
    assert rest == sorted(rest, reverse=True)


def test_linear_scaling_gives_as_many_times_the_rate_as_there_are_workers() -> None:
    one, four = TrainConfig(lr=0.1), TrainConfig(lr=0.1, workers=4)
    assert [learning_rate(four, step, 5) for step in range(20)] == [
        4 * learning_rate(one, step, 5) for step in range(20)
    ]
    assert TrainConfig(lr=0.1, workers=4, scale_lr=False).peak_lr == 0.1


def test_the_steps_are_where_they_were_asked_for() -> None:
    config = TrainConfig(lr=1.0, epochs=6, warmup_epochs=0, schedule="step", step_epochs=2, step_factor=0.1)
    assert torch.allclose(
        torch.tensor([learning_rate(config, step, 1) for step in range(6)]),
        torch.tensor([1.0, 1.0, 0.1, 0.1, 0.01, 0.01]),
    )
