"""Files of every kind that a command reads, damaged at random, and the commands that read them.

``python -m tests.mutations COUNT SEED`` tries many and prints what went wrong.
"""

import contextlib
import io
import json
import math
import os
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from mgwfbp import LinearCost, Network, PiecewiseCost, predict
from mgwfbp.cli import run
from mgwfbp.costs import ShardedCost
from mgwfbp.planners import find_sharded_plan
from tests.report.records import TRACE, write_all

# Whatever is put in place of a value.
NUMBERS: tuple[Any, ...] = (
    *(0, -0.0, 1, -1, 2, 0.5, 2**31, 2**53, 2**53 + 1, 2**64, 10**30, 10**400, -(10**400)),
    *(5e-324, 1e-310, 2.3e-308, 1e-200, 1e-100, 1e-20, 1e20, 9.9e99, 1e100, 1e154, 1e155, 1e200, 1e300, 1.7e308),
    *(math.nan, math.inf, -math.inf, True, False),
)
TEXTS: tuple[Any, ...] = (
    *("", " ", "a", "\ud800", "x\udfff", "\x1b[31mred\x1b[0m", "a\nb", "\r", "\x00", "\x07", "\u2028", "\u202e", "é😀"),
    *("[red]x[/red]", "</script>", "{}", "%s%n", "mgwfbp.trace/1", "mgwfbp.cost/1", "../x", "a" * 5000),
)
OTHERS: tuple[Any, ...] = (None, [], {}, [[]], [None], {"a": 1}, [1, 2, 3], [["a"]], {"": {}}, [1e308, 1e308])


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in parsed JSON, the root among them."""
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from places(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from places(value, (*path, index))


def at(tree: Any, path: Sequence[Any]) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Damage:
    """Damages parsed JSON in one way or several, as a generator of random numbers has it."""

    def __init__(self, source: random.Random) -> None:
        self._random = source

    def tree(self, tree: Any) -> Any:
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            ways = (self._replace, self._number, self._number, self._number, self._name, self._move)
            tree = self._random.choice(ways)(tree)
        return tree

    def text(self, text: str) -> bytes:
        raw = bytearray(text.encode())
        kind = self._random.randrange(6)
        if kind == 0:
            return bytes(raw[: self._random.randrange(len(raw))])
        if kind == 1:
            raw[self._random.randrange(len(raw))] = self._random.randrange(256)
        elif kind == 2:
            place = self._random.randrange(len(raw))
            raw[place:place] = raw[place : place + self._random.randrange(60)]
        elif kind == 3:
            raw[:0] = b"\xef\xbb\xbf"
        elif kind == 4:
            digits = [place for place, byte in enumerate(raw) if chr(byte).isdigit()]
            place = self._random.choice(digits or [0])
            raw[place:place] = b"9" * self._random.choice((1, 20, 350, 5000))
        else:
            opens = [place for place, byte in enumerate(raw) if chr(byte) in "[{"]
            place = self._random.choice(opens or [0])
            raw[place:place] = b"[" * self._random.choice((1, 100, 20_000))
        return bytes(raw)

    def _place(self, tree: Any, wanted: Callable[[Any], bool] | None = None) -> tuple[Any, ...] | None:
        found = [path for path in places(tree) if path and (wanted is None or wanted(at(tree, path)))]
        return self._random.choice(found) if found else None

    def _put(self, tree: Any, path: tuple[Any, ...] | None, value: Any) -> Any:
        if path is not None:
            at(tree, path[:-1])[path[-1]] = value
        return tree

    def _replace(self, tree: Any) -> Any:
        """Put something else in the place of a value: more often than not of the same kind, which goes further."""
        path = self._place(tree)
        if path is None:
            return tree
        old, kinds = at(tree, path), [NUMBERS, TEXTS, OTHERS, (nested(self._random.choice((5, 60, 200, 600))),)]
        if self._random.random() < 0.6:
            kinds = [TEXTS if isinstance(old, str) else NUMBERS if is_number(old) else OTHERS]
        value = self._random.choice(self._random.choice(kinds))
        return self._put(tree, path, json.loads(json.dumps(value)))

    def _number(self, tree: Any) -> Any:
        """Change one number, all that stand under the same name, or all times: these keep their order."""
        path = self._place(tree, is_number)
        if path is None:
            return tree
        how = self._random.randrange(3)
        exponent = self._random.choice((0, 20, 90, 99, 101, 200, 290, 306, 308))
        scale = self._random.choice((0.0, self._random.random(), 10.0**exponent, 10.0**-exponent, 1e-310))
        value = self._random.choice(NUMBERS) if self._random.random() < 0.4 else None
        for other in [path] if how == 0 else list(places(tree)):
            old = at(tree, other)
            if not other or not is_number(old) or (how == 1 and other[-1] != path[-1]):
                continue
            if how == 2 and isinstance(old, int):
                continue
            self._put(tree, other, value if value is not None else self._scaled(old, scale))
        return tree

    @staticmethod
    def _scaled(old: Any, scale: float) -> Any:
        try:
            return type(old)(old * scale)
        except (OverflowError, ValueError):
            return 1e308

    def _name(self, tree: Any) -> Any:
        """Change a text everywhere, so that what belongs together still does."""
        path = self._place(tree, lambda value: isinstance(value, str))
        if path is None or path[-1] in ("format", "kind", "algorithm"):
            return tree
        old, new = at(tree, path), self._random.choice(TEXTS)
        for other in list(places(tree)):
            if other and at(tree, other) == old:
                self._put(tree, other, new)
        return tree

    def _move(self, tree: Any) -> Any:
        path = self._place(tree)
        if path is None:
            return tree
        parent, value = at(tree, path[:-1]), at(tree, path)
        kind = self._random.randrange(3)
        if kind == 0:
            del parent[path[-1]]
        elif isinstance(parent, list):
            parent.insert(path[-1], json.loads(json.dumps(value)))
        elif kind == 1:
            parent[self._random.choice([text for text in TEXTS if isinstance(text, str)])] = parent.pop(path[-1])
        else:
            other = self._random.choice(list(parent))
            parent[path[-1]], parent[other] = parent[other], parent[path[-1]]
        return tree


def make_files(folder: Path) -> None:
    """One good file of every kind."""
    write_all(folder)
    LinearCost(4, 1e-4, 1e-9, {"network": "mine"}).save(folder / "line.json")
    Network("mine", "ring", 1e-5, 1e-9).save(folder / "network.json")
    layers = tuple(replace(layer, forward_s=layer.backward_s / 2) for layer in TRACE.layers)
    trace, cost = replace(TRACE, layers=layers), LinearCost(4, 1e-3, 2e-9)
    plan = find_sharded_plan(trace, cost)
    ShardedCost(cost, LinearCost(4, 1e-3, 1e-9), PiecewiseCost(4, ((4, 1e-4), (8000, 1e-3)))).save(
        folder / "halves.json"
    )
    trace.save(folder / "forward.json")
    plan.save(folder / "sharded.json")
    predict(trace, cost, plan).save(folder / "gathers.json")


FILES = (
    *("trace.json", "cost.json", "line.json", "network.json", "plan.json", "timeline.json", "bench.json", "sweep.json"),
    *("forward.json", "halves.json", "sharded.json", "gathers.json"),
    *(f"run/{name}" for name in ("config.json", "results.json", "plan.json", "trace.json", "cost.json")),
    *(f"run/{name}" for name in ("timeline.json", "predicted.json", "log.jsonl", "epochs.jsonl")),
)


def damage_file(path: Path, source: random.Random) -> None:
    damage, text = Damage(source), path.read_text()
    if source.random() < 0.15:
        path.write_bytes(damage.text(text))
    elif path.suffix == ".jsonl":
        lines = text.splitlines()
        place = source.randrange(len(lines))
        lines[place] = json.dumps(damage.tree(json.loads(lines[place])))
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text(json.dumps(damage.tree(json.loads(text))))


def command_for(name: str, source: random.Random) -> list[str]:
    """A command that reads the file, among good ones."""
    forms = (("-o", "out.html"), ("-o", "out.txt"), ("-o", "out.json"), ("--format", "text"), ("--format", "html"))
    form, as_json = source.choice(forms), source.choice(((), ("--json",)))
    costs = name if name in ("cost.json", "line.json") else source.choice(("cost.json", "line.json"))
    scenario = source.choice(((), ("--jitter", "0.1"), ("--contention", "2"), ("--in-flight", "2")))
    simulate = ["simulate", "--trace", "trace.json", *scenario, *as_json, "--network"]
    report = ["trace.json", costs, *form]
    with_cost = [
        ["compare", "--trace", "trace.json", "--cost", costs, *as_json],
        ["plan", "--trace", "trace.json", "--cost", costs, *source.choice(((), ("-o", "out.json")))],
        [*simulate, costs],
        ["report", *report],
    ]
    with_network = [
        [*simulate, "network.json", "--workers", "2,8"],
        ["report", "trace.json", "network.json", "--workers", "4", *form],
    ]
    to_shard, to_simulate = (
        ["--trace", "forward.json", "--cost", "halves.json" if name == "halves.json" else costs],
        ["--trace", "forward.json", "--network", costs],
    )
    commands = {
        "forward.json": [
            ["plan", *to_shard, "--engine", "sharded", *source.choice(((), ("-o", "out.json")))],
            ["compare", *to_shard, "--engine", "ddp,sharded", *as_json],
            ["simulate", *to_simulate, "--engine", "ddp,sharded", *scenario, *as_json],
            ["report", "forward.json", costs, "sharded.json", *form],
        ],
        "halves.json": [
            ["plan", *to_shard, "--engine", "sharded", *source.choice(((), ("-o", "out.json")))],
            ["compare", *to_shard, "--engine", "ddp,sharded", *as_json],
            ["plan", *to_shard],
            [*simulate, name],
            ["report", "trace.json", name, *form],
        ],
        "sharded.json": [[*simulate, costs, "--plan", name], ["report", name, *report], ["report", name, *form]],
        "trace.json": [*with_cost, *with_network],
        "network.json": [*with_network, ["cost", "--network", "network.json", "--workers", "3"]],
        "plan.json": [[*simulate, costs, "--plan", name, "--planner", "wfbp"], ["report", name, *report]],
        costs: with_cost,
        **{
            kind: [["report", kind, *form], ["report", kind, *report]]
            for kind in ("timeline.json", "gathers.json", "bench.json")
        },
        "sweep.json": [["report", name, *form]],
    }
    return source.choice(commands.get(name, [["report", "run", *form]]))


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    arguments: tuple[str, ...]
    status: int | None
    out: bytes
    err: bytes
    problem: str


def run_captured(arguments: Sequence[str]) -> Outcome:
    """Run a command in this process on streams as strict as a terminal's; warnings are errors."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True) for _ in range(2)]
    status, problem = None, ""
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            status = run(list(arguments))
        except BaseException:
            problem = traceback.format_exc()
    out, err = (stream.buffer.getvalue() for stream in streams)
    return Outcome(tuple(arguments), status, out, err, problem)


