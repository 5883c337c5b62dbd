"""What is known of the communication of a run: from the tuner, or from a few steps that are observed."""

from contextlib import ExitStack

from mgwfbp.cost import Cost
from mgwfbp.errors import MeasureError
from mgwfbp.runtime.distributed import DistributedDataParallel
from mgwfbp.runtime.observe.observation import Observation
from mgwfbp.trace import ModelTrace
from mgwfbp.train.writer import SilentWriter

__all__ = ["CommunicationWatch"]

# The first steps, in which memory and connections are made, are not typical.
_OBSERVE_AFTER_STEPS = 20
_OBSERVE_STEPS = 10


class CommunicationWatch:
    """Observes ten steps once the plan is settled, and keeps what they showed in the run's folder."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        writer: SilentWriter,
        *,
        predict_with: tuple[ModelTrace | None, Cost] | None,
        was_tuned: bool = False,
    ) -> None:
        self._ddp = ddp
        self._writer = writer
        self._predict_with = predict_with
        self._was_tuned = was_tuned
        self._exposed_s: float | None = None
        self._first_step: int | None = None
        self._num_seen = 0
        self._has_settled = ddp.tuning.state != "working"
        self._open = ExitStack()
        self._seen: Observation | None = None

    @property
    def exposed_s(self) -> float | None:
        """Communication of a step that nothing hides; None until it was observed."""
        return self._exposed_s

    @property
    def is_tuned(self) -> bool:
        """Say whether the tuner has found its plan, in this start of the run or in one before."""
        return self._was_tuned or self._ddp.tuning.state == "settled"

    def before_step(self, step: int) -> None:
        """Begin to observe, if it is time; ``step`` steps are done."""
        if self._first_step is None:
            self._first_step = step
        if self._ddp.tuning.state == "working":
            return
        if not self._has_settled:
            self._has_settled = True
            self._keep_tuning()
        if self._num_seen == 0 and self._seen is None and step - self._first_step >= _OBSERVE_AFTER_STEPS:
            try:
                observing = self._ddp.observe(_OBSERVE_STEPS, predict_with=self._predict_with)
                self._seen = self._open.enter_context(observing)
            except MeasureError:  # sparse gradients, for one: training does without
                self._num_seen = _OBSERVE_STEPS

    def after_step(self) -> None:
        """End the observation once it has seen enough."""
        if self._seen is None or self._num_seen == _OBSERVE_STEPS:
            return
        self._num_seen += 1
        if self._num_seen == _OBSERVE_STEPS:
            self.close()

    def close(self) -> None:
        """Keep what was seen."""
        self._open.close()
        if self._seen is not None and self._seen.timelines:
            self._exposed_s = self._seen.timeline.exposed_s
            self._writer.save("timeline.json", self._seen.timeline)
            self._writer.save("predicted.json", self._seen.predicted)

    def _keep_tuning(self) -> None:
        tuning = self._ddp.tuning
        self._exposed_s = tuning.exposed_s
        self._writer.save("tuning.json", tuning.to_json())
        self._writer.save("plan.json", self._ddp.plan)
        self._writer.save("trace.json", tuning.trace)
        # With a sharded optimizer the tuner's cost of a message is a reduce-scatter's; a file's is an all-reduce's.
        self._writer.save("cost.json", tuning.cost if tuning.gathering is None else tuning.costs)
