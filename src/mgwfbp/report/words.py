"""What a case says in words: what is the bottleneck, what would help, by how much.

Every time is marked as measured or predicted, and a ratio is one of likes: measured over measured, predicted over
predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mgwfbp.cost import taken_by, taking_nothing
from mgwfbp.fitting import padding_words
from mgwfbp.planners import plan_optimal
from mgwfbp.report.cases import DEFAULTS, OURS_LOW, Case, StepRow, step_rows
from mgwfbp.report.inputs import KnownCost, ScalingRow
from mgwfbp.report.whatif import faster_bandwidth, no_startup
from mgwfbp.run import TrainingRun
from mgwfbp.timeline import Timeline, predict
from mgwfbp.trace import ModelTrace
from mgwfbp.units import format_seconds, plural

__all__ = [
    "Remedy",
    "find_bottleneck",
    "find_current",
    "find_remedies",
    "low_words",
    "message_words",
    "summarize",
    "summarize_runs",
    "summarize_scaling",
    "taken_words",
]

# Closer than this is "as good as": real steps differ by as much from one to the next.
NEAR = 0.05
# A gain below this is not worth a word.
WORTH = 0.005
# Where predictions are off by more than this on average, what else they promise is not worth repeating.
TRUSTED = 0.25
MESSAGES_OWN = "what starting and copying messages takes from the computation"


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that might be done about a step, and the step it would give."""

    what: str
    iteration_s: float
    num_messages: int

    def gain(self, current_s: float) -> float:
        """How many times as fast the step would be."""
        return current_s / self.iteration_s if self.iteration_s else 1.0

    def is_reached_by(self, row: StepRow) -> bool:
        """Whether a measured step is as good as this prediction already, so that it would gain nothing."""
        return row.how == "measured" and row.iteration_s <= self.iteration_s * (1 + NEAR)


def find_current(case: Case, rows: Sequence[StepRow]) -> StepRow:
    """Return the step that is taken today.

    Of what was measured it is that of PyTorch's buckets, or else the first; where nothing was, that of the run, or of
    PyTorch's buckets where there is none, or else the first.
    """
    measured = [row for row in rows if row.how == "measured"]
    if not measured and case.num_runs:
        return rows[0]
    known = measured or list(rows)
    return next((row for name in DEFAULTS for row in known if row.strategy == name), known[0])


def find_remedies(trace: ModelTrace, cost: KnownCost) -> list[Remedy]:
    """Predict what the best plan would give: as things are, with a better network, and with messages that take nothing.

    Each is planned anew, so that a remedy is not blamed for a plan that was made without it.
    """

    def best(what: str, other: KnownCost) -> Remedy:
        plan = plan_optimal(trace, other)
        return Remedy(what, predict(trace, other, plan).iteration_s, plan.num_groups)

    found = [
        best("merging", cost),
        best("twice the bandwidth", faster_bandwidth(cost)),
        best("start-up times of zero", no_startup(cost)),
    ]
    if taken_by(cost, trace.grad_bytes):
        found.append(best("messages that take nothing from the computation", taking_nothing(cost)))
    return found


def find_bottleneck(current: StepRow, predicted: StepRow | None, remedies: Sequence[Remedy]) -> str:
    """Name what the current step is longest because of, by what its remedy would gain.

    Computation, where communication is as good as hidden and messages take next to nothing from it; else the way of
    merging, the bandwidth, the start-up times or what messages take, whichever would save most of the step as it was
    predicted. Without remedies, or where no prediction knows of time lost, no more can be said than "communication".
    """
    if current.lost_s <= NEAR * current.iteration_s:
        return "computation"
    if not remedies or predicted is None or predicted.lost_s <= NEAR * predicted.iteration_s:
        return "communication"
    merging, *others = remedies
    saved_s = {"the way gradients are merged": predicted.iteration_s - merging.iteration_s}
    for name, other in zip(("bandwidth", "start-up times", MESSAGES_OWN), others, strict=False):
        saved_s[name] = merging.iteration_s - other.iteration_s
    if merging.is_reached_by(current):
        del saved_s["the way gradients are merged"]
    return max(saved_s, key=lambda name: saved_s[name])


def summarize(case: Case) -> list[str]:
    """Say in a few sentences what limits the case's step, what would help, and by how much."""
    rows = step_rows(case)
    if not rows:
        return []
    current = find_current(case, rows)
    errors = _errors(rows)
    mean_error = sum(abs(error) for error in errors) / len(errors) if errors else 0.0
    remedies: list[Remedy] = []
    if case.trace is not None and case.cost is not None and mean_error <= TRUSTED:
        remedies = find_remedies(case.trace, case.cost)
    taken = f", and {_part(current.taken_s, current)} is {MESSAGES_OWN}" if current.taken_s else ""
    sentences = [
        f"{case.title}: with {_name(current.strategy)} a step takes {format_seconds(current.iteration_s)} "
        f"({current.how_known}), and {_part(current.exposed_s, current)} is communication that nothing hides{taken}.",
        f"The bottleneck is {find_bottleneck(current, _prediction(current, rows), remedies)}.",
    ]
    likes = [row for row in rows if row.is_like(current)]
    # What the model promises is said below, once, if it can be.
    if len(likes) > 1 and not (remedies and current.how == "predicted"):
        sentences += _fastest(case, current, likes)
    if case.raced_s is not None:
        before, after = map(format_seconds, case.raced_s)
        sentences.append(
            f"In turns within one run, measured by its tuner: DDP's buckets {before} a step, the chosen plan {after}."
        )
    if remedies:
        best = min(likes, key=lambda row: row.iteration_s) if current.how == "measured" else current
        sentences += [_merging(remedies[0], best, _prediction(best, rows)), _others(remedies[0], remedies[1:])]
        sentences += _low_precision(case, remedies[0])
    if padded := padding_words(case.cost):
        sentences.append(f"{padded[0].upper()}{padded[1:]}.")
    if errors:
        words = f"Predictions are off by {mean_error:.1%} on average, by {max(errors, key=abs):+.1%} at worst"
        too_far = ": too far to say what else would help; measure the trace and the cost again"
        sentences.append(f"{words}{too_far if mean_error > TRUSTED else ''}.")
    return sentences


