"""A worker that lies, hangs or vanishes: its server takes no sandbox that is not as planned, and nothing is left.

The worker is real, and so are its sandboxes; what it says is changed on its way. Unchanged is the control.
"""

import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.fixtures import leftovers
from tests.fixtures.leftovers import until
from tests.fixtures.workers import workers
from tests.fixtures.zygotes import outcome_of

from glovebox_sandboxes.conformance.case import LIMITS
from glovebox_sandboxes.conformance.trial import processes
from glovebox_sandboxes.contract.base import Driver, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.pool.pool import Pool
from glovebox_sandboxes.session.connection import AttestedSandbox, host_namespaces
from glovebox_sandboxes.worker import client
from glovebox_sandboxes.worker.client import WorkerClient
from glovebox_sandboxes.worker.messages import Message, Reader, encode
from glovebox_sandboxes.worker.tables import SharedTable
from glovebox_server.settings import Settings

every = pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.driver(each)) for each in registry.NAMES])
only = pytest.mark.driver("bubblewrap")

Change = Callable[[Message], Message | None]
"""Returns what a server hears in place of a message; None for nothing."""


def meddle(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Change what the worker says on its way."""
    reach = client._reach

    def answers(there: socket.socket, ours: socket.socket) -> None:
        reader = Reader()
        with suppress(OSError):
            while (received := socket.recv_fds(there, 1 << 16, 16))[0]:
                for message, given in reader.feed(*received[:2]):
                    if (said := change(message)) is not None:
                        socket.send_fds(ours, [encode(said)], given if "fds" in said else [])
                    for descriptor in given:
                        os.close(descriptor)
            ours.shutdown(socket.SHUT_RDWR)

    def asks(there: socket.socket, ours: socket.socket) -> None:
        with there, ours:
            back = threading.Thread(target=answers, args=(there, ours))
            back.start()
            with suppress(OSError):
                while data := ours.recv(1 << 16):
                    there.sendall(data)
                there.shutdown(socket.SHUT_RDWR)
            back.join()

    def reached(state: Path, data: Path, starts: bool) -> socket.socket:
        ours, theirs = socket.socketpair()
        there = reach(state, data, starts)
        there.settimeout(None)
        threading.Thread(target=asks, args=(there, ours)).start()
        theirs.settimeout(1)
        return theirs

    monkeypatch.setattr(client, "_reach", reached)


class Scene:
    """A server's end, and what it asks for."""

    def __init__(self, worker: WorkerClient, driver: Driver, plan: Plan, state: Path) -> None:
        self.worker, self.driver, self.plan, self.state = worker, driver, plan, state
        self.waited = 0

    async def _waits(self) -> None:
        self.waited += 1

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[AttestedSandbox | None]:
        """Ask for a sandbox."""
        async with self.worker.lease(self.driver, self.plan, "key", self._waits) as found:
            yield found.sandbox

    async def printed(self, code: str = "print(1)") -> str | None:
        """What a program prints in a sandbox of the worker's; None if there was none."""
        async with self.lease() as leased:
            return None if leased is None else (await outcome_of(leased, code)).stdout.text

    async def ready(self) -> None:
        """Wait until there are some."""
        while await self.printed() is None:  # noqa: ASYNC110 - by asking, as a call does
            await anyio.sleep(0.05)

    async def thrice(self) -> None:
        """Run programs in three sandboxes."""
        await self.ready()
        await self.printed()
        await self.printed()


@asynccontextmanager
async def scene(state: Path, name: str = "bubblewrap") -> AsyncIterator[Scene]:
    """A client of a worker that is ended afterwards."""
    settings = Settings()
    async with registry.opened(settings.data_dir, "g1-1") as drivers:
        driver = await drivers.get(name)
        plan = driver.plan(SandboxSpec(limits=LIMITS, output=True))
        worker = WorkerClient(state, settings.data_dir, lambda _: None, shared=False)
        try:
            yield Scene(worker, driver, plan, state)
        finally:
            worker.close()
            for pid in workers(state):
                os.kill(pid, signal.SIGKILL)


@every
async def test_a_sandbox_is_leased_to_one_call_and_ended(tmp_path: Path, name: str) -> None:
    """The control: each call has another, measured; of all that ran nothing is left, and others are ready."""
    async with scene(tmp_path, name) as here:
        ids: list[str] = []
        while len(ids) < 3:
            async with here.lease() as leased:
                if leased is not None:
                    ids.append(leased.sandbox.id)
                    assert leased.attestation.differences == ()
                    assert (await outcome_of(leased, "print(1)")).stdout.text == "1\n"
            await anyio.sleep(0.01)
        assert len({*ids}) == 3
        await until(lambda: not any(list(Path("/sys/fs/cgroup").glob(f"*/glovebox/*/{each}")) for each in ids))
        async with scene(tmp_path, name) as other:  # another server of the state directory
            await other.ready()
            assert len(workers(tmp_path)) == 1


@every
async def test_what_a_killed_program_used_is_told(tmp_path: Path, name: str) -> None:
    """By the server's own reading, or the worker's: its end, its time, and what it printed."""
    async with scene(tmp_path, name) as here:
        here.plan = here.driver.plan(replace(here.plan.spec, limits=replace(LIMITS, wall_seconds=1)))
        await here.ready()
        found = None
        while found is None:
            async with here.lease() as leased:
                if leased is not None:
                    found = await outcome_of(leased, "print(1, flush=True)\nwhile True: pass")
                    await leased.sandbox.kill()
                    facts, namespaces = await leased.sandbox.stats(), leased.measured.namespaces
            await anyio.sleep(0.01)
        assert (found.ended, found.stdout.text, found.usage.cpu_from) == ("timed_out", "1\n", "group")
        assert found.usage.cpu_ms is not None
        assert found.usage.cpu_ms > 0
        assert facts.out_of_memory is False
        assert facts.memory_peak_bytes is not None
        assert not processes(namespaces)


def _forged(message: Message, **body: Any) -> Message:
    """A table with another measurement, and the digest of that."""
    told = {**message["table"], "body": {**message["table"]["body"], **body}}
    return {**message, "table": told, "digest": SharedTable.decoded(told).digest}


def _with(kind: str, change: Change) -> Change:
    return lambda message: change(message) if message["kind"] == kind else message


OWN = host_namespaces()
LIES: dict[str, tuple[Change, str]] = {
    "another version": (_with("hello", lambda told: {**told, "version": "0"}), "is of another version"),
    "another digest": (_with("table", lambda told: {**told, "digest": "sha256:" + "0" * 64}), "it has ended"),
    "a shared namespace": (
        _with("granted", lambda told: {**told, "namespaces": {**told["namespaces"], "net": OWN["net"]}}),
        "namespaces shared with the host|net namespace is not its own",
    ),
    "another process": (
        _with("granted", lambda told: {**told, "outside": {**told["outside"], "namespaces": OWN}}),
        "found .*from outside|saw different processes",
    ),
    "root": (
        _with("granted", lambda told: {**told, "outside": {**told["outside"], "uids": [0]}}),
        "root on the host|on the host is root",
    ),
    "its zygote's namespaces": (
        _with("granted", lambda told: {**told, "zygote": told["namespaces"]}),
        "namespaces shared with its zygote|namespace is not its own",
    ),
    "the same again": (_with("granted", lambda told: {**told, "sandbox": "s1"}), "was leased before"),
    "no descriptors": (_with("granted", lambda told: {**told, "fds": 0}), "broke the protocol"),
    "no namespaces": (
        _with("granted", lambda told: {**told, "namespaces": None}),
        "broke the protocol|guest's measurement",
    ),
}


@only
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("lie", LIES)
async def test_a_worker_that_lies_has_nothing_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str, later: bool
) -> None:
    """Neither with the first sandbox of a plan, which is compared in full, nor with a later one."""
    change, words = LIES[lie]
    granted: list[Message] = []

    def changed(message: Message) -> Message | None:
        granted.extend([message] * (message["kind"] == "granted"))
        return message if later and message["kind"] == "granted" and len(granted) == 1 else change(message)

    meddle(monkeypatch, changed)
    monkeypatch.setattr(client, "RETRY_SECONDS", (0.0, 0.0))
    async with scene(tmp_path) as here:
        with pytest.raises(SandboxError, match=words):
            await here.thrice()


