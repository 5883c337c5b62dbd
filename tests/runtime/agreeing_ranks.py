"""What ranks make of steps that each observed on its own: ``python -m tests.runtime.agreeing_ranks FOLDER steps``."""

from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from mgwfbp.runtime.observe.learn import learn_trace
from mgwfbp.runtime.observe.observer import ObservedMessage, ObservedStep
from mgwfbp.runtime.observe.steps import Gradients, PackedSteps
from tests.runtime.launch import be_rank
from tests.runtime.odd_ranks import Deep
from tests.runtime.tuner_ranks import tuned, vectors

GRADIENTS = Gradients("toy", ("a", "bb"), (1, 2))


def step(forward_s: float, ready_s: tuple[float, float], *messages: tuple[int, float, float, float]) -> ObservedStep:
    """A step whose gradients are ready, and whose messages are (bytes, ready, start, end)."""
    observed = tuple(ObservedMessage(*message) for message in messages)
    end_s = max([*ready_s, *(message.end_s for message in observed)])
    return ObservedStep(forward_s, max(ready_s), end_s, dict(enumerate(ready_s)), observed)


# By rank: the same two steps as each saw them.
SEEN = {
    0: [
        # The first message was sent at once, the second waited for it.
        step(1.0, (2.0, 6.0), (1, 2.0, 2.0, 9.0), (2, 6.0, 9.0, 10.0)),
        step(1.0, (5.0, 6.0), (1, 5.0, 5.0, 6.0), (2, 6.0, 6.0, 8.0)),
    ],
    1: [
        step(1.0, (5.0, 6.0), (1, 6.0, 6.0, 9.5), (2, 6.0, 9.5, 12.5)),
        step(3.0, (2.0, 6.5), (1, 4.0, 4.0, 6.0), (2, 6.5, 6.5, 8.0)),
    ],
}


def steps() -> dict[str, Any]:
    agreed = PackedSteps.of(SEEN[dist.get_rank()], GRADIENTS, [1, 2], "gradients", "messages").agreed()
    return {"agreed": asdict(agreed), "trace": learn_trace(agreed, GRADIENTS).to_json()}


def traffic() -> dict[str, Any]:
    """What a rank says to others in Python while a model is tuned: the kind and the bytes of each collective."""
    said: list[tuple[str, int]] = []

    def spied(name: str, real: Any) -> Any:
        def spy(tensor: Any, *arguments: Any, **named: Any) -> Any:
            said.append((name, tensor.nbytes if isinstance(tensor, Tensor) else -1))
            return real(tensor, *arguments, **named)

        return spy

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "broadcast", "all_gather", "all_gather_object", "gather", "gather_object"):
            patch.setattr(dist, name, spied(name, getattr(dist, name)))
        model = tuned(Deep())
        for number in range(24):
            model(vectors(number)[0]).square().mean().backward()
    return {"said": said, "tuning": model.tuning.state}


if __name__ == "__main__":
    be_rank({"steps": steps, "traffic": traffic})
