"""Compiled models, on real processes: where the graph is cut, when gradients come, what they are."""

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp.runtime.reducer.compile_private import cut_after, missing
from tests.runtime.compile_ranks import plan_of
from tests.runtime.launch import run_ranks

pytestmark = pytest.mark.timeout(300)  # of processes that may share their cores

where_plans_cut = pytest.mark.skipif(
    bool(missing()), reason="this torch cuts compiled graphs by its own rule alone (DDPOptimizer without add_param)"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What 2 ranks saw."""
    scenarios = ["cuts", "odd", "replanned"]
    return run_ranks("tests.runtime.compile_ranks", scenarios, tmp_path_factory.mktemp("compile"), 2)


@where_plans_cut
@pytest.mark.parametrize(
    ("sizes", "way"),
    [((2, 4, 4), "outside"), ((2, 4, 4), "inside"), ((2, 4, 4), "prefixed"), ((10,), "inside"), ((4, 2, 4), "outside")],
)
def test_every_message_goes_when_its_own_graph_has_ended(ranks: list[Any], sizes: tuple[int, ...], way: str) -> None:
    for found in ranks:
        seen = found["cuts"][f"{sizes} {way}"]
        assert seen["graphs"] == len(sizes)
        pieces = [list(piece) for _, piece in groupby(seen["events"], key=_Counter("graph"))]
        assert len(pieces) == len(sizes)
        for piece, group in zip(pieces, plan_of(*sizes).groups, strict=True):
            assert (piece[0], piece[-1]) == ("graph", "message")
            assert sorted(piece[1:-1]) == sorted(group)


class _Counter:
    """A key that is another one from each mark on."""

    def __init__(self, mark: str) -> None:
        self.mark, self.count = mark, 0

    def __call__(self, event: str) -> int:
        self.count += event == self.mark
        return self.count


def test_gradients_of_compiled_models_are_those_of_torch(ranks: list[Any]) -> None:
    for found in ranks:
        both = {**found["cuts"], **found["odd"]}
        assert {name: seen["distance"] for name, seen in both.items() if not seen["distance"] < 1e-6} == {}


@where_plans_cut
def test_weight_and_bias_of_one_operation_stay_in_one_graph(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["odd"]["weight and bias apart"]["graphs"] == 5
        assert found["odd"]["weight and bias apart"]["events"].count("message") == 10
        assert found["odd"]["ps"]["graphs"] == 5


def test_buckets_below_torchs_first_are_no_assertion(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["odd"]["small caps"]["graphs"] == 5


def test_models_in_torchs_own_class_are_cut_by_torchs_own_rule(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["odd"]["torch's own"]["graphs"] == 1


@where_plans_cut
def test_a_graph_that_breaks_is_cut_within_its_parts(ranks: list[Any]) -> None:
    # Layers 4 | 3, 2 and 1, 0: the break lies where the plan cuts.
    assert [found["odd"]["broken"]["graphs"] for found in ranks] == [3, 3]


@where_plans_cut
def test_a_shared_parameter_is_complete_after_its_first_use(ranks: list[Any]) -> None:
    # Two layers a message; the weight of layer 4 is layer 0's and is ready last, and so is the message that it is in.
    for found in ranks:
        events = found["odd"]["tied"]["events"]
        assert events[-1] == "message"
        assert "layers.0.weight" in events[max(place for place, event in enumerate(events) if event == "graph") :]


@where_plans_cut
def test_where_a_graph_cannot_be_cut_one_warning_says_so(ranks: list[Any]) -> None:
    for found in ranks:
        (warning,) = found["odd"]["no pieces"]["warnings"]
        assert warning.startswith("the compiled graph is not cut by the plan")
        assert warning.endswith(": this compiler takes no pieces")
        assert found["odd"]["no pieces"]["graphs"] == 1
        assert [name for name, seen in found["odd"].items() if seen["warnings"]] == ["no pieces"]


@pytest.mark.skipif(not missing(), reason="graphs are cut by the plan")
def test_where_torch_cannot_cut_by_a_plan_a_warning_says_so(ranks: list[Any]) -> None:
    for found in ranks:
        for seen in found["cuts"].values():
            (warning,) = seen["warnings"]
            assert warning.startswith("the compiled graph is not cut by the plan")
            assert warning.endswith(" lacks DDPOptimizer.add_param")


@where_plans_cut
def test_a_plan_that_changes_after_compilation_is_a_warning_and_the_next_compilation_follows_it(
    ranks: list[Any],
) -> None:
    for found in (rank["replanned"] for rank in ranks):
        (first,), second = found["said"]
        assert first.startswith("the plan has changed after the model was compiled")
        assert second == []  # once
        assert found["graphs"] == [2, 2, 2, 2 + 4]


@given(st.data())
def test_a_walk_that_cuts_meets_every_message_before_its_cut(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 8))
    uses = data.draw(st.lists(st.lists(st.integers(0, num - 1), max_size=3), max_size=12))
    order = data.draw(st.permutations(range(num)))
    marks = sorted(data.draw(st.sets(st.integers(1, num))) | {num})
    groups = [order[start:end] for start, end in zip([0, *marks], marks, strict=False)]
    used = {one for some in uses for one in some}
    cuts = sorted(cut_after(uses, groups))
    assert len(cuts) <= sum(bool(used & set(group)) for group in groups)
    for index, cut in enumerate(cuts):
        # Whatever follows the cut uses nothing of some prefix of the plan's messages that is longer at every cut.
        later = {one for some in uses[cut + 1 :] for one in some}
        done = next((place for place, group in enumerate(groups) if later & set(group)), len(groups))
        assert done > index
    if used:
        assert cuts[-1] == max(place for place, some in enumerate(uses) if some)
