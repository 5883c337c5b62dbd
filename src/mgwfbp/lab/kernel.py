"""The few Linux calls that Python does not offer before 3.12, and the namespaces a lab lives in.

[Note: who holds what]
A lab's switch, links and hosts are in namespaces without a name: the kernel takes each away with the last process in
it. All processes are in one process namespace, whose first process is the lab's supervisor: when that one ends, however
it ends, the kernel kills all others. And the kernel kills the supervisor when the process that started the lab ends. So
nothing of a lab can outlive it.
"""

import ctypes
import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mgwfbp.errors import LabError

__all__ = [
    "cover_file",
    "die_with_parent",
    "forbidden",
    "inside",
    "make_namespaces",
    "mount_own_proc",
    "new_network",
    "own_sys",
]

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21

# Each of these forbids an ordinary user to make namespaces when it has this value.
_FORBIDDEN_BY = {
    "user.max_user_namespaces": "0",
    "user.max_net_namespaces": "0",
    "user.max_pid_namespaces": "0",
    "kernel.unprivileged_userns_clone": "0",
    "kernel.apparmor_restrict_unprivileged_userns": "1",
}

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A parent that has ended already is not noticed."""
    _call("prctl", _PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


def make_namespaces() -> None:
    """Give this process an empty network and mounts of its own, and its future children a process namespace.

    An ordinary user first becomes the owner of a user namespace, in which all this is allowed and from which
    nothing outside can be changed; what is started from it has no more rights than before.
    """
    flags = _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWPID
    user, group = os.geteuid(), os.getegid()
    ordinary = not _has_capabilities(_CAP_SYS_ADMIN, _CAP_NET_ADMIN)
    try:
        _call("unshare", flags | (_CLONE_NEWUSER if ordinary else 0))
        if ordinary:
            Path("/proc/self/setgroups").write_text("deny", encoding="ascii")  # else the group may not be mapped
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    except OSError as error:
        raise forbidden(error) from error


def forbidden(error: OSError) -> LabError:
    """Say what is missing when the kernel does not let us make a network."""
    reasons = [f"{name} is {value}" for name, value in _FORBIDDEN_BY.items() if _setting(name) == value]
    return LabError(
        f"the kernel does not let us make a network of our own ({', '.join(reasons) or error.strerror or error}): "
        "run as root (in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN), or allow unprivileged user namespaces"
    )


def _has_capabilities(*numbers: int) -> bool:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    return all(held >> number & 1 for number in numbers)


def _setting(name: str) -> str:
    try:
        return Path("/proc/sys", *name.split(".")).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def mount_own_proc() -> None:
    """Let ``/proc`` show this process namespace, for us and our children only.

    Where the kernel refuses (an ordinary user in a container that hides parts of ``/proc``) the old one stays:
    ``/proc/self`` is right in it too, only listing processes by number is not.
    """
    _call("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    # What lies over parts of /proc, as containers with GPUs have it, must lie over the new one too.
    covers = [(point, os.open(point, os.O_PATH)) for point in _mount_points() if point.startswith("/proc/")]
    with suppress(OSError):
        _call("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC), None)
        for point, source in covers:
            with suppress(OSError):
                cover_file(Path(f"/proc/self/fd/{source}"), Path(point))
    for _, source in covers:
        os.close(source)


def cover_file(source: Path, target: Path) -> None:
    """Let `source` be found at `target`, for us and our children only."""
    _call("mount", os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(_MS_BIND | _MS_REC), None)


def _mount_points() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return [line.split()[4] for line in lines]


def new_network() -> int:
    """Make an empty network namespace and return a descriptor of it; it lives as long as the descriptor."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _call("unshare", _CLONE_NEWNET)
        made = os.open("/proc/self/ns/net", os.O_RDONLY)
        _call("setns", here, _CLONE_NEWNET)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise LabError("no more network namespaces: user.max_net_namespaces is reached; use fewer hosts") from error
        raise forbidden(error) from error
    finally:
        os.close(here)
    return made


@contextmanager
def inside(network: int) -> Iterator[None]:
    """Be in a network namespace for a while: sockets opened and processes started there stay in it."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _call("setns", network, _CLONE_NEWNET)
        yield
    finally:
        _call("setns", here, _CLONE_NEWNET)
        os.close(here)


@contextmanager
def own_sys() -> Iterator[None]:
    """Let ``/sys`` show the current network namespace for a while, for us and our children only."""
    _call("mount", b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC), None)
    try:
        yield
    finally:
        _call("umount2", b"/sys", _MNT_DETACH)