def strict_json(text: str) -> Any:
    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


def complaint(outcome: Outcome, before: set[str]) -> str:
    """What is wrong with what a command did, if anything; in the folder it ran in."""
    if outcome.problem:
        return outcome.problem
    try:
        out, err = outcome.out.decode(), outcome.err.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    written = {path.name for path in Path().iterdir()} - before
    for text in (out, err):
        if any(not (letter.isprintable() or letter == "\n") for letter in text if "<!DOCTYPE" not in text):
            return f"control characters: {text!r}"
    if outcome.status != 0:
        if outcome.status not in (1, 2):
            return f"status {outcome.status}"
        if err.count("\n") != 1 or not err.endswith("\n") or len(err) > 2000:
            return f"not one line: {err[:3000]!r}"
        return f"half a result: {out!r}, {written}" if out or written else ""
    results = {name: (Path() / name).read_bytes().decode() for name in written}
    results["stdout"] = out
    for name, text in results.items():
        prints_json = "--json" in outcome.arguments or (outcome.arguments[0] in ("plan", "cost") and text)
        is_json = name.endswith(".json") or (name == "stdout" and prints_json)
        try:
            if is_json:
                strict_json(text)
            elif "<!DOCTYPE" in text:
                strict_json(text.partition('type="application/json">')[2].partition("</script>")[0])
            elif {"nan", "inf", "nan%", "inf%"} & set(text.lower().replace("x", " ").split()):
                return f"no number in {name}: {text[:3000]}"
        except ValueError as error:
            return f"{name}: {error}"
    return ""


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    here = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)


