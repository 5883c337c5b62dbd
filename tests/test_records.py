"""Records: checked at birth, the same after a trip through a file, and no bad file gets in."""

import copy
import json
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp import (
    CostError,
    FileError,
    FormatError,
    LayerTrace,
    LinearCost,
    MergePlan,
    MgwfbpError,
    ModelTrace,
    Network,
    PiecewiseCost,
    PlanError,
    Timeline,
    TraceError,
    find_plan,
    load_cost,
    load_network,
    predict,
)
from mgwfbp.files import MAX_FILE_BYTES
from mgwfbp.record import Fields, Record
from tests.examples import make_trace

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
seconds = st.floats(0, 1e6)
sources = st.dictionaries(names, st.one_of(names, st.floats(-1e9, 1e9), st.none(), st.lists(st.integers(-5, 5))))
layers = st.lists(
    st.builds(LayerTrace, names, seconds, st.integers(0, 2**40)),
    min_size=1,
    max_size=6,
    unique_by=lambda layer: layer.name,
).map(tuple)
layers_with_forward = st.lists(
    st.builds(LayerTrace, names, seconds, st.integers(0, 2**40), seconds),
    min_size=1,
    max_size=6,
    unique_by=lambda layer: layer.name,
).map(tuple)
any_record: st.SearchStrategy[Record] = st.one_of(
    st.builds(ModelTrace, names, seconds, st.one_of(layers, layers_with_forward), sources),
    st.builds(LinearCost, st.integers(1, 10**6), seconds, seconds, sources),
    st.builds(
        lambda sizes, times: PiecewiseCost(3, tuple(zip(sorted(sizes), sorted(times), strict=True))),
        st.sets(st.integers(0, 2**40), min_size=4, max_size=4),
        st.lists(seconds, min_size=4, max_size=4),
    ),
    st.builds(Network, names, st.sampled_from(["ring", "binary_tree"]), seconds, seconds, seconds),
    st.builds(MergePlan, names, names, st.just((("a", "b"), ("c",))), sources),
    st.builds(MergePlan, names, names, st.just((("a", "b"), ("c",))), sources, gathers=st.just((("c",), ("b", "a")))),
)


@given(any_record)
def test_a_record_survives_its_file_pickle_and_copy(tmp_path_factory: pytest.TempPathFactory, record: Record) -> None:
    path = tmp_path_factory.mktemp("records") / "record.json"
    record.save(path)
    assert type(record).load(path) == record
    assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record  # noqa: S301 - our own bytes
    assert hash(record) == hash(copy.deepcopy(record))


@given(any_record)
def test_a_record_prints_on_one_short_line(record: Record) -> None:
    assert len(repr(record)) < 300
    assert repr(record).isprintable()


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


TRACE = ModelTrace("toy", 1.0, (LayerTrace("b", 1.0, 8), LayerTrace("a", 2.0, 4)), {"device": "none"})


def damaged(record: Record, **changes: Any) -> dict[str, Any]:
    return {**record.to_json(), **changes}


def layer(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "b", "backward_s": 1.0, "grad_bytes": 8, **changes}]


