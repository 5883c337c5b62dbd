"""What may hold a parameter without asking a module for it, in the tests of guards: `HOLDERS`."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

Factor = Callable[[Tensor], Tensor]  # multiplies by a parameter


class Times:
    """Keeps it in a dict of its own."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        factor = self.factor
        while isinstance(factor, (Times, list, dict)):
            factor = factor.factor if isinstance(factor, Times) else factor[0]
        return x * factor  # type: ignore[no-any-return]


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


def of_a_default(factor: Tensor) -> Factor:
    def call(x: Tensor, held: Tensor = factor) -> Tensor:
        return x * held

    return call


def of_a_cache(factor: Tensor) -> Factor:
    @lru_cache
    def held(number: int) -> Any:
        return made.pop()

    made = [factor]
    held(0)
    return lambda x: x * held(0)


def of_a_generator(factor: Tensor) -> Factor:
    def factors(held: Tensor) -> Iterator[Tensor]:
        while True:
            yield held

    found = factors(factor)
    next(found)
    return lambda x: x * next(found)


def of_a_stray(factor: Tensor) -> Factor:
    module: Any = nn.Module()
    module.factor = factor
    return lambda x: x * module.factor


def of_a_key(factor: Tensor) -> Factor:
    names = {factor: "factor"}
    return lambda x: x * next(iter(names))


def of_a_reference(factor: Tensor) -> Factor:
    held: Any = weakref.ref(factor)
    return lambda x: x * held()


def of_a_deque(factor: Tensor) -> Factor:
    held = deque([factor])
    return lambda x: x * held[0]


HOLDERS: dict[str, Callable[[Tensor], Factor]] = {
    "partial": lambda factor: partial(torch.mul, factor),
    "object": Times,
    "object in an object": lambda factor: Times([Times({0: [Times(factor)]})]),
    "slots": Slotted,
    "bound method": lambda factor: Times(factor).__call__,
    "closure": lambda factor: lambda x: x * factor,
    "default": of_a_default,
    "deque": of_a_deque,
    "cache": of_a_cache,
    "key": of_a_key,
    "weak reference": of_a_reference,
    "generator": of_a_generator,
    "module that is none of the model's": of_a_stray,
}


class Scaled(nn.Module):
    """Begins with a factor, which another module gives where ``is_inside``, whose own forward pass never runs."""

    def __init__(self, hold: Callable[[Tensor], Factor], *, is_inside: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.inside, self.head = nn.Module(), nn.Linear(6, 3)
        self.is_inside = is_inside
        vars(self.inside if is_inside else self)["times"] = hold(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        times: Any = self.inside.times if self.is_inside else vars(self)["times"]
        return self.head(torch.tanh(times(x)))  # type: ignore[no-any-return]
