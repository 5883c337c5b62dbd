"""Traces from profiles: real ones of this machine, one of a GPU worked out by hand, and those that are refused."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from mgwfbp import FileError, FormatError, MgwfbpError, ModelTrace, measure_backward
from mgwfbp.measure.profile import trace_from_profile
from mgwfbp.measure.workload import Workload
from tests.measure.models import Odd, SlowMiddle
from tests.mutations import Damage

US = 1e-6


def names(trace: ModelTrace) -> list[str]:
    return [layer.name for layer in trace.layers]


def on_meta(make: Callable[[], nn.Module], *batch_shape: int) -> Workload:
    with torch.device("meta"):
        return Workload("m", make(), torch.ones(batch_shape), batch_shape[0])


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


# ---- recorded here ---------------------------------------------------------------------------------------------------


def record(path: Path, make: Callable[[], nn.Module], steps: int = 3, **options: Any) -> None:
    """Profile training as a user would: the optimizer's work lies between the steps."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with profile(activities=[ProfilerActivity.CPU], **options) as prof:
        for _ in range(steps):
            loss = model(torch.ones(2, 4)).sum()
            optimizer.zero_grad()  # between forward and backward, as some write it
            loss.backward()
            optimizer.step()
            prof.step()
    prof.export_chrome_trace(str(path))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    record(path, lambda: SlowMiddle(0.02), record_shapes=True)
    return path


def test_a_profile_tells_what_measuring_tells(recorded: Path) -> None:
    trace = trace_from_profile(recorded, on_meta(lambda: SlowMiddle(0.0), 2, 4))
    measured = measure_backward(SlowMiddle(0.02), torch.ones(2, 4), steps=2, warmup=1)
    assert names(trace) == names(measured)
    assert [layer.grad_bytes for layer in trace.layers] == [layer.grad_bytes for layer in measured.layers]
    assert trace.source["device"] == "cpu"
    assert trace.source["steps"] == 2  # the first of three is dropped
    assert trace.backward_s >= 0.02  # it sleeps so long
    assert trace.backward_s > trace.forward_s > 0
    spent = {layer.name: layer.backward_s for layer in trace.layers}
    assert max(spent["first.weight"], spent["first.bias"]) >= 0.02  # where the model sleeps


def test_a_packed_profile_is_read(recorded: Path, tmp_path: Path) -> None:
    packed = tmp_path / "profile.json.gz"
    packed.write_bytes(gzip.compress(recorded.read_bytes()))
    workload = on_meta(lambda: SlowMiddle(0.0), 2, 4)
    assert trace_from_profile(packed, workload).layers == trace_from_profile(recorded, workload).layers


def test_a_profile_by_schedule_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    record(path, two_layers, steps=4, record_shapes=True, schedule=schedule(wait=1, warmup=1, active=2))
    assert "ProfilerStep#" in path.read_text()
    assert trace_from_profile(path, on_meta(two_layers, 2, 4)).source["steps"] == 1


def test_unused_and_frozen_parameters_are_as_in_a_measured_trace(tmp_path: Path) -> None:
    model, tokens = Odd(), torch.arange(6)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        model(tokens)["logits"].sum().backward()
    prof.export_chrome_trace(str(tmp_path / "odd.json"))
    with torch.device("meta"):
        workload = Workload("odd", Odd(), torch.arange(6), 6, lambda output: output["logits"].sum())
    trace = trace_from_profile(tmp_path / "odd.json", workload)
    measured = measure_backward(model, tokens, lambda output: output["logits"].sum(), steps=2)
    assert names(trace) == names(measured)
    assert trace.source["unused"] == measured.source["unused"]


