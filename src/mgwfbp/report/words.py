"""What a case says in words: what is the bottleneck, what would help, by how much."""

from collections.abc import Sequence
from dataclasses import dataclass

from mgwfbp.planners import plan_optimal
from mgwfbp.report.cases import Case, StepRow, step_rows
from mgwfbp.report.inputs import KnownCost, ScalingRow
from mgwfbp.report.whatif import faster_bandwidth, no_startup
from mgwfbp.run import TrainingRun
from mgwfbp.timeline import predict
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_seconds, plural

__all__ = [
    "Remedy",
    "find_bottleneck",
    "find_current",
    "find_remedies",
    "summarize",
    "summarize_runs",
    "summarize_scaling",
]

# Closer than this is "as good as": real steps differ by as much from one to the next.
NEAR = 0.05
# A gain below this is not worth a word.
WORTH = 0.005
# Where predictions are off by more than this on average, what else they promise is not worth repeating.
TRUSTED = 0.25
# What training runs with if nobody does anything: PyTorch's buckets, by any of their names.
DEFAULTS = ("ddp", "bucket")


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that might be done about a step, and the step it would give."""

    what: str
    iteration_s: float
    num_messages: int

    def gain(self, current_s: float) -> float:
        """How many times as fast the step would be."""
        return current_s / self.iteration_s if self.iteration_s else 1.0


def find_current(rows: Sequence[StepRow]) -> StepRow:
    """Return the step that is taken today: of what was measured, or else of all, PyTorch's buckets or the first."""
    known = [row for row in rows if row.how == "measured"] or list(rows)
    return next((row for name in DEFAULTS for row in known if row.strategy == name), known[0])


def find_remedies(trace: ModelTrace, cost: KnownCost) -> list[Remedy]:
    """Predict what the best plan would give: as things are, and with a better network or processor.

    Each is planned anew, so that a remedy is not blamed for a plan that was made without it.
    """

    def best(what: str, other: KnownCost) -> Remedy:
        plan = plan_optimal(trace, other)
        return Remedy(what, predict(trace, other, plan).iteration_s, plan.num_groups)

    return [
        best("merging", cost),
        best("twice the bandwidth", faster_bandwidth(cost)),
        best("start-up times of zero", no_startup(cost)),
    ]


def find_bottleneck(current: StepRow, predicted: StepRow, remedies: Sequence[Remedy]) -> str:
    """Name what the current step is longest because of, by what its remedy would gain.

    Computation, where communication is as good as hidden; else the way of merging, the bandwidth or the start-up times,
    whichever would save most of the step as it was predicted. Without remedies, or where the prediction knows of no
    exposed communication, no more can be said than "communication".
    """
    if current.exposed_s <= NEAR * current.iteration_s:
        return "computation"
    if not remedies or predicted.exposed_s <= NEAR * predicted.iteration_s:
        return "communication"
    merging, bandwidth, startup = (remedy.iteration_s for remedy in remedies)
    saved_s = {
        "the way gradients are merged": predicted.iteration_s - merging,
        "bandwidth": merging - bandwidth,
        "start-up times": merging - startup,
    }
    return max(saved_s, key=lambda name: saved_s[name])


def summarize(case: Case) -> list[str]:
    """Say in a few sentences what limits the case's step, what would help, and by how much."""
    rows = step_rows(case)
    if not rows:
        return []
    current = find_current(rows)
    predicted = next((row for row in rows if (row.strategy, row.how) == (current.strategy, "predicted")), current)
    errors = _errors(rows)
    mean_error = sum(abs(error) for error in errors) / len(errors) if errors else 0.0
    remedies: list[Remedy] = []
    if case.trace is not None and case.cost is not None and mean_error <= TRUSTED:
        remedies = find_remedies(case.trace, case.cost)
    share = current.exposed_s / current.iteration_s if current.iteration_s else 0.0
    percent = f"{share:.0%}" if share >= 0.01 or not share else "less than 1%"
    sentences = [
        f"{case.title}: with {_name(current.strategy)} a step takes {format_seconds(current.iteration_s)} "
        f"({current.how}), and {format_seconds(current.exposed_s)} of it ({percent}) is communication that "
        "nothing hides.",
        f"The bottleneck is {find_bottleneck(current, predicted, remedies)}.",
    ]
    others = [row for row in rows if row.how == current.how and row is not current]
    # What the model promises is said below, once, if it can be.
    if others and not (remedies and current.how == "predicted"):
        sentences.append(_fastest(current, others))
    if remedies:
        sentences.append(_help(remedies, predicted))
    if errors:
        words = f"Predictions are off by {mean_error:.1%} on average, by {max(errors, key=abs):+.1%} at worst"
        too_far = ": too far to say what else would help; measure the trace and the cost again"
        sentences.append(f"{words}{too_far if mean_error > TRUSTED else ''}.")
    return sentences


