"""A server's end of its worker: find or start it, lease a sandbox for a call, and see it ended."""

import asyncio
import itertools
import json
import logging
import os
import select
import signal
import socket
import subprocess  # noqa: TID251 - the worker outlives this server: nothing of it is to be killed with us
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import ByteStream, SocketAttribute, UNIXSocketStream

from glovebox_sandboxes.contract.attestation import Attestation
from glovebox_sandboxes.contract.base import Driver, Plan, SandboxSpec, SandboxStats
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.measure import Measured
from glovebox_sandboxes.drivers.registry import Waits
from glovebox_sandboxes.host.descriptors import receive
from glovebox_sandboxes.host.process import END_SECONDS, read_words
from glovebox_sandboxes.session.connection import AttestedSandbox, GuestConnection, host_namespaces
from glovebox_sandboxes.session.run import GRACE_SECONDS
from glovebox_sandboxes.worker import place
from glovebox_sandboxes.worker.messages import HEAD, MAX_DESCRIPTORS, Message, Reader
from glovebox_sandboxes.worker.tables import Alone, SharedTable

START_SECONDS = 20.0
"""For a worker to listen: half a second of imports on an idle machine."""
TURN_SECONDS = 45.0
"""Longest wait for a turn among the calls of all servers."""
WAITING_SECONDS = 60.0
"""For a sandbox that a call waits for: its start and its measurement have bounds of their own."""
ENDED_SECONDS = 1.0
"""Longest that a call which did not end well waits for the worker's word that nothing is left."""
RETRY_SECONDS = (0.1, 5.0)
"""Shortest and longest pause before a worker that has gone is started again."""
_READ = 1 << 16
_SEND_SECONDS = 1.0
_LOOK_SECONDS = 5.0
"""For the counts of a sandbox: the Docker Engine may need two to find out why one has ended."""
_RECORD_SECONDS = 30.0
"""For a slow disk, between a lease and its job."""
_COUNTER_BYTES = 4096
_MOST_SEEN = 65_536
"""Ids of sandboxes that are remembered, so that none is taken twice."""

_log = logging.getLogger(__name__)

Answers = asyncio.Queue[tuple[Message, list[int]]]
"""From the worker, with their descriptors."""
Looked = Awaitable[Message | None]