BAD_TRACES: list[tuple[Any, str]] = [
    ([], "expected an object"),
    ({}, "format: missing"),
    (damaged(TRACE, format="mgwfbp.plan/1"), "format: expected 'mgwfbp.trace/1', found 'mgwfbp.plan/1'"),
    (damaged(TRACE, format="mgwfbp.trace/2"), "format: expected"),
    (damaged(TRACE, format=["mgwfbp.trace/1"]), "format: expected"),
    (damaged(TRACE, model=7), "model is 7, expected a non-empty string"),
    (damaged(TRACE, model=""), "model is ''"),
    (damaged(TRACE, forward_s=-1), "forward_s is -1"),
    (damaged(TRACE, forward_s=True), "forward_s is True, expected a number"),
    (damaged(TRACE, forward_s="1"), "forward_s is '1', expected a number"),
    (damaged(TRACE, forward_s=10**400), "forward_s is 1000"),
    (damaged(TRACE, layers=[]), "has no layers"),
    (damaged(TRACE, layers={}), "layers: expected a list"),
    (damaged(TRACE, layers=[7]), r"layers\[0\]: expected an object, found 7"),
    (damaged(TRACE, layers=[{"name": "b"}]), r"layers\[0\]\.backward_s: missing"),
    (damaged(TRACE, layers=layer(backward_s=None)), r"layers\[0\]: layer 'b': backward_s is None"),
    (damaged(TRACE, layers=layer(grad_bytes=-8)), r"layers\[0\]: layer 'b': grad_bytes is -8"),
    (damaged(TRACE, layers=layer(grad_bytes=8.5)), r"layers\[0\]: layer 'b': grad_bytes is 8.5, expected a whole"),
    (damaged(TRACE, layers=layer(grad_bytes=False)), r"grad_bytes is False"),
    (damaged(TRACE, layers=layer(grad_bytes=2**60)), r"grad_bytes is 1152921504606846976"),
    (damaged(TRACE, layers=layer(name=3)), r"layers\[0\]: a layer's name is 3"),
    (damaged(TRACE, layers=layer() + layer()), "layer 'b' stands twice"),
    (damaged(TRACE, layers=layer(forward_s=-1)), r"layers\[0\]: layer 'b': forward_s is -1"),
    (
        damaged(TRACE, layers=layer(forward_s=1) + layer(name="a")),
        "layer 'a' has no forward_s and others have one, expected it of all or none",
    ),
    (damaged(TRACE, layers=layer(forward_s=1e100) + layer(name="a", forward_s=1e100)), "forward_s of all layers"),
    (damaged(TRACE, source=3), "source is 3, expected an object"),
]


@pytest.mark.parametrize(("content", "message"), BAD_TRACES)
def test_a_bad_trace_is_refused_with_file_and_field(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content))
    with pytest.raises((FormatError, TraceError), match=message) as caught:
        ModelTrace.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty, expected JSON"),
        (TRACE.dumps()[:70], r"not JSON \(line \d+, column \d+\)"),
        ("hello", "not JSON"),
        (TRACE.dumps().replace("1.0", "NaN"), "NaN is no number here"),
        (TRACE.dumps().replace("1.0", "-Infinity"), "-Infinity is no number here"),
        (TRACE.dumps().replace("1.0", "1e999"), "expected a finite number"),
        (TRACE.dumps().replace("1.0", "9" * 5000), "not JSON"),
        ('{"format": 1, "format": 2}', "'format' stands twice"),
        ("[" * 100_000, "nested too deeply"),
        (
            '{"a": "\\ud800", "format": "mgwfbp.trace/1", "model": "\\ud800", "forward_s": 1, "layers": []}',
            "not valid Unicode",
        ),
    ],
)
def test_text_that_is_no_record_is_refused_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(MgwfbpError, match=message) as caught:
        ModelTrace.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b'{"model": "\xff"}')
    with pytest.raises(FormatError, match=r"not UTF-8 text \(byte 11\)"):
        ModelTrace.load(path)


