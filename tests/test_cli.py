"""The commands as a user runs them: real processes, real files."""

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from mgwfbp import LayerTrace, LinearCost, MergePlan, ModelTrace, PiecewiseCost, load_cost, load_network, load_trace
from mgwfbp.cli import app
from mgwfbp.costs import ShardedCost, WireCost
from mgwfbp.fsdp import FsdpPlan
from mgwfbp.memory import Precision
from mgwfbp.planners import find_plan, find_sharded_plan, find_wire_plan
from mgwfbp.planners.fsdp import plan_fsdp
from tests.examples import make_trace

TRACE = make_trace([2, 4, 6, 8, 10, 12], [1] * 6)
COST = LinearCost(4, 3.0, 1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TRACE.save(tmp_path / "trace.json")
    COST.save(tmp_path / "cost.json")
    return tmp_path


def run(folder: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "mgwfbp", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_compare_prints_a_line_for_every_planner(folder: Path) -> None:
    lines = run(folder, "compare", "--trace", "trace.json", "--cost", "cost.json").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["planner", "messages"],
        ["wfbp", "6"],
        ["single", "1"],
        ["bucket", "1"],
        ["mgwfbp", "1"],
        ["optimal", "3"],
    ]


def test_compare_gives_the_same_as_json(folder: Path) -> None:
    rows = json.loads(run(folder, "compare", "--trace", "trace.json", "--cost", "cost.json", "--json").stdout)
    best = rows[-1]
    assert best["planner"] == "optimal"
    assert (best["num_groups"], best["iteration_s"], best["exposed_s"], best["lower_bound_s"]) == (3, 18.0, 6.0, 16.0)
    assert {"planner", "num_groups", "iteration_s", "exposed_s", "lower_bound_s"} <= set(rows[0])


def on_a_terminal(folder: Path, columns: int, *arguments: str) -> str:
    """Run a command on a pseudo-terminal of so many columns and return what it shows."""
    shown, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    done = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.DEVNULL,
        env={**environment, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(terminal)
    text = b""
    with contextlib.suppress(OSError):  # Linux says EIO when the other end closes
        while chunk := os.read(shown, 65536):
            text += chunk
    os.close(shown)
    assert done.wait(timeout=60) == 0
    return text.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [120, 80, 40])
def test_a_terminal_of_any_width_shows_every_word_of_the_table(folder: Path, columns: int) -> None:
    text = on_a_terminal(folder, columns, "-m", "mgwfbp", "compare", "--trace", "trace.json", "--cost", "cost.json")
    assert "…" not in text
    assert ("─" in text) == (columns >= 80)  # the rule under the titles: drawn where the table fits
    for word in ("planner", "optimal", "18 s", "efficiency"):
        assert word in text


def test_markup_in_a_table_is_text(folder: Path) -> None:
    code = "from mgwfbp.cli.output import print_table; print_table(['name', 'n'], [['[red]x[/red]', '1']])"
    assert "[red]x[/red]" in on_a_terminal(folder, 80, "-c", code)


FILES = ("--trace", "trace.json", "--cost", "cost.json")


def test_compare_has_a_row_of_both_precisions_and_what_is_sent_only_where_asked_to(folder: Path) -> None:
    plain = run(folder, "compare", *FILES)
    assert "low precision" not in plain.stdout
    done = run(folder, "compare", *FILES, "--wire", "bfloat16")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["optimal", "optimal+bf16"]
    assert lines[0].endswith("sent  low precision")
    assert [line.split()[-3:] for line in lines[-2:]] == [["6", "B", "0%"], ["3", "B", "100%"]]
    assert done.stderr.count("half the bytes") == 1
    rows = json.loads(run(folder, "compare", *FILES, "--wire", "float16", "--json").stdout)
    assert [(row["sent_bytes"], row["low_bytes"]) for row in rows[:-1]] == [(6, 0)] * 5
    expected = find_wire_plan(TRACE, COST, "float16").predicted
    assert {name: rows[-1][name] for name in expected} == expected
    assert rows[-1]["planner"] == "optimal+fp16"


def test_a_measured_cost_of_low_precision_is_planned_with(folder: Path) -> None:
    low = LinearCost(4, 3.0, 0.25)
    low.save(folder / "low.json")
    done = run(folder, "plan", *FILES, "--wire", "bfloat16", "--wire-cost", "low.json", "-o", "plan.json")
    assert "half the bytes" not in done.stderr
    plan = MergePlan.load(folder / "plan.json")
    assert plan == find_wire_plan(TRACE, WireCost(COST, low))
    assert json.loads((folder / "plan.json").read_text())["format"] == "mgwfbp.plan/2"
    # Where converting costs more than it saves, messages travel as they are, and older readers take the plan.
    LinearCost(4, 9.0, 0.5).save(folder / "low.json")
    run(folder, "plan", *FILES, "--wire", "bfloat16", "--wire-cost", "low.json", "-o", "plan.json")
    assert json.loads((folder / "plan.json").read_text())["format"] == "mgwfbp.plan/1"
    lost = run(folder, "plan", *FILES, "--wire", "float16", "--wire-cost", "low.json", "-o", "low.json", status=1)
    assert "is also an input" in lost.stderr


def test_a_cost_file_that_holds_both_precisions_is_planned_with_both(folder: Path) -> None:
    both = WireCost(COST, LinearCost(4, 3.0, 0.4), "bfloat16")
    both.save(folder / "cost.json")
    done = run(folder, "compare", *FILES, "--wire", "bfloat16", "--wire-tolerance", "0", "--json")
    assert "half the bytes" not in done.stderr
    (row,) = (row for row in json.loads(done.stdout) if row["planner"] == "optimal+bf16")
    expected = find_wire_plan(TRACE, both, tolerance=0.0).predicted
    assert {name: row[name] for name in expected} == expected
    assert row["iteration_s"] != find_wire_plan(TRACE, COST, tolerance=0.0).predicted["iteration_s"]
    # Of another precision nothing was measured.
    assert "half the bytes" in run(folder, "plan", *FILES, "--wire", "float16").stderr


def test_the_tolerance_is_planned_with_and_said(folder: Path) -> None:
    options = ("plan", *FILES, "--wire", "bfloat16", "--wire-tolerance", "0.2", "-o", "plan.json")
    assert "within 20 % of the shortest step" in run(folder, *options).stderr
    assert MergePlan.load(folder / "plan.json") == find_wire_plan(TRACE, COST, tolerance=0.2)
    assert MergePlan.load(folder / "plan.json") != find_wire_plan(TRACE, COST)
    refused = run(folder, "compare", *FILES, "--wire-tolerance", "0.2", status=2)
    assert "needs --wire" in refused.stderr


WITH_FORWARD = make_trace([8, 10, 12, 14, 16, 18], [1] * 6, forward_s=6)


def test_a_plan_for_a_sharded_optimizer_is_written_and_said_what_is_assumed(folder: Path) -> None:
    WITH_FORWARD.save(folder / "trace.json")
    done = run(folder, "plan", *FILES, "--engine", "sharded", "-o", "plan.json")
    plan = MergePlan.load(folder / "plan.json")
    assert plan == find_sharded_plan(WITH_FORWARD, COST)
    assert json.loads((folder / "plan.json").read_text())["format"] == "mgwfbp.plan/2"
    assert "half an all-reduce each" in done.stderr
    assert "layers are taken to share it as they share the backward pass" in done.stderr
    assert "0 B of 6 B all-reduced, the rest sharded: the best of plans that" in done.stderr
    run(folder, "plan", *FILES, "--engine", "ddp", "-o", "plan.json")
    assert MergePlan.load(folder / "plan.json") == find_plan(WITH_FORWARD, COST)
    refused = run(folder, "plan", *FILES, "--engine", "sharded", "--wire", "float16", status=2)
    assert "such a plan sends messages as they are; leave out --wire" in refused.stderr
    refused = run(folder, "plan", *FILES, "--engine", "sharded", "--format", "torch", status=2)
    assert "torch's DDP all-reduces all messages; give json" in refused.stderr


def test_a_plan_for_fsdp2_is_written_within_the_memory_there_is(folder: Path) -> None:
    trace = load_trace("bert-h200-b32")
    cost = load_network("25gbe").cost(4)
    given = ("plan", "--engine", "fsdp2", "--trace", "bert-h200-b32", "--cost", "25gbe", "--workers", "4")
    done = run(folder, *given, "-o", "plan.json")
    assert FsdpPlan.load(folder / "plan.json") == plan_fsdp(trace, cost)
    assert "no plan is shorter; 1.03 GB a rank, with 2 states of the optimizer" in done.stderr
    run(folder, *given, "--memory-limit", "800MB", "-o", "plan.json")
    assert FsdpPlan.load(folder / "plan.json") == plan_fsdp(trace, cost, memory_limit=800_000_000)
    refused = run(folder, *given, "--memory-limit", "0.5 GB", status=1)
    assert "fits into 500 MB: the least is at most 626 MB" in refused.stderr
    run(folder, *given, "--param-dtype", "bfloat16", "--reduce-dtype", "float32", "--states", "1", "-o", "plan.json")
    assert FsdpPlan.load(folder / "plan.json") == plan_fsdp(trace, cost, precision=Precision(0.5, 1.0, 1.0))
    refused = run(folder, "plan", *FILES, "--reduce-dtype", "bfloat16", status=2)
    assert "ddp sends gradients as they are; give --engine fsdp2" in refused.stderr
    refused = run(folder, *given, "--memory-limit", "much", status=2)
    assert "'much', expected a size such as 40GiB or 512MB" in refused.stderr
    refused = run(folder, "plan", *FILES, "--memory-limit", "1GB", status=2)
    assert "ddp keeps all parameters; give --engine fsdp2" in refused.stderr


def test_where_engines_send_in_different_precisions_the_table_and_a_line_say_so(folder: Path) -> None:
    trace = ("--trace", "bert-h200-b32", "--workers", "4", "--engine", "ddp,fsdp2")
    for command in (("compare", *trace, "--cost", "25gbe"), ("simulate", *trace, "--network", "25gbe")):
        plain = run(folder, *command)
        assert "not alike" not in plain.stderr
        assert "bits" not in plain.stdout.splitlines()[0].split()
        short = run(folder, *command, "--param-dtype", "bfloat16", "--reduce-dtype", "float32")
        assert "fsdp2 gathers and sends in 16, 32 bits, the other engines send in 32: not alike" in short.stderr
        titles, *lines = short.stdout.splitlines()
        assert titles.endswith("bits")
        for line in lines[: lines.index(next(one for one in lines if one.startswith("fsdp2 "))) + 1]:
            assert line.endswith("16, 32") == line.startswith("fsdp2")
        rows = json.loads(run(folder, *command, "--param-dtype", "bfloat16", "--json").stdout)
        assert {(row["planner"].startswith("fsdp2"), row["bits"]) for row in rows} == {(False, "32"), (True, "16")}


def test_memory_of_every_engine_counts_frozen_parameters(folder: Path) -> None:
    layers = tuple(LayerTrace(f"h.{name}.w", 1.0, 100, 1.0) for name in "cba")
    plain = ModelTrace("toy", 3.0, layers)
    part = {"name": "h.tower.w", "bytes": 1000, "within": "h.a.w", "share": 0.0, "next": "h.a.w"}
    frozen = replace(plain, source={"frozen": [part]})
    held: dict[str, list[int]] = {}
    for name, trace in (("without", plain), ("with", frozen)):
        trace.save(folder / "trace.json")
        for command, files in (("compare", FILES), ("simulate", ("--trace", "trace.json", "--network", "cost.json"))):
            rows = json.loads(run(folder, command, *files, "--engine", "ddp,sharded,fsdp2", "--json").stdout)
            of_ours = [row["memory_bytes"] for row in rows if not row["planner"].startswith("fsdp2")]
            held.setdefault(name, []).extend(of_ours)
    assert len(held["with"]) > 10
    assert held["with"] == [size + 1000 for size in held["without"]]


def test_compare_has_a_row_of_the_sharded_plan_only_where_asked_to(folder: Path) -> None:
    WITH_FORWARD.save(folder / "trace.json")
    assert "gathers" not in run(folder, "compare", *FILES).stdout
    done = run(folder, "compare", *FILES, "--engine", "sharded")
    lines = done.stdout.splitlines()
    assert lines[0].split()[-3:] == ["bound", "gathers", "all-reduced"]
    assert [line.split()[0] for line in lines[-2:]] == ["optimal", "sharded"]
    assert "half an all-reduce each" in done.stderr
    rows = json.loads(run(folder, "compare", *FILES, "--engine", "ddp,sharded", "--json").stdout)
    plain = json.loads(run(folder, "compare", *FILES, "--json").stdout)
    assert rows[:-1] == [{**row, "num_gathers": 0, "all_reduced_bytes": 6} for row in plain]
    expected = find_sharded_plan(WITH_FORWARD, COST)
    assert rows[-1]["num_gathers"] == len(expected.gathers)
    assert {name: rows[-1][name] for name in expected.predicted} == expected.predicted


def test_compare_has_fsdp2_planned_and_by_block_with_the_memory_of_every_engine(folder: Path) -> None:
    trace, cost = load_trace("bert-h200-b32"), load_network("25gbe").cost(4)
    given = ("compare", "--trace", "bert-h200-b32", "--cost", "25gbe", "--workers", "4", "--engine")
    rows = json.loads(run(folder, *given, "ddp,sharded,fsdp2", "--memory-limit", "900 MB", "--json").stdout)
    by_name = {row["planner"]: row for row in rows}
    assert list(by_name)[-4:] == ["sharded", "fsdp2-block", "fsdp2-rest-in-root", "fsdp2"]
    for row in rows:
        assert {"planner", "num_groups", "iteration_s", "exposed_s", "lower_bound_s"} <= set(row)
        assert row["lower_bound_s"] <= row["iteration_s"]
        assert row["fits"] == (row["memory_bytes"] <= 900_000_000)
    plan = plan_fsdp(trace, cost, memory_limit=900_000_000)
    for name in ("iteration_s", "exposed_s", "lower_bound_s", "memory_bytes", "gathered_again_bytes"):
        assert by_name["fsdp2"][name] == pytest.approx(plan.predicted[name])
    assert by_name["fsdp2-block"]["memory_bytes"] < by_name["fsdp2"]["memory_bytes"] <= 900_000_000
    assert by_name["sharded"]["memory_bytes"] < by_name["optimal"]["memory_bytes"] == 5 * trace.grad_bytes
    done = run(folder, *given, "ddp,fsdp2", "--memory-limit", "900 MB")
    lines = done.stdout.splitlines()
    assert lines[0].endswith("memory a rank")
    assert [line.split()[0] for line in lines[-4:-1]] == ["fsdp2-block", "fsdp2-rest-in-root", "fsdp2"]
    assert all(line.endswith("too much") for line in lines[1:-4])
    fits = [row for row in rows if row["fits"] and row["planner"] != "sharded"]
    best, other = sorted(fits, key=lambda row: row["iteration_s"])[:2]
    assert lines[-1].startswith("fastest that fits: fsdp2, ")
    assert lines[-1].endswith(f"{other['iteration_s'] / best['iteration_s']:.2f} times as fast as {other['planner']}")
    assert "without activations" in done.stderr
    refused = run(folder, *given, "ddp,fsdp2", "--memory-limit", "0.1 GB", status=1)
    assert "fits into 100 MB: the least is at most 626 MB a rank" in refused.stderr
    assert refused.stdout.splitlines()[-1].startswith("nothing fits into 100 MB: the least of these is fsdp2-block")
    refused = run(folder, *given, "ddp,sharded", "--memory-limit", "1 GB", status=2)
    assert "ddp,sharded keeps all parameters; give --engine fsdp2" in refused.stderr


def test_measured_halves_make_the_sharded_plan_and_no_other(folder: Path) -> None:
    WITH_FORWARD.save(folder / "trace.json")
    before = json.loads(run(folder, "compare", *FILES, "--json").stdout)
    halves = ShardedCost(COST, LinearCost(COST.workers, 3.0, 0.5), LinearCost(COST.workers, 0.25, 0.25))
    halves.save(folder / "cost.json")
    done = run(folder, "plan", *FILES, "--engine", "sharded", "-o", "plan.json")
    assert MergePlan.load(folder / "plan.json") == find_sharded_plan(WITH_FORWARD, halves)
    assert find_sharded_plan(WITH_FORWARD, halves) != find_sharded_plan(WITH_FORWARD, COST)
    assert "half an all-reduce each" not in done.stderr
    done = run(folder, "compare", *FILES, "--engine", "ddp,sharded", "--json")
    rows = json.loads(done.stdout)
    assert "half an all-reduce each" not in done.stderr
    assert rows[:-1] == [{**row, "num_gathers": 0, "all_reduced_bytes": 6} for row in before]
    assert rows[-1]["iteration_s"] == find_sharded_plan(WITH_FORWARD, halves).predicted["iteration_s"]
    assert json.loads(run(folder, "compare", *FILES, "--json").stdout) == before
    (folder / "cost.json").write_text(json.dumps({**COST.to_json(), "all_gather": COST.to_json()}))
    refused = run(folder, "plan", *FILES, "--engine", "sharded", status=1)
    assert refused.stderr == "mgwfbp: cost.json: reduce_scatter: missing\n"


def test_bucket_sizes_are_options(folder: Path) -> None:
    byte = str(1 / 2**20)
    options = ("--bucket-mb", str(2 / 2**20), "--first-bucket-mb", byte)
    rows = json.loads(run(folder, "compare", "--trace", "trace.json", "--cost", "cost.json", "--json", *options).stdout)
    assert {row["planner"]: row["num_groups"] for row in rows}["bucket"] == 4  # 1 + 2 + 2 + 1


def test_plan_writes_a_plan_that_covers_the_model(folder: Path) -> None:
    run(folder, "plan", "--trace", "trace.json", "--cost", "cost.json", "-o", "plan.json")
    plan = MergePlan.load(folder / "plan.json")
    assert plan.group_sizes == (1, 2, 3)
    assert plan.predicted["iteration_s"] == 18.0


def test_plan_writes_the_sizes_that_torchs_own_ddp_takes(folder: Path) -> None:
    command = ("plan", "--trace", "trace.json", "--cost", "cost.json", "--format", "torch")
    done = run(folder, *command, "-o", "caps.json")
    assert [size * 2**20 for size in json.loads((folder / "caps.json").read_text())] == [1, 2, 3]
    assert "bucket_cap_mb_list" in done.stderr.splitlines()[1]


def test_a_torch_that_takes_no_sizes_is_told_of_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "__init__", torch.nn.Module.__init__)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["plan", "--trace", "trace.json", "--cost", "cost.json", "--format", "torch"])
    assert done.exit_code == 0, done.stderr
    assert len(json.loads(done.stdout)) == 3
    told = "torch 2.10.0 takes no bucket_cap_mb_list, 2.11 and newer do: here write the plan without --format and give"
    assert done.stderr.splitlines()[0].startswith(told)