def try_one(good: Path, seed: int) -> tuple[Outcome, str]:
    """Damage one file in a copy of the good ones, run a command on it, and say what is wrong."""
    source = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="damaged-") as scratch:
        folder = Path(scratch) / "files"
        shutil.copytree(good, folder)
        name = source.choice(FILES)
        damage_file(folder / name, source)
        others = [other for other in FILES if other != name]
        for other in source.sample(others, source.choice((0, 0, 0, 1, 2))):
            damage_file(folder / other, source)
        with inside(folder):
            before = {path.name for path in Path().iterdir()}
            outcome = run_captured(command_for(name, source))
            return outcome, complaint(outcome, before)


def main(count: int, first: int) -> None:
    statuses: dict[int | None, int] = {}
    kinds: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="good-") as scratch:
        make_files(Path(scratch))
        for seed in range(first, first + count):
            outcome, wrong = try_one(Path(scratch), seed)
            statuses[outcome.status] = statuses.get(outcome.status, 0) + 1
            if wrong:
                place = [line.strip() for line in wrong.splitlines() if line.strip().startswith("File")]
                key = f"{wrong.strip().splitlines()[-1][:150]} | {place[-1] if place else ''}"
                kinds.setdefault(key, []).append(seed)
                if len(kinds[key]) == 1:
                    print(f"--- seed {seed}: {outcome.arguments}\n{wrong[-1500:]}", flush=True)  # noqa: T201
    print(statuses)  # noqa: T201
    for key, seeds in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(len(seeds), seeds[:5], key)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
