"""Every way a call can end leaves one last record and nothing else, wherever it is stopped. No real sandbox."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, cast
from unittest.mock import AsyncMock, Mock

import anyio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.fixtures.artifact_stores import a_store
from tests.fixtures.brokered import Heard
from tests.fixtures.channels import READY, Channel, Guest, Weightless

from glovebox_audit import chain
from glovebox_audit.chain import Draft, Head, Record, draft
from glovebox_audit.file import Follower
from glovebox_audit.place import AuditError
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_sandboxes.contract.attestation import made_with
from glovebox_sandboxes.contract.base import GUEST_UID, Capabilities, Plan, SandboxSpec, SandboxStats
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.contract.measure import Expected
from glovebox_sandboxes.host.host_view import HostView, unseen
from glovebox_sandboxes.pool.pool import Pool, SandboxProvider
from glovebox_sandboxes.session.connection import attest, host_namespaces
from glovebox_sandboxes.worker.client import CallLease
from glovebox_server.app import check_example
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.calls import CallResult, Principal
from glovebox_server.core.broker import Broker, _pass_on, _show_live
from glovebox_server.core.rights import Rights
from glovebox_server.guards.admission.admission import Admission
from glovebox_server.guards.journal.journal import CallJournal, SandboxDescriber
from glovebox_server.guards.registry import GuardSet
from glovebox_server.receipts.keys import Signer
from glovebox_server.receipts.recorder import ReceiptIssuer
from glovebox_server.tools import TOOLS

ARGUMENTS: dict[str, Any] = {"code": "1", "inputs": (), "timeout_seconds": None}
SIGNER = Signer(Ed25519PrivateKey.generate())
MEASURED = {**READY, "namespaces": {"net": 1}}
FAKE = Capabilities(driver="fake", level="namespaces", version="1.0", limits={})


@dataclass
class Recorder:
    """An audit log in memory that takes two turns of the event loop for a record, and fails where it is told to."""

    events: list[Any] = field(default_factory=list)
    fails: str = ""
    writes: list[list[str]] = field(default_factory=list)
    """What was written together."""
    receipts: list[Any] = field(default_factory=list)
    """One per last word."""
    lost: dict[str, str] = field(default_factory=dict)

    head: Head = field(default_factory=lambda: Head(seq=1, hash="0" * 64))

    async def append_all(
        self, events: Sequence[Any], then: Callable[[Sequence[Draft]], tuple[Follower, int]] | None = None
    ) -> list[Record]:
        """Take events, and keep receipts apart; like the real one, all or none, not interrupted by cancellation."""
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
        if any(event.kind in self.fails.split() for event in events):
            raise AuditError("record it in /secret/state", "No space left on device", "Make room.")
        self.events += events
        self.writes.append([event.kind for event in events])
        drafts = [event if isinstance(event, Draft) else draft(event) for event in events]
        place: dict[str, Any] = {"seq": 1, "time": "2026-11-20T12:00:00.000001Z", "server": "s", "prev": "0" * 64}
        records = [chain.seal(each, **place) for each in drafts]
        if then is not None:
            follower, _ = then(drafts)
            self.receipts.append(follower(records[-1]))
            records.append(chain.seal(self.receipts[-1], **place))
        return records

    def lose(self, call_id: str, reason: str) -> None:
        self.lost[call_id] = reason

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def last_words(self) -> list[Any]:
        return [event for event in self.events if not isinstance(event, Draft) and event.ends_call]


@dataclass
class Driver:
    """A driver whose sandboxes are tasks, each with a guest that follows the rules."""

    name: str = "fake"
    capabilities: Capabilities = FAKE
    opened: int = 0
    plans: list[Plan] = field(default_factory=list)
    """Of all that were opened."""
    live: int = 0
    problem: Exception | None = None
    measured: Mapping[str, Any] = field(default_factory=lambda: MEASURED)
    script: Callable[[Guest], Awaitable[None]] | None = None
    prepares: bool = False
    """Whether it lets sandboxes be prepared; else each is started for its call."""

    async def choose(self, _: Any, spec: SandboxSpec, waits: Any = anyio.lowlevel.checkpoint) -> tuple["Driver", Plan]:
        """The drivers of the broker: this one, known already where sandboxes are prepared."""
        if not self.prepares or self.problem is not None:
            await waits()
        if isinstance(self.problem, UnsupportedSpecError):
            raise self.problem
        return self, self._plan(spec)

    def _plan(self, spec: SandboxSpec) -> Plan:
        expected = Expected(uid=GUEST_UID, interfaces=("lo",), writable=(), mounts=(), namespaces=("net",))
        return Plan(driver="fake", level="namespaces", spec=spec, action={}, expected=expected)

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator["Driver.Sandbox"]:
        self.opened += 1
        self.plans.append(plan)
        name = f"s{self.opened}"
        self.live += 1
        channel = Channel()
        try:
            await anyio.lowlevel.checkpoint()
            if self.problem is not None:
                raise self.problem
            sandbox = Driver.Sandbox(self, channel, name)
            task = asyncio.ensure_future(sandbox.guest())  # stands for a process: it belongs to no task group
            try:
                yield sandbox
            finally:
                task.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([task])
        finally:
            await channel.aclose()
            self.live -= 1

    class Sandbox(Weightless):
        def __init__(self, driver: "Driver", channel: Channel, name: str) -> None:
            self.id = name
            self.driver, self.channel = driver, channel

        async def guest(self) -> None:
            guest = Guest(self.channel)
            try:
                await guest.say(guest.wire.message("ready", self.driver.measured))
                while guest.wire.state != "running":
                    guest._early = (await guest.hear())[1:]
                if self.driver.script is not None:
                    await self.driver.script(guest)
                else:
                    await guest.file("a.txt", b"content")
                    await guest.done()
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
                pass

        async def host_view(self) -> HostView:
            return unseen("it is a task of the test")

        async def kill(self) -> None:
            await self.channel.aclose()

        def cpu_seconds(self) -> None:
            """Nothing counts it."""

        async def stats(self) -> SandboxStats:
            return SandboxStats()


class Worker:
    """A worker that has a sandbox ready of every plan but those that are new to it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.plans: list[Plan] = []
        self.started = 0

    @asynccontextmanager
    async def lease(
        self, driver: Driver, plan: Plan, _key: str, waits: Any, _bound: int | None
    ) -> AsyncIterator[CallLease]:
        """Lease one, or leave it to the call."""
        if plan not in self.plans or not driver.prepares:
            await waits()
            self.plans += [plan]
            yield CallLease(None, self._start)
            return
        async with driver.open(plan) as sandbox:
            yield CallLease(await attest(cast("Any", sandbox), plan), self._start)

    def _start(self) -> None:
        self.started += 1


