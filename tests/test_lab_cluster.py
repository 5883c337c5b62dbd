"""What a lab computes before it makes anything."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgwfbp.errors import LabError
from mgwfbp.lab import Cluster, parse_delay, parse_rate
from mgwfbp.lab.hosts import shaping
from mgwfbp.lab.output import LineSplitter
from mgwfbp.lab.wire import Frame, FrameWriter, Kind, Order, read_frames

clusters = st.builds(
    Cluster,
    num_hosts=st.integers(1, 254),
    rate_bits_per_s=st.floats(1e5, 34e9),
    delay_s=st.floats(0, 1),
    ranks_per_host=st.integers(1, 8),
    mtu_bytes=st.integers(576, 9000),
    congestion_control=st.sampled_from(["", "reno", "bbr"]),
)


@given(st.decimals("0.001", "999", places=3), st.sampled_from(["kbit", "Mbit", "GBIT"]))
def test_a_rate_is_read_as_it_is_written(number: object, unit: str) -> None:
    scale = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[unit.lower()]
    assert math.isclose(parse_rate(f"{number}{unit}"), float(str(number)) * scale)


@pytest.mark.parametrize(
    "text", ["fast", "", "10", "gbit", "-1gbit", "1e3gbit", "10gbps", "nan", "1gbit\n1gbit", "٣gbit"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(LabError, match="expected a rate such as"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["soon", "50", "us", "-1us", "5min"])
def test_what_is_no_delay_is_refused(text: str) -> None:
    with pytest.raises(LabError, match="expected a delay such as"):
        parse_delay(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hosts": 0},
        {"num_hosts": 300},
        {"rate_bits_per_s": 0.0},
        {"rate_bits_per_s": math.nan},
        {"rate_bits_per_s": 1e11},
        {"delay_s": -1.0},
        {"delay_s": math.inf},
        {"ranks_per_host": 0},
        {"mtu_bytes": 100},
        {"congestion_control": "../reno"},
        {"congestion_control": "Reno"},
    ],
)
def test_a_cluster_that_cannot_be_is_refused_by_the_name_of_its_field(wrong: dict[str, float | str]) -> None:
    with pytest.raises(LabError, match=next(iter(wrong))):
        Cluster(**{"num_hosts": 2, "rate_bits_per_s": 1e9, **wrong})  # type: ignore[arg-type]


@given(clusters)
def test_ranks_are_numbered_host_by_host_and_hosts_have_addresses_of_their_own(cluster: Cluster) -> None:
    assert [rank.rank for rank in cluster.ranks] == list(range(cluster.num_ranks))
    assert all(rank.rank == rank.host * cluster.ranks_per_host + rank.local_rank for rank in cluster.ranks)
    assert len({cluster.address(host) for host in range(cluster.num_hosts)}) == cluster.num_hosts
    assert len({cluster.label(rank) for rank in cluster.ranks}) == cluster.num_ranks


@given(clusters)
def test_a_bucket_holds_its_largest_packet_and_fits_the_kernels_fields(cluster: Cluster) -> None:
    bucket = shaping(cluster)
    assert 2 * cluster.mtu_bytes <= bucket.packet_bytes <= bucket.burst_bytes / 2
    assert bucket.burst_bytes < bucket.queue_bytes < 2**32
    assert bucket.rate_bytes_per_s < 2**32


def test_every_variable_that_torchrun_sets_is_set_to_the_same(tmp_path: Path) -> None:
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    if torchrun is None:
        pytest.skip("torch is not installed")
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    command = [torchrun, "--nproc-per-node=2", f"--log-dir={tmp_path}", "--redirects=3", "--no-python"]
    clean = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    clean["LC_ALL"] = "C.UTF-8"  # else Python itself sets one
    subprocess.run([*command, sys.executable, "-c", show], env=clean, timeout=60, check=True, capture_output=True)
    cluster = Cluster(num_hosts=1, rate_bits_per_s=1e9, ranks_per_host=2)
    # torchrun itself holds the store on a port it chose, and tells ranks where to write errors for it to read.
    its_own = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
    its_own |= {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    for rank in cluster.ranks:
        (file,) = tmp_path.glob(f"*/attempt_0/{rank.rank}/stdout.log")
        theirs = json.loads(file.read_text())
        ours = cluster.environment(rank, clean)
        assert {name: ours.get(name) for name in theirs.keys() - its_own} == {
            name: theirs[name] for name in theirs.keys() - its_own
        }


def test_an_outer_torchruns_store_is_forgotten_and_the_users_threads_are_kept() -> None:
    cluster = Cluster(num_hosts=2, rate_bits_per_s=1e9)
    inherited = {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "7", "RANK": "5"}
    found = cluster.environment(cluster.ranks[1], inherited)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in found
    assert (found["OMP_NUM_THREADS"], found["RANK"]) == ("7", "1")


def test_each_host_has_an_nccl_id_of_its_own_which_its_ranks_share() -> None:
    cluster = Cluster(num_hosts=2, rate_bits_per_s=1e9, ranks_per_host=2)
    ids = [cluster.environment(rank, {})["NCCL_HOSTID"] for rank in cluster.ranks]
    assert ids[0] == ids[1] != ids[2] == ids[3]


@given(st.binary(max_size=200).map(lambda data: data.replace(b"x", b"\r").replace(b"y", b"\n")), st.data())
def test_lines_do_not_depend_on_how_the_bytes_arrive(written: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=5)))
    pieces = [written[start:end] for start, end in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    whole, parts = LineSplitter(), LineSplitter()
    in_parts = [line for piece in pieces for line in parts.feed(piece)]
    assert whole.feed(written) + whole.rest() == in_parts + parts.rest()


def test_a_line_without_end_comes_in_pieces_and_loses_nothing() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(10) for line in splitter.feed(b"x" * 50_000)] + splitter.rest()
    assert "".join(lines) == "x" * 500_000
    assert len(lines) > 1


@given(st.lists(st.text(st.characters(exclude_characters="\0")), min_size=1), st.dictionaries(st.text(), st.text()))
def test_an_order_arrives_as_it_was_sent(command: list[str], environment: dict[str, str]) -> None:
    cluster = Cluster(num_hosts=3, rate_bits_per_s=1e9, delay_s=5e-5)
    order = Order(cluster, "sh", (*command, "\udcff"), environment, 1, "/tmp/x", None, 2.5)  # noqa: S108 - only a text
    assert Order.loads(order.dumps()) == order
    assert order.dumps().count(b"\n") == 1


def test_frames_arrive_as_they_were_sent_and_a_cut_one_is_dropped() -> None:
    sent = [Frame(Kind.STDOUT, 3, payload=b"\n\0\xff"), Frame(Kind.EXIT, 254, 137), Frame(Kind.NOTE)]
    read_end, write_end = os.pipe()
    for frame in sent:
        FrameWriter(write_end).send(frame)
    os.write(write_end, b"\x01\x00")
    os.close(write_end)
    assert list(read_frames(read_end)) == sent
