"""Write the tables of a document from the results in its folder.

    python benchmarks/bench_tables.py replay                  # replay.md from replay/*.json
    python benchmarks/bench_tables.py gpu new/*.json          # takes these results into gpu/ first

Everything below the marker in the document is replaced; the results are those of the commands that stand there. Of a
result that is taken in, plans, timelines and trace are left out: no table needs them.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import bench_predictions
from mgwfbp import BenchResult
from mgwfbp.bench.tables import (
    ENOUGH_EXPOSED,
    beaten_by,
    bench_rows,
    bench_titles,
    disagreements,
    error_summary,
    exposed_errors,
    noise_summary,
)
from mgwfbp.units import format_seconds

# Whose tuners' predictions stand in a document besides those of its own results.
RELATED = {"gpu": ("wire",)}
MARKER = "<!-- everything below is written by bench_tables.py -->"


def main() -> None:
    name, *new = sys.argv[1:]
    folder = Path(__file__).parent / name
    for path in map(Path, new):
        slim(BenchResult.load(path)).save(folder / path.name)
    first, repeats = load(folder), load(folder, repeats=True)
    document = folder.with_suffix(".md")
    kept = document.read_text().partition(MARKER)[0]
    others = {other: named(load(folder.with_name(other))) for other in RELATED.get(name, ())}
    predictions = bench_predictions.sections({name: named(first), **others})
    parts = [*overview(first), *predictions, *cells(first), *repeated(first, repeats)]
    document.write_text(kept + MARKER + "\n" + "\n".join(parts))
    sys.stdout.write(error_summary(*first) + "\n")


def load(folder: Path, *, repeats: bool = False) -> list[BenchResult]:
    """Return the results of a folder by title, those of cells that were run again or the others."""
    paths = [path for path in folder.glob("*.json") if path.stem.endswith("repeat") == repeats]
    return sorted(map(BenchResult.load, sorted(paths)), key=lambda result: (title(result), result.workers))


def named(results: Sequence[BenchResult]) -> list[tuple[str, BenchResult]]:
    return [(f"{title(result)}, {result.workers} hosts", result) for result in results]


def slim(result: BenchResult) -> BenchResult:
    strategies = [replace(one, plan=None, timeline=None, predicted_timeline=None) for one in result.strategies]
    return replace(result, strategies=tuple(strategies), trace=None)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    rule = ["---", *["--:"] * (len(titles) - 1)]
    for row in (titles, rule, *rows):
        yield "| " + " | ".join(row) + " |"
    yield ""


def overview(results: Sequence[BenchResult]) -> Iterator[str]:
    yield "\n## Speedup over one worker, measured (the ideal is the number of hosts)\n"
    for which in dict.fromkeys(title(result) for result in results):
        mine = sorted((one for one in results if title(one) == which), key=lambda one: one.workers)
        names = list(dict.fromkeys(one.strategy for result in mine for one in result.strategies))
        rows = [[name, *[f"{one.speedup(name):.2f}" if name in known(one) else "" for one in mine]] for name in names]
        yield from table([which, *[f"{one.workers} hosts" for one in mine]], rows)
    yield "\n## Prediction errors, before and after learning in training\n"
    rows = []
    for result in results:
        before = result.source["predicted_before_learning_s"]
        errors = {
            "before": [before[one.strategy] / one.measured_s - 1 for one in result.strategies if before[one.strategy]],
            "after": list(result.prediction_errors.values()),
        }
        of_step = [mean_and_worst(list(map(abs, some))) for some in errors.values()]
        rows.append(
            [title(result), str(result.workers), mean_and_worst(list(exposed_errors(result).values())), *of_step]
        )
    words = error_summary(*results)
    yield (
        "The exposed communication is what a prediction has to find out; most of a step is computation that it is "
        f"given. {words[0].upper()}{words[1:]}. Steps with no more than {ENOUGH_EXPOSED:.0%} exposed have an error of "
        "the step alone.\n"
    )
    parts = ("the exposed communication, after", "the step, before", "the step, after")
    titles = ["mean, worst", "hosts", *(f"of {part}" for part in parts)]
    yield from table(titles, rows)
    yield bench_predictions.before_and_after(named(results))
    yield from bench_predictions.taken(named(results))
    yield "\n## Terms, watched in steps of a few plans\n"
    rows = [
        [
            f"{title(result)}, {result.workers} hosts",
            f"{terms['strategy']} ({terms['num_messages']})",
            f"{terms['computation_slowed']:+.1%}",
            f"{terms['slowest_rank']:+.1%}",
            f"{terms['messages_slowed']:+.1%}",
        ]
        for result in results
        for terms in result.source["terms"]
    ]
    yield from table(["cell", "plan (messages)", "computation slowed", "slowest rank", "messages slowed"], rows)


def mean_and_worst(errors: Sequence[float]) -> str:
    return f"{sum(errors) / len(errors):.1%}, {max(errors):.1%}" if errors else "-"


def cells(results: Sequence[BenchResult]) -> Iterator[str]:
    for result in results:
        alone = result.compute_s / result.source["recorded_compute_s"] - 1
        rate = "1gbit" if result.source["gpu"] is None else result.network.split()[0] + "gbit"
        yield f"\n## {title(result)}, {result.workers} hosts, {result.network}\n"
        yield f"`mgwfbp lab --hosts {result.workers} --rate {rate} -- {result.source['command']}`\n"
        yield (
            f"{result.source['date']}, load {result.source['load'][0]} at the start; {result.source['turns']} turns of "
            f"{result.source['steps']}; without communication {format_seconds(result.compute_s)}, {alone:+.2%} of the "
            f"recorded time; {error_summary(result)}{meters(result)}.\n"
        )
        yield from table(bench_titles(result), bench_rows(result))
        if "auto" in known(result):
            faster = beaten_by(result, "auto")
            yield f"Faster than `auto` beyond the spread: {', '.join(faster) or 'none'}.\n"
        if noise := noise_summary(result):
            yield f"{noise[0].upper()}{noise[1:]}.\n"


def meters(result: BenchResult) -> str:
    tcp, processors = result.source.get("tcp"), result.source.get("processors")
    text = f"; TCP sent {tcp['sent_again']} of {tcp['sent']} packets of a host again" if tcp else ""
    if processors:
        busy = 1 - (processors["idle"] + processors["stolen"]) / processors["all"]
        text += f"; processors {busy:.0%} busy, {processors['stolen'] / processors['all']:.1%} taken away"
    return text


def repeated(results: Sequence[BenchResult], repeats: Sequence[BenchResult]) -> Iterator[str]:
    for repeat in repeats:
        for first in results:
            if (title(first), first.workers) == (title(repeat), repeat.workers):
                pairs = [f"{fast} and {slow}" for fast, slow in disagreements(first, repeat)]
                yield f"\n## {title(first)}, {first.workers} hosts, run again\n"
                yield from table(bench_titles(repeat), bench_rows(repeat))
                yield f"In opposite order beyond the spread of both runs: {', '.join(pairs) or 'none'}.\n"


def title(result: BenchResult) -> str:
    """Name the trace that was replayed, of which a result itself knows only the model, or the model and its links."""
    words = result.source["command"].split()
    return words[words.index("--replay") + 1] if "--replay" in words else f"{result.model}, {result.network}"


def known(result: BenchResult) -> set[str]:
    return {one.strategy for one in result.strategies}


if __name__ == "__main__":
    main()
