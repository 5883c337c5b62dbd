"""What each layer takes in the forward pass: worked out by hand on a clock that only the model moves, and conserved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mgwfbp import LinearCost, measure_backward
from mgwfbp.measure.analytic import measure_analytic
from mgwfbp.measure.devices import Device
from mgwfbp.measure.forward import FirstUses, split_forward
from mgwfbp.measure.workload import Workload
from mgwfbp.planners.fsdp import plan_fsdp
from tests.measure.models import Checkpointed, Odd, SlowMiddle, tiny_transformer


class Time:
    """A clock that stands still until a module says that it took a while."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s


class Takes(nn.Module):
    """A layer that takes its time."""

    def __init__(self, time: Time, seconds: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
        self.time, self.seconds = time, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.time.now_s += self.seconds
        return x * self.weight + self.bias


class ReadsAnothers(nn.Module):
    """Uses the weights of a layer whose own forward pass never runs, as MultiheadAttention does; and a list of them."""

    def __init__(self, time: Time, seconds: float) -> None:
        super().__init__()
        self.own, self.inner = nn.Parameter(torch.ones(())), Takes(time, 100.0)
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(()))])
        self.time, self.seconds = time, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.time.now_s += self.seconds
        scaled: Tensor = x * self.own * self.inner.weight * self.listed[0]
        return scaled


def first_uses(time: Time, model: nn.Module, forward: Callable[[], object] | None = None) -> dict[str, float]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    with FirstUses(model, parameters, time.now) as uses:
        (forward or (lambda: model(torch.ones(()))))()
    return {names[place]: moment_s for place, moment_s in uses.moments().items()}


def test_a_layer_is_used_from_the_moment_at_which_its_module_begins() -> None:
    time = Time()
    model = nn.Sequential(Takes(time, 2.0), Takes(time, 3.0), ReadsAnothers(time, 5.0), Takes(time, 7.0))
    found = first_uses(time, model)
    begins_s = {"0": 0.0, "1": 2.0, "2": 5.0, "3": 10.0}
    assert found == {name: begins_s[name.partition(".")[0]] for name, _ in model.named_parameters()}
    ready_order = [name for name, _ in model.named_parameters()][::-1]
    taken_s = split_forward(found, ready_order, time.now_s)
    by_module = {key: sum(taken_s[name] for name in taken_s if name.startswith(key)) for key in begins_s}
    assert by_module == {"0": 2.0, "1": 3.0, "2": 5.0, "3": 7.0}
    # All of a module comes after all of its parameters: behind the last of them in the order of the forward pass.
    assert (taken_s["1.bias"], taken_s["1.weight"]) == (3.0, 0.0)


def test_of_a_module_that_runs_twice_and_of_a_shared_parameter_the_first_use_counts() -> None:
    time = Time()
    twice, early, late = Takes(time, 1.0), Takes(time, 2.0), Takes(time, 4.0)
    late.weight = early.weight
    found = first_uses(time, nn.Sequential(twice, early, twice, late))
    assert found == {"0.weight": 0.0, "0.bias": 0.0, "1.weight": 1.0, "1.bias": 1.0, "3.bias": 4.0}


def test_what_is_computed_again_in_the_backward_pass_was_used_before() -> None:
    time = Time()
    first, second = Takes(time, 1.0), Takes(time, 2.0)
    model = nn.Sequential(first, second)

    def step() -> None:
        y = checkpoint(first, torch.ones((), requires_grad=True), use_reentrant=False)
        checkpoint(second, y, use_reentrant=False).backward()

    assert first_uses(time, model, step) == {"0.weight": 0.0, "0.bias": 0.0, "1.weight": 1.0, "1.bias": 1.0}


def test_a_hook_of_the_users_that_computes_weights_comes_after_the_first_use() -> None:
    time = Time()
    layer = Takes(time, 1.0)
    layer.register_forward_pre_hook(lambda *_: setattr(time, "now_s", time.now_s + 8.0))
    assert first_uses(time, nn.Sequential(Takes(time, 2.0), layer))["1.weight"] == 2.0


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_inside_of_a_scripted_model_all_parameters_are_used_from_the_start() -> None:
    time = Time()
    inner = torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2))
    both = nn.Sequential(Takes(time, 2.0), inner)
    found = first_uses(time, both, lambda: both(torch.ones(1, 2)))
    assert {moment_s for name, moment_s in found.items() if name.startswith("1.")} == {2.0}