def _fastest(current: StepRow, others: Sequence[StepRow]) -> str:
    best = min(others, key=lambda row: row.iteration_s)
    gain = current.iteration_s / best.iteration_s if best.iteration_s else 1.0
    if gain <= 1 + WORTH:
        return f"None of the other strategies {current.how} is faster."
    return (
        f"The shortest step {current.how} is that of {best.strategy}: {format_seconds(best.iteration_s)} in "
        f"{plural(best.num_messages, 'message')}, {_times(gain)} as fast."
    )


def _help(remedies: Sequence[Remedy], current: StepRow) -> str:
    """Say what would help, prediction compared with prediction, the most helpful of the other two first."""
    merging, *others = remedies
    now_s = current.iteration_s
    if merging.gain(now_s) > 1 + WORTH:
        first = (
            f"merging gradients in the best way, into {plural(merging.num_messages, 'message')}, would make the step "
            f"{_times(merging.gain(now_s))} as fast ({format_seconds(merging.iteration_s)})"
        )
    else:
        first = "no other way of merging gradients would make the step shorter"
    others.sort(key=lambda remedy: remedy.iteration_s)
    useful = [remedy for remedy in others if merging.iteration_s / (remedy.iteration_s or 1.0) > 1 + WORTH]
    more = [
        f"{remedy.what} {_times(remedy.gain(now_s))} as fast ({format_seconds(remedy.iteration_s)})"
        for remedy in useful
    ]
    if len(more) == 2:
        rest = f"with {more[0]}, and with {more[1]}, each planned anew"
    elif more:
        useless = next(remedy.what for remedy in others if remedy not in useful)
        rest = f"with {more[0]}, planned anew; {useless} would add nothing to the best plan"
    else:
        rest = f"neither {others[0].what} nor {others[1].what} would add anything to that"
    return f"By the model, {first}; {rest}."


def _errors(rows: Sequence[StepRow]) -> list[float]:
    measured = {row.strategy: row.iteration_s for row in rows if row.how == "measured"}
    return [
        row.iteration_s / measured[row.strategy] - 1
        for row in rows
        if row.how == "predicted" and measured.get(row.strategy)
    ]


def _name(strategy: str) -> str:
    return f"PyTorch's default buckets ({strategy})" if strategy in DEFAULTS else strategy


def _times(gain: float) -> str:
    """Say a ratio.

    >>> _times(1.2345), _times(12.3)
    ('1.23 times', '12.3 times')
    """
    return f"{gain:.3g} times"


def summarize_scaling(rows: Sequence[ScalingRow]) -> list[str]:
    """Say which strategy is best on the most workers, one sentence for each model and network."""
    sentences = []
    for model, network, how in dict.fromkeys((row.model, row.network, row.how) for row in rows):
        some = [row for row in rows if (row.model, row.network, row.how) == (model, network, how)]
        workers = max(row.workers for row in some)
        last = {row.strategy: row for row in some if row.workers == workers}
        shortest_s = min(row.iteration_s for row in last.values())
        # Of equals, up to rounding, the one that is proven to be best.
        equals = [row for row in last.values() if row.iteration_s <= shortest_s * (1 + 1e-9)]
        best = next((row for row in equals if row.strategy == "optimal"), equals[0])
        words = (
            f"{model} over {network}, {how}: on {plural(workers, 'worker')} {best.strategy} is fastest, "
            f"{format_seconds(best.iteration_s)} a step and {best.efficiency:.0%} efficient"
        )
        other = next((last[name] for name in DEFAULTS if name in last), None)
        if other is not None and other is not best and best.iteration_s:
            words += f", {_times(other.iteration_s / best.iteration_s)} as fast as {_name(other.strategy)}"
        sentences.append(words + ".")
    return sentences


def summarize_runs(runs: Sequence[tuple[str, TrainingRun]]) -> list[str]:
    """Say what each training run reached, or how far it is."""
    sentences = []
    for name, run in runs:
        model, strategy = run.config.get("model", "a model"), run.config.get("strategy", "?")
        if run.results is not None:
            found = run.results
            sentences.append(
                f"{name}: {model} with {strategy} on {plural(found.workers, 'worker')} reached "
                f"{found.top1:.2%} top-1 accuracy in {plural(found.epochs, 'epoch')}, at "
                f"{found.samples_per_s:.4g} samples per second."
            )
        elif run.epochs:
            last = run.epochs[-1]
            sentences.append(
                f"{name}: {model} with {strategy} is not finished; after {plural(len(run.epochs), 'epoch')} "
                f"its top-1 accuracy is {last.top1:.2%}."
            )
        else:
            sentences.append(f"{name}: {model} with {strategy} has not finished an epoch.")
    return sentences
