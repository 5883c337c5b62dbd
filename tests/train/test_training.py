"""Training with real workers: strategies, precision, accumulation, validation, workers that hang."""

import csv
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as StockDdp

from mgwfbp import (
    LinearCost,
    MergePlan,
    PiecewiseCost,
    PlanError,
    StrategyError,
    TrainError,
    TrainingRun,
    load_cost,
    load_trace,
)
from mgwfbp.costs import ShardedCost, WireCost
from mgwfbp.train.batches import Batches
from mgwfbp.train.checkpoints import CheckpointFolder
from mgwfbp.train.config import TrainConfig
from mgwfbp.train.data import Samples, open_data
from mgwfbp.train.evaluate import evaluate
from mgwfbp.train.failures import lost_workers
from mgwfbp.train.models import build_model, classification_loss
from mgwfbp.train.rng import seed_rng
from mgwfbp.train.sampler import TrainBatches, ValidBatches
from mgwfbp.train.schedule import learning_rate
from mgwfbp.train.seeds import mixed_seed
from mgwfbp.train.strategy import check_strategy
from tests.train.ranks import equal, logged_step, said, started, train, train_to_end, wait_until, weights

CPU = torch.device("cpu")
TINY = TrainConfig(model="tests.train.models:tiny", workers=2, epochs=2, strategy="ddp", tensorboard=False)
PLAIN = replace(TINY, model="tests.train.models:plain")
PLANNED = replace(TINY, strategy="optimal", epochs=3, log_steps=5)


