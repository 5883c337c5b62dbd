"""The authors' own GoogLeNet, and what `mgwfbp paper` says with it."""

import json
import re
from pathlib import Path

import pytest

from mgwfbp import PLANNERS, LayerTrace, ModelTrace, load_network, load_trace
from mgwfbp.cli import run
from mgwfbp.simulate import Grid, MeasuredCluster, Strategy, sweep
from mgwfbp.simulate.evaluation import compare_with_paper, gains_by_forward, logged_cost, paper_rows, ready_at_half

AUTHORS_NAME = "googlenet-k80-bcaffe"
AUTHORS = load_trace(AUTHORS_NAME)
STRATEGIES = tuple(Strategy(name, PLANNERS[name]) for name in ("wfbp", "single", "mgwfbp", "optimal"))

# Channels in, and out of the six convolutions of each inception module: Table 1 of the GoogLeNet paper.
INCEPTIONS = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}


def padded_bytes(weights: int, biases: int) -> int:
    return 4 * sum(-(-elements // 64) * 64 for elements in (weights, biases))


def caffes_googlenet() -> list[tuple[str, int]]:
    """List layers and bytes in forward order."""
    shapes = [("conv1/7x7_s2", 3 * 49, 64), ("conv2/3x3_reduce", 64, 64), ("conv2/3x3", 64 * 9, 192)]
    for block, (before, one, reduce3, three, reduce5, five, pool) in INCEPTIONS.items():
        shapes += [
            (f"inception_{block}/1x1", before, one),
            (f"inception_{block}/3x3_reduce", before, reduce3),
            (f"inception_{block}/3x3", reduce3 * 9, three),
            (f"inception_{block}/5x5_reduce", before, reduce5),
            (f"inception_{block}/5x5", reduce5 * 25, five),
            (f"inception_{block}/pool_proj", before, pool),
        ]
        head, channels = {"4a": ("loss1", 512), "4d": ("loss2", 528)}.get(block, ("", 0))
        if head:
            shapes += [(f"{head}/conv", channels, 128), (f"{head}/fc", 2048, 1024), (f"{head}/classifier", 1024, 1000)]
    shapes.append(("loss3/classifier", 1024, 1000))
    return [(name, padded_bytes(inputs * outputs, outputs)) for name, inputs, outputs in shapes]


def test_the_authors_trace_has_the_layers_of_caffes_googlenet_last_first() -> None:
    assert [(layer.name, layer.grad_bytes) for layer in reversed(AUTHORS.layers)] == caffes_googlenet()
    low, _, high = AUTHORS.source["spread"]["backward_s"]
    assert low <= AUTHORS.backward_s <= high
    assert pytest.approx(AUTHORS.backward_s / 2) == AUTHORS.forward_s
    assert "B-Caffe" in AUTHORS.source["published"]


def test_the_authors_times_give_the_gain_that_the_paper_simulated_on_64_nodes() -> None:
    gains = compare_with_paper("googlenet", paper_rows(AUTHORS, load_network("10gbe"), STRATEGIES))
    (found,) = (gain for gain in gains if (gain.published.workers, gain.published.against) == (64, "wfbp"))
    assert found.ours["mgwfbp"] == pytest.approx(found.published.gain, rel=0.05)


def test_on_8_nodes_merging_gains_with_the_authors_all_reduces_and_nothing_at_line_rate() -> None:
    cost = logged_cost(AUTHORS)
    logged = sweep(AUTHORS, Grid((MeasuredCluster("logs", cost),), (cost.workers,), STRATEGIES))
    (over_wfbp, _) = compare_with_paper("googlenet", logged)
    assert over_wfbp.ours["mgwfbp"] == pytest.approx(over_wfbp.published.gain, rel=0.1)
    (line_rate, *_) = compare_with_paper("googlenet", paper_rows(AUTHORS, load_network("10gbe"), STRATEGIES))
    assert line_rate.ours["mgwfbp"] == pytest.approx(1.0, abs=0.01)


def test_a_longer_forward_pass_dilutes_every_gain() -> None:
    by_forward = gains_by_forward(AUTHORS, load_network("10gbe"), STRATEGIES)
    for gains in zip(*by_forward.values(), strict=True):
        ours = [gain.ours["optimal"] for gain in gains]
        assert ours == sorted(ours, reverse=True)


def test_bytes_at_half_the_backward_pass_are_those_whose_gradients_are_ready_by_then() -> None:
    layers = tuple(LayerTrace(str(index), 1.0, size) for index, size in enumerate((5, 3, 2, 10)))
    assert ready_at_half(ModelTrace("toy", 7.0, layers)) == 8 / 20
    assert ready_at_half(ModelTrace("toy", 7.0, (LayerTrace("a", 1.0, 0),))) == 1.0


def test_the_document_marks_rows_by_trace_and_says_of_the_analytic_one_what_was_computed(tmp_path: Path) -> None:
    document = tmp_path / "paper.md"
    assert run(["paper", "-o", str(document)]) == 0
    text = document.read_text()
    logs, analytic = (f"{ready_at_half(load_trace(name)):.0%}" for name in (AUTHORS_NAME, "googlenet-k80-b64"))
    assert f"analytic: {analytic} of bytes ready at half the backward pass, in the authors' logs {logs}" in text
    caution = load_trace("googlenet-k80-b64").source["caution"]
    assert caution.startswith(f"{analytic} of its bytes are ready at half the backward pass")
    assert f"({AUTHORS_NAME}) {logs}:" in caution
    for label in ("GoogLeNet, batch 64, the authors' logs", "GoogLeNet, batch 64, analytic"):
        assert f"{label}, 64 nodes, MG-WFBP over WFBP: 1.78 in the paper (simulated)" in text
    assert "With logged all-reduces" in text
    assert "github.com/shyhuai/B-Caffe" in text
    _check_reasons(text)


def _check_reasons(text: str) -> None:
    """A difference has a reason where exchanging one input in the same run brings the number nearer, and no other."""
    lines = [line for line in text.splitlines() if " in the paper (" in line and "MG-WFBP over" in line]
    assert len(lines) == 12
    for line in lines:
        stated, here = (float(one) for one in re.findall(r"(\d\.\d\d) (?:in the paper|here)", line))
        for other, nearer in re.findall(r"with the authors' [a-z-]+ (\d\.\d\d), nearer by (\d\.\d\d)", line):
            assert abs(here - stated) - abs(float(other) - stated) == pytest.approx(float(nearer), abs=0.016)
            assert float(nearer) > 0
    at_8, at_64 = (
        [line for line in lines if f"analytic, {count} nodes, MG-WFBP over WFBP" in line] for count in (8, 64)
    )
    assert "trace" not in at_8[0]  # with theirs it is the same 1.00
    assert "all-reduces" in at_8[0]
    assert "trace" in at_64[0]
    assert "with" not in at_64[1]  # of ResNet-50 they have no trace, and no all-reduces of 64 nodes


def test_a_given_trace_takes_the_place_of_both_and_nothing_is_said_of_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "trace.json"
    AUTHORS.save(given)
    document = tmp_path / "paper.md"
    assert run(["paper", "--googlenet", str(given), "-o", str(document)]) == 0
    assert "GoogLeNet, as given" in document.read_text()
    assert "logged all-reduces" not in document.read_text()
    capsys.readouterr()
    assert run(["paper", "--googlenet", str(given), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["rows"]) == ["googlenet", "resnet50"]
