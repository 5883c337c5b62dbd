"""Ranks meet within a stated time, or each says which one did not come.

Torch waits for all ranks at once: where one is missing or stopped the others end late, with pages of C++ frames and
without its number, or not at all. So ranks report in torch's store first, one by one, and only then connect.

[Note: waiting inside torch] A call to a store whose rank is stopped, or a connection to a rank that is, does not
return, and no exception reaches the thread that made it. A second thread watches the time and ends the process.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from mgwfbp.cli.output import talk
from mgwfbp.errors import MeasureError

__all__ = ["START_S", "meeting"]

# How long ranks wait for the others to start: on a busy machine they do so slowly.
START_S = 120.0
# How long a rank that is there takes at most to answer.
ANSWER_S = 5.0
_POLL_S = 0.1

_Store = Any  # torch.distributed.Store, which torch does not export to type checkers


@contextmanager
def meeting(patience_s: float = START_S) -> Iterator[_Store]:
    """Wait until all ranks of the environment are there and give their store, to connect with inside the context.

    All ranks must call it. Where one does not come in ``patience_s``, or does not connect in as long again, every
    other leaves the process, or raises a `MeasureError`, with a line that names it.
    """
    roll = _RollCall(patience_s)
    watch = threading.Thread(target=roll.watch, name="mgwfbp meeting", daemon=True)
    watch.start()
    try:
        yield roll.gather()
    finally:
        roll.is_over.set()
        watch.join()


class _RollCall:
    """Who of the ranks is there, by their own word."""

    def __init__(self, patience_s: float) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.is_over = threading.Event()
        self._patience_s = patience_s
        self._deadline_s = time.monotonic() + patience_s
        self._address, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Workers that are started again may find the store of before.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"mgwfbp/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}"
        # What to answer to "who is missing?", as far as this rank has come.
        self._find_missing: Callable[[], str] = lambda: f"rank 0 did not come {self._when}"

    @property
    def _when(self) -> str:
        return f"within {self._patience_s:g} s"

    def gather(self) -> _Store:
        """Return the store once every rank has reported."""
        # torchrun may keep the store itself.
        keeps_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not keeps_store:
            self._reach()
        store = self._open(is_master=keeps_store)
        self._find_missing = lambda: self._did_not_come(self._silent(self._open(), "here"))
        store.set(f"here/{self.rank}", "")
        store.add("count", 1)
        while store.add("count", 0) < self.world:
            if store.check(["said"]):  # by a rank that came earlier, and has waited long enough
                raise MeasureError(store.get("said").decode())
            if self._is_late() and (missing := self._silent(store, "here")):
                said = self._did_not_come(missing)
                store.set("said", said)
                self._let_others_ask()
                raise MeasureError(said)
            time.sleep(_POLL_S)
        self._find_missing = lambda: self._unconnected(self._open())
        self._deadline_s = time.monotonic() + self._patience_s
        return store

    def watch(self) -> None:
        """End the process where it waits too long inside torch: [Note: waiting inside torch]."""
        while not self.is_over.wait(_POLL_S):
            if time.monotonic() > self._deadline_s + ANSWER_S:
                break
        else:
            return
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(self._find_missing()), daemon=True)
        asking.start()
        asking.join(2 * ANSWER_S)
        silent = f"rank 0 does not answer at {self._address}:{self._port}, is it stopped?"
        if not self.is_over.is_set():
            talk(f"mgwfbp, rank {self.rank}: {answers[0] if answers else silent}")
            self._let_others_ask()
            os._exit(1)

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline_s

    def _let_others_ask(self) -> None:
        if self.rank == 0:  # whose end is that of the store
            time.sleep(ANSWER_S)

    def _reach(self) -> None:
        """Wait until somebody listens where the store will be; torch would complain of every attempt."""
        while True:
            try:
                socket.create_connection((self._address, self._port), timeout=self._patience_s).close()
            except OSError as error:
                if self._is_late():
                    where = f"{self._address}:{self._port}: {error.strerror or error}"
                    raise MeasureError(f"{self._find_missing()} ({where})") from None
                time.sleep(_POLL_S)
            else:
                return

    def _open(self, *, is_master: bool = False) -> _Store:
        import torch.distributed

        dist: Any = torch.distributed
        store = dist.TCPStore(
            self._address,
            self._port,
            self.world,
            is_master,
            timeout=timedelta(seconds=2 * self._patience_s + 60),  # the watch comes first
            wait_for_workers=False,
            multi_tenant=is_master,
        )
        return dist.PrefixStore(self._prefix, store)

    def _silent(self, store: _Store, question: str) -> list[int]:
        """Return the ranks that have not answered a question."""
        return [rank for rank in range(self.world) if not store.check([f"{question}/{rank}"])]

    def _did_not_come(self, missing: list[int]) -> str:
        return f"{_ranks(missing)} did not come {self._when}"

    def _unconnected(self, store: _Store) -> str:
        """Name the ranks that came and then fell silent: they do not answer now that all others ask the same."""
        store.set(f"waits/{self.rank}", "")
        time.sleep(ANSWER_S)
        silent = self._silent(store, "waits")
        if not silent:
            return f"the ranks could not connect to one another {self._when}"
        return f"{_ranks(silent)} came, but did not connect to the others {self._when}"


def _ranks(ranks: list[int]) -> str:
    """Name some ranks.

    >>> _ranks([3]), _ranks([0, 2]), _ranks(list(range(9)))
    ('rank 3', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4, …')
    """
    shown = ", ".join(str(rank) for rank in ranks[:5])
    return f"rank{'s' * (len(ranks) != 1)} {shown}{', …' if len(ranks) > 5 else ''}"