@dataclass
class Scene:
    broker: Broker
    guards: GuardSet
    audit: Recorder
    driver: Driver
    worker: Worker

    def guarded(self, **changes: Any) -> "Scene":
        guards = replace(self.guards, **changes)
        return replace(self, guards=guards, broker=replace(self.broker, guards=guards, sandboxes=guards.sandboxes))

    async def call(self, **arguments: Any) -> CallResult:
        who, given = Principal(id="local:1", transport="cli"), {**ARGUMENTS, **arguments}
        return await self.broker.submit(who, "run_python", given, Heard(), call_id="c_" + "0" * 26)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """A broker over the shipped profiles, a real artifact store and pool, and everything else in memory."""
    audit, driver = Recorder(), Driver(measured={**MEASURED, "namespaces": {"net": host_namespaces()["net"] + 1}})
    worker = Worker(driver)
    async with a_store(tmp_path / "artifacts") as store:
        pool = Pool(SandboxDescriber(), worker=cast("Any", worker))
        rights = Rights(profiles=load([SHIPPED], check_example=check_example), workspace=None)
        sandboxes = SandboxProvider(drivers=cast("Any", driver), pool=pool)
        guards = GuardSet(
            rights_of=lambda _: rights, admission=Admission(), sandboxes=sandboxes, artifacts=store,
            credentials=cast("Any", None),
        )  # fmt: skip
        receipts = ReceiptIssuer(log=cast("Any", audit), signer=SIGNER, version="0", server_id="s")
        journal = CallJournal(receipts=receipts, forms_of=guards.forms_of)
        broker = Broker(tools=TOOLS, guards=guards, sandboxes=sandboxes, artifacts=store, journal=journal)
        yield Scene(broker=broker, guards=guards, audit=audit, driver=driver, worker=worker)
    assert driver.live == 0


async def test_a_call_from_decision_to_result(scene: Scene) -> None:
    """The control: five records in the order of what they announce."""
    result = await scene.call()
    assert not result.failed
    assert scene.audit.kinds() == ["call.decided", "sandbox.started", "artifact.collected", "call.finished"]
    assert [each["name"] for each in result.structured["artifacts"]] == ["a.txt"]
    assert (scene.driver.opened, scene.driver.live) == (1, 0)


async def test_a_call_gets_the_sandbox_that_waits_and_nobody_gets_it_again(scene: Scene) -> None:
    """Each call's records and result are what they are without a pool, and its sandbox is gone after it."""
    scene.driver.prepares = True
    ids = []
    for number in range(3):
        scene.audit.events.clear()
        result = await scene.call()
        assert not result.failed
        assert scene.audit.kinds() == ["call.decided", "sandbox.started", "artifact.collected", "call.finished"]
        ids.append(scene.audit.events[1].data["sandbox_id"])
        # One disk write where a sandbox stood ready; before one is waited for or started, the decision's own.
        ready = number > 0
        assert scene.audit.writes[0] == ["call.decided", "sandbox.started"][: 1 + ready]
        scene.audit.writes.clear()
    assert len(set(ids)) == 3


