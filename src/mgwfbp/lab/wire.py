"""What the process outside a lab and the supervisor inside tell one another: one order in, frames out."""

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum

from mgwfbp.lab.cluster import Cluster

__all__ = ["Frame", "FrameWriter", "Kind", "Order", "read_frames"]

_HEADER = struct.Struct("!BIII")


@dataclass(frozen=True, slots=True)
class Order:
    """What the supervisor is to do."""

    cluster: Cluster
    program: str  # what to run, found on the ranks' own search path
    command: tuple[str, ...]  # its arguments, the name it is called by first
    environment: dict[str, str]  # what every rank inherits
    parent_pid: int  # the process outside, with which all must end
    directory: str  # where the lab may keep files
    mps_control: str | None  # the program that starts CUDA MPS, if that is to be done
    timeout_s: float | None

    def dumps(self) -> bytes:
        """Write the order as one line; odd bytes in arguments survive."""
        return json.dumps(asdict(self)).encode("ascii") + b"\n"

    @classmethod
    def loads(cls, line: bytes) -> "Order":
        """Read what `dumps` wrote."""
        fields = json.loads(line)
        cluster, command = Cluster(**fields.pop("cluster")), tuple(fields.pop("command"))
        return cls(cluster=cluster, command=command, **fields)


class Kind(IntEnum):
    """What a frame tells."""

    STDOUT = 1  # a rank wrote this
    STDERR = 2  # a rank wrote this
    EXIT = 3  # a rank ended with this status
    NOTE = 4  # something the user should know
    FAILURE = 5  # the lab itself cannot go on


@dataclass(frozen=True, slots=True)
class Frame:
    """One message from inside the lab."""

    kind: Kind
    rank: int = 0
    status: int = 0  # of a rank that ended: its exit status, or 128 + the signal that killed it
    payload: bytes = b""


class FrameWriter:
    """Writes frames to a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, frame: Frame) -> None:
        """Write one frame, and wait for the reader where the pipe is full."""
        header = _HEADER.pack(frame.kind, frame.rank, frame.status, len(frame.payload))
        rest = memoryview(header + frame.payload)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


def read_frames(descriptor: int) -> Iterator[Frame]:
    """Read frames until the pipe ends; a frame cut short by a killed writer is dropped."""
    with open(descriptor, "rb") as pipe:
        while len(header := pipe.read(_HEADER.size)) == _HEADER.size:
            kind, rank, status, length = _HEADER.unpack(header)
            payload = pipe.read(length)
            if len(payload) < length:
                return
            yield Frame(Kind(kind), rank, status, payload)