def _part(part_s: float, row: StepRow) -> str:
    """Say a part of a step, in seconds and as a share of it."""
    share = part_s / row.iteration_s if row.iteration_s else 0.0
    percent = f"{share:.0%}" if share >= 0.01 or not share else "less than 1%"
    return f"{format_seconds(part_s)} of it ({percent})"


def _prediction(row: StepRow, rows: Sequence[StepRow]) -> StepRow | None:
    """Return what was predicted of a row's strategy, by any of its names."""
    names = DEFAULTS if row.strategy in DEFAULTS else (row.strategy,)
    return next((other for name in names for other in rows if (other.strategy, other.how) == (name, "predicted")), None)


def _fastest(case: Case, current: StepRow, likes: Sequence[StepRow]) -> list[str]:
    """Compare the current step with the shortest of its likes."""
    best = min(likes, key=lambda row: row.iteration_s)
    gain = current.iteration_s / best.iteration_s if best.iteration_s else 1.0
    if gain <= 1 + WORTH:
        return [f"None of the other strategies {current.how} is faster."]
    words = (
        f"The shortest step {current.how} is that of {best.strategy}: {format_seconds(best.iteration_s)} in "
        f"{plural(best.num_messages, 'message')}, {_times(gain)} as fast."
    )
    if current.how != "measured" or case.num_runs < 2:
        return [words]
    return [words, "Runs come one after the other, so what else the machine did meanwhile is in their steps."]


def _merging(merging: Remedy, best: StepRow, predicted: StepRow | None) -> str:
    """Say what another way of merging would give over the shortest step there is."""
    shortest = f"{format_seconds(merging.iteration_s)} in {plural(merging.num_messages, 'message')} (predicted)"
    if merging.is_reached_by(best):
        reached = f"{format_seconds(best.iteration_s)} of {best.strategy} (measured)"
        return f"By the model the best plan takes {shortest}; {reached} is as good: merging otherwise gains nothing."
    if predicted is None:
        return f"By the model the best plan takes {shortest}; what {best.strategy} takes was not predicted."
    gain = merging.gain(predicted.iteration_s)
    now = format_seconds(predicted.iteration_s)
    if gain <= 1 + WORTH:
        return f"By the model no other way of merging gradients would make the step shorter ({now}, predicted)."
    return (
        f"By the model, merging gradients in the best way, into {plural(merging.num_messages, 'message')}, would make "
        f"the step of {predicted.strategy} {_times(gain)} as fast ({format_seconds(merging.iteration_s)} instead of "
        f"{now}, both predicted)."
    )


def _others(merging: Remedy, others: Sequence[Remedy]) -> str:
    """Say what else would make the best plan faster, prediction compared with prediction, the most helpful first."""
    now_s = merging.iteration_s
    others = sorted(others, key=lambda remedy: remedy.iteration_s)
    useful = [remedy for remedy in others if remedy.gain(now_s) > 1 + WORTH]
    if not useful:
        names = " nor ".join(remedy.what for remedy in others)
        return f"Neither {names} would add anything to the best plan, by the model."
    first, *second = useful
    words = (
        f"With {first.what} the best plan, made anew, would be {_times(first.gain(now_s))} as fast "
        f"({format_seconds(first.iteration_s)} instead of {format_seconds(now_s)}, both predicted)"
    )
    for remedy in second:
        words += f", with {remedy.what} {_times(remedy.gain(now_s))} ({format_seconds(remedy.iteration_s)}, predicted)"
    useless = [remedy.what for remedy in others if remedy not in useful]
    return f"{words}{''.join(f'; {what} would add nothing to it' for what in useless)}."


def _low_precision(case: Case, merging: Remedy) -> list[str]:
    """Say what low precision would add to the best plan, where such a plan was made."""
    step = next((one.predicted for one in case.strategies if one.name in OURS_LOW and one.predicted), None)
    if step is None:
        return []
    if not step.low_bytes:
        return ["No message needs low precision: it would hardly make the best plan's step shorter, by the model."]
    gain = merging.iteration_s / step.iteration_s if step.iteration_s else 1.0
    return [
        f"With {low_words(step).removeprefix(', ')} the best plan would be {_times(gain)} as fast "
        f"({format_seconds(step.iteration_s)} instead of {format_seconds(merging.iteration_s)}, both predicted)."
    ]


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


def message_words(timeline: Timeline) -> str:
    """Say how many messages a step sends, and how many gathers where there are some."""
    gathers = f" and {plural(len(timeline.gathers), 'gather')}" if timeline.gathers else ""
    return f"{plural(len(timeline.messages), 'message')}{gathers}"


def taken_words(timeline: Timeline) -> str:
    """Say what messages take from the computation, where they take something; to be added to words on the step."""
    return f", taken from the computation {format_seconds(timeline.taken_s)}" if timeline.takes else ""


def low_words(timeline: Timeline) -> str:
    """Say how much of a step travels in low precision, where some does; to be added to words on the step."""
    if not timeline.low_bytes:
        return ""
    wires = " and ".join(dict.fromkeys(message.wire for message in timeline.messages if message.wire))
    return f", {timeline.low_bytes / timeline.grad_bytes:.0%} of the bytes in {wires}"


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
                f"{found.samples_per_s:.4g} samples per second (measured)."
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