def test_an_input_that_asks_for_a_gradient_does_not_matter(tmp_path: Path) -> None:
    model, x = two_layers(), torch.ones(2, 4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        for _ in range(3):
            model(x).sum().backward()
    prof.export_chrome_trace(str(tmp_path / "profile.json"))
    trace = trace_from_profile(tmp_path / "profile.json", on_meta(two_layers, 2, 4))
    assert sorted(names(trace)) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert trace.source["foreign_gradients"] == 3


# ---- a GPU, by hand --------------------------------------------------------------------------------------------------


class Tape:
    """Writes a profile down, event by event, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def add(self, cat: str, name: str, ts: float, dur: float, tid: int, pid: int = 77, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}
        )

    def gpu(self, launched: float, start: float, end: float, *, name: str = "k", stream: int = 7, tid: int = 1) -> None:
        self.correlation += 1
        kind, call = ("gpu_memcpy", "cudaMemcpyAsync") if name == "Memcpy" else ("kernel", "cudaLaunchKernel")
        self.add("cuda_runtime", call, launched, 1, tid, correlation=self.correlation)
        self.add(kind, name, start, end - start, stream, 0, correlation=self.correlation, stream=stream)

    def gradient(self, ts: float, *shape: int) -> None:
        name = "torch::autograd::AccumulateGrad"
        self.add("cpu_op", f"autograd::engine::evaluate_function: {name}", ts - 1, 4, 2)
        self.add("cpu_op", name, ts, 2, 2)
        self.events[-1]["args"]["Input Dims"] = [list(shape)]

    def forward(self, at: float) -> None:
        self.add("cpu_op", "aten::linear", at + 10, 20, 1)
        self.gpu(at + 12, at + 100, at + 150)
        self.gpu(at + 14, at + 100, at + 990, name="Memcpy", stream=30)  # the next batch, in a stream of its own
        self.add("cpu_op", "aten::linear", at + 40, 10, 1)
        self.gpu(at + 42, at + 150, at + 200)
        self.add("cpu_op", "aten::ones_like", at + 60, 5, 1)
        self.gpu(at + 62, at + 200, at + 210)

    def backward(self, at: float) -> None:
        engine = "autograd::engine::evaluate_function: AddmmBackward0"
        self.add("cpu_op", engine, at + 70, 10, 2)
        self.add("cpu_op", "aten::mm", at + 71, 8, 2)
        self.gpu(at + 72, at + 210, at + 260, tid=2)
        self.gradient(at + 82, 2)
        self.gradient(at + 87, 2, 3)
        self.gpu(at + 91, at + 260, at + 900, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", stream=20, tid=2)
        self.add("cpu_op", engine, at + 100, 8, 2)
        self.gpu(at + 102, at + 260, at + 330, tid=2)
        self.gradient(at + 110, 3)
        self.gpu(at + 115, at + 330, at + 400, tid=2)
        self.gradient(at + 120, 3, 4)

    def optimizer(self, at: float) -> None:
        self.add("user_annotation", "Optimizer.step#SGD.step", at + 200, 20, 1)
        self.add("cpu_op", "aten::_foreach_add_", at + 205, 10, 1)
        self.gpu(at + 206, at + 400, at + 420)

    def step(self, at: float) -> None:
        self.forward(at)
        self.backward(at)
        self.optimizer(at)

    def save(self, folder: Path) -> Path:
        path = folder / "profile.json"
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return path


def check_by_hand(trace: ModelTrace) -> None:
    """The GPU is at the forward pass from 100 to 210; gradients come at 260, 260, 330 and 400."""
    assert trace.source["device"] == "gpu"
    assert names(trace) == ["1.bias", "1.weight", "0.bias", "0.weight"]
    assert trace.forward_s == pytest.approx(110 * US)
    assert [layer.backward_s for layer in trace.layers] == pytest.approx([50 * US, 0, 70 * US, 70 * US])


def test_on_a_gpu_a_gradient_is_ready_when_its_kernels_have_ended(tmp_path: Path) -> None:
    tape = Tape()
    for number in range(3):
        tape.step(1000.0 * number)
    check_by_hand(trace_from_profile(tape.save(tmp_path), on_meta(two_layers, 2, 4)))


def test_a_profile_may_start_and_end_within_a_step(tmp_path: Path) -> None:
    tape = Tape()
    tape.backward(0.0)
    tape.events = [event for event in tape.events if event["ts"] >= 100.0]
    tape.optimizer(0.0)
    tape.step(1000.0)
    tape.forward(2000.0)
    trace = trace_from_profile(tape.save(tmp_path), on_meta(two_layers, 2, 4))
    assert trace.source["steps"] == 1
    check_by_hand(trace)


def test_what_profilers_write_beside_it_does_not_matter(tmp_path: Path) -> None:
    tape = Tape()
    for number in range(3):
        tape.correlation = 0  # numbers that come again
        tape.step(1000.0 * number)
        # DDP's messages on threads of their own, and what an engine still does after the last gradient.
        tape.add("cpu_op", "gloo:all_reduce", 1000.0 * number + 85, 30, 9)
        tape.add("cpu_op", "autograd::engine::evaluate_function: X", 1000.0 * number + 130, 5, 2)
    tape.events += [
        {"ph": "X", "cat": "cpu_op", "name": "no dur, no args", "ts": 50.0, "pid": 77, "tid": 1},
        {"ph": "X", "cat": "kernel", "name": "no launch", "ts": 50.0, "dur": 5000.0, "pid": 0, "tid": 7, "args": None},
        {"ph": "X", "cat": "python_function", "name": "f", "ts": "soon", "pid": 77, "tid": 1},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "id": 5, "ts": 1.0},
    ]
    path = tape.save(tmp_path)
    # Repeated fields, NaN and a raw tab, none of which strict JSON has.
    text = path.read_text().replace('"schemaVersion": 1', '"schemaVersion": 1, "a": NaN, "schemaVersion": 2, "b": "\t"')
    path.write_text(text)
    check_by_hand(trace_from_profile(path, on_meta(two_layers, 2, 4)))


def test_an_optimizer_that_calls_a_closure_holds_the_step(tmp_path: Path) -> None:
    tape = Tape()
    for at in (0.0, 1000.0, 2000.0):
        tape.forward(at)
        tape.backward(at)
        tape.add("user_annotation", "Optimizer.step#LBFGS.step", at + 1, 250, 1)
        tape.add("cpu_op", "aten::add_", at + 205, 10, 1)
    check_by_hand(trace_from_profile(tape.save(tmp_path), on_meta(two_layers, 2, 4)))


# ---- refused ---------------------------------------------------------------------------------------------------------

HOW = "torch.profiler.profile(record_shapes=True)"


def refusal(path: Path, make: Callable[[], nn.Module] = two_layers) -> str:
    with pytest.raises(FormatError) as caught:
        trace_from_profile(path, on_meta(make, 2, 4))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.count(str(path)) == 1
    assert "\n" not in message
    return message


def test_a_profile_without_a_backward_pass_is_refused(tmp_path: Path) -> None:
    tape = Tape()
    tape.forward(0.0)
    message = refusal(tape.save(tmp_path))
    assert "no backward pass" in message
    assert HOW in message


def test_a_profile_without_shapes_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "profile.json", two_layers, record_shapes=False)
    message = refusal(tmp_path / "profile.json")
    assert "holds no shapes" in message
    assert HOW in message


def test_a_gpu_profile_without_kernels_is_refused(tmp_path: Path) -> None:
    tape = Tape()
    tape.step(0.0)
    tape.add("cpu_op", "aten::cudnn_convolution", 15.0, 2, 1)
    tape.events = [event for event in tape.events if event["cat"] in ("cpu_op", "user_annotation")]
    message = refusal(tape.save(tmp_path))
    assert "no kernels (CUDA activity was off)" in message
    assert HOW in message


def test_a_profile_of_another_model_is_refused(recorded: Path) -> None:
    message = refusal(recorded)
    assert "a gradient of shape [1] is not the model's" in message


def test_a_profile_of_a_longer_model_is_refused(tmp_path: Path) -> None:
    def stack(depth: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))

    record(tmp_path / "profile.json", lambda: stack(4), record_shapes=True)
    assert "the model has 4" in refusal(tmp_path / "profile.json", lambda: stack(2))


def test_a_merged_profile_of_several_ranks_is_refused(tmp_path: Path) -> None:
    tape = Tape()
    tape.step(0.0)
    other = Tape()
    other.step(0.0)
    tape.events += [{**event, "pid": 78} if event["pid"] == 77 else event for event in other.events]
    assert "gradients of 2 processes" in refusal(tape.save(tmp_path))


def test_a_time_that_is_no_number_is_refused(tmp_path: Path) -> None:
    tape = Tape()
    tape.step(0.0)
    tape.events[0]["ts"] = "soon"
    assert "ts of 'aten::linear' is 'soon', expected a number" in refusal(tape.save(tmp_path))


@pytest.mark.parametrize("field", ["ts", "dur"])
@pytest.mark.parametrize("value", [10**400, -(10**400), 1e300, float("inf"), float("nan"), 1e19])
def test_a_time_that_no_clock_shows_is_refused_by_its_event_and_field(tmp_path: Path, field: str, value: float) -> None:
    tape = Tape()
    tape.step(0.0)
    tape.step(1000.0)
    tape.events[0][field] = value
    message = refusal(tape.save(tmp_path))
    assert f"traceEvents: {field} of 'aten::linear' is " in message
    assert "expected microseconds within 1e+18 of 0" in message


@pytest.mark.parametrize("value", [None, [], {"a": []}, "x", [[[7]]], 2**70, -1, 1.5, True])
@pytest.mark.parametrize("field", ["correlation", "stream"])
def test_a_kernel_whose_launch_cannot_be_told_is_left_out(tmp_path: Path, field: str, value: Any) -> None:
    tape = Tape()
    for number in range(3):
        tape.step(1000.0 * number)
    tape.add("kernel", "odd", 5.0, 9000.0, 7, 0, **{"correlation": 10**6, "stream": 7, field: value})
    check_by_hand(trace_from_profile(tape.save(tmp_path), on_meta(two_layers, 2, 4)))


def test_work_that_seems_to_end_before_it_starts_lasts_no_time(tmp_path: Path) -> None:
    tape = Tape()
    tape.add("cpu_op", "aten::linear", 10, 20, 2)
    tape.add("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 70, 10, 2)
    for ts, shape in ((82, (2,)), (87, (2, 3)), (110, (3,)), (120, (3, 4))):
        tape.gradient(ts, *shape)
    tape.events[-1]["dur"] = -100
    trace = trace_from_profile(tape.save(tmp_path), on_meta(two_layers, 2, 4))
    # Each gradient is ready 2 us after it began, the last one at once.
    assert [layer.backward_s for layer in trace.layers] == pytest.approx([14 * US, 5 * US, 23 * US, 8 * US])


def test_more_values_than_a_profile_has_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{}," * 4_000_000)  # which is no JSON: whoever parses it says so
    assert "more values than a profile of this size has" in refusal(path)


@pytest.mark.parametrize("batch", range(4))
def test_a_damaged_profile_gives_a_trace_or_one_line_that_names_it(tmp_path: Path, batch: int) -> None:
    tape, workload = Tape(), on_meta(two_layers, 2, 4)
    for number in range(2):
        tape.step(1000.0 * number)
    whole = tape.save(tmp_path).read_text()
    for seed in range(50 * batch, 50 * (batch + 1)):
        source, path = random.Random(seed), tmp_path / f"{seed}.json"
        damage = Damage(source)
        path.write_bytes(damage.text(whole) if seed % 5 == 0 else json.dumps(damage.tree(json.loads(whole))).encode())
        try:
            trace_from_profile(path, workload)
        except MgwfbpError as error:
            problem = str(error)
            assert problem.startswith(f"{path}: "), (seed, problem)
            assert problem.isprintable(), (seed, problem)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": [{"ph": "X"', "not JSON"),
        ('{"traceEvents": [' + "9" * 5000 + "]}", "a number of thousands of digits"),
        ("", "not JSON"),
        ("[]", "not a profile"),
        ('{"format": "mgwfbp.trace/1"}', "not a profile"),
        ('{"traceEvents": [1, null, {"ph": "X"}]}', "no backward pass"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    refused = refusal(path)
    assert message in refused
    assert HOW in refused


def test_a_cut_gzip_file_is_refused(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json.gz"
    path.write_bytes(gzip.compress(recorded.read_bytes())[:1000])
    assert "not a whole gzip file" in refusal(path)


def test_a_profile_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        trace_from_profile(tmp_path / "none.json", on_meta(two_layers, 2, 4))
