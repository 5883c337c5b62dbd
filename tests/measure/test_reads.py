"""What a step reads while its module does not run: noted where it happens, and nothing else, measured and counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mgwfbp import LinearCost, ModelTrace, measure_backward
from mgwfbp.fsdp_units import idle_of, root_of, units_of
from mgwfbp.measure.analytic import measure_analytic
from mgwfbp.measure.devices import Device
from mgwfbp.measure.reads import find_reads
from mgwfbp.measure.workload import Workload
from mgwfbp.planners.fsdp import plan_fsdp
from mgwfbp.planners.fsdp_by_hand import BY_HAND

PLAIN = Device("d", 1.0, 1.0, 0.0, "made up")
Loss = Callable[[Any], Tensor]


class Table(nn.Module):
    """Learned positions: a view of what it has, a parameter somewhere in what it returns, or neither."""

    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.of = nn.Parameter(torch.ones(3, 4)), of

    def forward(self) -> Any:
        return self.of(self.weight)


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.view, self.deep = Table(lambda weight: weight[:2]), Table(lambda weight: {"all": (None, [weight])})
        self.copy, self.latents = Table(lambda weight: weight[:2] * 1.0), Table(lambda weight: weight.expand(2, 3, 4))
        self.cache = Table(self.keep)
        self.head = nn.Linear(4, 2)

    def keep(self, weight: Tensor) -> None:
        self.kept = weight[:2]

    def forward(self, x: Tensor) -> Tensor:
        self.cache()
        x = x + self.view() + self.copy() + self.deep()["all"][1][0][:2] + self.latents()[0, :2] + self.kept
        return self.head(x)  # type: ignore[no-any-return]


class Reading(nn.Module):
    """Weights that others read, and such as are only asked for, or go into an average."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.stem, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4)
        self.twice, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.stem.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)
        x = self.embed(x.to(self.stem.weight.dtype))
        x = self.twice(self.twice(x)) if self.state_dict() else x
        x = checkpoint(self.again, self.stem(x), use_reentrant=False) + self.teacher(x)
        assert all(one.shape for one in self.parameters())
        return self.head(x) @ self.embed.weight.T  # type: ignore[no-any-return]

    def loss(self, output: Tensor) -> Tensor:
        return output.square().mean() + self.head.bias.square().sum()


class Stopped(nn.Module):
    """Trained layers that run without gradients before, between and behind others, and one that nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.backbone, self.middle, self.detached, self.late = (nn.Linear(4, 4) for _ in range(4))
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.backbone(x)
        x = self.first(x)
        with torch.no_grad():
            shift = self.middle(x)
        x = self.last(x + shift + self.detached(x).detach())
        with torch.no_grad():
            shift = self.late(x)
        return x + shift  # type: ignore[no-any-return]


def both(make: Callable[[], nn.Module], loss: Callable[[Any], Loss]) -> list[ModelTrace]:
    """The trace of a model as it is measured and as it is counted."""
    model = make()
    measured = measure_backward(model, torch.ones(2, 4), loss(model), steps=1, warmup=0)
    with torch.device("meta"):
        model = make()
        counted = measure_analytic(Workload("r", model, torch.ones(2, 4), 2, loss(model)), PLAIN)
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())
    assert {type(one._parameters) for one in model.modules()} == {dict}
    return [measured, counted]


def mean_of(_: Any) -> Loss:
    return lambda output: output.mean()


def test_what_returns_a_parameter_or_a_view_of_one_is_in_a_trace_and_stays_with_the_root() -> None:
    cost = LinearCost(2, 1e-9, 1e-12)
    for trace in both(Returning, mean_of):
        assert set(trace.source["returned"]) == {"view", "deep", "latents"}
        assert set(trace.source["read_elsewhere"]) == {"view", "deep", "latents", "cache"}
        plan = plan_fsdp(trace, cost)
        for one in (plan, *(by_hand(trace, ()) for by_hand in BY_HAND.values())):
            assert set(one.root) >= {"view", "deep", "latents"}
        assert plan.predicted["returned"] == ("deep", "latents", "view")


def test_what_is_read_while_it_does_not_run_is_in_a_trace_and_what_is_only_asked_for_is_not() -> None:
    for trace in both(Reading, lambda model: model.loss):
        assert trace.source["read_elsewhere"] == ("embed", "head")
        assert trace.source["returned"] == trace.source["not_called"] == ()
        assert set(root_of(trace)) == {"embed", "head"}


def test_a_trace_that_does_not_say_it_means_that_nothing_is_read_elsewhere() -> None:
    trace = both(Reading, lambda model: model.loss)[1]
    source = {name: value for name, value in trace.source.items() if name not in ("read_elsewhere", "returned")}
    assert root_of(ModelTrace(trace.model, trace.forward_s, trace.layers, source)) == []


def test_where_operations_cannot_be_seen_whatever_was_asked_for_counts() -> None:
    stem, head, rest = (nn.Linear(4, 4) for _ in range(3))
    model = nn.ModuleDict({"stem": stem, "head": head, "rest": rest})
    whole = torch.compile(torch.tanh, backend="eager", fullgraph=True)

    def forward() -> torch.Tensor:
        found = rest(head(stem(torch.ones(2, 4, dtype=head.weight.dtype))))
        whole(found.detach())
        return found.sum()  # type: ignore[no-any-return]

    whole(torch.ones(2, 4))
    assert find_reads(model, forward).elsewhere == ("head",)


def test_a_copy_that_autocast_keeps_of_a_weight_is_read_as_the_weight() -> None:
    stem, head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.linear(head(stem(torch.ones(2, 4))), stem.weight).sum()

    assert find_reads(nn.ModuleDict({"stem": stem, "head": head}), forward).elsewhere == ("stem",)
    assert torch.is_autocast_cache_enabled()


def test_what_is_trained_and_gets_no_gradient_is_gathered_where_it_runs_and_needs_no_more_than_its_share() -> None:
    names = ("backbone", "first", "middle", "detached", "last", "late")
    for trace in both(Stopped, mean_of):
        assert {one["name"].partition(".")[0] for one in trace.source["not_reached"]} == {*names} - {"first", "last"}
        assert idle_of(trace) == ["spare"]
        units = units_of(trace, idle=["spare"])
        assert tuple(unit.name for unit in units) == names
        assert [unit.trained_bytes for unit in units] == [0, 80, 0, 0, 80, 0]
        assert [unit.goes_back for unit in units] == [False, True, False, False, True, False]
        assert sum(unit.forward_s for unit in units) == pytest.approx(trace.forward_s)
        assert all(unit.forward_s > 0 for unit in units)
