"""Labs as a user runs them: real namespaces, real links, real processes."""

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgwfbp.errors import LabError
from mgwfbp.lab import Cluster, Line, parse_rate, run_lab
from tests.lab_tools import LAB, Machine, skip_without_a_lab, wait_for_lines

skip_without_a_lab()

ONE_GBIT = ("--rate", "1gbit")

# Rank 0 asks rank 1 to send, counts what it gets and prints bytes per second: none came before the clock was read.
TRANSFER = """
import os, socket, sys, time
if os.environ["RANK"] == "0":
    with socket.create_server((os.environ["MASTER_ADDR"], 5001)) as server:
        connection, _ = server.accept()
    start_s, num_bytes = time.perf_counter(), 0
    connection.sendall(b"x")
    while got := len(connection.recv(1 << 16)):
        num_bytes += got
    print(num_bytes / (time.perf_counter() - start_s))
else:
    while True:
        try:
            connection = socket.create_connection(("host0", 5001), timeout=10)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    connection.recv(1)
    connection.sendall(bytes(int(sys.argv[1])))
"""

ROUND_TRIP = """
import os, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server(("10.0.0.1", 5001)) as server:
        connection, _ = server.accept()
    while data := connection.recv(1):
        connection.sendall(data)
else:
    while True:
        try:
            connection = socket.create_connection(("10.0.0.1", 5001), timeout=10)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    start_s = time.perf_counter()
    connection.sendall(b"x")
    connection.recv(1)
    print(time.perf_counter() - start_s)
"""

REACH = """
import errno, os, socket
names = sorted(name for _, name in socket.if_nameindex())
def reach(address):
    with socket.socket() as one:
        one.settimeout(5)
        # Nobody listens: whoever is there refuses.
        return {errno.ECONNREFUSED: "yes", errno.ENETUNREACH: "no"}.get(one.connect_ex((address, 9)), "perhaps")
other = f"10.0.0.{2 - int(os.environ['RANK'])}"
print(names, reach(other), reach("127.0.0.1"), reach("192.0.2.1"))
"""

# Prints each rate that the kernel gives links of this network, and when it was first seen, until the last is there.
RATES = """
import json, sys, time
from pyroute2 import IPRoute
last, seen = int(sys.argv[1]), {}
with IPRoute() as netlink:
    names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in netlink.get_links()}
    while not seen or any(list(rates)[-1] != last for rates in seen.values()):
        for one in netlink.get_qdiscs():
            if one.get_attr("TCA_KIND") == "tbf":
                rate = one.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"] * 8
                seen.setdefault(names[one["index"]], {}).setdefault(rate, time.monotonic())
        time.sleep(0.02)
print(json.dumps(seen))
"""

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.tensor([float(10 ** dist.get_rank())])
dist.all_reduce(tensor)
print(tensor.item())
dist.destroy_process_group()
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


def test_each_rank_runs_once_and_its_lines_carry_its_hosts_name(machine: Machine) -> None:
    done = machine.run("--hosts", "3", *ONE_GBIT, "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE; echo bad >&2")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"host{rank} | rank {rank} of 3" for rank in range(3)]
    assert sorted(done.stderr.splitlines()) == [f"host{rank} | bad" for rank in range(3)]


def test_a_line_names_the_local_rank_where_a_host_has_several(machine: Machine) -> None:
    done = machine.run(
        "--hosts", "2", *ONE_GBIT, "--ranks-per-host", "2", "--", "sh", "-c", "echo $RANK $GROUP_RANK $LOCAL_RANK"
    )
    assert sorted(done.stdout.splitlines()) == [
        "host0:0 | 0 0 0",
        "host0:1 | 1 0 1",
        "host1:0 | 2 1 0",
        "host1:1 | 3 1 1",
    ]


def test_a_command_gets_its_arguments_untouched(machine: Machine) -> None:
    given = ["--hosts", "9", "--", "-h", "--help", "", "two words", "*", "$RANK"]
    done = machine.run("--hosts", "1", *ONE_GBIT, "--", *python("import sys; print(sys.argv[1:])", *given))
    assert done.stdout == f"host0 | {given}\n"


