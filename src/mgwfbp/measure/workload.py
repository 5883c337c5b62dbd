"""What is measured: a model, a batch, a loss; of torchvision, of Hugging Face's configurations, or the user's own."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mgwfbp.errors import MeasureError
from mgwfbp.units import quote

__all__ = [
    "Workload",
    "build_workload",
    "default_loss",
    "load_function",
    "run_model",
    "run_to_loss",
    "torchvision_models",
    "trainable",
]

LossFn = Callable[[Any], Tensor]


def default_loss(output: Any) -> Tensor:
    """Reduce whatever a model returns to one number: its ``loss`` if it has one, else the mean of its tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not tensors:
        raise MeasureError(
            f"the model returned {quote(type(output).__name__)} without a floating-point tensor: pass loss_fn"
        )
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()


def run_model(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch: a dict becomes keyword arguments, a tuple or list positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def run_to_loss(model: nn.Module, batch: Any, loss_fn: LossFn) -> Tensor:
    """Run the forward pass up to a loss from which a backward pass can start."""
    loss = loss_fn(run_model(model, batch))
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise MeasureError(f"the loss is {shape}, expected a tensor with one number; reduce it in loss_fn")
    if not loss.requires_grad:
        raise MeasureError("the loss does not depend on any parameter that requires a gradient")
    return loss


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, what it is fed and how its output becomes a loss."""

    name: str
    model: nn.Module
    batch: Any
    batch_size: int
    loss_fn: LossFn = default_loss

    def loss(self) -> Tensor:
        """Run the forward pass."""
        return run_to_loss(self.model, self.batch, self.loss_fn)


def build_workload(
    model: str,
    *,
    batch_size: int,
    device: torch.device | str = "cpu",
    image_size: int | None = None,
    sequence_length: int = 128,
) -> Workload:
    """Make a workload with random weights and random data; nothing is downloaded.

    ``model`` is a name of torchvision (``resnet50``), ``hf:TYPE`` for the default configuration of a Hugging Face model
    type (``hf:bert`` is BERT-base, ``hf:gpt2`` GPT-2), ``hf:FOLDER`` for a folder with a ``config.json``, or
    ``package.module:function`` for a function of your own that returns ``(model, batch)`` or ``(model, batch,
    loss_fn)`` and may take ``batch_size``.
    """
    place = torch.device(device)
    if model.startswith("hf:"):
        return _hugging_face(model.removeprefix("hf:"), batch_size, sequence_length, place)
    if ":" in model:
        return _factory(model, batch_size, place)
    return _torchvision(model, batch_size, image_size, place)


def torchvision_models(name: str, *, otherwise: str) -> Any:
    """Return ``torchvision.models`` if it has this model; ``otherwise`` says what else there is."""
    try:
        from torchvision import models
    except ImportError as error:
        raise MeasureError(f"model {quote(name)} needs torchvision: pip install torchvision") from error
    known = models.list_models(module=models)
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, 4)) or "see torchvision.models.list_models()"
        raise MeasureError(f"torchvision has no classification model {quote(name)} (near: {near}); {otherwise}")
    return models


def load_function(name: str) -> Callable[..., Any]:
    """Import ``package.module:function``."""
    module_name, _, function_name = name.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise MeasureError(
            f"factory {quote(name)}: {error}; expected package.module:function, importable from here"
        ) from error
    return function


def _torchvision(name: str, batch_size: int, image_size: int | None, device: torch.device) -> Workload:
    models = torchvision_models(name, otherwise="language models are hf:TYPE, your own package.module:function")
    # With its auxiliary heads, as GoogLeNet and Inception are trained; without spending time on initial weights.
    options = {"aux_logits": True, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with device:
        model = models.get_model(name, weights=None, **options).train()
        size = image_size or (299 if name == "inception_v3" else 224)
        images = torch.randn(batch_size, 3, size, size)
        labels = torch.randint(0, 1000, (batch_size,))

    def loss_fn(output: Any) -> Tensor:
        cross_entropy = nn.functional.cross_entropy
        if isinstance(output, Tensor):
            return cross_entropy(output, labels)
        # 0.3: the weight of GoogLeNet's auxiliary heads (Szegedy et al. 2015, Section 5).
        main, *auxiliary = (head for head in output if head is not None)
        return cross_entropy(main, labels) + 0.3 * sum(cross_entropy(head, labels) for head in auxiliary)

    return Workload(name, model, images, batch_size, loss_fn)


# Model types whose task is not to predict the next token.
_MASKED = {"bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "xlm-roberta", "modernbert"}


def _hugging_face(name: str, batch_size: int, sequence_length: int, device: torch.device) -> Workload:
    try:
        import transformers
    except ImportError as error:
        raise MeasureError(f"model 'hf:{name}' needs transformers: pip install transformers") from error
    path = Path(name)
    # A configuration is data: code that one may name is not run.
    no_code = {"trust_remote_code": False}
    try:
        if (path / "config.json").exists():
            config = transformers.AutoConfig.from_pretrained(name, local_files_only=True, **no_code)
        else:
            config = transformers.AutoConfig.for_model(name)
        task = transformers.AutoModelForMaskedLM if config.model_type in _MASKED else transformers.AutoModelForCausalLM
        with device:
            model = task.from_config(config, **no_code).train()
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise MeasureError(f"no Hugging Face language model of type or folder {quote(name)}: {reason[:200]}") from error
    longest = getattr(config, "max_position_embeddings", None) or sequence_length
    if sequence_length > longest:
        raise MeasureError(f"sequence length {sequence_length}: 'hf:{name}' takes at most {longest}")
    with device:
        tokens = torch.randint(0, config.vocab_size, (batch_size, sequence_length))

    def loss_fn(output: Any) -> Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), tokens.flatten())

    return Workload(path.resolve().name or name, model, {"input_ids": tokens}, batch_size, loss_fn)


def _factory(name: str, batch_size: int, device: torch.device) -> Workload:
    function = load_function(name)
    takes_batch_size = "batch_size" in inspect.signature(function).parameters
    with device:
        made = function(batch_size=batch_size) if takes_batch_size else function()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise MeasureError(
            f"factory {quote(name)} returned {quote(type(made).__name__)}, "
            "expected (model, batch) or (model, batch, loss_fn)"
        )
    model, batch, *loss_fn = made
    moved = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
    return Workload(name.partition(":")[2], model.to(device), moved, batch_size, *loss_fn)


def trainable(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Walk over the parameters that get a gradient, shared ones once, as DDP does."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