class LeasedSandbox:
    """A sandbox that the worker made and will end; until then it is one call's."""

    def __init__(self, name: str, channel: ByteStream, handed: dict[str, int], look: Callable[[bool], Looked]) -> None:
        """Take over its channel, and what else was handed by name: see ``worker.source.LiveSandbox``.

        ``look`` asks the worker for its counts, killed before if that is true.
        """
        self.id, self.channel = name, channel
        self._handed = handed
        self._look = look
        self._outlived = "detail" in handed
        """Its counts are read here, also after its end."""
        self._last = SandboxStats()

    def weigh(self, parts: int) -> None:
        """Do nothing: the worker shares processors among all servers."""

    async def kill(self) -> None:
        """Kill its first process, and with it all others, and wait until that is gone: see pid_namespaces(7)."""
        with anyio.CancelScope(shield=True):
            if not self._outlived:
                await self._ask(kill=True, seconds=ENDED_SECONDS)
                self._outlived = True
            await self.channel.aclose()
            if "pidfd" not in self._handed:
                return
            with suppress(ProcessLookupError, PermissionError):  # a container's may be another user's
                signal.pidfd_send_signal(self._handed["pidfd"], signal.SIGKILL)
            with anyio.move_on_after(END_SECONDS):
                await anyio.wait_readable(self._handed["pidfd"])

    def cpu_seconds(self) -> float | None:
        """See ``Sandbox.cpu_seconds``."""
        words = self._read("time")
        if len(words) > 1:  # v2 has a table, in microseconds
            return int(words[words.index("usage_usec") + 1]) / 1e6
        return int(words[0]) / 1e9 if words else None

    async def stats(self) -> SandboxStats:
        """See ``Sandbox.stats``."""
        if "detail" not in self._handed:
            if not self._outlived:
                await self._ask(kill=False, seconds=_LOOK_SECONDS)
            return replace(self._last, detail=getattr(self.channel, "last_words", "") or self._last.detail)
        events, peak = self._read("events"), self._read("peak")
        over = select.poll()
        over.register(self._handed["pidfd"], select.POLLIN)
        ended = over.poll(0)  # of others the last words do not matter
        return SandboxStats(
            out_of_memory="oom_kill" in events and int(events[events.index("oom_kill") + 1]) > 0,
            memory_peak_bytes=int(peak[0]) if peak else None,
            cpu_seconds=self.cpu_seconds(),
            detail=read_words(self._handed["detail"])[-2000:] if ended else "",
        )

    def close(self) -> None:
        """Close the wire and all that was handed."""
        self.channel.extra(SocketAttribute.raw_socket).close()  # noqa: S610 - not Django's; aclose costs a loop's turn
        _close([*self._handed.values()])

    async def _ask(self, *, kill: bool, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            if (found := await self._look(kill)) is not None:
                self._last = SandboxStats(**found)

    def _read(self, what: str) -> list[str]:
        if what not in self._handed:
            return []
        try:
            return os.pread(self._handed[what], _COUNTER_BYTES, 0).decode().split()
        except OSError:  # ENODEV: the group was removed
            return []


@dataclass(frozen=True, slots=True)
class CallLease:
    """A call's sandbox, or leave to start one itself; ``started`` is called once that has started."""

    sandbox: AttestedSandbox | None
    started: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proved:
    """A table, and what it proved with the first sandbox that had it."""

    table: SharedTable
    measured: Measured
    attestation: Attestation


class WorkerLink:
    """One connection to a worker."""

    def __init__(self, link: socket.socket, tell: Callable[[Message], None]) -> None:
        self._link, self._tell = link, tell
        self._reader = Reader()
        self._answers: dict[object, Answers] = {}
        self.numbers = itertools.count(1)
        """Of leases."""
        self.tables: dict[str, SharedTable] = {}
        self.proved: dict[tuple[str, str], _Proved] = {}
        self.prepared: dict[str, SandboxSpec] = {}
        self.lost = asyncio.Event()
        asyncio.get_running_loop().add_reader(link.fileno(), self._receive)

    def ask(self, message: Message, about: object) -> Answers:
        """Send a message; answers about this come into the queue, until ``forget``."""
        answers = self._answers[about] = asyncio.Queue()
        if self.lost.is_set():
            answers.put_nowait(({"kind": "lost"}, []))
        self.send(message)
        return answers

    def send(self, message: Message) -> None:
        """Send a message; the connection is lost if the worker does not take it."""
        try:
            text = json.dumps(message, separators=(",", ":")).encode()
            self._link.sendall(HEAD.pack(len(text)) + text)
        except OSError:
            self.close()

    async def next(self, answers: Answers, seconds: float) -> tuple[Message, list[int]]:
        """Return the next answer; the connection is lost if it does not come in time."""
        late = asyncio.get_running_loop().call_later(seconds, self.close)
        try:
            return await answers.get()
        finally:
            late.cancel()

    async def look(self, lease: int, kill: bool) -> Message | None:
        """Return the worker's counts of a sandbox, which is killed before if ``kill``."""
        answers = self._answers[lease]
        before = [each for each in _drained(answers) if each[0]["kind"] != "looked"]  # of a look that came too late
        for each in before:
            answers.put_nowait(each)
        self.send({"kind": "look", "lease": lease, "kill": kill})
        said, _ = await answers.get()
        if said["kind"] != "looked":  # the connection is lost, or the lease is over
            answers.put_nowait((said, []))
        found: Message | None = said.get("found")
        return found

    def forget(self, about: object) -> None:
        """Drop what still comes about this."""
        for _, descriptors in _drained(self._answers.pop(about)):
            _close(descriptors)

    def close(self) -> None:
        """End the connection, and with it all that was leased over it."""
        if not self.lost.is_set():
            self.lost.set()
            asyncio.get_running_loop().remove_reader(self._link.fileno())
            self._link.close()
            self._reader.close()
            for answers in self._answers.values():
                answers.put_nowait(({"kind": "lost"}, []))

    def _receive(self) -> None:
        try:
            data, descriptors = receive(self._link, _READ, MAX_DESCRIPTORS, socket.MSG_DONTWAIT)
            if not data:
                self.close()
            for message, given in self._reader.feed(data, descriptors):
                self._take(message, given)
        except BlockingIOError:
            return
        except (OSError, LookupError, TypeError, ValueError) as problem:
            _log.warning("the connection to the worker ended: %r", problem)
            self.close()

    def _take(self, message: Message, descriptors: list[int]) -> None:
        kind = message["kind"]
        about = message.get("lease") or message.get("plan") or kind
        if kind == "event":
            self._tell(message)
        elif kind == "table":
            table = SharedTable.decoded(message["table"])
            if table.digest != message["digest"]:
                raise ValueError("a table has another digest than it claims")
            self.tables[message["digest"]] = table
        elif about in self._answers:
            self._answers[about].put_nowait((message, descriptors))
        else:
            _close(descriptors)


class WorkerClient:
    """The worker of a server's state directory, started when it is needed and is not there."""

    def __init__(
        self, state: Path, data: Path, tell: Callable[[Message], None], *, shared: bool, starts: bool = True
    ) -> None:
        """Find it by its directories; ``tell`` gets its events. Unless it ``starts``, it may be missing."""
        self._state, self._data, self._tell, self._shared, self._starts = state, data, tell, shared, starts
        self.link: WorkerLink | None = None
        self._lock = anyio.Lock()
        self._seen: dict[str, None] = {}
        self._own = host_namespaces()
        self._delay = 0.0
        self._retry_at = 0.0

    def close(self) -> None:
        """End the connection."""
        if self.link is not None:
            self.link.close()

    async def prepare(self, driver: Driver, plan: Plan) -> WorkerLink:
        """Have sandboxes of a plan prepared, unless the worker cannot. Raises SandboxError if it is not there."""
        async with self._lock:
            link = self.link
            if link is None or link.lost.is_set():
                link = self.link = await self._connect()
            if plan.digest not in link.prepared:
                message = {"kind": "prepare", "plan": plan.digest, "driver": driver.name, "shared": self._shared}
                answers = link.ask({**message, "spec": asdict(plan.spec)}, plan.digest)
                try:
                    said, _ = await link.next(answers, START_SECONDS)
                finally:
                    link.forget(plan.digest)
                if "what" in said:  # it was connected to other programs, or an earlier runtime
                    _log.warning("the worker prepares no sandboxes of %s: %s", plan.digest, said["reason"])
                elif said["kind"] == "lost":
                    raise _gone("it has ended")
                link.prepared[plan.digest] = plan.spec
            return link

    @asynccontextmanager
    async def lease(
        self, driver: Driver, plan: Plan, key: str, waits: Waits, bound: int | None = None
    ) -> AsyncIterator[CallLease]:
        """Hold a turn for a call during the block, and a sandbox, unless starting one is as quick.

        ``bound``: how many calls of its key may run at one time with it. ``waits`` is awaited before anything is waited
        for. Raises SandboxError.
        """
        link = self.link
        if link is None or link.lost.is_set() or plan.digest not in link.prepared:
            await waits()
            try:
                link = await self.prepare(driver, plan)
            except SandboxError:
                if self._starts:
                    raise
                yield CallLease(None, lambda: None)
                return
        number = next(link.numbers)
        seconds = plan.spec.limits.wall_seconds + GRACE_SECONDS + _RECORD_SECONDS
        message = {"kind": "lease", "lease": number, "plan": plan.digest, "key": key}
        answers = link.ask({**message, "seconds": seconds, "bound": bound}, number)
        sandbox: LeasedSandbox | None = None
        well = False

        try:
            said, descriptors = await _answer(link, answers, waits)
            if said["kind"] == "refused":
                well = True
                if not said["known"]:
                    link.prepared.pop(plan.digest, None)
                yield CallLease(None, partial(link.send, {"kind": "started", "lease": number}))
                return
            try:
                sandbox = await _taken(said, descriptors, driver, partial(link.look, number))
                attested = self._prove(link, plan, said, sandbox)
            except (LookupError, TypeError, ValueError, AttributeError) as problem:
                link.close()
                raise _gone(f"it broke the protocol: {problem!r}") from problem
            yield CallLease(attested, lambda: None)
            well = True
        finally:
            with ExitStack() as over:
                over.callback(link.forget, number)
                try:
                    if sandbox is not None and not well:
                        await sandbox.kill()
                finally:
                    if sandbox is not None:
                        sandbox.close()
                    link.send({"kind": "end", "lease": number})
                if sandbox is not None and not well:
                    await _confirm(answers, sandbox.id)

    def _prove(self, link: WorkerLink, plan: Plan, said: Message, sandbox: LeasedSandbox) -> AttestedSandbox:
        """Check a leased sandbox by our own plan. Raises SandboxError."""
        alone = Alone(namespaces=said["namespaces"], outside=said["outside"], zygote=said["zygote"])
        own = self._own
        known = link.proved.get((plan.digest, said["table"]))
        if known is None:
            table = link.tables[said["table"]]
            measured, attestation = table.attest(plan, alone, own)
            known = link.proved[plan.digest, said["table"]] = _Proved(
                table=table, measured=measured, attestation=attestation
            )
        known.table.require_alone(plan, alone, own)
        if sandbox.id in self._seen:
            raise SandboxError("Leasing a sandbox", f"{sandbox.id} was leased before", "Restart the worker.")
        self._seen[sandbox.id] = None
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        measured = known.measured.model_copy(update={"namespaces": alone.namespaces})
        guest = GuestConnection(sandbox.channel, ready=True)
        return AttestedSandbox(sandbox=sandbox, plan=plan, link=guest, measured=measured, attestation=known.attestation)

    async def _connect(self) -> WorkerLink:
        """Connect to the worker, or start it. Raises SandboxError, also for a while after that failed."""
        if time.monotonic() < self._retry_at:
            raise _gone("it has ended, or could not be started, a moment ago")
        least, most = RETRY_SECONDS
        self._delay = min(max(least, self._delay * 2), most)
        self._retry_at = time.monotonic() + self._delay
        try:
            link = WorkerLink(await anyio.to_thread.run_sync(_reach, self._state, self._data, self._starts), self._tell)
        except OSError as problem:
            raise _gone(str(problem)) from problem
        try:
            said, _ = await link.next(link.ask({"kind": "hello", "version": place.VERSION}, "hello"), START_SECONDS)
        except BaseException:
            link.close()
            raise
        if said.get("version") == place.VERSION:
            self._delay = self._retry_at = 0.0
            link.forget("hello")
            return link
        link.close()
        raise _gone("it is of another version, or does not answer")


async def _answer(link: WorkerLink, answers: Answers, waits: Waits) -> tuple[Message, list[int]]:
    """Return the answer to a lease: ``granted`` or ``refused``. Raises SandboxError."""
    said, descriptors = await link.next(answers, START_SECONDS)
    if said["kind"] == "queued":
        await waits()
        with anyio.move_on_after(TURN_SECONDS) as wait:
            said, descriptors = await answers.get()
        if wait.cancelled_caught:
            reason = f"the calls of all servers have every turn, and none came within {TURN_SECONDS:.0f} seconds"
            raise SandboxError("Waiting for a turn", reason, "Call again later.")
    if said["kind"] == "waiting":
        await waits()
        with anyio.move_on_after(WAITING_SECONDS) as wait:
            while said["kind"] == "waiting":
                said, descriptors = await answers.get()
        if wait.cancelled_caught:
            reason = f"none was ready or could be started within {WAITING_SECONDS:.0f} seconds"
            raise SandboxError("Waiting for a sandbox", reason, "Call again later.")
    if said["kind"] == "lost":
        raise _gone("it has ended")
    return said, descriptors


async def _taken(
    said: Message, descriptors: list[int], driver: Driver, look: Callable[[bool], Looked]
) -> LeasedSandbox:
    with ExitStack() as failed:
        failed.callback(_close, descriptors)
        handed = dict(zip(said["handed"], descriptors, strict=True))
        channel: ByteStream = await UNIXSocketStream.from_socket(handed["wire"])
        if driver.adopt is not None:
            channel = driver.adopt(channel)
        sandbox = LeasedSandbox(said["sandbox"], channel, handed, look)
        failed.pop_all()
    del handed["wire"]
    return sandbox


async def _confirm(answers: Answers, name: str) -> None:
    """Wait for the worker's word that nothing of a sandbox is left; say so if it does not come, or something is."""
    stayed = "the worker has not confirmed it"
    with anyio.CancelScope(shield=True), anyio.move_on_after(ENDED_SECONDS):
        while (said := (await answers.get())[0])["kind"] not in {"ended", "lost"}:
            pass
        stayed = said.get("stayed", "its worker has gone, and it with that")
    if stayed:
        _log.warning("sandbox %s may not be gone: %s", name, stayed)


def _gone(reason: str) -> SandboxError:
    fix = "Try again; if it persists, run `glovebox doctor`, and see worker/log in the state directory."
    return SandboxError("Asking the worker for a sandbox", reason, fix)


def _reach(state: Path, data: Path, starts: bool) -> socket.socket:
    """Connect to the worker, which is started if there is none and it ``starts``. Blocking; raises OSError."""
    if not starts and not (state / "worker").exists():
        raise FileNotFoundError(state / "worker")
    with place.directory(state) as directory:
        address = place.address(directory, place.name(data))
        with suppress(FileNotFoundError, ConnectionRefusedError):
            return _connected(address)
        if not starts:
            raise FileNotFoundError(address)
        place.lock(directory)
        with suppress(FileNotFoundError, ConnectionRefusedError):
            return _connected(address)
        log = os.open(
            "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600, dir_fd=directory
        )
        try:
            command = [sys.executable, "-I", "-m", "glovebox_sandboxes.worker.main", str(state), str(data)]
            started = subprocess.Popen(  # noqa: S603 - the interpreter we run on, with a program from this package
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=place.engine(),
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(log)
        started.communicate()  # until it listens, or has ended
        return _connected(address)


def _connected(address: str) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(_SEND_SECONDS)
        link.connect(address)
        place.require_peer(link)
    except BaseException:
        link.close()
        raise
    return link


def _drained(answers: "asyncio.Queue[Any]") -> Any:
    while not answers.empty():
        yield answers.get_nowait()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
