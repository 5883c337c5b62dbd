"""Worlds in which the true step of every plan is known: recorded traces, known links, noise as it was measured.

A world answers what the tuner's script asks (`mgwfbp.runtime.tune.decide`), step by step, as real ranks would.
"""

import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial

from mgwfbp import Cost, MergePlan, ModelTrace, Timeline, load_network, load_trace, predict, recorded_traces
from mgwfbp.planners import plan_bucket, plan_optimal
from mgwfbp.runtime.observe.steps import AgreedSteps, Gradients, Seen
from mgwfbp.runtime.tune.decide import BUCKET_MIB, Situation, Verdict, decide
from mgwfbp.runtime.tune.race import Limits, Turn

NETWORKS = ("1gbe", "10gbe", "25gbe", "100gbe")


@dataclass
class World:
    """A model, a link, and everything that makes its steps uneven."""

    trace: ModelTrace
    cost: Cost
    rng: random.Random
    noise: float = 0.01  # spread of a step, log-normal
    batches: float = 0.0  # spread of the size of batches, log-normal
    spell_chance: float = 0.0  # that a slow spell begins with a step
    spell_slows: float = 1.2
    is_sharded: bool = False  # messages are reduce-scatters, and parameters are gathered
    gathering_slows: float = 1.0  # how much longer both passes are where parameters are gathered
    per_message_s: float = 0.0  # what each message takes from the computation, evenly over the backward pass
    steps: int = 0
    _spell_left: int = 0
    _steps_of: dict[object, Timeline] = field(default_factory=dict)

    @property
    def gradients(self) -> Gradients:
        layers = self.trace.layers
        names, sizes = tuple(layer.name for layer in layers), tuple(layer.grad_bytes for layer in layers)
        return Gradients(self.trace.model, names, sizes)

    @property
    def default(self) -> MergePlan:
        return plan_bucket(self.trace, self.cost)

    def truth(self, plan: MergePlan, batch: float = 1.0, *, is_reduced: bool = False) -> Timeline:
        """Return a step as it really is, but for noise; in a sharded world perhaps with its messages all-reduced."""
        if is_reduced:
            plan = replace(plan, gathers=())
        elif self.is_sharded and not plan.gathers:
            plan = replace(plan, gathers=tuple(group[::-1] for group in reversed(plan.groups)))
        key = plan.messages, batch
        if key not in self._steps_of:
            trace = self.trace.scaled(batch)
            # Each message holds the backward pass up, evenly.
            held_up = 1 + self.per_message_s * plan.num_groups / max(trace.backward_s, 1e-9)
            layers = tuple(replace(layer, backward_s=layer.backward_s * held_up) for layer in trace.layers)
            self._steps_of[key] = predict(replace(trace, layers=layers), self.cost, plan)
        return self._steps_of[key]

    def best_s(self) -> float:
        """Return the shortest true step there is among plans that could be thought of."""
        plans = [self.default, plan_optimal(self.trace, self.cost)]
        for mib in BUCKET_MIB:
            sized = partial(plan_bucket, first_bucket_bytes=mib * 2**20, bucket_bytes=mib * 2**20)
            plans.append(sized(self.trace, self.cost))
        return min(self.truth(plan).iteration_s for plan in plans)

    def answer(self, turn: Turn) -> Seen:
        """Run the steps of a turn."""
        plan = turn.plan
        found: dict[str, list[_Step]] = {}
        for note in turn.notes:
            step = self._step(plan, is_reduced=turn.all_reduces)
            if note != "settle":
                found.setdefault(note, []).append(step)
        return Seen(**{note: self._agreed(note, steps, plan) for note, steps in found.items()})

    def _step(self, plan: MergePlan, *, is_reduced: bool) -> "_Step":
        self.steps += 1
        if self._spell_left:
            self._spell_left -= 1
        elif self.rng.random() < self.spell_chance:
            self._spell_left = self.rng.randint(3, 40)
        slow = self.spell_slows if self._spell_left else 1.0
        # Half of the variance is the whole step's, half is each pass's own.
        spread = self.noise / math.sqrt(2)
        whole, forward, backward = (self.rng.lognormvariate(0, spread) for _ in range(3))
        # Batches come in sizes that are 5 % apart.
        batch = math.exp(0.05 * round(self.rng.gauss(0, self.batches) / 0.05)) if self.batches else 1.0
        slow *= self.gathering_slows if self.is_sharded and not is_reduced else 1.0
        timeline = self.truth(plan, batch, is_reduced=is_reduced)
        return _Step(timeline, slow * whole * forward, slow * whole * backward)

    def _agreed(self, note: str, steps: "list[_Step]", plan: MergePlan) -> AgreedSteps:
        order = {name: place for place, name in enumerate(self.gradients.names)}

        def ready(step: _Step) -> tuple[float, ...]:
            moments = [0.0] * len(order)
            for span in step.timeline.backward:
                moments[order[span.layers[0]]] = step.at(span.end_s)
            return tuple(moments)

        def taken(step: _Step) -> tuple[float, ...]:
            spread = 3 * self.noise
            sent = step.timeline.gathers if note == "gathers" else step.timeline.messages
            return tuple(step.backward * one.duration_s * self.rng.lognormvariate(0, spread) for one in sent)

        layer_s = dict(zip(self.gradients.names, self.trace.layer_forward_s, strict=True))

        def pieces(step: _Step) -> tuple[float, ...]:
            return tuple(step.forward * sum(layer_s[name] for name in group) for group in plan.gathers)

        return AgreedSteps(
            forward_s=tuple(
                step.at(self.trace.forward_s if note == "alone" else step.timeline.forward.end_s) for step in steps
            ),
            compute_s=tuple(step.at(step.timeline.compute_s) for step in steps),
            mean_compute_s=tuple(step.at(step.timeline.compute_s) for step in steps),
            length_s=tuple(step.at(step.timeline.iteration_s) for step in steps),
            exposed_s=tuple(step.backward * step.timeline.exposed_s for step in steps),
            ready_s=tuple(ready(step) for step in steps) if note == "gradients" else (),
            message_s=tuple(taken(step) for step in steps) if note in ("messages", "gathers") else (),
            pieces_s=tuple(pieces(step) for step in steps) if note == "gathers" else (),
        )


