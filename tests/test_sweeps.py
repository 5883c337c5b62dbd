"""Sweeps as the tools print them (written here after their formats, with numbers of our own)."""

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
        (read_points, "4 1e-5 9\n", "line 1: 3 columns, expected 2"),
        (read_points, "4 nan\n", "line 1: expected a number of 0 or more, found 'nan'"),
        (read_points, "-4 1\n", "line 1: expected a number"),
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
