"""What is measured: a model, a batch, a loss; of torchvision, of Hugging Face's configurations, or the user's own."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mgwfbp.errors import MeasureError
from mgwfbp.measure.factory import LossFn, call_factory, model_name
from mgwfbp.measure.meta import built_on
from mgwfbp.units import quote

__all__ = [
    "LossFn",
    "Workload",
    "build_workload",
    "default_loss",
    "frozen",
    "run_model",
    "run_to_loss",
    "torchvision_models",
    "trainable",
]

# Samples of a model that is named, unless told otherwise; a factory has a batch of its own.
DEFAULT_BATCH_SIZE = 32
DEFAULT_SEQUENCE_LENGTH = 128


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
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    image_size: int | None = None,
    sequence_length: int | None = None,
) -> Workload:
    """Make a workload with random weights and random data; nothing is downloaded.

    ``model`` is a name of torchvision (``resnet50``), ``hf:TYPE`` for the default configuration of a Hugging Face model
    type (``hf:bert`` is BERT-base, ``hf:gpt2`` GPT-2), ``hf:FOLDER`` for a folder with a ``config.json``, or
    ``package.module:function`` for a function of your own that returns ``(model, batch)`` or ``(model, batch,
    loss_fn)`` and may take ``batch_size``. Its batch counts: the first dimension of the first tensor is the batch size.

    On the meta device parameters have no values; tokens, and what a function of your own keeps, have.
    """
    place = torch.device(device)
    if model.startswith("hf:"):
        _refuse(model, image_size=image_size)
        tokens = (batch_size or DEFAULT_BATCH_SIZE, sequence_length or DEFAULT_SEQUENCE_LENGTH)
        return _hugging_face(model.removeprefix("hf:"), tokens, place)
    _refuse(model, sequence_length=sequence_length)
    if ":" in model:
        _refuse(model, image_size=image_size)
        return _factory(model, batch_size, place)
    return _torchvision(model, batch_size or DEFAULT_BATCH_SIZE, image_size, place)


def _refuse(model: str, **unused: int | None) -> None:
    for name, value in unused.items():
        if value is not None:
            raise MeasureError(f"{name} is {value}, but {quote(model)} takes none: leave it out")


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


def _torchvision(name: str, batch_size: int, image_size: int | None, device: torch.device) -> Workload:
    models = torchvision_models(name, otherwise="language models are hf:TYPE, your own package.module:function")
    # With its auxiliary heads, as GoogLeNet and Inception are trained; without spending time on initial weights.
    options = {"aux_logits": True, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with built_on(device):
        model = models.get_model(name, weights=None, **options).train()
    with device:
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


def _hugging_face(name: str, shape: tuple[int, int], device: torch.device) -> Workload:
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
        task = _language_task(name, config)
        with built_on(device), device:
            model = task.from_config(config, **no_code).train()
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise MeasureError(f"no Hugging Face language model of type or folder {quote(name)}: {reason[:200]}") from error
    batch_size, sequence_length = shape
    longest = getattr(config, "max_position_embeddings", None) or -1
    if sequence_length > longest > 0:
        raise MeasureError(f"sequence length {sequence_length}: 'hf:{name}' takes at most {longest}")
    tokens = torch.randint(0, config.vocab_size, shape, device=_with_values(device))

    def loss_fn(output: Any) -> Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), tokens.flatten())

    batch = {"input_ids": tokens}
    if task is transformers.AutoModelForSeq2SeqLM:
        batch["decoder_input_ids"] = tokens
    return Workload(path.resolve().name or name, model, batch, batch_size, loss_fn)


def _language_task(name: str, config: Any) -> Any:
    """Return what a type of model is trained for: to answer, to fill gaps, or to go on."""
    import transformers

    for task, known in (
        (transformers.AutoModelForSeq2SeqLM, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
        (transformers.AutoModelForMaskedLM, transformers.MODEL_FOR_MASKED_LM_MAPPING),
        (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    ):
        if type(config) in known:
            return task
    raise MeasureError(
        f"'hf:{name}' is no language model of Hugging Face's; return it from a function of your own: "
        "package.module:function"
    )


def _with_values(device: torch.device) -> torch.device:
    """Return where small inputs go: a model may look at them (is there padding?), so on the CPU instead of meta."""
    return torch.device("cpu") if device.type == "meta" else device


def _factory(spec: str, batch_size: int | None, device: torch.device) -> Workload:
    given = {} if batch_size is None else {"batch_size": batch_size}
    with built_on(device):
        made = call_factory(spec, given, {"batch_size": DEFAULT_BATCH_SIZE})
    if made.batch is None:
        raise MeasureError(
            f"factory {quote(spec)} returned a model without a batch, expected (model, batch) or "
            "(model, batch, loss_fn): there are no data but its own"
        )
    tensors = [leaf for leaf in pytree.tree_leaves(made.batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        raise MeasureError(f"factory {quote(spec)} returned a batch without a tensor: how many samples are in it?")
    samples = tensors[0].shape[0]
    if batch_size not in (None, samples):
        raise MeasureError(
            f"factory {quote(spec)} returned a batch of {samples} samples where {batch_size} are asked for: "
            "let it take batch_size, or leave the batch size out"
        )

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device if tensor.is_floating_point() else _with_values(device))

    batch = pytree.tree_map_only(Tensor, place, made.batch)
    name = model_name(spec, made.model)
    return Workload(name, made.model.to(device), batch, samples, made.loss_fn or default_loss)


def trainable(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Walk over the parameters that get a gradient, shared ones once, as DDP does."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def frozen(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Walk over the parameters that get none."""
    return ((name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad)
