"""Has a second process do half of the work on many items, if there is a second processor.

Standard library only. No program is started: it is a fork of this one, with the same rights, limits and files, and
killed before the result is sent. It talks to this process alone.
"""

from __future__ import annotations

import marshal
import os
import select
from collections import deque
from contextlib import suppress
from itertools import islice
from time import monotonic

from _glovebox_guest.stdlib import Any, Callable, Generator, Iterator, signal

ALONE = 512
"""Items before there is a helper: its start takes as long as searching some hundred small files."""
_OWN = 32
"""Items this process takes at a time, before it checks whether the helper is idle."""
_MOST = 1024
"""Items of one batch of the helper at most."""
_AHEAD = 256
"""Batches this process may finish before one of the helper's, which may wait for its turn on a busy machine.
Each holds as much as one answer at most."""
_SECONDS = 0.02
"""Work per batch of the helper: much more than a change of processes, and less than a noticeable wait."""


def in_order(work: Callable[[list[str]], Any], items: Iterator[str]) -> Generator[Any, None, None]:
    """Yield the results of batches of items, in their order; closing it ends the helper.

    ``work`` runs in either process, and its results are of types that ``marshal`` writes. Items have no NUL, and are
    taken in this process.
    """
    waiting: deque[list[Any]] = deque()
    """Batches in order, each a list of its result; empty while the helper has it."""
    helper: _Helper | None = None
    taken = 0
    try:
        while True:
            if helper is None and taken >= ALONE and len(os.sched_getaffinity(0)) > 1:
                helper = _Helper(work)
            if helper is not None and not helper.items and (given := list(islice(items, helper.size))):
                waiting.append(helper.give(given))
            own = list(islice(items, _OWN))
            taken += len(own)
            if own:
                waiting.append([work(own)])
            if helper is not None and helper.items:
                helper.look(wait=not own or len(waiting) > _AHEAD)
            while waiting and waiting[0]:
                yield waiting.popleft()[0]
            if not own and not waiting:
                return
    finally:
        if helper is not None:
            helper.end()


class _Helper:
    """The other process, with one batch at a time: so neither ever waits for the other to read."""

    def __init__(self, work: Callable[[list[str]], Any]) -> None:
        self._work = work
        self.size = ALONE // 4
        self.items: list[str] = []
        """Its batch; empty while it is idle."""
        self._result: list[Any] = []
        self._began = 0.0
        self._pid = 0
        # A write to a helper that has ended must not end this process.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        orders, give = os.pipe()
        look, results = os.pipe()
        self._orders = open(give, "wb")  # noqa: SIM115 - until ``end``
        self._results = open(look, "rb")  # noqa: SIM115 - as above
        try:
            self._pid = os.fork()
        except OSError:  # no more processes: nothing reads the orders, so the work is done here
            self._pid = -1
        if self._pid == 0:
            try:
                self._orders.close()
                self._results.close()
                with open(orders, "rb") as source, open(results, "wb") as target:
                    while True:
                        items = marshal.load(source)  # noqa: S302 - from the process it is a fork of
                        marshal.dump(self._work(items.split("\0")), target)
                        target.flush()
            finally:
                os._exit(0)
        os.close(orders)
        os.close(results)

    def give(self, items: list[str]) -> list[Any]:
        """Send it a batch; return where its result will be."""
        self.items, self._result, self._began = items, [], monotonic()
        with suppress(OSError):  # it has ended, as ``look`` finds out
            marshal.dump("\0".join(items), self._orders)
            self._orders.flush()
        return self._result

    def look(self, *, wait: bool) -> None:
        """Take its result if it is there; ``wait`` for it otherwise."""
        poll = select.poll()
        poll.register(self._results, select.POLLIN)
        if not poll.poll(None if wait else 0):
            return
        try:
            self._result.append(marshal.load(self._results))  # noqa: S302 - as above
            took = max(monotonic() - self._began, _SECONDS / 8)
            self.size = max(1, min(_MOST, int(self.size * _SECONDS / took)))
        except (EOFError, ValueError, TypeError):  # it has ended, most likely for lack of memory
            self._result.append(self._work(self.items))
        self.items = []

    def end(self) -> None:
        with suppress(OSError):  # as above
            self._orders.close()
        self._results.close()
        if self._pid > 0:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