def test_plan_takes_the_bucket_sizes_too(folder: Path) -> None:
    options = ("--planner", "bucket", "--bucket-mb", str(2 / 2**20), "--first-bucket-mb", str(1 / 2**20))
    done = run(folder, "plan", "--trace", "trace.json", "--cost", "cost.json", *options)
    assert MergePlan.from_json(json.loads(done.stdout)).group_sizes == (1, 2, 2, 1)


def test_compare_says_how_much_faster_than_buckets_a_plan_is(folder: Path) -> None:
    lines = run(folder, "compare", "--trace", "trace.json", "--cost", "cost.json").stdout.splitlines()
    optimal = next(line for line in lines if line.startswith("optimal"))
    assert "1.17x" in optimal  # 21 s against 18 s


def test_a_ratio_that_is_no_number_is_null(folder: Path) -> None:
    make_trace([0.0], [1]).save(folder / "trace.json")
    rows = json.loads(run(folder, "compare", "--trace", "trace.json", "--cost", "cost.json", "--json").stdout)
    assert rows[0]["ratio"] is None


@pytest.mark.parametrize("redirect", [">/dev/full", "2>/dev/full >/dev/full"])
def test_output_that_cannot_be_written_is_status_1_without_a_traceback(folder: Path, redirect: str) -> None:
    command = f"{sys.executable} -m mgwfbp compare --trace trace.json --cost cost.json {redirect}"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, check=False)  # noqa: S602
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_plan_is_written_even_if_nobody_can_be_told(folder: Path) -> None:
    command = f"{sys.executable} -m mgwfbp plan --trace trace.json --cost cost.json -o plan.json 2>/dev/full >&-"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, check=False)  # noqa: S602
    assert done.returncode == 0
    assert MergePlan.load(folder / "plan.json").group_sizes == (1, 2, 3)


