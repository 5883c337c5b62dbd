"""Hugging Face's Trainer with our DDP."""

from collections.abc import Mapping
from typing import Any

from mgwfbp.integrations import missing
from mgwfbp.integrations.accelerate import Accelerator

try:
    import transformers
except ImportError as error:
    raise missing("transformers", error) from None

__all__ = ["MgwfbpTrainerMixin", "Trainer"]


class MgwfbpTrainerMixin:
    """What makes a Trainer wrap its model in `mgwfbp.DistributedDataParallel`.

    ``class MyTrainer(MgwfbpTrainerMixin, Seq2SeqTrainer): pass`` for a Trainer of another kind. ``model_wrapped`` is
    the wrapped model: ``trainer.model_wrapped.tuning``. What TrainingArguments say of DDP counts.

    Args:
        *args: as the Trainer takes them.
        mgwfbp: what our class takes beside torch's arguments: ``{"plan": "plan.json"}``, ``{"tune": False}``.
        **kwargs: as the Trainer takes them.
    """

    accelerator: Any

    def __init__(self, *args: Any, mgwfbp: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._mgwfbp = dict(mgwfbp or {})  # before the Trainer makes its accelerator
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as the Trainer does, and have it wrap models in our class."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        Accelerator.take_over(self.accelerator, self._mgwfbp)


class Trainer(MgwfbpTrainerMixin, transformers.Trainer):
    """Hugging Face's Trainer, with our DDP: see `MgwfbpTrainerMixin`."""