@dataclass(frozen=True)
class _Step:
    """A step as it should be, and how much longer its passes took."""

    timeline: Timeline
    forward: float
    backward: float

    def at(self, moment_s: float) -> float:
        """Return when something happened, from the start of the step."""
        forward_s = self.timeline.forward.end_s
        return self.forward * min(moment_s, forward_s) + self.backward * max(0.0, moment_s - forward_s)


def tune_in(
    world: World,
    limits: Limits | None = None,
    in_force: MergePlan | None = None,
    wire: str | None = None,
    most_bytes: float = math.inf,
    allowed: Callable[[MergePlan], MergePlan] = lambda plan: plan,
) -> Verdict:
    """Let the tuner's script work in a world, where torch's buckets are in force or another plan is."""
    torchs, force = (world.default, in_force) if in_force else (None, world.default)
    gathers = None if not world.is_sharded else in_force.gathers if in_force else ()
    situation = Situation(
        world.gradients, world.cost.workers, force, torchs=torchs, wire=wire, gathers=gathers, most_bytes=most_bytes
    )
    script: Generator[Turn, Seen, Verdict] = decide(situation, allowed, limits or Limits())
    try:
        turn = next(script)
        while True:
            turn = script.send(world.answer(turn))
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict


def random_world(seed: int) -> World:
    """Make a world with noise like that of the testbeds, slow spells, and in some batches that vary."""
    rng = random.Random(seed)
    # Without traces that came later: the worlds of published decisions stay what they were.
    names = [name for name in recorded_traces() if not any(word in name for word in ("cpu", "bcaffe", "mobilenet"))]
    trace = load_trace(rng.choice(names))
    workers = rng.choice([2, 4, 8, 16, 64])
    cost = load_network(rng.choice(NETWORKS)).cost(workers)
    return World(
        trace,
        cost,
        random.Random(rng.random()),
        noise=math.exp(rng.uniform(math.log(0.002), math.log(0.04))),
        batches=rng.choice([0.0, 0.0, 0.05, 0.2]),
        spell_chance=rng.choice([0.0, 0.005, 0.02]),
        spell_slows=rng.uniform(1.05, 1.5),
        per_message_s=rng.choice([0.0, 2e-5, 2e-4]),
    )
