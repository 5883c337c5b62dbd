"""`mgwfbp simulate` and `mgwfbp paper` as a user meets them."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mgwfbp import LayerTrace, LinearCost, ModelTrace, Network, find_plan, load_network, load_trace, predict
from mgwfbp.bounds import lower_bound_s, sharded_lower_bound_s
from mgwfbp.cli import progress, run
from mgwfbp.cli.fsdp import fastest_words
from mgwfbp.costs import WireCost
from mgwfbp.planners import PLANNERS, find_sharded_plan, find_wire_plan
from mgwfbp.planners.fsdp import plan_fsdp


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    layers = tuple(
        LayerTrace(f"layer{index}.{part}", 0.4 / 100, size)
        for index in range(50)
        for part, size in (("bias", 1000), ("weight", 2 * 10**6))
    )
    path = tmp_path / "trace.json"
    ModelTrace("toy", 0.2, layers, {"device": "a K80, perhaps"}).save(path)
    return str(path)


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run(["simulate", *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert isinstance(rows, list)
    return rows


def test_json_has_a_row_for_every_planner_and_number_of_workers(
    trace_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(capsys, "--trace", trace_file, "--network", "10gbe", "--workers", "4,8,16,32,64")
    assert [(row["workers"], row["planner"]) for row in rows] == [(n, p) for n in (4, 8, 16, 32, 64) for p in PLANNERS]
    trace = ModelTrace.load(trace_file)
    for row in rows:
        predicted = find_plan(trace, load_network("10gbe").cost(row["workers"]), row["planner"]).predicted
        assert row["iteration_s"] == predicted["iteration_s"]
        assert row["exposed_s"] == predicted["exposed_s"]
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["workers"])
        assert row["num_groups"] >= 1


def test_the_table_names_every_planner_and_says_what_limits(
    trace_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", "--trace", trace_file, "--network", "10gbe", "--network", "ib-hdr", "--workers", "8,4096"]
    assert run(arguments) == 0
    output = capsys.readouterr().out
    assert all(planner in output for planner in PLANNERS)
    assert "InfiniBand HDR, 8 workers: computation hides communication, merged or not" in output
    assert "10GbE, 4096 workers: start-up times cost" in output


def test_jitter_is_the_same_for_a_seed(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--trace", trace_file, "--network", "10gbe", "--workers", "16", "--jitter", "0.1", "--planner", "optimal")
    first, again, other = (rows_of(capsys, *common, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other
    assert first[0]["steps"] == 100


def test_a_measured_cost_brings_its_own_number_of_workers(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost_file = str(tmp_path / "cost.json")
    LinearCost(6, 1e-3, 1e-9).save(cost_file)
    rows = rows_of(capsys, "--trace", trace_file, "--network", cost_file)
    assert {row["workers"] for row in rows} == {6}
    assert run(["simulate", "--trace", trace_file, "--network", cost_file, "--workers", "8"]) == 1
    assert "was measured on 6 workers" in capsys.readouterr().err


def test_what_messages_take_from_the_computation_is_no_computation(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost_file = str(tmp_path / "cost.json")
    LinearCost(4, 1e-6, 3e-9, taken_s=5e-3, taken_per_byte_s=1e-9).save(cost_file)
    rows = rows_of(capsys, "--trace", trace_file, "--network", cost_file)
    for row in rows:
        assert row["compute_s"] == pytest.approx(0.6)
        assert row["taken_s"] + row["exposed_s"] == pytest.approx(row["iteration_s"] - 0.6)
        assert row["efficiency"] == pytest.approx(0.6 / row["iteration_s"])
    by_planner = {row["planner"]: row["limit"] for row in rows}
    assert by_planner["wfbp"] == by_planner["optimal"] == "messages' own time"
    assert run(["simulate", "--trace", trace_file, "--network", cost_file]) == 0
    said = capsys.readouterr().out
    assert " taken " in said
    assert "starting and copying messages takes time from the computation" in said
    assert run(["compare", "--trace", trace_file, "--cost", cost_file, "--json"]) == 0
    compared = {row["planner"]: row for row in json.loads(capsys.readouterr().out)}
    for row in rows:
        assert compared[row["planner"]]["taken_s"] == pytest.approx(row["taken_s"])
        assert compared[row["planner"]]["efficiency"] == pytest.approx(row["efficiency"])


def test_sizes_that_are_planned_as_padded_are_named(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost_file = str(tmp_path / "cost.json")
    LinearCost(4, 1e-4, 1e-9, {"padded": [[16384, 2.8e-3]]}).save(cost_file)
    assert run(["simulate", "--trace", trace_file, "--network", cost_file]) == 0
    said = capsys.readouterr().err
    assert said.count("larger messages are faster than those of 1 size from 16.4 kB to 16.4 kB") == 1


def test_a_plan_is_simulated_as_it_is(trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file = str(tmp_path / "plan.json")
    plan = find_plan(ModelTrace.load(trace_file), load_network("1gbe").cost(8), "optimal")
    plan.save(plan_file)
    rows = rows_of(capsys, "--trace", trace_file, "--network", "10gbe", "--workers", "2,64", "--plan", plan_file)
    assert [row["num_groups"] for row in rows] == [plan.num_groups] * 2


def test_two_levels_slow_links_and_algorithms_are_options(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--trace", trace_file, "--network", "10gbe", "--workers", "64", "--planner", "single,naive,ps,ps-sharded")
    flat = rows_of(capsys, *common)
    nodes = rows_of(capsys, *common, "--per-node", "8", "--inside", "nvlink3")
    slow = rows_of(capsys, *common, "--slow-link", "4")
    tree = rows_of(capsys, *common, "--algorithm", "binary_tree")
    assert [row["planner"] for row in flat] == ["single", "naive", "ps", "ps-sharded"]
    assert nodes[0]["exposed_s"] < flat[0]["exposed_s"] < slow[0]["exposed_s"]
    assert tree[0]["network"] == "10GbE binary_tree"
    assert tree[0]["exposed_s"] != flat[0]["exposed_s"]


@pytest.mark.parametrize(
    ("wrong", "status", "words"),
    [
        (("--workers", "0"), 2, "--workers"),
        (("--workers", "4,,8"), 2, "--workers"),
        (("--workers", "four"), 2, "--workers"),
        (("--workers", "99999999999999999999"), 1, "workers"),
        (("--scale", "-1"), 2, "--scale"),
        (("--scale", "nan"), 2, "--scale"),
        (("--scale", "x"), 2, "--scale"),
        (("--planner", "best"), 2, "planner 'best' is unknown"),
        (("--network", "100gbf"), 1, "neither a file nor one of"),
        (("--network", "no/such.json"), 1, "no/such.json"),
        (("--inside", "nvlink3"), 2, "give both or none"),
        (("--algorithm", "butterfly"), 2, "'butterfly' is not one of"),
        (("--jitter", "-0.1"), 2, "--jitter"),
        (("--jitter", "0.1", "--steps", "3"), 1, "even number"),
        (("--straggler", "0.5"), 2, "--straggler"),
        (("--straggler", "2", "--straggler", "2", "--workers", "1"), 1, "2 stragglers among 1 worker"),
        (("--contention", "0"), 2, "--contention"),
        (("--in-flight", "0"), 2, "--in-flight"),
        (("--per-node", "3", "--inside", "nvlink3"), 1, "do not fill nodes of 3"),
        (("--plan", "no-such-plan.json"), 1, "no-such-plan.json"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_1_or_2(
    trace_file: str, capsys: pytest.CaptureFixture[str], wrong: tuple[str, ...], status: int, words: str
) -> None:
    arguments = ["simulate", "--trace", trace_file]
    arguments += [] if "--network" in wrong else ["--network", "10gbe"]
    arguments += [] if "--workers" in wrong else ["--workers", "64"]
    assert run([*arguments, *wrong]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_workers_are_asked_for_where_the_network_has_none(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--trace", trace_file, "--network", "10gbe"]) == 2
    assert "--workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("--trace", '{"format": "mgwfbp.trace/1", "model": "x", "forward_s": 0, "layers": []}', "no layers"),
        (
            "--network",
            json.dumps({**Network("x", "ring", 0.0, 1.0).to_json(), "per_byte_s": -1}),
            "per_byte_s is -1",
        ),
    ],
)
def test_a_trace_without_layers_and_a_negative_rate_are_refused(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, words: str
) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(content)
    options = {"--trace": trace_file, "--network": "10gbe", "--workers": "8", name: str(file)}
    assert run(["simulate", *(part for option in options.items() for part in option)]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert "wrong.json" in error


def terminal_output(arguments: list[str], patience_s: float) -> str:
    """Run the command with a terminal for its stderr and so much patience; return what appears there."""
    ours, theirs = pty.openpty()
    code = f"from mgwfbp.cli import progress; progress.PATIENCE_S = {patience_s}; "
    command = [sys.executable, "-c", code + "from mgwfbp.__main__ import main; main()", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:  # how Linux says that the other side has closed
            pass
        finally:
            os.close(ours)
        assert process.wait(timeout=60) == 0
    return seen.decode()


def test_a_progress_bar_appears_when_it_takes_more_than_a_second_and_not_before(trace_file: str) -> None:
    assert progress.PATIENCE_S == 1.0
    command = ["simulate", "--trace", trace_file, "--network", "10gbe", "--json", "--workers", ",".join(["1024"] * 2)]
    command += ["--jitter", "0.1", "--jitter-shared", "0.5", "--steps", "100"]
    # How long the machine takes for it does not decide: one is more than any patience, the other is less.
    assert "simulating" in terminal_output(command, 0.0)
    assert "simulating" not in terminal_output(command, 3600.0)


def test_the_paper_s_evaluation_is_one_command(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = ["--googlenet", trace_file, "--resnet50", trace_file]
    document = tmp_path / "paper.md"
    assert run(["paper", *traces, "-o", str(document)]) == 0
    text = document.read_text()
    for words in ("Fig. 5", "Figs. 6 and 7", "Fig. 8", "Fig. 9", "Where ours differ", "Past the paper", "4096"):
        assert words in text
    for gain in ("1.20 (measured)", "1.36 (measured)", *(f"{g} (simulated)" for g in ("1.78", "1.35", "1.75", "1.45"))):
        assert gain in text
    assert "a K80, perhaps" in text
    capsys.readouterr()
    assert run(["paper", *traces]) == 0
    assert "Where ours differ" in capsys.readouterr().out


def test_the_paper_s_numbers_as_json_agree_with_simulate(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    traces = ["--googlenet", trace_file, "--resnet50", trace_file, "--per-tensor"]
    assert run(["paper", *traces, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ours = rows_of(capsys, "--trace", trace_file, "--network", "10gbe", "--workers", "64", "--planner", "mgwfbp")
    (row,) = (row for row in found["rows"]["resnet50"] if (row["workers"], row["planner"]) == (64, "mgwfbp"))
    assert row == ours[0]
    assert {gain["paper"] for gain in found["gains"]} == {1.20, 1.36, 1.78, 1.35, 1.75, 1.45}
    assert found["crossing"]["googlenet"] is not None
    assert list(found["beyond"]) == ["resnet50", "densenet201", "bert", "gpt2"]
    assert {row["workers"] for row in found["beyond"]["bert"]} == {64, 256, 1024, 4096}


def test_the_paper_needs_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["paper", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # The traces that come with the package show the crossing the paper points out.
    assert found["crossing"]["googlenet"] is not None
    assert found["crossing"]["resnet50"] is not None


@pytest.mark.parametrize("missing", ["no-such-trace.json", "no-such-trace", "no/such/trace"])
def test_a_missing_trace_of_the_paper_is_named(
    capsys: pytest.CaptureFixture[str], trace_file: str, missing: str
) -> None:
    assert run(["paper", "--googlenet", trace_file, "--resnet50", missing]) == 1
    assert missing in capsys.readouterr().err


def test_modern_traces_take_the_place_of_those_that_come_with_the_package(
    trace_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = ["--googlenet", trace_file, "--resnet50", trace_file]
    assert run(["paper", *traces, "--modern", trace_file, "--modern", trace_file, "--json"]) == 0
    beyond = json.loads(capsys.readouterr().out)["beyond"]
    assert list(beyond) == ["toy", "toy (2)"]
    assert beyond["toy"] == beyond["toy (2)"]
    assert min(row["compute_s"] for row in beyond["toy"]) == pytest.approx(0.6)  # not scaled


def test_a_plan_of_both_precisions_stands_beside_the_others_as_it_was_predicted(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, link = ModelTrace.load(trace_file), load_network("1gbe")
    arguments = ("--trace", trace_file, "--network", "1gbe", "--workers", "4", "--wire", "bfloat16")
    half = rows_of(capsys, *arguments)
    assert [row["planner"] for row in half] == [*PLANNERS, "optimal+bf16"]
    assert half[-1]["iteration_s"] == find_wire_plan(trace, link.cost(4)).predicted["iteration_s"]
    low = LinearCost(4, 1e-3, 1e-9)
    low.save(tmp_path / "low.json")
    measured = rows_of(capsys, *arguments, "--planner", "optimal", "--wire-cost", str(tmp_path / "low.json"))
    assert [row["planner"] for row in measured] == ["optimal", "optimal+bf16"]
    assert measured[0] == half[-2]
    promised = find_wire_plan(trace, WireCost(link.cost(4), low)).predicted
    assert measured[1]["iteration_s"] == promised["iteration_s"] < measured[0]["iteration_s"]
    for name in ("sent_bytes", "low_bytes"):
        assert measured[1][name] == promised[name] > 0
    assert (measured[0]["sent_bytes"], measured[0]["low_bytes"]) == (trace.grad_bytes, 0)
    # A file of both precisions says the same; and what the tolerance leaves is what the planner says.
    WireCost(link.cost(4), low, "bfloat16").save(tmp_path / "both.json")
    both = ("--trace", trace_file, "--network", str(tmp_path / "both.json"), "--wire", "bfloat16")
    assert rows_of(capsys, *both, "--planner", "optimal")[1]["iteration_s"] == promised["iteration_s"]
    lax = rows_of(capsys, *both, "--planner", "optimal", "--wire-tolerance", "0.3")[1]
    assert lax["low_bytes"] == find_wire_plan(trace, WireCost(link.cost(4), low), tolerance=0.3).predicted["low_bytes"]
    assert run(["simulate", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-3:] == ["sent", "low", "precision"]
    assert lines[1 + len(PLANNERS)].split()[-1].endswith("%")
    assert lines[1].split()[-1] == "0%"


def test_a_written_plan_of_both_precisions_is_simulated_as_it_says(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = find_wire_plan(ModelTrace.load(trace_file), load_network("1gbe").cost(4), "float16")
    assert plan.wire
    plan.save(tmp_path / "plan.json")
    arguments = ("--trace", trace_file, "--network", "1gbe", "--workers", "4", "--plan", str(tmp_path / "plan.json"))
    (row,) = rows_of(capsys, *arguments)
    assert row["iteration_s"] == plan.predicted["iteration_s"]


def test_a_written_plan_of_both_precisions_is_simulated_with_the_cost_that_was_measured(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, full = ModelTrace.load(trace_file), load_network("1gbe").cost(4)
    both = WireCost(full, LinearCost(4, 1e-3, 0.9 * full.per_byte_s), "float16")
    plan = find_wire_plan(trace, full, "float16")
    plan.save(tmp_path / "plan.json")
    both.save(tmp_path / "both.json")
    both.low.save(tmp_path / "low.json")
    measured_s = predict(trace, both, plan).iteration_s
    assert measured_s > 1.2 * predict(trace, full, plan).iteration_s
    given = ("--trace", trace_file, "--plan", str(tmp_path / "plan.json"))
    of_both = ("--network", str(tmp_path / "both.json"))
    apart = ("--network", "1gbe", "--workers", "4", "--wire-cost", str(tmp_path / "low.json"))
    sharded = (*of_both, "--engine", "sharded")
    for arguments in (of_both, (*of_both, "--wire", "float16"), apart, sharded):
        assert run(["simulate", *given, *arguments, "--json"]) == 0
        printed = capsys.readouterr()
        row = json.loads(printed.out)[0]
        assert row["iteration_s"] == measured_s
        assert row.get("lower_bound_s", 0.0) <= measured_s
        assert "half the bytes" not in printed.err


def test_what_is_assumed_of_low_precision_is_said_of_a_written_plan_too(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = load_network("1gbe").cost(4)
    find_wire_plan(ModelTrace.load(trace_file), full, "float16").save(tmp_path / "plan.json")
    find_plan(ModelTrace.load(trace_file), full).save(tmp_path / "full.json")
    WireCost(full, full, "bfloat16").save(tmp_path / "other.json")  # which says nothing of float16
    for network in (("1gbe", "--workers", "4"), (str(tmp_path / "other.json"),)):
        given = ["simulate", "--trace", trace_file, "--network", *network, "--plan"]
        assert run([*given, str(tmp_path / "plan.json")]) == 0
        assert "no cost of messages in float16 is given" in capsys.readouterr().err
        assert run([*given, str(tmp_path / "full.json")]) == 0
        assert "no cost" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--plan", "float16.json", "--wire", "bfloat16"),
        ("--plan", "float16.json", "--plan", "bfloat16.json"),
        ("--plan", "float16.json", "--wire-cost", "low.json", "--engine", "sharded"),
    ],
)
def test_plans_of_which_one_cost_cannot_speak_are_refused_in_one_line(
    trace_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    LinearCost(4, 1e-3, 1e-10).save("low.json")
    for wire in ("float16", "bfloat16"):
        find_wire_plan(ModelTrace.load(trace_file), load_network("1gbe").cost(4), wire).save(f"{wire}.json")
    assert run(["simulate", "--trace", trace_file, "--network", "1gbe", "--workers", "4", *arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "--wire" in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workers", "4", "--wire", "int8"),
        ("--workers", "4", "--wire-cost", "low.json"),
        ("--workers", "4,8", "--wire", "bfloat16", "--wire-cost", "low.json"),
        ("--workers", "8", "--wire", "bfloat16", "--wire-cost", "low.json"),
        ("--workers", "4", "--network", "25gbe", "--wire", "bfloat16", "--wire-cost", "low.json"),
    ],
)
def test_a_cost_of_low_precision_that_says_nothing_of_the_workers_is_refused_in_one_line(
    trace_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    LinearCost(4, 1e-3, 1e-10).save("low.json")
    assert run(["simulate", "--trace", trace_file, "--network", "1gbe", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "--wire" in printed.err


OF_GATHERS = {"num_gathers", "all_reduced_bytes", "lower_bound_s"}


@pytest.mark.parametrize("disturbed", [(), ("--straggler", "1.5"), ("--jitter", "0.1", "--contention", "1.5")])
def test_the_plan_for_a_sharded_optimizer_stands_beside_those_that_all_reduce(
    trace_file: str, capsys: pytest.CaptureFixture[str], disturbed: tuple[str, ...]
) -> None:
    arguments = ("--trace", trace_file, "--network", "1gbe", "--network", "10gbe", "--workers", "4,16", *disturbed)
    usual = rows_of(capsys, *arguments)
    rows = rows_of(capsys, *arguments, "--engine", "sharded")
    assert [row["planner"] for row in rows] == [*PLANNERS, "sharded"] * 4
    reduced = [row for row in rows if row["planner"] != "sharded"]
    assert [{key: value for key, value in row.items() if key not in OF_GATHERS} for row in reduced] == usual
    trace = ModelTrace.load(trace_file).scaled(1.5 if "--straggler" in disturbed else 1.0)
    assert all(row["num_gathers"] == 0 and row["all_reduced_bytes"] == trace.grad_bytes for row in reduced)
    for row in rows:
        cost = load_network(row["network"]).cost(row["workers"])
        bound_s = sharded_lower_bound_s if row["planner"] == "sharded" else lower_bound_s
        assert row["lower_bound_s"] == bound_s(trace, cost) <= row["iteration_s"] * (1 + 1e-12)
        assert row["bandwidth_bound_s"] <= row["iteration_s"] * (1 + 1e-12)
        assert row["iteration_s"] == pytest.approx(row["compute_s"] + row["exposed_s"], rel=1e-12)
        if row["planner"] == "sharded":
            plan = find_sharded_plan(trace, cost)
            assert row["num_gathers"] == len(plan.gathers)
            assert row["all_reduced_bytes"] == plan.predicted["all_reduced_bytes"]
            if "--jitter" not in disturbed:
                assert row["iteration_s"] == plan.predicted["iteration_s"]


def test_fsdp2_stands_beside_those_that_all_reduce_with_memory_and_where_it_does_not_fit_a_line_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ("--trace", "bert-h200-b32", "--network", "25gbe", "--workers", "4,64", "--planner", "bucket")
    rows = rows_of(capsys, *given, "--engine", "ddp,fsdp2", "--scale", "1,2")
    assert [row["planner"] for row in rows] == ["bucket", "fsdp2-block", "fsdp2-rest-in-root", "fsdp2"] * 4
    for row in rows:
        trace, cost = load_trace("bert-h200-b32").scaled(row["scale"]), load_network("25gbe").cost(row["workers"])
        if row["planner"] == "fsdp2":
            plan = plan_fsdp(trace, cost)
            assert row["memory_bytes"] == plan.predicted["memory_bytes"]
            assert row["iteration_s"] == pytest.approx(plan.predicted["iteration_s"])
        assert row["bandwidth_bound_s"] <= row["iteration_s"] * (1 + 1e-12)
        assert row["iteration_s"] == pytest.approx(row["compute_s"] + row["exposed_s"])
        assert row["efficiency"] == pytest.approx(trace.compute_s / row["iteration_s"])
        assert row["lower_bound_s"] <= row["iteration_s"] * (1 + 1e-12)
    assert run(["simulate", *given, "--engine", "ddp,fsdp2", "--memory-limit", "600 MB"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].endswith("memory a rank")
    assert [line.split()[0] for line in printed.out.splitlines()[1:8]] == [
        *("bucket", "fsdp2-block", "fsdp2-rest-in-root"),  # nothing of ours fits on 4 workers
        *("bucket", "fsdp2-block", "fsdp2-rest-in-root", "fsdp2"),
    ]
    assert "4 workers: no plan for 'bert' fits into 600 MB: the least is at most 626 MB a rank" in printed.err
    assert "64 workers: fsdp2 is " in printed.out
    rows = rows_of(capsys, *given, "--engine", "ddp,fsdp2", "--memory-limit", "600 MB")
    assert printed.out.splitlines()[-2:] == [
        f"25GbE, {count} workers: {fastest_words([row for row in rows if row['workers'] == count], 600_000_000)}"
        for count in (4, 64)
    ]
    assert "4 workers: nothing fits into 600 MB: the least of these is fsdp2-block" in printed.out
    assert "64 workers: fastest that fits: fsdp2, " in printed.out
    assert [row["fits"] for row in rows] == [False, False, False, False, True, True, True]
    assert run(["simulate", *given, "--engine", "ddp,fsdp2", "--memory-limit", "1 MB"]) == 1
    assert "the least is" in capsys.readouterr().err.splitlines()[-1]
    for disturbed in (("--jitter", "0.1"), ("--in-flight", "2")):
        assert run(["simulate", *given, "--engine", "ddp,fsdp2", *disturbed]) == 2
        assert "fsdp2 is predicted undisturbed" in capsys.readouterr().err


def test_the_table_has_bounds_and_gathers_and_a_line_says_what_sharding_gains(
    trace_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--trace", trace_file, "--network", "1gbe", "--workers", "4,16")
    rows = rows_of(capsys, *arguments, "--engine", "ddp,sharded")
    assert run(["simulate", *arguments]) == 0
    usual = capsys.readouterr().out
    assert run(["simulate", *arguments, "--engine", "ddp,sharded"]) == 0
    printed = capsys.readouterr()
    head, *lines = printed.out.splitlines()
    assert head.split()[-3:] == ["bound", "gathers", "all-reduced"]
    assert head.startswith(usual.splitlines()[0])
    # What was found of all-reduced messages is what is found without the other engine.
    assert [line for line in usual.splitlines() if ":" in line] == [line for line in lines if ":" in line][:-1]
    steps_s = {(row["workers"], row["planner"]): row["iteration_s"] for row in rows}
    gains = [min(steps_s[count, name] for name in PLANNERS) / steps_s[count, "sharded"] for count in (4, 16)]
    said = f"sharded is {min(gains):.2f} to {max(gains):.2f} times as fast as the best plan that all-reduces everything"
    assert lines[-1] == f"1GbE, 4 to 16 workers: {said}"
    assert "taken to cost half an all-reduce each" in printed.err
    assert "the trace has no forward pass by layer" in printed.err


def test_with_messages_in_flight_no_bound_is_claimed(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", trace_file, "--network", "10gbe", "--workers", "4", "--in-flight", "2")
    assert all(row["lower_bound_s"] is None for row in rows_of(capsys, *arguments, "--engine", "ddp,sharded"))


def test_a_written_plan_with_gathers_is_simulated_as_it_says(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = find_sharded_plan(ModelTrace.load(trace_file), load_network("1gbe").cost(4))
    assert plan.gathers
    plan.save(tmp_path / "plan.json")
    arguments = ("--trace", trace_file, "--network", "1gbe", "--workers", "4", "--plan", str(tmp_path / "plan.json"))
    (row,) = rows_of(capsys, *arguments)
    assert row["iteration_s"] == plan.predicted["iteration_s"]
    written, planned = rows_of(capsys, *arguments, "--engine", "ddp,sharded")
    assert {**written, "planner": "sharded"} == planned


@pytest.mark.parametrize("arguments", [("ddp,fsdp",), ("sharded", "--wire", "bfloat16")])
def test_engines_that_cannot_be_are_refused_in_one_line(
    trace_file: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run(["simulate", "--trace", trace_file, "--network", "1gbe", "--workers", "4", "--engine", *arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "--engine" in printed.err
