"""What an optimizer of rows shows of whole parameters: the lists of its groups, `Finished`, and its `States`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any, SupportsIndex

from torch import Tensor
from torch.optim import Optimizer

from mgwfbp.runtime.rows.rows import Owned

__all__ = ["Finished", "States"]


def _finishing(name: str) -> Any:
    """Return a method of a list that gives parameters away or compares them: once they are finished."""

    def call(self: "Finished", *arguments: Any, **named: Any) -> Any:
        self._finish()
        return getattr(list, name)(self, *arguments, **named)

    return call


class Finished(list[Any]):
    """The parameters of a group, all of which are finished before Python gets one. Its copy is an ordinary list."""

    def __init__(self, parameters: Iterable[Tensor], finish: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._finish = finish

    def holds(self, known: Sequence[Tensor]) -> bool:
        """Say whether these are the parameters, of which none is finished for it; asked in each step."""
        return len(self) == len(known) and all(map(is_, super().__iter__(), known))

    def __iter__(self) -> Iterator[Any]:
        self._finish()
        return super().__iter__()

    def __reversed__(self) -> Iterator[Any]:
        self._finish()
        return super().__reversed__()

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        self._finish()
        return super().__getitem__(place)

    def __add__(self, other: Any) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self]

    pop = _finishing("pop")
    remove = _finishing("remove")
    index = _finishing("index")
    count = _finishing("count")
    sort = _finishing("sort")
    __contains__ = _finishing("__contains__")
    __eq__ = _finishing("__eq__")
    __ne__ = _finishing("__ne__")
    __mul__ = _finishing("__mul__")
    __rmul__ = _finishing("__rmul__")

    def copy(self) -> list[Any]:
        """Return an ordinary list."""
        return list(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)


class States(MutableMapping[Tensor, Any]):
    """The state of each parameter's row: what is set or cleared here is so for the optimizer of the rows."""

    def __init__(self, inner: Optimizer, owned: Mapping[int, Owned], finish: Callable[[], None]) -> None:
        self._inner, self._owned, self._finish = inner, owned, finish

    def _row(self, parameter: Tensor) -> Tensor:
        owned = self._owned.get(id(parameter))
        return parameter if owned is None else owned.row

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._inner.state[self._row(parameter)]  # which torch makes where there is none

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._inner.state[self._row(parameter)] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._inner.state[self._row(parameter)]

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, Tensor) and self._row(parameter) in self._inner.state

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """Return the state of a parameter, if it has one."""
        return self._inner.state.get(self._row(parameter), default)

    def __iter__(self) -> Iterator[Tensor]:
        self._finish()
        parameters = {id(owned.row): owned.parameter for owned in self._owned.values()}
        return iter([parameters.get(id(row), row) for row in self._inner.state])

    def __len__(self) -> int:
        return len(self._inner.state)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)