@only
async def test_a_plan_that_the_worker_does_not_make_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by other programs than those it was connected to: each call starts a sandbox of its own."""
    async with scene(tmp_path) as here:
        await here.ready()
        here.plan = replace(here.plan, action={**here.plan.action, "runtime": "another"})
        assert [await here.printed(), await here.printed()] == [None, None]
    assert [each.rpartition(": ")[2] for each in caplog.messages] == ["its worker makes another plan of it"]


@only
async def test_what_waits_for_profiles_that_are_not_in_effect_any_more_ends(tmp_path: Path) -> None:
    """One that runs is not ended, and what is kept stays, with other covers too (the control)."""
    heard: list[Message] = []
    async with scene(tmp_path) as here:
        here.worker._tell = heard.append
        await here.ready()
        pool, spec = Pool(worker=here.worker), here.plan.spec
        async with here.lease() as leased:
            pool.keep_only([replace(spec, output=False), replace(spec, masks=())])
            await here.ready()
            assert [each["what"] for each in heard if each["what"] == "cleared"] == []
            pool.keep_only([replace(spec, output=False)])
            await until(lambda: here.plan.digest not in here.worker.link.prepared)  # type: ignore[union-attr]
            assert leased is not None
            assert (await outcome_of(leased, "print(1)")).stdout.text == "1\n"
        await until(lambda: "cleared" in [each["what"] for each in heard], 20)
        await here.ready()  # where it is asked for again


@only
async def test_a_plan_that_the_worker_has_forgotten_is_prepared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call starts a sandbox of its own meanwhile."""
    heard: list[str] = []

    def change(message: Message) -> Message:
        heard.append(message["kind"])
        known = message["kind"] != "granted" or heard.count("granted") != 2
        return message if known else {"kind": "refused", "lease": message["lease"], "known": False}

    meddle(monkeypatch, change)
    async with scene(tmp_path) as here:
        await here.ready()
        assert await here.printed() is None
        await here.ready()
    assert heard.count("prepared") == 2