def test_a_huge_file_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(FileError, match=f"larger than {MAX_FILE_BYTES >> 20} MiB"):
        ModelTrace.load(path)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="Is a directory"):
        ModelTrace.load(tmp_path)
    with pytest.raises(FileError, match="No such file"):
        ModelTrace.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "0 given, a curve needs 2"),
        ([[4, 1.0]], "1 given, a curve needs 2"),
        ([[8, 1.0], [4, 2.0]], r"points\[1\]: 4 bytes after 8, expected sizes that rise"),
        ([[8, 1.0], [8, 2.0]], r"points\[1\]: 8 bytes after 8"),
        ([[4, 2.0], [8, 1.0]], r"points\[1\]: 1.0 s after 2.0 s, expected times that never fall"),
        ([[4, 2.0], [8]], r"points\[1\] is \[8\], expected \[bytes, seconds\]"),
        ([[4, 2.0], 8], r"points\[1\] is 8"),
        ([[4, 2.0], [8, True]], r"points\[1\]\[1\], seconds, is True"),
        ([[4.5, 2.0], [8, 3.0]], r"points\[0\]\[0\], bytes, is 4.5"),
    ],
)
def test_a_bad_curve_is_refused_with_the_point(tmp_path: Path, points: Any, message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(damaged(PiecewiseCost(2, ((1, 1.0), (2, 2.0))), points=points)))
    with pytest.raises(CostError, match=message) as caught:
        load_cost(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "cubic"}, "kind: expected 'linear' or 'piecewise', found 'cubic'"),
        ({"kind": "piecewise"}, "points: missing"),
        ({"workers": 0}, "workers is 0, expected a whole number from 1"),
        ({"workers": True}, "workers is True"),
        ({"startup_s": -1e-9}, "startup_s is -1e-09"),
        ({"per_byte_s": None}, "per_byte_s is None"),
    ],
)
def test_a_bad_line_is_refused_with_the_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(damaged(LinearCost(2, 1.0, 1.0), **changes)))
    with pytest.raises((CostError, FormatError), match=message):
        load_cost(path)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "groups: empty"),
        ([[]], r"groups\[0\] is \[\]"),
        (["ab"], r"groups\[0\] is 'ab', expected a non-empty list"),
        ([["a"], [3]], r"groups\[1\]\[0\] is 3"),
        ([["a"], ["a"]], "'a' stands twice"),
    ],
)
def test_a_bad_plan_is_refused_with_the_group(groups: Any, message: str) -> None:
    data = damaged(MergePlan("toy", "by hand", (("a",),)), groups=groups)
    with pytest.raises(PlanError, match=message):
        MergePlan.from_json(data)


SHARDED = MergePlan("toy", "by hand", (("d", "c"), ("b",), ("a",)), gathers=(("a",), ("d",), ("c",)))


def test_a_plan_with_gathers_says_so_in_its_file_and_readers_of_others_refuse_it() -> None:
    data = SHARDED.to_json()
    assert (data["format"], data["gathers"]) == ("mgwfbp.plan/2", [["a"], ["d"], ["c"]])
    assert MergePlan.from_json(data) == SHARDED
    assert SHARDED.sharded == (True, False, True)
    plain = MergePlan("toy", "by hand", SHARDED.groups)
    assert plain.to_json().keys() == data.keys() - {"gathers"}
    assert plain.messages != SHARDED.messages
    assert plain.sharded == (False,) * 3
    # What a reader of the first format does with it.
    with pytest.raises(FormatError, match=r"format: expected 'mgwfbp\.plan/1', found 'mgwfbp\.plan/2'"):
        Fields(data).check_format(MergePlan.FORMAT)
    with pytest.raises(FormatError, match="wire: missing"):
        MergePlan.from_json({key: value for key, value in data.items() if key != "gathers"})