def test_a_file_name_with_a_line_break_stays_on_one_line(folder: Path) -> None:
    done = run(folder, "compare", "--trace", "a\nb.json", "--cost", "cost.json", status=1)
    assert done.stderr == "mgwfbp: 'a\\nb.json': cannot be read: No such file or directory\n"


def test_samples_no_cost_fits_name_the_file(folder: Path) -> None:
    (folder / "sweep.txt").write_text("4 0\n8 1\n")
    done = run(folder, "cost", "--points", "sweep.txt", "--workers", "4", status=1)
    assert done.stderr == "mgwfbp: sweep.txt: samples[0]: 4 bytes in 0 s, expected 1e-12 s or more\n"


def test_times_that_do_not_grow_are_remarked_on(folder: Path) -> None:
    (folder / "sweep.txt").write_text("4 3\n8 2\n16 1\n")
    assert "larger messages would be free" in run(folder, "cost", "--points", "sweep.txt", "--workers", "4").stderr


def test_sizes_that_are_slower_than_larger_ones_are_said_to_be_planned_as_padded(folder: Path) -> None:
    rows = [(4096, 1e-4), (16384, 2.8e-3), (32768, 3.2e-3), (65536, 1.6e-4), (131072, 2e-4), (10**7, 1e-2)]
    (folder / "sweep.txt").write_text("".join(f"{size} {time}\n" for size, time in rows))
    done = run(folder, "cost", "--points", "sweep.txt", "--workers", "144", "-o", "c.json")
    assert "larger messages are faster than those of 2 sizes from 16.4 kB to 32.8 kB" in done.stderr
    assert "planned as if padded" in done.stderr
    data = json.loads((folder / "c.json").read_text())
    assert data["source"]["padded"] == [[16384, 2.8e-3], [32768, 3.2e-3]]
    trace = ("--trace", "trace.json", "--cost")
    for command in (("compare", "--json"), ("plan", "--engine", "sharded")):
        said = run(folder, command[0], *trace, "c.json", *command[1:]).stderr
        assert said.count("larger messages are faster than those of 2 sizes from 16.4 kB to 32.8 kB") == 1, command
        assert "padded" not in run(folder, command[0], *trace, "cost.json", *command[1:]).stderr
    odd_values: list[object] = ["text", [5], [["a", 1]]]
    for odd in odd_values:
        (folder / "odd.json").write_text(json.dumps({**data, "source": {"padded": odd}}))
        assert "padded" not in run(folder, "plan", *trace, "odd.json").stderr


