"""Parameters that are held by what is no module of the model: each is waited for, and none without need."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from mgwfbp.runtime.rows.guards import Guards
from mgwfbp.runtime.rows.holders import Holders
from tests.runtime.holders import HOLDERS, Factor, Scaled, Times
from tests.runtime.launch import run_ranks
from tests.runtime.shard_ways import Recurrent

STRAY = "module that is none of the model's"


def guards_of(module: nn.Module) -> Guards:
    return Guards(module, {}, set(map(id, module.parameters())))


def held_by(module: nn.Module) -> Holders:
    return Holders(module.modules(), set(map(id, module.parameters())))


def test_no_forward_pass_reads_what_was_before_whoever_holds_the_parameter(tmp_path: Path) -> None:
    for found in run_ranks("tests.runtime.shard_ranks", ["held_otherwise"], tmp_path, 2):
        differences = found["held_otherwise"]
        assert len(differences) == 2 * len(HOLDERS) + 1
        assert differences == dict.fromkeys(differences, 0.0)


@pytest.mark.parametrize("name", sorted(HOLDERS.keys() - {STRAY}))
def test_what_another_module_holds_of_a_model_is_waited_for_when_the_model_begins(name: str) -> None:
    module = Scaled(HOLDERS[name], is_inside=True)
    assert held_by(module).behind[module.inside] == {id(module.scale): module.scale}
    outer = nn.Sequential(module, nn.Linear(3, 3))
    assert guards_of(outer).waits_early == "Sequential for 1 parameter"


def test_a_module_that_is_none_of_the_models_waits_as_those_do_and_so_does_the_forward_pass_when_it_asks() -> None:
    module = Scaled(HOLDERS[STRAY], is_inside=True)
    (stray,) = held_by(module).strays
    assert stray._parameters == {"factor": module.scale}
    assert guards_of(module).waits_early == ""


def test_parameters_are_found_behind_a_data_set_that_has_no_end() -> None:
    class Endless:
        def __init__(self, scale: Tensor) -> None:
            self.samples, self.scale = [[number] for number in range(100_000)], scale

    def hold(scale: Tensor) -> Factor:
        found = Times(scale)
        vars(found)["data"] = Endless(scale)
        return found

    module = Scaled(hold)
    assert list(held_by(module).behind[module]) == [id(module.scale)]


def lists_of_everything(module: nn.Module) -> Any:
    """What a script has around a model, whose average and optimizer the model itself is given, too."""
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    average = AveragedModel(module)
    holder: Any = module
    holder.average, holder.optimizer, holder.scheduler = [average], optimizer, scheduler
    holder.step = scheduler.step
    holder.wrapped = [nn.Identity()]
    return list(module.parameters()), dict(module.named_parameters()), module.named_parameters()


def normed() -> nn.Module:
    """Weights that are made of others whenever they are asked for."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    )


def torchvisions(name: str) -> Callable[[], nn.Module]:
    return lambda: getattr(pytest.importorskip("torchvision").models, name)(num_classes=3)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.BertForMaskedLM(  # type: ignore[no-any-return]
        transformers.BertConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
    )


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "ResNet": torchvisions("resnet18"),
    "MobileNet": torchvisions("mobilenet_v2"),
    "LSTM": lambda: nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 5, 2, bidirectional=True)),
    "attention": lambda: nn.Sequential(nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2, 8)),
    "norms": normed,
    "BERT": bert,
}


@pytest.mark.filterwarnings("ignore")  # torch no longer likes all of them
@pytest.mark.parametrize("name", ORDINARY)
def test_of_an_ordinary_model_nothing_is_waited_for_early_whoever_trains_it(name: str) -> None:
    module = ORDINARY[name]()
    around = lists_of_everything(module)
    found = held_by(module)
    assert around
    assert not any(found.behind.values())
    assert found.strays == []
    assert guards_of(module).waits_early == ""


def test_lists_of_modules_are_theirs_and_wait_when_these_begin() -> None:
    module = Recurrent()
    found = held_by(module)
    assert set(found.listed[module.lstm]) == set(map(id, module.lstm.parameters()))
    assert not any(found.behind.values())


def test_what_stands_for_another_is_not_asked_for_that() -> None:
    class Gone:
        pass

    proxy = weakref.proxy(Gone())
    with pytest.raises(ReferenceError):
        isinstance(proxy, nn.Module)
    module = nn.Linear(2, 2)
    vars(module)["lazy"] = Times([Times(proxy)])
    assert guards_of(module).waits_early == ""