async def test_a_call_alone_asks_no_worker_and_a_program_without_modules_for_another_plan(scene: Scene) -> None:
    scene.driver.prepares = True
    alone = scene.guarded(sandboxes=replace(scene.broker.sandboxes, pool=Pool(SandboxDescriber())))
    await alone.call(code="import pandas")
    assert scene.worker.plans == []
    assert [plan.spec.preload for plan in scene.driver.plans] == [()]
    for code, kinds in (("print(1)", [False]), ("import pandas", [False, True])):
        await scene.call(code=code)
        assert [bool(plan.spec.preload) for plan in scene.worker.plans] == kinds
    assert scene.worker.started == 2
    assert [bool(plan.spec.preload) for plan in scene.driver.plans] == [False] * 3


async def test_a_call_whose_decision_is_not_on_disk_has_no_last_word_either(scene: Scene) -> None:
    """Whether it is there is not known, so it is not written again; if it is, the call is lost."""
    scene.driver.prepares = True
    await scene.call()
    scene.audit.fails = "sandbox.started"
    scene.audit.writes.clear()
    with pytest.raises(AuditError):
        await scene.call()
    assert scene.audit.writes == []
    assert len(scene.audit.lost) == 1


@pytest.mark.long
@pytest.mark.parametrize("prepared", [False, True], ids=["cold", "prepared"])
async def test_wherever_a_call_is_cancelled_nothing_is_left(scene: Scene, tmp_path: Path, *, prepared: bool) -> None:
    """Cancelled before its first step, before its second, and so on until it is through."""
    if prepared:
        scene.driver.prepares = True
        await scene.call()

    async def cancelled_after(steps: int) -> bool:
        result: list[CallResult] = []

        async def run() -> None:
            result.append(await scene.call())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        return not result

    for steps in range(3000):
        scene.audit.events.clear()
        cancelled = await cancelled_after(steps)
        assert scene.driver.live == 0
        kinds = scene.audit.kinds()
        # What did not get as far as its decision has no record; everything else has exactly one last word.
        assert len(scene.audit.last_words()) == (1 if kinds else 0), (steps, kinds)
        if cancelled and kinds:
            assert kinds[-1] in ("call.cancelled", "call.finished")
        if not cancelled:
            assert kinds[-1] == "call.finished"
            break
    else:
        pytest.fail("the call never came through")
    assert steps > 20
    incoming = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file() and "incoming" in str(path)]
    assert incoming == []


@pytest.mark.parametrize("kind", ["call.decided", "sandbox.started", "artifact.collected", "call.finished"])
async def test_without_its_record_an_effect_does_not_happen(scene: Scene, kind: str) -> None:
    """The log fails at one record: the caller hears exactly that, and nothing after it was done."""
    scene.audit.fails = kind
    with pytest.raises(AuditError):
        await scene.call()
    order = ["call.decided", "sandbox.started", "artifact.collected", "call.finished"]
    done = order[: order.index(kind)]
    assert scene.audit.kinds() == ([*done, "call.failed"] if done else [])
    assert scene.driver.opened == (0 if kind == "call.decided" else 1)
    assert scene.driver.live == 0
    for event in scene.audit.last_words():
        assert event.error == "AuditError"
        assert "/secret" not in event.reason


async def test_a_call_whose_last_word_cannot_be_written_is_handed_over_as_lost(scene: Scene) -> None:
    """Not while one of its last words can still be: then it has failed (control)."""
    scene.audit.fails = "call.finished"
    with pytest.raises(AuditError):
        await scene.call()
    assert scene.audit.lost == {}
    scene.audit.fails = "call.finished call.failed"
    with pytest.raises(AuditError):
        await scene.call()
    assert list(scene.audit.lost.values()) == ["Its last record could not be written: No space left on device."]


@pytest.mark.parametrize(
    ("problem", "error", "words"),
    [
        (UnsupportedSpecError("limits", "not here", "Fix it."), "UnsupportedSpecError", "not here"),
        (SandboxError("Starting", "'/home/a b/x' is missing", "Fix it."), "SandboxError", "[host path] is"),
        (RuntimeError("secret words of /etc/passwd"), "RuntimeError", "Internal error"),
        (ExceptionGroup("several", [ValueError()]), "ExceptionGroup", "Internal error"),
        (OSError(28, "No space left on device", "/var/lib/x"), "OSError", "Internal error"),
    ],
)
async def test_our_own_failures_are_a_calls_last_word(scene: Scene, problem: Exception, error: str, words: str) -> None:
    """Also those nobody foresaw, by their class alone; none tells a host path."""
    scene.driver.problem = problem
    with pytest.raises(type(problem)):
        await scene.call()
    (last,) = scene.audit.last_words()
    assert (last.kind, last.error) == ("call.failed", error)
    assert words in last.reason
    assert "/home" not in last.reason
    assert "/etc" not in last.reason