@only
async def test_a_measurement_that_is_not_as_planned_is_found_by_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the worker stands by it: the server compares with a plan of its own."""
    names: dict[str, str] = {}

    def change(message: Message) -> Message:
        if message["kind"] == "table":
            forged = _forged(message, capabilities=1 << 21)
            names[message["digest"]] = forged["digest"]
            return forged
        return {**message, "table": names[message["table"]]} if message["kind"] == "granted" else message

    meddle(monkeypatch, change)
    async with scene(tmp_path) as here:
        with pytest.raises(SandboxError, match="capabilities: planned 0x0, found 0x200000"):
            await here.ready()


@only
@pytest.mark.parametrize("stopped", [True, False], ids=["hangs", "says nothing"])
async def test_a_call_ends_though_its_worker_does_not_confirm_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stopped: bool
) -> None:
    """The server kills the sandbox itself, and says that the worker has not told it so."""
    meddle(monkeypatch, lambda message: None if message["kind"] == "ended" and not stopped else message)
    monkeypatch.setattr(client, "ENDED_SECONDS", 0.1)
    async with scene(tmp_path) as here:
        await here.ready()
        namespaces: list[Mapping[str, int]] = []

        async def fail() -> None:
            async with here.lease() as leased:
                assert leased is not None
                namespaces.append(leased.measured.namespaces)
                assert processes(namespaces[0])
                if stopped:
                    os.kill(workers(tmp_path)[0], signal.SIGSTOP)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await until(lambda: not processes(namespaces[0]))
    said = [each for each in caplog.messages if "may not be gone" in each]
    assert [each.partition(": ")[2] for each in said] == ["the worker has not confirmed it"]


@only
@pytest.mark.parametrize("job", [False, True], ids=["before the job", "after it"])
async def test_a_worker_that_vanishes_takes_its_sandboxes_along_and_another_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: bool
) -> None:
    monkeypatch.setattr(client, "RETRY_SECONDS", (0.0, 0.0))
    async with scene(tmp_path) as here:
        await here.ready()
        (worker,) = workers(tmp_path)

        async def call() -> None:
            async with here.lease() as leased:
                assert leased is not None
                if job:
                    assert (await outcome_of(leased, "print(1)")).stdout.text == "1\n"
                family = leftovers.family(worker)
                os.kill(worker, signal.SIGKILL)
                await until(lambda: not leftovers.alive(family))
                if not job:
                    await outcome_of(leased, "print(1)")

        if job:
            await call()
        else:
            with pytest.raises(SandboxError):
                await call()
        await here.ready()
        assert workers(tmp_path) != [worker]
    await until(lambda: not leftovers.groups(worker))
