"""What one rank does in the tests of Accelerate and of Hugging Face's Trainer: ``python -m ... FOLDER SCENARIO``."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import accelerate_loop
import torch
import transformers
import transformers_trainer
from accelerate.utils import DistributedDataParallelKwargs, TorchDynamoPlugin
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDdp

import mgwfbp
from mgwfbp import MergePlan
from mgwfbp.integrations.accelerate import Accelerator
from mgwfbp.integrations.transformers import Trainer
from tests.integrations.launch import be_rank, digests, found


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def _plan() -> MergePlan:
    names = [name for name, _ in _net().named_parameters()]
    return MergePlan("Sequential", "by hand", (tuple(names[::2]), tuple(names[1::2])))


def accelerate_example() -> dict[str, Any]:
    model = accelerate_loop.main()
    assert model.plan is not None
    return {"settled": found(model.tuning), "plan": len(model.plan.layer_names)}


def _anew() -> None:
    """Let Accelerate forget the settings of the last accelerator, of which a process has one."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=False)
    accelerate.state.GradientState._reset_state()


def accelerates() -> dict[str, Any]:
    """Accumulate, clip, autocast, save and load, with Accelerate's class and with ours."""

    def train(kind: Any) -> list[str]:
        _anew()
        handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        accelerator = kind(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16", kwargs_handlers=[handler])
        net = _net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert model.gradient_as_bucket_view
        assert accelerator.prepare(model) is model
        assert accelerator.unwrap_model(model) is net
        assert list(accelerator.get_state_dict(model)) == list(_net().state_dict())
        batches = torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(accelerator.process_index))
        folder = f"{sys.argv[1]}/{kind.__module__}"
        for step, x in enumerate(batches):
            with accelerator.accumulate(model):
                output = model(x)
                assert output.dtype is torch.float32  # Accelerate's autocast turns it back
                accelerator.backward(nn.functional.mse_loss(output, x / 2))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if step == 21:
                accelerator.save_state(folder)
                accelerator.wait_for_everyone()
                at_save = digests(net)
        trained = digests(net)
        accelerator.load_state(folder)
        assert digests(net) == at_save != trained
        return trained

    return {"weights": [train(kind) for kind in (accelerate.Accelerator, Accelerator)]}


def preparing() -> dict[str, Any]:
    """What is wrapped, and in what."""
    _anew()
    accelerator = Accelerator(cpu=True, mgwfbp={"plan": _plan()})
    net, frozen = _net(), _net().requires_grad_(False)
    first = accelerator.prepare_model(net)
    told: dict[str, Any] = {
        "plan": first.plan == _plan(),
        "evaluation": accelerator.prepare_model(_net(), evaluation_mode=True).__class__.__name__,
        "again": type(accelerator.prepare_model(net)).__module__,
    }
    told["frozen"] = _problem(lambda: accelerator.prepare_model(frozen))  # torch's own
    accelerator.delayed_fp8_autocast = True  # as Transformer Engine, which needs a GPU, has it
    told["fp8"] = _problem(lambda: accelerator.prepare_model(_net()))
    _anew()
    compiling = Accelerator(cpu=True, mgwfbp={"plan": _plan()}, dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    compiled: Any = compiling.prepare_model(_net())
    compiled(torch.ones(2, 8)).sum().backward()
    told["compiled"] = [type(compiled).__name__, type(compiled._orig_mod).__module__]
    told["the plugin stays"] = compiling.state.dynamo_plugin.backend.value
    _anew()
    told["another accelerator"] = _problem(lambda: Accelerator.take_over(Accelerator(cpu=True), {}))
    return told


def _problem(work: Callable[[], object]) -> str:
    try:
        work()
    except (mgwfbp.StrategyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class StopWhenSettled(transformers.TrainerCallback):
    """Ends the training some steps after the tuner, which all ranks do in the same step."""

    left = 5
    wrapped: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:  # noqa: ARG002 - all by name
        if self.wrapped is None:  # the Trainer tells its callbacks of the model inside only
            models = [one for one in gc.get_objects() if isinstance(one, mgwfbp.DistributedDataParallel)]
            self.wrapped = next(one for one in models if one.module is known["model"])
        self.left -= self.wrapped.tuning.state != "working"
        control.should_training_stop = self.left <= 0


def trainer_example() -> dict[str, Any]:
    trainer = transformers_trainer.main(callbacks=[StopWhenSettled()], mgwfbp={"tune_steps": 60})
    wrapped = trainer.model_wrapped
    return {"settled": found(wrapped.tuning), "steps": trainer.state.global_step}


def trainers() -> dict[str, Any]:
    """Accumulate, clip, autocast, checkpoint and resume, with the Trainer and with ours."""

    def train(kind: Any, folder: str, *, resume: str | None = None) -> Any:
        torch.manual_seed(1)
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
        settings = transformers.TrainingArguments(
            folder,
            max_steps=24,
            save_steps=12,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            bf16=True,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            seed=3,
            logging_steps=100,
        )
        model = transformers.BertForSequenceClassification(config)
        trainer = kind(model=model, args=settings, train_dataset=transformers_trainer.Parity())
        trainer.train(resume_from_checkpoint=resume)
        assert isinstance(trainer.model_wrapped, mgwfbp.DistributedDataParallel) == (kind is Trainer)
        assert isinstance(trainer.model_wrapped, StockDdp)
        return model

    folders = {kind: f"{sys.argv[1]}/{kind.__module__}" for kind in (transformers.Trainer, Trainer)}
    models = [train(kind, folder) for kind, folder in folders.items()]
    saved = [Path(folder) / "checkpoint-12" for folder in folders.values()]
    reloaded = transformers.BertForSequenceClassification.from_pretrained(saved[1])
    return {
        "weights": [digests(model) for model in models],
        "resumed": [digests(train(kind, f"{sys.argv[1]}/again", resume=str(saved[1]))) for kind in folders],
        "names": list(reloaded.state_dict()) == list(models[0].state_dict()),
    }


if __name__ == "__main__":
    be_rank(
        {
            "accelerate_example": accelerate_example,
            "accelerates": accelerates,
            "preparing": preparing,
            "trainer_example": trainer_example,
            "trainers": trainers,
        }
    )