@pytest.mark.parametrize(
    ("said", "words"), [(b"\xff" * 20, "broke the wire's protocol"), (b"", "ended without an outcome")]
)
async def test_a_guest_that_breaks_the_wire_or_dies_is_a_failed_call(scene: Scene, said: bytes, words: str) -> None:
    """Not an internal error, and not a program's outcome: nothing can be said about that."""

    async def script(guest: Guest) -> None:
        if said:
            await guest.say(said)
            await anyio.sleep_forever()
        guest.channel.to_host.close()

    scene.driver.script = script
    with pytest.raises(SandboxError, match=words):
        await scene.call()
    assert scene.audit.kinds() == ["call.decided", "sandbox.started", "call.failed"]


async def test_isolation_that_is_not_as_planned_runs_nothing(scene: Scene) -> None:
    """The record says what was found, the job was never given."""
    scene.driver.measured = {**scene.driver.measured, "capabilities": 1 << 21}
    told: list[str] = []

    async def script(guest: Guest) -> None:
        told.append(guest.wire.state)

    scene.driver.script = script
    with pytest.raises(SandboxError, match="capabilities: planned 0x0, found 0x200000"):
        await scene.call()
    (started,) = [event.data for event in scene.audit.events if event.kind == "sandbox.started"]
    (plan,), driver = scene.driver.plans, cast("Any", scene.driver)
    assert (started["sandbox_id"], started["host"], started["verified"]) == ("s1", made_with(driver, plan), False)
    assert (started["driver"], started["level"], started["plan_digest"]) == ("fake", "namespaces", plan.digest)
    assert started["measured"].items() >= scene.driver.measured.items()
    (differs,) = [row for row in started["fields"] if row["verdict"] == "differs"]
    assert (differs["field"], differs["planned"], differs["inside"]) == ("capabilities", "0x0", "0x200000")
    assert told == []


async def test_what_is_refused_starts_nothing(scene: Scene) -> None:
    """One record decides and ends it; an unknown artifact has the words for every one that is not the caller's."""
    result = await scene.call(timeout_seconds=599.0)
    assert result.failed
    assert result.structured["refused"]["rule"] == "limits.wall_seconds"
    assert scene.driver.opened == 0
    assert len(scene.audit.events) == 1
    result = await scene.call(inputs=("artifact://" + "0" * 26,))
    assert result.structured["refused"]["rule"] == "artifacts.unknown"
    assert scene.driver.opened == 0
    rights = Rights(profiles=ProfileSet({}, {}), workspace=None)
    empty = scene.guarded(rights_of=lambda _: rights).broker
    result = await replace(scene, broker=empty).call()
    assert result.structured["refused"]["rule"] == "profile.missing"
    assert scene.driver.opened == 0


async def test_an_input_that_cannot_be_read_is_a_failed_call(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision is on the record before the disk's failure is told."""

    def fail(*_: object) -> NoReturn:
        raise ArtifactStoreError("reading an artifact", "Input/output error", "Check the disk.")

    monkeypatch.setattr("glovebox_server.artifacts.store.ArtifactStore.open", fail)
    with pytest.raises(ArtifactStoreError):
        await scene.call(inputs=("artifact://" + "0" * 26,))
    assert scene.audit.kinds() == ["call.decided", "call.failed"]


@pytest.mark.parametrize("complete", [True, False])
async def test_what_a_mask_withheld_is_shown_where_all_live_output_was_passed_on_alone(*, complete: bool) -> None:
    """Else the rest of what a canary is in would still be shown at the end."""
    look, transform, outcome = Mock(is_complete=complete, ended=AsyncMock()), AsyncMock(), Mock(ended="exited")
    await _pass_on(Mock(now=Mock(observers=[look], transforms=[transform])), outcome)
    look.ended.assert_awaited_once_with(outcome)
    transform.assert_awaited_once_with(outcome, complete)


@pytest.mark.parametrize("observers", [1, 2])
def test_live_output_has_one_observer(observers: int) -> None:
    """The control is one: of two, neither would know what the other withholds."""
    call = Mock(now=Mock(wrap_live=[], observers=[Mock(name="look")] * observers))
    with nullcontext() if observers == 1 else pytest.raises(AssertionError, match="one observer"):
        assert _show_live(call) is call.now.observers[0].printed.return_value
