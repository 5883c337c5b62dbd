"""Torch's own tests of DDP, from its wheel, with our class in the place of torch's: ``make torchtests``.

``python -m tests.runtime.torchs_own FILE [TEST ...]`` runs them over gloo on the CPU, first with torch's class and,
what passes there, with each of ours (`WRAPPERS`), and writes to FILE what came of each: JSON, or a page by its ending.
The exit status is 1 where ours fails what torch's passes, and `DIFFERENT` does not say why.

Most of these tests ask for two GPUs only to have somewhere to put their model. Those run on the CPU too (`on_cpu`):
what is sent to a GPU stays where it is. What needs a GPU all the same fails with torch's class, and is not counted.

Ranks are forks of this process, which itself never computes: torch starts a fresh interpreter for every rank of every
test, which takes longer than the test.
"""

import inspect
import json
import os
import sys
import time
import unittest
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import CodeType
from typing import Any

# Torch's tests read it as they are imported.
os.environ.update(BACKEND="gloo", WORLD_SIZE="2", TEMP_DIR="", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

import torch
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel as StockDdp
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

from mgwfbp import DistributedDataParallel, PlanError
from mgwfbp.runtime.messages.gloo import MOMENT_S
from mgwfbp.runtime.reducer import handle as reducer
from mgwfbp.runtime.tune import decide, race, tuner
from tests.runtime.models import make_plan

NEED_GPUS: set[str] = set()  # tests that ask for them


def _no_gpus_needed(*_: Any, **__: Any) -> Callable[[Any], Any]:
    def note(test: Any) -> Any:
        NEED_GPUS.add(test.__name__)
        return test

    return note


# These decorate tests as torch's module is imported.
common_distributed.skip_if_lt_x_gpu = _no_gpus_needed
common_distributed.skip_if_no_gpu = _no_gpus_needed()
common_distributed.logger.setLevel("ERROR")
common_distributed.TIMEOUT_DEFAULT = 60
common_distributed.TIMEOUT_OVERRIDE.clear()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some torches warn of what they themselves import
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test, distributed_test
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as rpc

distributed_test.HAS_TORCHVISION = False  # its models take minutes on a CPU
_destroy = torch.distributed.destroy_process_group


def _destroy_when_idle(*arguments: Any, **named: Any) -> None:
    """Leave groups once gloo's threads need Python no more, see [Note: the end of a process] in ``gloo.py``."""
    time.sleep(MOMENT_S)
    _destroy(*arguments, **named)


torch.distributed.destroy_process_group = _destroy_when_idle
_NOWHERE = os.open(os.devnull, os.O_WRONLY)
_FORK = multiprocessing.get_context("fork")
_CHANGES: Any = _FORK.Value("i", 0)  # how often ranks changed their buckets


class Planned(DistributedDataParallel):
    """Ours with a plan that torch would never choose, in force from the first step on."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        for size in ("bucket_cap_mb", "bucket_cap_mb_list"):  # which a plan says
            kwargs.pop(size, None)
        super().__init__(module, *args, plan=_any_plan(module, 0), **kwargs)


class Replanned(DistributedDataParallel):
    """Ours with another plan before every step, which may be several passes under ``no_sync`` and a last one."""

    steps = 0
    has_averaged = True  # whether the last pass did, and the next one begins a step

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._take_another()
        return super()._pre_forward(*inputs, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _take_another(self) -> None:
        begins, self.has_averaged = self.has_averaged, self.require_backward_grad_sync
        if begins and torch.is_grad_enabled() and not self._join_config.enable:
            self.steps += 1
            with suppress(PlanError):  # where the step before has not ended, or no plan can be held
                self.replan(_any_plan(self.module, self.steps))


def _any_plan(module: nn.Module, seed: int) -> Any:
    """Return a plan, or None where there is nothing to plan, and torch shall say so."""
    ignored = tuple(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    if all(name in ignored or not one.requires_grad for name, one in module.named_parameters()):
        return None
    return make_plan(module, seed, leave_out=ignored)


def _tune_quickly() -> None:
    """Let the tuner begin at once, and change buckets in every step as soon as it knows what messages take."""
    tuner.WARMUP_STEPS = 1
    decide.OBSERVE, decide.OBSERVE_MESSAGES = ("plain", "gradients", "messages"), ("messages",)
    race.GLANCE = race.LONGER = ("plain",)
    decide.BUCKET_MIB = (2**-14, 2**-10)  # type: ignore[assignment]  # 64 bytes and 1 KiB


WRAPPERS: Mapping[str, type[StockDdp]] = {
    "stock": StockDdp,
    "ours": DistributedDataParallel,
    "quick": DistributedDataParallel,  # with `_tune_quickly`
    "planned": Planned,
    "replanned": Replanned,
}


class _Forked(common_distributed.MultiProcessTestCase):
    """Each rank is a fork that puts a class in the place of torch's."""

    wrapper = "stock"

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(_FORK.Process)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        for stream in (1, 2):  # what fails is told through the pipe
            os.dup2(_NOWHERE, stream)
        torch.set_num_threads(1)
        _count_changes()
        if self.wrapper == "quick":
            _tune_quickly()
        kind = WRAPPERS[self.wrapper]
        put_in_place(on_cpu(kind) if test_name in NEED_GPUS else kind)
        super().run_test(test_name, parent_pipe)


class Tests(_Forked, distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Torch's tests of everything distributed, 2 ranks each."""


class Comparisons(_Forked, rpc.TensorPipeRpcAgentTestFixture, ddp_under_dist_autograd_test.DdpComparisonTest):
    """Models that are partly elsewhere and reached by remote calls, 4 ranks each."""


def put_in_place(kind: type[StockDdp]) -> None:
    """Let torch's tests find this class where they look for torch's."""
    nn.parallel.DistributedDataParallel = kind  # type: ignore[misc]
    for module in (distributed_test, ddp_under_dist_autograd_test):
        vars(module)["DistributedDataParallel"] = kind


def _count_changes() -> None:
    give = reducer.ReducerHandle._give

    @wraps(give)
    def counted(self: Any, *arguments: Any) -> None:
        if isinstance(self.ddp, DistributedDataParallel):  # and not the toy that shows whether torch takes buckets
            with _CHANGES.get_lock():
                _CHANGES.value += 1
        give(self, *arguments)

    reducer.ReducerHandle._give = counted  # type: ignore[assignment, method-assign]


class _OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU, whatever device is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*_without_gpus(args), **kwargs) if func is torch.Tensor.to else func(*args, **kwargs)


def _without_gpus(args: tuple[Any, ...]) -> tuple[Any, ...]:
    def is_gpu(one: Any) -> bool:
        return type(one) is int or (isinstance(one, str | torch.device) and str(one).startswith("cuda"))

    return tuple("cpu" if is_gpu(one) else one for one in args)


def on_cpu(kind: Any) -> type[StockDdp]:
    """Let what is sent to a GPU stay where it is, for as long as this process lives; return a DDP that does too."""
    _OnCpu().__enter__()
    to: Any = nn.Module.to
    setattr(nn.Module, "cuda", lambda module, *_: module)  # noqa: B010 - mypy allows no method to be replaced
    setattr(nn.Module, "to", lambda module, *args, **kwargs: to(module, *_without_gpus(args), **kwargs))  # noqa: B010
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    setattr(torch.cuda, "current_device", lambda: "cpu")  # noqa: B010

    class OnCpu(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            for name in ("device_ids", "output_device"):
                kwargs.pop(name, None)
            super().__init__(*args, **kwargs)

    return OnCpu


def about_ddp() -> dict[str, type[_Forked]]:
    """Return the tests that use DDP, themselves or in what they call, and where they are."""
    found: dict[str, type[_Forked]] = {}
    for case in (Tests, Comparisons):
        for name in dir(case):
            if name.startswith("test_") and "DistributedDataParallel" in _words_of(name, case, set()):
                found[name] = case
    return found


def _words_of(method: str, case: type[_Forked], seen: set[str]) -> set[str]:
    """Return all names that a method of torch's tests uses."""
    seen.add(method)
    words: set[str] = set()
    codes = [inspect.unwrap(getattr(case, method)).__code__]
    while codes:
        code = codes.pop()
        words |= set(code.co_names)
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    for name in words - seen:
        if name.startswith("_") and inspect.isfunction(getattr(case, name, None)):
            words |= _words_of(name, case, seen)
    return words


def run(name: str, case: type[_Forked], wrapper: str) -> dict[str, Any]:
    """Run a test; say what came of it, why, how often a rank changed its buckets, and how long it took."""
    case.wrapper, _CHANGES.value = wrapper, 0
    result, started_s, test = unittest.TestResult(), time.perf_counter(), case(name)
    test.run(result)
    if result.skipped:
        outcome, why = "skipped", result.skipped[0][1]
    elif result.errors or result.failures:
        outcome, why = "failed", (result.errors + result.failures)[0][1]
    else:
        outcome, why = "passed", ""
    changes, taken_s = _CHANGES.value / int(test.world_size), time.perf_counter() - started_s
    return {"outcome": outcome, "why": why, "changes": round(changes, 1), "taken_s": round(taken_s, 1)}


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Write what came of all tests as a document."""
    passed = {name: came for name, came in found.items() if came["stock"]["outcome"] == "passed"}
    skipped = sum(came["stock"]["outcome"] == "skipped" for came in found.values())
    counts = ", ".join(f"{wrapper} {_passes(passed, wrapper)}" for wrapper in list(WRAPPERS)[1:])
    lines = [
        "# Torch's own tests of DDP",
        "",
        "Made by `make torchtests`, which runs the tests of DistributedDataParallel that come in torch's wheel",
        "(`torch.testing._internal.distributed`) over gloo on the CPU, with `mgwfbp.DistributedDataParallel` in the",
        f"place of torch's class. torch {torch.__version__}, Python {sys.version.split()[0]}.",
        "",
        f"{len(found)} tests use DDP. Torch itself skips {skipped} of them, and {len(found) - skipped - len(passed)}",
        f"fail with torch's class here, since they need a GPU. Of the other {len(passed)} pass: {counts}.",
        "",
        "| column | what stands in the place of torch's class |",
        "|---|---|",
        "| stock | torch's own |",
        *(f"| {wrapper} | {said} |" for wrapper, said in _SAID.items()),
        "",
        "A number is how often each rank changed its buckets. CPU: the test asks for GPUs and was run on the CPU; what",
        "it sends to a GPU stays where it is.",
        "",
        "## Where ours differs",
        "",
        "| test | with | why |",
        "|---|---|---|",
    ]
    for name, came in passed.items():
        for wrapper in WRAPPERS:
            if came[wrapper]["outcome"] != "passed":
                why = DIFFERENT.get(name, {}).get(wrapper, f"**not known**: {_last_line(came[wrapper]['why'])}")
                lines.append(f"| {name} | {wrapper} | {why} |")
    lines += ["", "## All", "", f"| test | | {' | '.join(WRAPPERS)} |", "|---|---|" + "---|" * len(WRAPPERS)]
    for name, came in found.items():
        cells = [_cell(came[wrapper]) if wrapper in came else "" for wrapper in WRAPPERS]
        lines.append(f"| {name} | {'CPU' if came['asks for GPUs'] else ''} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


_SAID = {
    "ours": "`mgwfbp.DistributedDataParallel`, which tunes itself",
    "quick": "the same, with a tuner that begins after one step and then changes buckets in every step",
    "planned": "the same with a plan of random messages, in force from the first step on",
    "replanned": "the same with another random plan before every step",
}


def _passes(passed: Mapping[str, Mapping[str, Any]], wrapper: str) -> int:
    return sum(came[wrapper]["outcome"] == "passed" for came in passed.values())


def _cell(came: Mapping[str, Any]) -> str:
    return f"{came['outcome']} {came['changes']:g}" if came["changes"] else str(came["outcome"])


def _last_line(why: str) -> str:
    errors = [
        line for line in why.splitlines() if "Error" in line and not line.startswith((" ", "RuntimeError: Process"))
    ]
    return (errors or ["?"])[-1][:200].replace("|", "/")


_SENT = "it counts messages, or asks how large they are, and the plan has others"
_POWER_SGD = "PowerSGD keeps errors by bucket and meets other buckets; the tuner leaves such a hook alone"
_NEW_REDUCER = "with `find_unused_parameters` new buckets take a new Reducer, and it asks that one for the step before"
_NEW_GRAPH = "a new Reducer learns the graph again, so that it takes no other graph for an error"
# What torch's class passes and ours does not, by test and wrapper, and why that is right.
DIFFERENT: Mapping[str, Mapping[str, str]] = {
    "test_ddp_bucket_cap_mb_list": {
        "planned": "a plan and sizes of buckets exclude each other: the sizes were dropped"
    },
    "test_ddp_control_flow_different_across_ranks": {"quick": _NEW_REDUCER},
    "test_ddp_control_flow_same_across_ranks": {"quick": _NEW_REDUCER},
    "test_ddp_hook_parity_powerSGD": {"replanned": _POWER_SGD},
    "test_ddp_hook_pickling_powerSGD": {"replanned": _POWER_SGD},
    "test_ddp_logging_data_cpu": {"planned": _SENT, "replanned": _SENT},
    "test_ddp_profiling_torch_profiler": {
        "quick": _SENT,
        "planned": "it counts broadcasts, and a plan spares the one of torch's new buckets",
        "replanned": _SENT,
    },
    "test_ddp_sink_noclone": {"replanned": "nothing may be cloned in its forward pass, where ranks compare plans"},
    "test_detect_ddp_is_actually_static": {"quick": _NEW_REDUCER, "replanned": _NEW_REDUCER},
    "test_invalid_static_graph": {"replanned": _NEW_GRAPH},
    "test_skip_all_reduce_unused_parameters": {"quick": _NEW_REDUCER, "planned": _SENT, "replanned": _NEW_REDUCER},
}


def unexplained(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Name what torch's class passes and ours does not, and nothing says why."""
    return [
        f"{name} ({wrapper}): {_last_line(came[wrapper]['why'])}"
        for name, came in found.items()
        for wrapper in WRAPPERS
        if wrapper in came
        and came["stock"]["outcome"] == "passed" != came[wrapper]["outcome"]
        and wrapper not in DIFFERENT.get(name, {})
    ]


def main() -> int:
    path, *names = sys.argv[1:]
    found: dict[str, dict[str, Any]] = {}
    Tests.setUpClass()
    cases = about_ddp()
    for name in [name for name in names or cases if name in cases]:  # older versions of torch have fewer
        found[name] = {"asks for GPUs": name in NEED_GPUS}
        for wrapper in WRAPPERS:
            found[name][wrapper] = run(name, cases[name], wrapper)
            if found[name]["stock"]["outcome"] != "passed":
                break
        told = " | ".join(_cell(found[name][one]) for one in WRAPPERS if one in found[name])
        print(f"{name} | {told}", flush=True)  # noqa: T201
    Path(path).write_text(json.dumps(found, indent=1) if path.endswith(".json") else page(found), encoding="utf-8")
    for line in unexplained(found):
        print(f"not explained: {line}")  # noqa: T201
    return bool(unexplained(found))


if __name__ == "__main__":
    sys.exit(main())
