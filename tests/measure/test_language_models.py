"""Types of Hugging Face's language models, counted without weights."""

import pytest

from mgwfbp import MeasureError
from mgwfbp.cli import run
from mgwfbp.measure.analytic import count_operations
from mgwfbp.measure.workload import build_workload

TOKENS = 2 * 64


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("bert", 1.0),
        ("roberta", 1.0),
        ("distilbert", 1.0),
        ("deberta", 1.0),  # looks for padding among its tokens
        ("gpt2", 1.0),
        ("llama", 1.0),
        ("t5", 1.0),  # encoder and decoder are fed the same
        ("mixtral", 12.9 / 46.7),  # published: parameters that a token meets, and all
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa's module, when it is imported
def test_a_token_meets_every_parameter_that_is_used_once_forward_and_twice_backward(kind: str, share: float) -> None:
    workload = build_workload(f"hf:{kind}", batch_size=2, sequence_length=64, device="meta")
    found = count_operations(workload)
    parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    # Besides, tokens meet one another in attention; and of the embeddings they meet one row each.
    assert found.forward_flops == pytest.approx(2 * TOKENS * parameters * share, rel=0.05)
    assert found.backward_flops == 2 * found.forward_flops


def test_a_model_without_a_longest_sequence_takes_any() -> None:
    workload = build_workload("hf:xlnet", batch_size=2, sequence_length=64, device="meta")
    assert workload.batch["input_ids"].shape == (2, 64)
    assert {parameter.device.type for parameter in workload.model.parameters()} == {"meta"}


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(MeasureError, match=r"'hf:vit' is no language model of Hugging Face's; return it from a funct"):
        build_workload("hf:vit", device="meta")


def test_a_model_that_looks_at_values_is_one_line_that_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["measure", "analytic", "--model", "hf:longformer", "--batch-size", "1"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "modeling_longformer.py" in err
    assert "it looks at values, and counting computes none: use `mgwfbp measure backward`" in err
