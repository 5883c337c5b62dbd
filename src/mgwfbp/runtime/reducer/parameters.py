"""The parameters of a DDP model as its Reducer knows them: `Parameters`, by place, and their names."""

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Buckets", "Parameters", "uncompiled"]

Buckets = list[list[int]]  # indices into the Reducer's parameters, one list per message, in the order of sending


def uncompiled(name: str) -> str:
    """Return what a parameter is called where nothing is compiled.

    >>> uncompiled("_orig_mod.blocks._orig_mod.0.weight")
    'blocks.0.weight'
    """
    return name.replace("_orig_mod.", "")


class Parameters:
    """The parameters that the Reducer of a DDP model sends gradients of, and their names, as they are now."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        parameters, sparse = DistributedDataParallel._build_params_for_reducer(ddp)
        self.parameters: list[nn.Parameter] = list(parameters)
        self.sparse: list[bool] = list(sparse)
        by_id = {id(parameter): uncompiled(name) for name, parameter in ddp.module.named_parameters()}
        self.names = tuple(by_id[id(parameter)] for parameter in self.parameters)
        self.sizes = tuple(parameter.nbytes for parameter in self.parameters)

    def buckets_of(self, groups: Sequence[Sequence[str]]) -> Buckets:
        """Return the buckets that hold a plan's groups."""
        places = {name: place for place, name in enumerate(self.names)}
        return [[places[name] for name in group] for group in groups]

    def groups_of(self, buckets: Buckets) -> tuple[tuple[str, ...], ...]:
        """Return the groups of a plan whose buckets these are."""
        return tuple(tuple(self.names[place] for place in bucket) for bucket in buckets)
