"""Hugging Face's Trainer with our DDP: ``torchrun --nproc-per-node 2 examples/transformers_trainer.py``."""

from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from mgwfbp.integrations.transformers import Trainer  # where transformers' stood


class Parity(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 1600

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": tokens, "labels": tokens.sum() % 2}


def main(**arguments: Any) -> Trainer:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
    settings = TrainingArguments(
        "runs/parity", max_steps=1000, per_device_train_batch_size=4, use_cpu=True, save_strategy="no", report_to=[]
    )
    trainer = Trainer(model=model, args=settings, train_dataset=Parity(), **arguments)
    trainer.train()
    if trainer.is_world_process_zero():
        print(trainer.model_wrapped.tuning)
    return trainer


if __name__ == "__main__":
    main()