def test_plan_goes_to_stdout_without_a_file(folder: Path) -> None:
    done = run(folder, "plan", "--trace", "trace.json", "--cost", "cost.json", "--planner", "wfbp")
    assert MergePlan.from_json(json.loads(done.stdout)).group_sizes == (1,) * 6


def test_cost_fits_a_sweep(folder: Path) -> None:
    (folder / "sweep.txt").write_text("".join(f"{size} {1e-4 + 1e-9 * size}\n" for size in (4, 1000, 10**6)))
    done = run(folder, "cost", "--points", "sweep.txt", "--workers", "4", "-o", "c.json")
    assert "mean error 0.0%" in done.stderr
    assert isinstance(load_cost(folder / "c.json"), LinearCost)
    run(folder, "cost", "--points", "sweep.txt", "--workers", "4", "--kind", "piecewise", "-o", "c.json")
    assert isinstance(load_cost(folder / "c.json"), PiecewiseCost)


def test_a_fit_that_is_far_off_says_what_to_do_about_it(folder: Path) -> None:
    # Two levels that take turns: neither a line nor a curve that never falls is near them.
    rows = [
        f"{size} {(1e-4 if place % 2 else 9e-4) + 1e-9 * size}\n"
        for place, size in enumerate(range(1000, 30_000, 1000))
    ]
    (folder / "sweep.txt").write_text("".join(rows))
    command = ("cost", "--points", "sweep.txt", "--workers", "4", "-o", "c.json")
    assert "measure again" in run(folder, *command).stderr
    assert "--kind piecewise" in run(folder, *command, "--kind", "linear").stderr
    (folder / "sweep.txt").write_text("".join(f"{size} {1e-4 + 1e-9 * size}\n" for size in (4, 1000, 10**6)))
    assert "measure again" not in run(folder, *command).stderr


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--trace", "trace.json", "--cost", "cost.json", "-o", "trace.json"),
        ("report", "trace.json", "cost.json", "-o", "./trace.json", "--format", "perfetto"),
        ("report", "trace.json", "cost.json", "-o", "link.json"),
        ("cost", "--points", "trace.json", "--workers", "4", "-o", "trace.json"),
        ("measure", "profile", "trace.json", "--model", "resnet18", "-o", "trace.json"),
    ],
)
def test_a_result_is_never_written_over_what_it_is_made_from(folder: Path, command: tuple[str, ...]) -> None:
    (folder / "link.json").symlink_to(folder / "trace.json")
    before = (folder / "trace.json").read_bytes()
    done = run(folder, *command, status=1)
    assert "is also an input" in done.stderr
    assert (folder / "trace.json").read_bytes() == before