def stock_training(rank: int, config: TrainConfig, folder: Path) -> None:
    """The same training written with torch alone: the oracle for plans at 2 ranks."""
    data = open_data(config)
    seed_rng(config.seed)
    model = build_model(config.model, num_classes=data.num_classes, channels=data.channels)
    ddp = StockDdp(model)
    seed_rng(mixed_seed(config.seed, rank))
    sampler = TrainBatches(len(data.train), config.batch_size, rank=rank, workers=config.workers, seed=config.seed)
    batches = Batches(data.train, sampler, CPU, loaders=0, refuse=True, on_skip=print)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    step = 0
    for epoch in range(config.epochs):
        sampler.go_to(epoch)
        for images, labels in batches:
            optimizer.param_groups[0]["lr"] = learning_rate(config, step, len(sampler))
            classification_loss(ddp(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    if rank == 0:
        torch.save(model.state_dict(), folder / "stock.pt")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run of 3 epochs that measured what its planner needs."""
    return train_to_end(PLANNED, tmp_path_factory.mktemp("planned") / "run")


def test_every_strategy_learns_and_every_plan_at_2_ranks_is_bitwise_stock_ddp(
    tmp_path: Path, planned: TrainingRun
) -> None:
    with started(stock_training, 2, tmp_path, TINY, tmp_path) as ranks:
        assert ranks.wait() == [0, 0]
    stock = torch.load(tmp_path / "stock.pt", weights_only=True)
    names = [name for name, _ in build_model(TINY.model, num_classes=10, channels=1).named_parameters()]
    MergePlan("tiny", "by hand", (tuple(names[4:]), tuple(names[:4]))).save(tmp_path / "plan.json")
    trace, cost = (str(planned.folder / name) for name in ("trace.json", "cost.json"))
    for strategy in ("ddp", "wfbp", "single", "optimal", "naive", "ps", str(tmp_path / "plan.json")):
        config = replace(TINY, strategy=strategy, trace=trace, cost=cost)
        run = train_to_end(config, tmp_path / Path(strategy).stem)
        assert run.results is not None
        assert run.results.top1 > 0.9, strategy
        found = {name: tensor for name, tensor in weights(run.folder).items() if name in stock}
        assert equal(found, stock), strategy


def test_a_planner_measures_what_it_needs_and_keeps_it_in_the_run(tmp_path: Path, planned: TrainingRun) -> None:
    assert said(planned.folder).count("measuring") == 1
    assert planned.plan is not None
    assert planned.trace is not None
    assert planned.cost is not None
    assert planned.plan.planner == "optimal"
    assert planned.cost.workers == 2
    assert planned.results is not None
    assert planned.results.num_messages == planned.plan.num_groups
    # What was kept can be given to another run, which then measures nothing and has the same plan.
    trace, cost = (str(planned.folder / name) for name in ("trace.json", "cost.json"))
    again = train_to_end(replace(TINY, strategy="optimal", epochs=1, trace=trace, cost=cost), tmp_path / "again")
    assert again.plan == planned.plan
    assert load_trace(str(again.folder / "trace.json")) == planned.trace
    assert load_cost(again.folder / "cost.json") == planned.cost
    assert "measuring" not in said(again.folder)


def test_a_planned_run_that_is_resumed_keeps_its_plan_and_measures_nothing(
    tmp_path: Path, planned: TrainingRun
) -> None:
    folder = shutil.copytree(planned.folder, tmp_path / "run")
    longer = train_to_end(replace(PLANNED, epochs=4), folder, resume=True)
    assert longer.plan == planned.plan
    assert "going on after step" in said(folder)
    assert "measuring" not in said(folder)


def test_a_run_that_is_resumed_with_another_strategy_has_that_ones_plan(tmp_path: Path) -> None:
    config = replace(PLAIN, strategy="wfbp", epochs=1)
    before = train_to_end(config, tmp_path / "run")
    assert before.plan is not None
    assert before.plan.num_groups == 4
    LinearCost(2, 1.0, 0.0).save(tmp_path / "cost.json")  # a start-up so long that all gradients travel together
    other = replace(config, strategy="optimal", cost=str(tmp_path / "cost.json"), epochs=2)
    after = train_to_end(other, tmp_path / "run", resume=True)
    assert "not as before: strategy was wfbp, is optimal" in said(tmp_path / "run")
    assert after.plan is not None
    assert (after.plan.planner, after.plan.num_groups) == ("optimal", 1)


def test_a_batch_in_parts_gives_the_weights_of_a_whole_one(tmp_path: Path) -> None:
    whole = train_to_end(replace(PLAIN, epochs=1), tmp_path / "whole")
    parts = train_to_end(replace(PLAIN, epochs=1, accumulation_steps=4), tmp_path / "parts")
    for name, tensor in weights(whole.folder).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.allclose(tensor, weights(parts.folder)[name], atol=1e-5), name


def test_two_workers_give_the_weights_of_one_with_the_whole_batch(tmp_path: Path) -> None:
    two = train_to_end(replace(PLAIN, epochs=1), tmp_path / "two")
    one = train_to_end(replace(PLAIN, epochs=1, workers=1, batch_size=64, scale_lr=False, lr=0.1), tmp_path / "one")
    assert abs(two.epochs[0].train_loss - one.epochs[0].train_loss) < 1e-5
    for name, tensor in weights(one.folder).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.allclose(tensor, weights(two.folder)[name], atol=1e-5), name


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_mixed_precision_learns_too(tmp_path: Path, autocast: str) -> None:
    run = train_to_end(replace(PLAIN, epochs=3, autocast=autocast, clip_norm=5.0), tmp_path / "run")  # type: ignore[arg-type]
    assert run.results is not None
    assert run.results.top1 > 0.8


def test_clipping_keeps_every_update_small(tmp_path: Path) -> None:
    config = replace(PLAIN, workers=1, epochs=1, lr=1.0, momentum=0.0, weight_decay=0.0, warmup_epochs=0.0)
    run = train_to_end(replace(config, clip_norm=1e-6), tmp_path / "run")
    seed_rng(config.seed)
    before = build_model(config.model, num_classes=10, channels=1).state_dict()
    moved = sum(float((weights(run.folder)[name] - tensor).square().sum()) for name, tensor in before.items()) ** 0.5
    assert run.results is not None
    assert 0 < moved <= 1e-6 * run.results.steps * 1.01 + 1e-6


def test_a_run_that_diverges_says_so_on_every_rank(tmp_path: Path) -> None:
    config = replace(PLAIN, lr=1e20, warmup_epochs=0.0, log_steps=5)
    with started(train, 2, tmp_path, config, tmp_path / "run", False) as ranks:
        assert ranks.wait() == [1, 1]
    assert said(tmp_path / "run").count("training has diverged") == 2


def count_right(rank: int, workers: int, folder: Path) -> None:
    torch.manual_seed(5)
    samples = Samples(torch.randn(1000, 1, 8, 8), torch.randint(10, (1000,)))
    model = build_model("tests.train.models:plain", num_classes=10, channels=1)
    shares = ValidBatches(1000, 32, rank=rank, workers=workers)
    found = evaluate(model, Batches(samples, shares, CPU, loaders=0, refuse=True, on_skip=print), CPU)
    (folder / f"{workers}-{rank}.json").write_text(json.dumps([found.num_samples, found.top1, found.top5, found.loss]))


def test_accuracy_over_3_workers_and_1000_samples_is_the_single_process_figure_exactly(tmp_path: Path) -> None:
    for workers in (1, 3):
        with started(count_right, workers, tmp_path, workers, tmp_path) as ranks:
            assert ranks.wait() == [0] * workers
    alone = json.loads((tmp_path / "1-0.json").read_text())
    assert alone[0] == 1000
    assert 0 < alone[1] < alone[2] < 1
    for rank in range(3):
        found = json.loads((tmp_path / f"3-{rank}.json").read_text())
        assert found[:3] == alone[:3]
        assert abs(found[3] - alone[3]) < 1e-9


def test_a_worker_that_hangs_is_found_by_the_timeout(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = replace(TINY, epochs=50, log_steps=1, timeout_s=3.0)
    with started(train, 2, tmp_path, config, folder, False, timeout_s=3.0) as ranks:
        wait_until(lambda: logged_step(folder) >= 3)
        hung = ranks.processes[1]
        assert hung.pid is not None
        os.kill(hung.pid, signal.SIGSTOP)
        begin_s = time.monotonic()
        ranks.processes[0].join(40)
        assert ranks.processes[0].exitcode == 1
        assert time.monotonic() - begin_s < 40
    assert "timed out" in said(folder).lower() or "timeout" in said(folder).lower()  # gloo has several words for it


@pytest.mark.parametrize(
    ("said_by_gloo", "words"),
    [
        ("Application timeout caused pair closure", "another worker hangs: Application timeout"),
        ("[/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1", "another worker is gone: Connection closed"),
        ("Timed out waiting 3000ms for recv operation to complete", "another worker hangs: Timed out"),
    ],
)
def test_what_gloo_says_of_another_worker_is_not_blamed_on_the_model(said_by_gloo: str, words: str) -> None:
    with pytest.raises(TrainError, match=words), lost_workers():
        raise RuntimeError(said_by_gloo)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), lost_workers():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_the_logs_agree_with_one_another(tmp_path: Path) -> None:
    run = train_to_end(replace(TINY, log_steps=4, tensorboard=True), tmp_path / "run")
    assert [line.step for line in run.steps] == list(range(4, 45, 4))
    with (run.folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [line.loss for line in run.steps]
    assert [row["exposed_s"] or None for row in rows] == [
        None if line.exposed_s is None else str(line.exposed_s) for line in run.steps
    ]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [line.step for line in run.steps]
    assert board.Scalars("epoch/top1")[-1].value == pytest.approx(run.epochs[-1].top1)
    assert run.config["model"] == TINY.model
    assert run.environment["backend"] == "gloo"
    assert len(run.environment["hosts"]) == 2


def test_a_run_does_not_overwrite_another(tmp_path: Path) -> None:
    config = replace(PLAIN, workers=1, epochs=1)
    before = train_to_end(config, tmp_path / "run")
    with started(train, 1, tmp_path, config, tmp_path / "run", False) as ranks:
        assert ranks.wait() == [1]
    assert "holds a run already" in said(tmp_path / "run")
    assert TrainingRun.load(tmp_path / "run").results == before.results


def test_a_run_goes_on_only_as_it_was_begun(tmp_path: Path) -> None:
    train_to_end(replace(PLAIN, workers=1, epochs=1), tmp_path / "run")
    other = replace(PLAIN, workers=1, epochs=2, batch_size=16)
    with started(train, 1, tmp_path, other, tmp_path / "run", True) as ranks:
        assert ranks.wait() == [1]
    assert "begun with batch_size 32, now it is 16" in said(tmp_path / "run")


def test_a_tuned_run_keeps_what_the_tuner_found_and_is_bitwise_one_with_ddps_buckets_at_2_ranks(tmp_path: Path) -> None:
    config = replace(TINY, strategy="auto", epochs=8)
    tuned = train_to_end(config, tmp_path / "tuned")
    plain = train_to_end(replace(config, strategy="ddp"), tmp_path / "plain")
    assert equal(weights(tuned.folder), weights(plain.folder))
    assert tuned.tuning is not None
    assert tuned.tuning["state"] == "settled"
    assert tuned.trace is not None
    assert tuned.cost is not None
    assert tuned.plan is not None
    assert plain.tuning is None
    # A run that goes on does not tune again: it has the plan that was found.
    (tuned.folder / "tuning.json").unlink()
    longer = train_to_end(replace(config, epochs=9), tuned.folder, resume=True)
    assert longer.plan == tuned.plan
    assert longer.tuning is None
    # Nor does one that goes on a second time.
    longest = train_to_end(replace(config, epochs=10), tuned.folder, resume=True)
    assert longest.plan == tuned.plan
    checkpoint, _ = CheckpointFolder(tuned.folder / "checkpoints", keep=1).newest()
    assert checkpoint is not None
    assert checkpoint.is_tuned


def test_ten_steps_are_observed_and_their_exposed_communication_is_logged(planned: TrainingRun) -> None:
    assert planned.timeline is not None
    assert planned.predicted is not None
    assert planned.plan is not None
    assert [message.layers for message in planned.timeline.messages] == list(planned.plan.groups)
    assert [message.layers for message in planned.predicted.messages] == list(planned.plan.groups)
    assert planned.steps[0].exposed_s is None
    assert planned.steps[-1].exposed_s == planned.timeline.exposed_s


def test_runs_whose_messages_travel_in_low_precision_learn_keep_that_and_go_on_bitwise(tmp_path: Path) -> None:
    config = replace(TINY, strategy="ddp+bf16")
    whole = train_to_end(config, tmp_path / "whole")
    assert whole.plan is not None
    assert set(whole.plan.wire) == {"bfloat16"}
    assert whole.results is not None
    assert whole.results.top1 > 0.9
    in_steps = replace(config, schedule="step")  # whose rate does not depend on the length of the run
    first = train_to_end(replace(in_steps, epochs=1), tmp_path / "steps")
    assert first.plan == whole.plan
    longer = train_to_end(in_steps, tmp_path / "steps", resume=True)
    straight = train_to_end(in_steps, tmp_path / "straight")
    assert equal(weights(longer.folder), weights(straight.folder))


def test_runs_with_a_sharded_optimizer_end_bitwise_where_plain_ones_do_and_either_goes_on_with_the_other(
    tmp_path: Path,
) -> None:
    config = replace(TINY, schedule="step", clip_norm=1e6)  # whose rate does not depend on the length of the run
    sharded = replace(config, shard_optimizer=True)
    plain = weights(train_to_end(config, tmp_path / "plain").folder)
    assert equal(weights(train_to_end(sharded, tmp_path / "sharded").folder), plain)
    for name, first, second in (
        ("resumed", sharded, sharded),
        ("to plain", sharded, config),
        ("back", config, sharded),
    ):
        train_to_end(replace(first, epochs=1), tmp_path / name)
        assert equal(weights(train_to_end(second, tmp_path / name, resume=True).folder), plain), name


def test_a_tuned_run_with_a_sharded_optimizer_goes_on_with_its_plan_and_a_plain_one_with_its_messages(
    tmp_path: Path,
) -> None:
    config = replace(TINY, strategy="auto", schedule="step", epochs=16, shard_optimizer=True)
    folder = tmp_path / "run"
    plan = train_to_end(config, folder).plan  # a tuner has at most a quarter of the steps to compare, and has settled
    assert plan is not None
    assert sorted(name for group in plan.gathers for name in group) == sorted(plan.layer_names)
    cost = ShardedCost.load(folder / "cost.json")  # to whoever needs no halves it is that of an all-reduce
    tuning = json.loads((folder / "tuning.json").read_text())
    learnt = (tuning["gathering"]["all_reduce_cost"], tuning["cost"], tuning["gathering"]["cost"])
    assert cost == ShardedCost(*map(PiecewiseCost.from_json, learnt))
    longer = train_to_end(replace(config, epochs=17), folder, resume=True).plan
    assert longer is not None
    assert longer.messages == plan.messages
    plain = train_to_end(replace(config, epochs=18, shard_optimizer=False), folder, resume=True).plan
    assert plain is not None
    assert (plain.groups, plain.gathers) == (plan.groups, ())


def test_plans_for_a_sharded_optimizer_are_run_and_a_run_that_goes_on_has_the_same(tmp_path: Path) -> None:
    plain = weights(train_to_end(replace(TINY, schedule="step"), tmp_path / "plain").folder)
    names = MergePlan.load(tmp_path / "plain" / "plan.json").layer_names
    half = MergePlan("tiny", "by hand", (names[:1], names[1:3], names[3:]), gathers=(names[3:][::-1], names[:1]))
    half.save(tmp_path / "plan.json")
    LinearCost(2, 1e-3, 1e-8).save(tmp_path / "cost.json")
    given: dict[str, Any] = {"schedule": "step", "shard_optimizer": True}
    for config in (
        replace(TINY, strategy=str(tmp_path / "plan.json"), **given),
        replace(TINY, strategy="optimal", cost=str(tmp_path / "cost.json"), **given),
    ):
        folder = tmp_path / Path(config.strategy).stem
        first = train_to_end(replace(config, epochs=1), folder).plan
        run = train_to_end(config, folder, resume=True)
        assert first is not None
        assert run.plan is not None
        assert run.plan.messages == first.messages
        assert first.planner == ("by hand" if config.cost is None else "sharded")
        assert first.gathers == half.gathers if config.cost is None else first.gathers
        assert equal(weights(run.folder), plain)


def test_the_halves_of_a_given_cost_are_planned_with(tmp_path: Path) -> None:
    line, half = LinearCost(2, 1e-3, 1e-8), LinearCost(2, 1.0, 1e-8)  # of half a line each all would be sharded
    ShardedCost(line, half, half).save(tmp_path / "cost.json")
    config = replace(TINY, strategy="optimal", cost=str(tmp_path / "cost.json"), shard_optimizer=True, epochs=1)
    plan = train_to_end(config, tmp_path / "run").plan
    assert plan is not None
    assert (plan.planner, plan.gathers) == ("sharded", ())


def test_a_sharded_optimizer_is_refused_where_something_else_says_how_gradients_travel() -> None:
    for options in (
        {"strategy": "auto", "wire": "bfloat16"},
        {"strategy": "ddp+bf16"},
        {"strategy": "naive"},
        {"strategy": "ps"},
    ):
        with pytest.raises(TrainError, match="--shard-optimizer sends gradients itself"):
            check_strategy(replace(TINY, shard_optimizer=True, **options), num_classes=10, channels=1)  # type: ignore[arg-type]


def test_a_planner_chooses_what_travels_in_low_precision_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    LinearCost(2, 1e-6, 1e-3).save(tmp_path / "cost.json")  # a link so slow that every byte counts
    config = replace(PLAIN, strategy="optimal", wire="float16", cost=str(tmp_path / "cost.json"), epochs=1)
    before = train_to_end(config, tmp_path / "run")
    assert before.plan is not None
    assert "float16" in before.plan.wire
    after = train_to_end(replace(config, epochs=2), tmp_path / "run", resume=True)
    assert after.plan == before.plan
    plan = str(tmp_path / "plan.json")
    before.plan.save(plan)
    given = train_to_end(replace(PLAIN, strategy=plan, wire="float16", epochs=1), tmp_path / "given")
    assert given.plan is not None
    assert given.plan.messages == before.plan.messages


def test_what_converting_costs_is_measured_before_it_is_planned_and_read_where_it_is_given(tmp_path: Path) -> None:
    config = replace(PLAIN, strategy="optimal+bf16", epochs=1)
    measured = train_to_end(config, tmp_path / "measured").cost
    assert isinstance(measured, WireCost)
    assert measured.low.source["measured"] == "allreduce in bfloat16"
    # A link so slow that every byte counts, and half of them no faster.
    WireCost(LinearCost(2, 1e-6, 1e-3), LinearCost(2, 1e-6, 1e-3), "bfloat16").save(tmp_path / "cost.json")
    given = train_to_end(replace(config, cost=str(tmp_path / "cost.json")), tmp_path / "given")
    assert given.plan is not None
    assert not given.plan.wire
    assert "half the bytes" not in said(tmp_path / "given")
    LinearCost(2, 1e-6, 1e-3).save(tmp_path / "cost.json")
    halved = train_to_end(replace(config, cost=str(tmp_path / "cost.json")), tmp_path / "halved")
    assert halved.plan is not None
    assert halved.plan.wire
    assert "no cost of messages in bfloat16 is given: they are taken to cost what half the bytes" in said(
        tmp_path / "halved"
    )


def test_precisions_that_a_strategy_cannot_have_are_refused_before_anything_starts(tmp_path: Path) -> None:
    plan = MergePlan("tiny", "by hand", (("a",),), wire=("bfloat16",))
    plan.save(tmp_path / "plan.json")
    for strategy, wire, words in (
        ("wfbp", "bfloat16", "with 'wfbp\\+bf16' all its messages travel so"),
        ("auto+bf16", "bfloat16", "both name a precision"),
    ):
        with pytest.raises(TrainError, match=words):
            check_strategy(replace(TINY, strategy=strategy, wire=wire), num_classes=10, channels=1)  # type: ignore[arg-type]
    for strategy in ("auto", "optimal", "ddp+bf16"):
        with pytest.raises(TrainError, match="wire_tolerance is for strategies 'optimal' and 'auto' with a wire"):
            check_strategy(replace(TINY, strategy=strategy, wire_tolerance=0.1), num_classes=10, channels=1)
    with pytest.raises(StrategyError, match="'naive\\+bf16' is unknown"):
        check_strategy(replace(TINY, strategy="naive+bf16"), num_classes=10, channels=1)
    names = tuple(name for name, _ in build_model(TINY.model, num_classes=10, channels=1).named_parameters())
    replace(plan, groups=(names,)).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="the model was made without wire="):
        check_strategy(replace(TINY, strategy=str(tmp_path / "plan.json")), num_classes=10, channels=1)
