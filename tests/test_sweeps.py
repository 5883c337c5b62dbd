"""Sweeps as the tools print them (written here after their formats, with numbers of our own)."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mgwfbp import FileError, FormatError
from mgwfbp.measure.sweeps import read_nccl_tests, read_osu, read_points

OSU = """
# OSU MPI Allreduce Latency Test v7.3
# Datatype: MPI_FLOAT.
# Size       Avg Latency(us)
4                      12.50
8192                   40.25
1048576              2000.00
"""

NCCL = """# nThread 1 nGpus 1 minBytes 8 maxBytes 1048576 step: 2(factor) warmup iters: 5 iters: 20
# Using devices
#  Rank  0 Group  0 Pid   1111 on     host0 device  0 [0x07] Some GPU
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    20.00    0.00    0.00      0    10.00    0.00    0.00      0
     1048576        262144     float     sum      -1    80.00   13.11   13.11      0    60.00   17.48   17.48      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 7.64
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "sweep.txt"
    path.write_text(text)
    return path


def test_osu_rows_are_bytes_and_microseconds(tmp_path: Path) -> None:
    assert read_osu(write(tmp_path, OSU)) == [(4, 12.5 * 1e-6), (8192, 40.25 * 1e-6), (1048576, 2000 * 1e-6)]


def test_osu_rows_survive_the_full_output_and_what_mpirun_says(tmp_path: Path) -> None:
    header = "# Size  Avg Latency(us)  Min Latency(us)  Max Latency(us)  Iterations"
    text = f"Warning: something\n{header}\n4  12.5  11  13  1000\n\nbye 1\n"
    assert read_osu(write(tmp_path, text)) == [(4, 12.5 * 1e-6)]


def test_nccl_tests_rows_take_the_in_place_time(tmp_path: Path) -> None:
    assert read_nccl_tests(write(tmp_path, NCCL)) == [(8, 10 * 1e-6), (1048576, 60 * 1e-6)]


def test_nccl_tests_rows_of_an_old_version_have_fewer_columns(tmp_path: Path) -> None:
    text = "# size count type redop time algbw busbw error\n 8 2 float sum 20.0 0 0 1e-7\n"
    assert read_nccl_tests(write(tmp_path, text)) == [(8, 20 * 1e-6)]


OSU_SAMPLES = [(4, 12.5 * 1e-6), (8192, 40.25 * 1e-6), (1048576, 2000 * 1e-6)]
NCCL_SAMPLES = [(8, 10 * 1e-6), (1048576, 60 * 1e-6)]
INFO = "node1:4242:4250 [0] NCCL INFO Channel 00/02 : 0 1"

# How a launcher marks the lines of one rank, or says nothing of it: line number, rank, text -> line.
Launcher = Callable[[int, int, str], str]
LAUNCHERS: dict[str, Launcher] = {
    "mpirun --tag-output": lambda _, rank, text: f"[1,{rank}]<stdout>:{text}",
    "mpirun, with a blank": lambda _, rank, text: f"[1,{rank}]<stdout>: {text}",
    "mpirun --timestamp-output": lambda line, rank, text: f"Thu Mar  7 12:00:{line:02} 2024[1,{rank}]<stdout>:{text}",
    "prterun": lambda _, rank, text: f"[prterun-node1-77@1,{rank}]<stdout>: {text}",
    "mpiexec -prepend-rank": lambda _, rank, text: f"[{rank}] {text}",
    "srun --label": lambda _, rank, text: f"{rank}: {text}",
    "srun --label, many": lambda _, rank, text: f"{rank:2}: {text}",
    "torchrun": lambda _, rank, text: f"[default{rank}]:{text}",
    "kubectl --timestamps": lambda line, rank, text: (
        f"2024-03-07T12:00:{line:02}.123456789Z [pod/worker-{rank}] {text}"
    ),
    "a column": lambda line, rank, text: f"2024-03-07 12:00:{line:02},123 worker-{rank} | {text}",
}


def launched(text: str, launcher: Launcher, table_rank: int = 0) -> str:
    """The log of a run whose ranks all talk, one of which prints the table."""
    lines = []
    for number, line in enumerate(text.splitlines()):
        lines += [launcher(number, table_rank, line), launcher(number, 1, INFO), launcher(number, 1, f"{number} 7.5")]
        lines.append(launcher(number, table_rank, INFO))
    return "\n".join(["Warning: permanently added node1 to known hosts", *lines, "srun: 3 7.5 done"]) + "\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_a_launcher_puts_before_every_line_is_taken_off(tmp_path: Path, launcher: str) -> None:
    assert read_nccl_tests(write(tmp_path, launched(NCCL, LAUNCHERS[launcher]))) == NCCL_SAMPLES
    assert read_osu(write(tmp_path, launched(OSU, LAUNCHERS[launcher], table_rank=12))) == OSU_SAMPLES


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_that_print_a_table_each_are_refused(tmp_path: Path, launcher: str) -> None:
    mark = LAUNCHERS[launcher]
    pairs = [(mark(n, 0, line), mark(n, 1, line)) for n, line in enumerate(NCCL.splitlines())]
    both = "\n".join(line for pair in pairs for line in pair)
    with pytest.raises(FormatError, match=r"line 12: a second rank prints a table, .*: is each a run of its own\?"):
        read_nccl_tests(write(tmp_path, both))