def test_compare_and_plan_take_a_network_where_the_number_of_workers_is_given(folder: Path) -> None:
    nodes = ("--workers", "64", "--per-node", "8", "--inside", "nvlink3")
    run(folder, "cost", "--network", "10gbe", *nodes, "-o", "c.json")
    from_file = run(folder, "compare", "--trace", "trace.json", "--cost", "c.json", "--json").stdout
    assert run(folder, "compare", "--trace", "trace.json", "--cost", "10gbe", *nodes, "--json").stdout == from_file
    plan = json.loads(run(folder, "plan", "--trace", "trace.json", "--cost", "10GbE", *nodes).stdout)
    assert plan["predicted"]["iteration_s"] == json.loads(from_file)[-1]["iteration_s"]
    assert "--workers" in run(folder, "compare", "--trace", "trace.json", "--cost", "10gbe", status=2).stderr
    other = run(folder, "compare", "--trace", "trace.json", "--cost", "c.json", "--workers", "8", status=1)
    assert "measured on 64 workers" in other.stderr


def test_planners_have_the_names_that_strategies_have_for_them(folder: Path) -> None:
    files = ("--trace", "trace.json", "--cost", "cost.json")
    as_ddp = json.loads(run(folder, "plan", *files, "--planner", "ddp").stdout)
    assert as_ddp["groups"] == json.loads(run(folder, "plan", *files, "--planner", "bucket").stdout)["groups"]
    small = json.loads(run(folder, "plan", *files, "--planner", "bucket-0.000001").stdout)
    assert len(small["groups"]) == 6