def test_no_hook_is_left_on_a_module() -> None:
    for fails in (False, True):
        model = Odd()
        if fails:
            with pytest.raises(ZeroDivisionError):
                measure_backward(model, torch.arange(6), lambda output: output["logits"].sum() / (1 // 0), steps=2)
        else:
            measure_backward(model, torch.arange(6), lambda output: output["logits"].sum(), steps=2)
        assert not any(module._forward_pre_hooks for module in model.modules())


moments = st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=1, max_size=12)


@given(moments, st.floats(0, 100), st.randoms(use_true_random=False))
def test_layers_together_take_the_forward_pass(some: list[float | None], forward_s: float, random: Any) -> None:
    used = {f"layer {place}": moment_s for place, moment_s in enumerate(some) if moment_s is not None}
    order = [f"layer {place}" for place in range(len(some))]
    random.shuffle(order)
    taken_s = split_forward(used, order, forward_s)
    assert list(taken_s) == order
    assert min(taken_s.values()) >= 0
    assert sum(taken_s.values()) == pytest.approx(forward_s if used else 0.0)
    assert all(taken_s[layer] == 0 for layer in order if layer not in used)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_in_reverse_order_the_forward_pass_is_what_was_seen(parts: list[int]) -> None:
    """The model of a sharded step starts a layer when those behind it in ready order have ended: that is its use."""
    starts = [float(sum(parts[:place])) for place in range(len(parts))]
    ready_order = list(range(len(parts)))[::-1]
    taken_s = split_forward(dict(enumerate(starts)), ready_order, float(sum(parts)))
    now_s = 0.0
    for layer in reversed(ready_order):
        assert now_s >= starts[layer]  # nothing is asked for before it is used
        now_s += taken_s[layer]
    assert now_s == sum(parts)


@pytest.mark.parametrize(
    ("model", "batch", "accumulation_steps"),
    [
        (SlowMiddle(0.0), torch.ones(2, 4), 1),
        (SlowMiddle(0.0), torch.ones(2, 4), 3),
        (tiny_transformer(), torch.randn(2, 5, 32), 1),
        (Checkpointed(reentrant=False), torch.ones(2, 6), 1),
        (nn.LSTM(3, 4, num_layers=2), torch.ones(5, 1, 3), 1),
    ],
    ids=["linear", "accumulated", "transformer", "checkpointed", "lstm"],
)
def test_the_layers_of_a_measured_trace_take_its_forward_pass(
    model: nn.Module, batch: Tensor, accumulation_steps: int
) -> None:
    trace = measure_backward(model, batch, steps=3, accumulation_steps=accumulation_steps)
    parts_s = [layer.forward_s for layer in trace.layers]
    assert sum(part_s or 0.0 for part_s in parts_s) == pytest.approx(trace.forward_s)
    assert None not in parts_s
    assert trace.layer_forward_s == pytest.approx(parts_s)


def test_unused_parameters_take_nothing_and_the_rest_all() -> None:
    trace = measure_backward(Odd(), torch.arange(6), lambda output: output["logits"].sum(), steps=2)
    taken_s = {layer.name: layer.forward_s or 0.0 for layer in trace.layers}
    assert (taken_s["unused.weight"], taken_s["unused.bias"]) == (0.0, 0.0)
    assert sum(taken_s.values()) == pytest.approx(trace.forward_s)
    # Shared by both calls, and then frozen: the layer before has all of it.
    assert all(taken_s[name] > 0 for name in ("embedding.weight", "head.bias"))


def test_counted_layers_take_their_operations() -> None:
    """On a device on which only arithmetic takes time, times are operations over its rate."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        workload = Workload("l", model, torch.ones(2, 5), 2)
    device = Device("d", 1.0, 1e30, 0.0, "made up")
    trace = measure_analytic(workload, device)
    taken_s = {layer.name: layer.forward_s for layer in trace.layers}
    assert taken_s["0.weight"] == pytest.approx(0.0, abs=1e-20)  # what is before the first: nothing
    assert taken_s["0.bias"] == pytest.approx(2 * 2 * 5 * 7)
    assert taken_s["2.weight"] == pytest.approx(0.0, abs=1e-20)
    assert taken_s["2.bias"] == pytest.approx(2 * 2 * 7 * 3)
    fast = measure_analytic(workload, device, images_per_second=10.0)
    assert sum(layer.forward_s or 0.0 for layer in fast.layers) == pytest.approx(fast.forward_s)
    assert fast.compute_s == pytest.approx(2 / 10.0)


class Tied(nn.Module):
    """An embedding with the weight of the head, and a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.extra = nn.ParameterList([torch.ones(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)) * self.extra[0])  # type: ignore[no-any-return]


def test_what_shares_parameters_or_has_no_forward_pass_is_in_a_trace_and_stays_with_the_root_of_its_plans() -> None:
    tokens = torch.tensor([[1, 2], [3, 4]])
    trace = measure_backward(Tied(), tokens, lambda output: output.sum(), steps=1, warmup=0)
    with torch.device("meta"):
        counted = measure_analytic(
            Workload("t", Tied(), tokens.to("meta"), 2, lambda output: output.sum()), Device("d", 1.0, 1.0, 0.0, "made")
        )
    for one in (trace, counted):
        assert (one.source["shared"], one.source["not_called"]) == (("embed",), ("extra",))
        assert plan_fsdp(one, LinearCost(2, 1e-9, 1e-12)).root == ("embed", "extra")
        # All of it is known beforehand, as where it is planned for a model that is there.
        least = plan_fsdp(one, LinearCost(2, 1e-9, 1e-12), root=("embed", "extra")).predicted
        assert plan_fsdp(one, LinearCost(2, 1e-9, 1e-12)).predicted == least


def test_what_accumulates_gradients_and_computes_activations_again_runs_once_in_a_step() -> None:
    for accumulation_steps in (1, 3):
        trace = measure_backward(
            Checkpointed(reentrant=False),
            torch.ones(2, 6),
            lambda output: output.sum(),
            steps=1,
            warmup=0,
            accumulation_steps=accumulation_steps,
        )
        assert trace.source["repeated"] == ("shared",)