def test_hosts_names_are_coloured_on_a_terminal_only(machine: Machine) -> None:
    ours, theirs = pty.openpty()
    subprocess.run(
        [*LAB, "--hosts", "2", *ONE_GBIT, "--", "sh", "-c", "echo hello; sleep 0.$RANK"],
        env={name: value for name, value in machine.environment.items() if name != "NO_COLOR"},
        stdout=theirs,
        stderr=theirs,
        timeout=60,
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert sorted(shown.splitlines()) == ["\x1b[33mhost1\x1b[0m | hello", "\x1b[36mhost0\x1b[0m | hello"]


def test_the_log_directory_has_all_that_each_rank_wrote_and_nothing_else(machine: Machine, tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    code = "import os; os.write(1, b'\\xff\\r\\n\\x1b[0m'); os.write(2, os.environ['RANK'].encode())"
    done = machine.run("--hosts", "2", *ONE_GBIT, "--log-dir", str(logs), "--", *python(code))
    assert done.returncode == 0
    assert sorted(path.name for path in logs.iterdir()) == ["rank0.log", "rank1.log"]
    for rank in range(2):
        # Two pipes: which came first is not known.
        assert sorted((logs / f"rank{rank}.log").read_bytes()) == sorted(b"\xff\r\n\x1b[0m%d" % rank)


def test_much_output_arrives_whole_and_in_order(machine: Machine) -> None:
    done = machine.run("--hosts", "2", *ONE_GBIT, "--", "seq", "1", "20000")
    lines = done.stdout.splitlines()
    for host in ("host0", "host1"):
        assert [line for line in lines if line.startswith(host)] == [f"{host} | {n}" for n in range(1, 20001)]


def test_a_reader_that_has_enough_ends_the_lab(machine: Machine) -> None:
    with machine.lab("--hosts", "2", *ONE_GBIT, "--", "yes") as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("| y\n")
        process.stdout.close()
        process.wait(timeout=30)
    machine.check_nothing_is_left()


def test_the_first_failing_rank_ends_the_others_and_its_status_and_last_lines_are_shown(machine: Machine) -> None:
    script = 'if [ $RANK = 1 ]; then seq 100; echo "this is why" >&2; exit 7; fi; sleep 300'
    done = machine.run("--hosts", "3", *ONE_GBIT, "--", "sh", "-c", script)
    assert done.returncode == 7
    summary = done.stderr[done.stderr.index("mgwfbp lab: ") :].splitlines()
    assert summary[0] == "mgwfbp lab: rank 1 on host1 ended with exit status 7:"
    assert "  this is why" in summary
    assert "  100" in summary
    assert len(summary) == 21


def test_a_killed_rank_is_called_killed(machine: Machine) -> None:
    done = machine.run("--hosts", "2", *ONE_GBIT, "--", "sh", "-c", "[ $RANK = 0 ] && kill -9 $$; sleep 300")
    assert done.returncode == 137
    assert "rank 0 on host0 was killed by SIGKILL" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--hosts", "0", "--rate", "1gbit", "--", "true"),
        ("--hosts", "300", "--rate", "1gbit", "--", "true"),
        ("--hosts", "two", "--rate", "1gbit", "--", "true"),
        ("--hosts", "2", "--rate", "fast", "--", "true"),
        ("--hosts", "2", "--rate", "100gbit", "--", "true"),
        ("--hosts", "2", "--rate", "1gbit"),
        ("--hosts", "2", "--rate", "1gbit", "--"),
        ("--hosts", "2", "--rate", "1gbit", "--", ""),
        ("--hosts", "2", "--rate", "1gbit", "--", "no-such-program"),
        ("--hosts", "2", "--rate", "1gbit", "--delay", "soon", "--", "true"),
        ("--hosts", "2", "--rate", "1gbit", "--rate-change", "2gbit", "--", "true"),
        ("--hosts", "2", "--rate", "1gbit", "--rate-change", "2s=2gbit", "--rate-change", "1s=3gbit", "--", "true"),
        ("--hosts", "2", "--rate", "1gbit", "--ranks-per-host", "0", "--", "true"),
        ("--hosts", "2", "--rate", "1gbit", "--mtu", "1", "--", "true"),
        ("--hosts", "2", "--rate", "1gbit", "--congestion-control", "no/such", "--", "true"),
        ("--hosts", "2", "--", "true"),
        ("--rate", "1gbit", "--", "true"),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_is_made(machine: Machine, arguments: tuple[str, ...]) -> None:
    done = machine.run(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("mgwfbp lab: ")
    assert list(machine.temporary.iterdir()) == []


def test_a_log_directory_that_cannot_be_is_one_clear_line(machine: Machine) -> None:
    done = machine.run("--hosts", "2", *ONE_GBIT, "--log-dir", "/proc/none", "--", "true")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "/proc/none/rank0.log" in done.stderr


def test_a_delay_is_kept_or_refused_but_never_left_out() -> None:
    cluster = Cluster(num_hosts=2, rate_bits_per_s=1e9, delay_s=0.02)
    lines: list[Line] = []
    try:
        run_lab(cluster, python(ROUND_TRIP), on_line=lines.append, timeout_s=60).check()
    except LabError as error:
        assert "netem" in str(error)  # noqa: PT017 - either may be, depending on the kernel
        return
    assert float(lines[0].text) >= 2 * 0.02


def test_hosts_send_at_a_steady_rate_unless_told_otherwise_and_the_machine_keeps_its_own_way(machine: Machine) -> None:
    tcp = Path("/proc/sys/net/ipv4")
    before = [(tcp / name).read_text() for name in ("tcp_congestion_control", "tcp_slow_start_after_idle")]
    show = ["cat", *(str(tcp / name) for name in ("tcp_congestion_control", "tcp_slow_start_after_idle"))]
    found = {"": "reno"}
    for name in (tcp / "tcp_allowed_congestion_control").read_text().split():
        found[name] = name
    for given, used in found.items():
        option = ["--congestion-control", given] if given else []
        done = machine.run("--hosts", "2", *ONE_GBIT, *option, "--", *show)
        assert sorted(done.stdout.splitlines()) == [
            f"host{host} | {text}" for host in range(2) for text in sorted(("0", used))
        ]
    assert [(tcp / name).read_text() for name in ("tcp_congestion_control", "tcp_slow_start_after_idle")] == before


def test_a_congestion_control_that_the_kernel_does_not_have_is_one_clear_line(machine: Machine) -> None:
    done = machine.run("--hosts", "2", *ONE_GBIT, "--congestion-control", "no_such", "--", "true")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "congestion control 'no_such' cannot be used" in done.stderr
    assert "hosts may use: " in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into the lab's networks from outside")
def test_one_core_receives_all_packets_of_a_connection_so_that_none_overtakes_another(machine: Machine) -> None:
    show = "mount -t sysfs sysfs /sys && cd /sys/class/net && grep . */queues/rx-0/rps_cpus"
    found: dict[str, list[int]] = {}
    with machine.lab("--hosts", "3", *ONE_GBIT, "--", "sh", "-c", "echo here; sleep 60") as process:
        wait_for_lines(process, "here", 3)
        for network in machine.networks().values():
            command = ["nsenter", f"--net={network}", "unshare", "--mount", "sh", "-c", show]
            for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
                file, mask = line.split(":")
                found.setdefault(file.split("/")[0], []).append(int(mask.replace(",", ""), 16).bit_count())
    cores = os.cpu_count()
    assert {name: masks for name, masks in found.items() if name not in ("lo", "switch")} == {
        "host0": [cores],
        "host1": [cores],
        "host2": [cores],
        "lab0": [cores] * 3,
    }


def test_neither_ip_nor_tc_is_needed(machine: Machine) -> None:
    done = machine.run("--hosts", "2", *ONE_GBIT, "--", "/bin/echo", "hello", environment={"PATH": "/nowhere"})
    assert sorted(done.stdout.splitlines()) == ["host0 | hello", "host1 | hello"]


def test_hosts_see_one_another_and_themselves_but_not_the_world(machine: Machine) -> None:
    done = machine.run("--hosts", "2", *ONE_GBIT, "--", *python(REACH))
    assert sorted(done.stdout.splitlines()) == [f"host{host} | ['lab0', 'lo'] yes yes no" for host in range(2)]


def test_a_link_carries_its_rate_and_twice_the_rate_carries_twice_as_much() -> None:
    # Headers take 4.4 % of a frame of 1514 bytes. A link never carries more; it carries less where others take the
    # cores meanwhile, hence several times.
    for rate in ("50mbit", "100mbit"):
        cluster = Cluster(num_hosts=2, rate_bits_per_s=parse_rate(rate))
        carried = [0.0]
        while carried[-1] < 0.8:
            assert len(carried) <= 8, carried
            lines: list[Line] = []
            run_lab(cluster, python(TRANSFER, "6000000"), on_line=lines.append, timeout_s=60).check()
            carried.append(float(lines[0].text) * 8 / cluster.rate_bits_per_s)
        assert max(carried) < 1.0


def test_links_change_their_rates_in_order_and_none_before_its_time(machine: Machine) -> None:
    rates = {200_000_000: 0.0, 50_000_000: 0.7, 400_000_000: 1.4}  # from when on
    changes = [f"--rate-change={after_s}s={rate}bit" for rate, after_s in list(rates.items())[1:]]
    command = python(RATES, str(list(rates)[-1]))
    started_s = time.monotonic()  # the same clock in all processes
    with machine.lab("--hosts", "2", "--rate", "200mbit", *changes, "--", *command) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, len(stdout.splitlines())) == (0, 2), stderr
    for line in stdout.splitlines():
        seen = {int(rate): seen_s for rate, seen_s in json.loads(line.partition("|")[2])["lab0"].items()}
        assert list(seen) == list(rates)[-len(seen) :]  # where all was slow, the first are over when it looks
        assert all(seen_s - started_s >= rates[rate] for rate, seen_s in seen.items())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into the lab's networks from outside")
def test_a_rate_changes_at_both_ends_of_every_link(machine: Machine) -> None:
    found: dict[str, list[list[int]]] = {}
    lab = ("--hosts", "3", "--rate", "200mbit", "--rate-change", "0s=50mbit", "--", "sh", "-c", "echo here; sleep 60")
    with machine.lab(*lab) as process:
        wait_for_lines(process, "here", 3)
        for network in machine.networks().values():
            command = ["nsenter", f"--net={network}", *python(RATES, "50000000")]
            told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
            for name, seen in told.items():
                found.setdefault(name, []).append([int(rate) for rate in seen][-1:])
    ends = {f"host{host}": [[50_000_000]] for host in range(3)}
    assert found == {**ends, "lab0": [[50_000_000]] * 3}


def test_gloo_ranks_find_one_another_and_sum() -> None:
    pytest.importorskip("torch")
    lines: list[Line] = []
    cluster = Cluster(num_hosts=3, rate_bits_per_s=1e9)
    run_lab(cluster, python(ALL_REDUCE), on_line=lines.append, timeout_s=90).check()
    assert sorted((line.label, line.text) for line in lines if not line.is_error) == [
        ("host0", "111.0"),
        ("host1", "111.0"),
        ("host2", "111.0"),
    ]
    assert not [line.text for line in lines if line.is_error]


def test_two_labs_run_at_once_with_the_same_addresses_and_ports(machine: Machine) -> None:
    cluster_arguments = ("--hosts", "2", "--rate", "100mbit", "--", *python(TRANSFER, "3000000"))
    with machine.lab(*cluster_arguments) as one, machine.lab(*cluster_arguments) as other:
        outputs = [process.communicate(timeout=60)[0] for process in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0]
    assert all(float(output.split("|")[1]) * 8 < 100e6 for output in outputs)
    machine.check_nothing_is_left()


def test_the_python_call_gives_statuses_lines_and_the_failing_rank(tmp_path: Path) -> None:
    lines: list[Line] = []
    cluster = Cluster(num_hosts=2, rate_bits_per_s=1e9, ranks_per_host=2)
    script = "echo $MINE; [ $RANK = 3 ] && exit 5; sleep 300"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mine").symlink_to("/bin/sh")
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "MINE": "given"}
    result = run_lab(cluster, ["mine", "-c", script], environment=environment, on_line=lines.append, log_dir=tmp_path)
    assert (result.status, result.failed_rank, result.failed_label, result.last_lines) == (5, 3, "host1:1", ("given",))
    assert result.statuses == (143, 143, 143, 5)
    assert {line.text for line in lines} <= {"given"}
    with pytest.raises(LabError, match="rank 3 on host1:1 ended with exit status 5: given"):
        result.check()


def test_the_python_call_ends_ranks_that_take_too_long() -> None:
    cluster = Cluster(num_hosts=2, rate_bits_per_s=1e9)
    with pytest.raises(LabError, match="did not end within 500 ms"):
        run_lab(cluster, ["sleep", "300"], timeout_s=0.5)


def test_an_error_of_whoever_reads_the_lines_ends_the_lab_and_is_raised() -> None:
    def refuse(line: Line) -> None:
        raise KeyError(line.text)

    with pytest.raises(KeyError, match="hello"):
        run_lab(Cluster(num_hosts=2, rate_bits_per_s=1e9), ["sh", "-c", "echo hello; sleep 300"], on_line=refuse)


def test_the_callers_folder_and_modules_do_not_disturb_the_lab(tmp_path: Path) -> None:
    for name in ("signal", "json", "pyroute2"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not me')")
    code = (
        "from mgwfbp.lab import *; print(run_lab(Cluster(1, 1e9), ['pwd'], on_line=lambda it: print(it.text)).status)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{tmp_path}\n0\n"


def test_a_rank_sees_only_the_labs_processes(machine: Machine) -> None:
    code = (
        "import json, os; print(json.dumps([os.getpid(), sorted(int(n) for n in os.listdir('/proc') if n.isdigit())]))"
    )
    done = machine.run("--hosts", "1", *ONE_GBIT, "--", *python(code))
    own, seen = json.loads(done.stdout.split("|")[1])
    assert own in seen
    assert max(seen) < 100