@pytest.mark.parametrize(
    ("gathers", "message"),
    [
        (None, "gathers is None, expected a list"),
        ([[]], r"gathers\[0\] is \[\], expected a non-empty list"),
        ([["b"], [3]], r"gathers\[1\]\[0\] is 3"),
        ([["a"], ["a"]], "gathers: 'a' stands twice"),
        ([["e"]], "gathers: 'e' is no gradient of the plan's groups"),
        ([["a", "d"]], r"gathers: 'c' of groups\[0\] is not gathered and others of that message are"),
    ],
)
def test_gathers_that_cannot_be_are_refused(gathers: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        MergePlan("toy", "by hand", SHARDED.groups, gathers=gathers)


def test_a_plan_has_gathers_or_low_precision_but_not_both() -> None:
    with pytest.raises(PlanError, match="both gathers and messages in low precision"):
        MergePlan("toy", "by hand", SHARDED.groups, wire=("", "", "float16"), gathers=SHARDED.gathers)


def test_whoever_all_reduces_all_messages_refuses_a_plan_with_gathers() -> None:
    trace = make_trace([1, 2], [4, 8])
    plan = MergePlan("example", "by hand", (("g0",), ("g1",)), gathers=(("g1",),))
    with pytest.raises(PlanError, match=r"gathers parameters in the forward pass.* and torch's DDP all-reduces all"):
        plan.bucket_cap_mb_list(trace)


def test_messages_that_torchs_own_ddp_cannot_be_told_are_refused() -> None:
    trace = make_trace([1, 2, 3, 4], [4, 8, 0, 16])
    assert MergePlan.of_sizes(trace, [1, 1, 2]).bucket_cap_mb_list(trace) == [4 / 2**20, 8 / 2**20, 16 / 2**20]
    assert MergePlan("example", "by hand", (("g1", "g0"), ("g3", "g2"))).bucket_cap_mb_list(trace)[0] == 12 / 2**20
    with pytest.raises(PlanError, match="message 1 of the plan does not hold the gradients that are ready next"):
        MergePlan("example", "by hand", (("g0", "g2"), ("g1", "g3"))).bucket_cap_mb_list(trace)
    with pytest.raises(PlanError, match="message 2 of the plan ends with 'g2' of 0 bytes"):
        MergePlan.of_sizes(trace, [1, 2, 1]).bucket_cap_mb_list(trace)
    with pytest.raises(PlanError, match="it was made for another model"):
        MergePlan("example", "by hand", (("g0",),)).bucket_cap_mb_list(trace)


def test_both_kinds_of_cost_and_a_network_load_from_their_files(tmp_path: Path) -> None:
    for record in (LinearCost(8, 1e-4, 8e-10), PiecewiseCost(8, ((4, 1e-5), (8, 2e-5)))):
        record.save(tmp_path / "cost.json")
        assert load_cost(tmp_path / "cost.json") == record
    network = Network("mine", "ring", 1e-5, 1e-9)
    network.save(tmp_path / "network.json")
    assert load_network(tmp_path / "network.json") == network


def test_a_timeline_whose_spans_run_backwards_is_refused() -> None:
    cost = LinearCost(2, 1.0, 1.0)
    data = predict(TRACE, cost, find_plan(TRACE, cost)).to_json()
    data["messages"][0]["end_s"] = 0.0
    with pytest.raises(FormatError, match=r"messages\[0\]: span of .* expected them in this order"):
        Timeline.from_json(data)


def test_the_forward_pass_is_shared_out_as_layers_say_or_else_as_the_backward_pass() -> None:
    known = ModelTrace("toy", 6.0, (LayerTrace("b", 1.0, 8, 1.0), LayerTrace("a", 2.0, 4, 3.0)))
    assert known.layer_forward_s == (1.5, 4.5)
    assert known.scaled(2.0).layer_forward_s == (3.0, 9.0)
    assert known.scaled(2.0).layers[1] == LayerTrace("a", 4.0, 4, 6.0)
    assert ModelTrace("toy", 6.0, TRACE.layers).layer_forward_s == (2.0, 4.0)
    for forward_s in (None, 0.0):
        still = ModelTrace("toy", 6.0, tuple(LayerTrace(name, 0.0, 4, forward_s) for name in "cba"))
        assert still.layer_forward_s == (2.0, 2.0, 2.0)


@given(st.floats(0, 1e6), st.one_of(layers, layers_with_forward))
def test_the_shares_of_layers_add_up_to_the_forward_pass(forward_s: float, some: tuple[LayerTrace, ...]) -> None:
    shares = ModelTrace("toy", forward_s, some).layer_forward_s
    assert len(shares) == len(some)
    assert sum(shares) == pytest.approx(forward_s)


def test_files_without_forward_times_of_layers_are_as_they_were() -> None:
    assert TRACE.to_json()["layers"][0] == {"name": "b", "backward_s": 1.0, "grad_bytes": 8}


def test_a_byte_order_mark_is_no_reason_to_refuse(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"\xef\xbb\xbf" + TRACE.dumps().encode())
    assert ModelTrace.load(path) == TRACE


def test_forty_thousand_fields_are_looked_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{" + ", ".join(f'"f{index}": 1' for index in [*range(40_000), 0]) + "}")
    with pytest.raises(FormatError, match="'f0' stands twice"):
        ModelTrace.load(path)


def test_what_a_record_holds_cannot_be_changed() -> None:
    trace = ModelTrace("toy", 1.0, TRACE.layers, {"spread": {"low": [1, 2]}})
    with pytest.raises(TypeError, match="cannot be changed"):
        trace.source["new"] = 1  # type: ignore[index]  # the point of the test
    with pytest.raises(TypeError, match="cannot be changed"):
        trace.source["spread"]["low"] = 3
    assert trace.source["spread"]["low"] == (1, 2)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (ModelTrace, ("m", 1.0, ("a",)), r"layers\[0\] is 'a', expected a LayerTrace"),
        (ModelTrace, ("m", 1.0, None), "layers is None, expected a list"),
        (ModelTrace, ("m", 1.0, TRACE.layers, {1: "a"}), "source cannot be written as JSON: the key 1"),
        (ModelTrace, ("m", 1.0, TRACE.layers, {"x": float("nan")}), "source cannot be written as JSON"),
        (
            ModelTrace,
            ("m", 1.0, TRACE.layers, {"x": "a\ud800"}),
            r"as JSON: 'a\\ud800' is not",
        ),
        (
            ModelTrace,
            ("m", 1.0, TRACE.layers, {"x": [{"\udfff": 1}]}),
            r"as JSON: '\\udfff' is not",
        ),
        (
            ModelTrace,
            ("m", 1.0, TRACE.layers, {"x": nested(60)}),
            "as JSON: nested more than 50 levels",
        ),
        (ModelTrace, ("m", 1.0, TRACE.layers, {"x": 10**5000}), "source cannot be written as JSON"),
        (ModelTrace, ("m", 1.1e100, TRACE.layers), r"forward_s is 1\.1e\+100, expected a number of 1e\+100 at most"),
        (LayerTrace, ("a", 1.0, 10**5000), "grad_bytes is a very large int"),
        (ModelTrace, ("m", 1e100, (LayerTrace("a", 1e100, 1),)), "all backward_s together is 2e\\+100"),
        (ModelTrace, ("m", 1.0, tuple(LayerTrace(n, 1.0, 2**53) for n in "ab")), "all grad_bytes together"),
        (PiecewiseCost, (2, None), "points is None, expected a list"),
        (MergePlan, ("m", "p", None), "groups is None, expected a list"),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_our_own_errors(kind: Any, values: Any, message: str) -> None:
    with pytest.raises(MgwfbpError, match=message):
        kind(*values)


def test_numbers_of_numpy_are_numbers() -> None:
    layer = LayerTrace("a", np.float32(0.5), np.int64(8))  # type: ignore[arg-type]  # the point of the test
    assert (type(layer.backward_s), type(layer.grad_bytes)) == (float, int)


def test_unknown_fields_are_left_alone() -> None:
    assert ModelTrace.from_json(damaged(TRACE, colour="blue")) == TRACE


def test_a_failed_write_leaves_the_old_file_and_no_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(FileError, match="cannot be written: No space left"):
        TRACE.save(path)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("trace.json", "old")]


def test_a_write_replaces_the_file_and_does_not_touch_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    with path.open() as reader:
        TRACE.save(path)
        assert reader.read() == "old"
    assert ModelTrace.load(path) == TRACE


def test_a_new_file_has_the_mode_the_user_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        TRACE.save(tmp_path / "trace.json")
    finally:
        os.umask(before)
    assert (tmp_path / "trace.json").stat().st_mode & 0o777 == 0o640


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    TRACE.save(pipe)
    text, _ = reader.communicate(timeout=30)
    assert text == TRACE.dumps()
    assert pipe.is_fifo()


def test_a_write_into_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none/trace\.json: cannot be written: No such file"):
        TRACE.save(tmp_path / "none" / "trace.json")


def test_a_write_keeps_the_mode_and_the_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    TRACE.save(link)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert ModelTrace.load(real) == TRACE
