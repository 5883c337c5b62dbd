"""Write the tables of replay.md from the results in replay/: ``python benchmarks/replay_tables.py``.

Everything below the marker in replay.md is replaced; the results are those of the commands that the document names.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mgwfbp import BenchResult
from mgwfbp.bench.tables import beaten_by, bench_rows, bench_titles, disagreements, error_summary

MARKER = "<!-- everything below is written by replay_tables.py -->"
TITLES = {"googlenet": "GoogLeNet", "resnet50": "ResNet-50"}


def main() -> None:
    folder = Path(__file__).parent
    results = [BenchResult.load(path) for path in sorted((folder / "replay").glob("*.json"))]
    first = [result for result in results if "repeat" not in result.network]
    repeats = [result for result in results if "repeat" in result.network]
    document = folder / "replay.md"
    kept = document.read_text().partition(MARKER)[0]
    document.write_text(kept + MARKER + "\n" + "\n".join([*overview(first), *cells(first), *repeated(first, repeats)]))
    sys.stdout.write(error_summary(*first) + "\n")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    rule = ["---", *["--:"] * (len(titles) - 1)]
    for row in (titles, rule, *rows):
        yield "| " + " | ".join(row) + " |"
    yield ""


def overview(results: Sequence[BenchResult]) -> Iterator[str]:
    yield "\n## Speedup over one worker, measured (the ideal is the number of hosts)\n"
    for model in dict.fromkeys(result.model for result in results):
        mine = sorted((one for one in results if one.model == model), key=lambda one: one.workers)
        names = list(dict.fromkeys(one.strategy for result in mine for one in result.strategies))
        rows = [[name, *[f"{one.speedup(name):.2f}" if name in known(one) else "" for one in mine]] for name in names]
        yield from table([TITLES.get(model, model), *[f"{one.workers} hosts" for one in mine]], rows)
    yield "\n## Prediction errors, before and after learning in training\n"
    rows = []
    for result in results:
        before = result.source["predicted_before_learning_s"]
        errors = {
            "before": [before[one.strategy] / one.measured_s - 1 for one in result.strategies if before[one.strategy]],
            "after": list(result.prediction_errors.values()),
        }
        sums = [f"{sum(map(abs, some)) / len(some):.1%}, {max(map(abs, some)):.1%}" for some in errors.values()]
        rows.append([TITLES.get(result.model, result.model), str(result.workers), *sums])
    yield from table(["mean, worst", "hosts", "before", "after"], rows)
    yield f"After, over all cells: {error_summary(*results)}.\n"
    yield "\n## Terms, watched in steps of three plans\n"
    rows = [
        [
            f"{TITLES.get(result.model, result.model)}, {result.workers} hosts",
            f"{terms['strategy']} ({terms['num_messages']})",
            f"{terms['computation_slowed']:+.1%}",
            f"{terms['slowest_rank']:+.1%}",
            f"{terms['messages_slowed']:+.1%}",
        ]
        for result in results
        for terms in result.source["terms"]
    ]
    yield from table(["cell", "plan (messages)", "computation slowed", "slowest rank", "messages slowed"], rows)


def cells(results: Sequence[BenchResult]) -> Iterator[str]:
    for result in results:
        alone = result.compute_s / result.source["recorded_compute_s"] - 1
        yield f"\n## {TITLES.get(result.model, result.model)}, {result.workers} hosts, {result.network}\n"
        yield f"`mgwfbp lab --hosts {result.workers} --rate 1gbit -- {result.source['command']}`\n"
        yield (
            f"{result.source['date']}, load {result.source['load'][0]} at the start; {result.source['turns']} turns of "
            f"{result.source['steps']}; without communication {result.compute_s:.3f} s, {alone:+.2%} of the recorded "
            f"time; {error_summary(result)}.\n"
        )
        yield from table(bench_titles(result), bench_rows(result))
        if "auto" in known(result):
            faster = beaten_by(result, "auto")
            yield f"Faster than `auto` beyond the spread: {', '.join(faster) or 'none'}.\n"


def repeated(results: Sequence[BenchResult], repeats: Sequence[BenchResult]) -> Iterator[str]:
    for repeat in repeats:
        for first in results:
            if (first.model, first.workers) == (repeat.model, repeat.workers):
                pairs = [f"{fast} and {slow}" for fast, slow in disagreements(first, repeat)]
                yield f"\n## {TITLES.get(first.model, first.model)}, {first.workers} hosts, run again\n"
                yield from table(bench_titles(repeat), bench_rows(repeat))
                yield f"In opposite order beyond the spread of both runs: {', '.join(pairs) or 'none'}.\n"


def known(result: BenchResult) -> set[str]:
    return {one.strategy for one in result.strategies}


if __name__ == "__main__":
    main()
