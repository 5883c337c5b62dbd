"""Files, pipes and devices: read up to a limit, and never waited for without end."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mgwfbp import FileError, FormatError, LayerTrace, LinearCost, ModelTrace, files
from mgwfbp.files import MAX_FILE_BYTES, MAX_VALUES, parse_json, read_json, read_text, write_text
from mgwfbp.units import quote
from tests.examples import make_trace


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "PIPE_WAIT_S", 0.5)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_pipe_that_nobody_writes_to_is_given_up(pipe: Path) -> None:
    with pytest.raises(FileError, match=r"pipe: cannot be read: a pipe that nobody writes to \(0\.5 s\)"):
        read_text(pipe)


def test_a_pipe_whose_writer_comes_late_and_writes_slowly_is_read_to_its_end(
    pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIPE_WAIT_S", 2.0)

    def write() -> None:
        time.sleep(0.2)
        with pipe.open("w") as stream:
            for word in ("[1,", " 2", "]"):
                time.sleep(0.7)  # together longer than a writer may take to come
                stream.write(word)
                stream.flush()

    writer = threading.Thread(target=write)
    writer.start()
    assert read_json(pipe) == [1, 2]
    writer.join()


def test_a_pipe_that_nobody_reads_is_given_up(pipe: Path) -> None:
    with pytest.raises(FileError, match=r"pipe: cannot be written: a pipe that nobody reads \(0\.5 s\)"):
        write_text(pipe, "a")


def test_a_pipe_longer_than_the_limit_is_not_read_to_its_end(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIPE_WAIT_S", 30.0)
    writer = subprocess.Popen(["sh", "-c", f"exec cat /dev/zero > {pipe}"], stderr=subprocess.DEVNULL)
    with pytest.raises(FileError, match="larger than 1 MiB"):
        read_text(pipe, max_bytes=2**20)
    writer.wait(timeout=30)


def test_a_device_is_read(tmp_path: Path) -> None:
    assert read_text("/dev/null") == ""
    with pytest.raises(FileError, match="larger than 1 MiB"):
        read_text("/dev/zero", max_bytes=2**20)


@pytest.mark.parametrize("source", ["< trace.json", "<<< $(cat trace.json)", "< <(sleep 0.3; cat trace.json)"])
def test_stdin_and_what_a_shell_puts_in_place_of_a_file_are_read(tmp_path: Path, source: str) -> None:
    make_trace([1.0, 2.0], [4, 4]).save(tmp_path / "trace.json")
    LinearCost(2, 0.1, 0.1).save(tmp_path / "cost.json")
    command = f"{sys.executable} -m mgwfbp compare --json --trace /dev/stdin --cost <(cat cost.json) {source}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 5


@pytest.mark.parametrize("command", ["simulate --trace {trace} --network {cost}", "report {trace} {cost}"])
def test_no_command_reads_a_pipe_twice(tmp_path: Path, command: str) -> None:
    make_trace([1.0, 2.0], [4, 4]).save(tmp_path / "trace.json")
    LinearCost(2, 0.1, 0.1).save(tmp_path / "cost.json")
    line = f"{sys.executable} -m mgwfbp {command.format(trace='<(cat trace.json)', cost='<(cat cost.json)')}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "optimal" in done.stdout


def test_more_values_than_any_file_of_ours_has_are_refused_before_they_are_parsed() -> None:
    text = "{}," * (MAX_FILE_BYTES // 3)  # which is no JSON: whoever parses it says so
    with pytest.raises(FormatError, match=f"more than {MAX_VALUES:,} values"):
        parse_json(text)


def test_a_trace_of_a_hundred_thousand_layers_is_no_reason_to_refuse(tmp_path: Path) -> None:
    layers = tuple(LayerTrace(f"blocks.{index}.attention.weight", 1e-6, 4096) for index in range(100_000))
    trace = ModelTrace("large", 1.0, layers)
    trace.save(tmp_path / "trace.json")
    assert ModelTrace.load(tmp_path / "trace.json").layers == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9" * 5000, "a number of thousands of digits"),
        ("[" * 5000, "nested too deeply"),
        ('{"a": NaN}', "NaN is no number here"),
        ('{"b": 1, "a": 1, "a": 2}', "'a' stands twice"),
        ("[1, 2", r"not JSON \(column 6\)"),
        ("[1,\n 2", r"not JSON \(line 2, column 3\)"),
    ],
)
def test_text_that_is_no_json_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)


def test_text_that_utf_8_cannot_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"page\.html: cannot be written: '\\ud800' in its text is not valid Unicode"):
        write_text(tmp_path / "page.html", "a\ud800b")
    assert list(tmp_path.iterdir()) == []


def test_any_value_can_be_quoted_on_one_short_line() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, 10**5000, [10**5000], "a\nb\ud800" * 100):
        assert len(quote(value)) <= 60
        assert quote(value).isprintable()