def commands() -> list[tuple[str, ...]]:
    """All commands there are, as the command line itself lists them."""
    found: list[tuple[str, ...]] = [()]
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        nested = getattr(command, "commands", {})
        found += [(name,), *((name, inner) for inner in nested)]
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_at_80_columns_cuts_nothing(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, [*command, "--help"]).output
    assert "…" not in shown
    assert not [line for line in shown.splitlines() if line.endswith("...") and "[OPTIONS]" not in line]
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_cost_of_a_preset_network(folder: Path) -> None:
    run(folder, "cost", "--network", "10GbE", "--workers", "8", "-o", "c.json")
    cost = load_cost(folder / "c.json")
    assert isinstance(cost, LinearCost)
    assert cost.startup_s == pytest.approx(633.64e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "--trace", "trace.json"),
        ("compare", "--trace", "trace.json", "--cost", "cost.json", "--bucket-mb", "0"),
        ("compare", "--trace", "trace.json", "--cost", "cost.json", "--bucket-mb", "nan"),
        ("plan", "--trace", "trace.json", "--cost", "cost.json", "--planner", "magic"),
        ("cost", "--workers", "0", "--network", "10gbe"),
        ("cost", "--workers", "4"),
        ("cost", "--workers", "4", "--osu", "a", "--points", "b"),
        ("cost", "--workers", "4", "--network", "10gbe", "--kind", "piecewise"),
        ("cost", "--workers", "4", "--points", "a", "--kind", "cubic"),
        ("compare", "--trace", "trace.json", "--cost", "cost.json", "--wire", "int8"),
        ("compare", "--trace", "trace.json", "--cost", "cost.json", "--wire-cost", "cost.json"),
        ("plan", "--trace", "trace.json", "--cost", "cost.json", "--wire", "bfloat16", "--planner", "bucket"),
        ("plan", "--trace", "trace.json", "--cost", "cost.json", "--wire", "bfloat16", "--format", "torch"),
        ("plan", "--trace", "trace.json", "--cost", "cost.json", "--engine", "fsdp"),
        ("plan", "--trace", "trace.json", "--cost", "cost.json", "--engine", "sharded", "--wire", "bfloat16"),
        ("plan", "--trace", "trace.json", "--cost", "cost.json", "--engine", "sharded", "--format", "torch"),
        ("plan", "--trace", "trace.json", "--cost", "cost.json", "--engine", "sharded", "--planner", "wfbp"),
        ("compare", "--trace", "trace.json", "--cost", "cost.json", "--engine", "ddp,fsdp"),
        ("compare", "--trace", "trace.json", "--cost", "cost.json", "--engine", "sharded", "--wire", "float16"),
        (
            *("plan", "--trace", "trace.json", "--cost", "10gbe", "--workers", "8"),
            *("--wire", "float16", "--wire-cost", "cost.json"),
        ),
        ("nonsense",),
        ("compare", "--nonsense"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(folder: Path, arguments: tuple[str, ...]) -> None:
    done = run(folder, *arguments, status=2)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"trace.json": TRACE.dumps()[:50]}, "trace.json: not JSON"),
        ({"trace.json": COST.dumps()}, "trace.json: format: expected 'mgwfbp.trace/1', found 'mgwfbp.cost/1'"),
        ({"cost.json": COST.dumps().replace("3.0", "-3.0")}, "cost.json: startup_s is -3.0"),
        ({"cost.json": COST.dumps().replace("3.0", "NaN")}, "cost.json: NaN is no number here"),
    ],
)
def test_bad_input_is_one_line_and_status_1_and_nothing_is_written(
    folder: Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
    done = run(folder, "plan", "--trace", "trace.json", "--cost", "cost.json", "-o", "plan.json", status=1)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert sorted(entry.name for entry in folder.iterdir()) == ["cost.json", "trace.json"]


def test_an_output_that_cannot_be_written_is_one_line_and_status_1(folder: Path) -> None:
    done = run(folder, "plan", "--trace", "trace.json", "--cost", "cost.json", "-o", "none/plan.json", status=1)
    assert done.stderr == "mgwfbp: none/plan.json: cannot be written: No such file or directory\n"


def test_a_closed_pipe_ends_the_command_quietly(folder: Path) -> None:
    big = ModelTrace("big", 0.0, make_trace(list(range(1, 5001)), [1] * 5000).layers)
    big.save(folder / "trace.json")
    command = f"{sys.executable} -m mgwfbp plan --trace trace.json --cost cost.json | head -c 10"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, check=True)  # noqa: S602
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_names_from_a_file_are_no_markup(folder: Path) -> None:
    ModelTrace("[red]m[/red]\x1b[31m", 1.0, TRACE.layers).save(folder / "trace.json")
    done = run(folder, "compare", "--trace", "trace.json", "--cost", "cost.json")
    assert "[red]m[/red]\\x1b[31m" in done.stderr


def test_help_and_version_work(folder: Path) -> None:
    assert "compare" in run(folder, "--help").stdout
    assert run(folder, "--version").stdout.startswith("mgwfbp ")
    assert "compare" in run(folder, status=2).stdout