def test_a_row_that_is_cut_is_refused_whatever_stands_before_it(tmp_path: Path) -> None:
    cut = launched(NCCL[: NCCL.index("13.11")], LAUNCHERS["mpirun --tag-output"])
    with pytest.raises(FormatError, match=r"line \d+: 6 columns, the header has 13"):
        read_nccl_tests(write(tmp_path, cut))


@pytest.mark.parametrize("kind", ["float", "half", "bfloat16", "fp8_e4m3"])
def test_nccl_tests_rows_may_be_of_any_type(tmp_path: Path, kind: str) -> None:
    assert read_nccl_tests(write(tmp_path, NCCL.replace("float", kind))) == NCCL_SAMPLES


def test_nccl_tests_rows_that_were_not_checked_have_no_errors(tmp_path: Path) -> None:
    text = (
        NCCL.replace("  0    10.00", "N/A    10.00")
        .replace("  0    60.00", "N/A    60.00")
        .replace("    0\n", "  N/A\n")
    )
    assert text.count("N/A") == 4
    assert read_nccl_tests(write(tmp_path, text)) == NCCL_SAMPLES


def test_nccl_tests_rows_may_end_with_a_timestamp(tmp_path: Path) -> None:
    text = re.sub(r"(#wrong)\n", r"\1           timestamp\n", NCCL)
    text = re.sub(r"(   0)\n", r"\1 2025-09-04 10:11:12\n", text)
    assert text.count("2025-09-04 10:11:12\n") == 2
    assert read_nccl_tests(write(tmp_path, text)) == NCCL_SAMPLES


def test_nccl_tests_rows_may_have_the_spread_of_iterations(tmp_path: Path) -> None:
    head = "time algbw busbw #wrong i_min i_max i_p99 i_cv%"
    text = f"# size count type redop root {head} {head}\n 8 2 float sum -1 20 0 0 0 19 21 21 3.5 10 0 0 0 9 11 11 2.5\n"
    assert read_nccl_tests(write(tmp_path, text)) == [(8, 10 * 1e-6)]


def test_plain_points_may_have_comments_and_commas(tmp_path: Path) -> None:
    assert read_points(write(tmp_path, "# bytes seconds\n4 1e-5\n\n8192, 2e-5 # large\n")) == [(4, 1e-5), (8192, 2e-5)]


@pytest.mark.parametrize(
    ("reader", "text", "message"),
    [
        (read_osu, "4 12.5\n", "no header"),
        (read_osu, OSU[:60], "no header"),
        (read_osu, "# Size Avg Latency(us)\n", "no row of OSU"),
        (read_osu, "# Size Avg Latency(us)\n4 fast\n", "line 2: expected a number of 0 or more, found 'fast'"),
        (read_nccl_tests, OSU, "no header"),
        (read_nccl_tests, NCCL[: NCCL.index("13.11")], r"line \d+: \d+ columns, the header has 13"),
        (read_nccl_tests, NCCL.replace("time ", "cputime "), "line 6: no column 'time'; run it without -C"),
        (read_nccl_tests, "[1,0]<stdout>:# size count type\n[1,0]<stdout>:8 2 float\n", "line 1: no column 'time'"),
        (read_nccl_tests, "[1,0]<stdout>:no table\n[1,0]<stdout>:8 2 float\n", "no header"),
        (read_nccl_tests, NCCL.partition("  8")[0], "no row of nccl-tests"),
        (read_points, "4 1e-5 9\n", "line 1: 3 columns, expected 2"),
        (read_points, "4 nan\n", "line 1: expected a number of 0 or more, found 'nan'"),
        (read_points, "-4 1\n", "line 1: expected a number"),
        (read_points, "4.9 1\n", "line 1: expected a whole number of bytes, found '4.9'"),
        (read_points, "# nothing\n", "no row of plain"),
    ],
)
def test_what_is_no_sweep_is_refused_with_its_line(tmp_path: Path, reader, text: str, message: str) -> None:  # type: ignore[no-untyped-def]
    path = write(tmp_path, text)
    with pytest.raises(FormatError, match=message) as caught:
        reader(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read_points(tmp_path / "none")
