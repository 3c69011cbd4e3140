"""An app with a real audit log and a broker that really waits and is cancelled; only sandboxes are missing."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
from pydantic import Field
from tests.fixtures.artifact_stores import collector_of, receive
from tests.fixtures.callers import give_token

from glovebox_audit.events import CallCancelled, CallFinished
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_profiles.compile import ProfileSet
from glovebox_sandboxes.contract.base import Capabilities, Limits
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_sandboxes.runtime.environments import Environment
from glovebox_server.app import App
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import CallResult, Content, Decision, Image, Link, Listener, Principal, Text, ToolCall, Trace
from glovebox_server.core.call import find_tool, validate_arguments
from glovebox_server.core.rights import ActivePolicy, Governed, Rights
from glovebox_server.guards.admission.admission import Admission
from glovebox_server.guards.journal import journal
from glovebox_server.requests import Refusals, Runs
from glovebox_server.tools.base import Arguments, Tool, ToolAnswer, ToolResult

DIGEST = "sha256:" + "0" * 64
LIMITS = Limits(
    wall_seconds=30,
    cpu_seconds=20,
    memory_bytes=1 << 29,
    pids=64,
    scratch_bytes=1 << 28,
    output_bytes=1 << 20,
    output_files=8,
    stream_bytes=1 << 18,
)
PIXEL = bytes.fromhex("89504e470d0a1a0a")


class RunArguments(Arguments):
    """Like ``run_python``; the code is a word that says how the call goes."""

    code: str = Field(max_length=1000, description="Python source")
    tag: str = ""
    timeout_seconds: float | None = Field(default=None, gt=0, le=120)
    inputs: tuple[str, ...] = ()


class RunResult(ToolResult):
    """What comes back."""

    ended: str | None = None
    tag: str = ""
    stdout: str = ""


def _answer(outcome: Outcome) -> ToolAnswer:
    """Never asked: a fake broker answers before there is a sandbox."""
    raise NotImplementedError(outcome)


RUN = Tool(
    name="run_python",
    title="Run Python",
    description="Run a short program.",
    arguments=RunArguments,
    result=RunResult,
    kind="python",
    answer=_answer,
)


class EmptyHost:
    """The drivers of a host that has none of their mechanisms."""

    async def get(self, name: str) -> SimpleNamespace:
        """One of them."""
        return SimpleNamespace(capabilities=Capabilities(driver=name, level="namespaces", version="", limits={}))


@dataclass(slots=True, kw_only=True)
class WaitingBroker:
    """Does what the code says and writes the records a real broker writes."""

    audit: AuditLog
    artifacts: ArtifactStore
    admission: Admission = field(default_factory=Admission)
    running: dict[str, ToolCall] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    started: anyio.Event = field(default_factory=anyio.Event)
    release: anyio.Event = field(default_factory=anyio.Event)
    sandboxes: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(drivers=EmptyHost()))

    async def submit(
        self,
        principal: Principal,
        tool: str,
        arguments: Mapping[str, Any],
        listener: Listener,
        *,
        call_id: str = "",
        session: str | None = None,
        run: str | None = None,
        trace: Trace | None = None,
    ) -> CallResult:
        """Validate and admit like the real one."""
        valid = validate_arguments(find_tool({RUN.name: RUN}, tool), arguments)
        async with self.admission.enter(principal.id, tool, valid):
            call = ToolCall(
                id=call_id,
                principal=principal,
                session=session,
                run=run,
                trace=trace,
                tool=tool,
                arguments=valid,
                received=datetime.now(UTC),
            )
            return await self._call(call, listener)

    async def _call(self, call: ToolCall, listener: Listener) -> CallResult:
        """Run one call as its code asks."""
        code = str(call.arguments["code"])
        denied = code == "refuse"
        decision = Decision(
            effect="deny" if denied else "allow", rule="test.rule", reason="No.", hint="Ask.", profile_digest=DIGEST
        )
        decided = journal.decided(call, decision, keep_arguments=True)
        await self.audit.append(
            replace(decided, tool=call.tool, principal=call.principal.id, client=call.principal.client)
        )
        if denied:
            refused = {"rule": decision.rule, "reason": decision.reason, "hint": decision.hint}
            return self._result(call, {"refused": refused}, "Refused by test.rule: No. Ask.", failed=True)
        self.running[call.id] = call
        self.started.set()
        try:
            return await self._run(code, call, listener)
        except BaseException:
            self.cancelled.append(call.id)
            with anyio.CancelScope(shield=True):
                await self.audit.append(
                    CallCancelled(call_id=call.id, principal=call.principal.id, by="client", elapsed_ms=1.0)
                )
            raise
        finally:
            del self.running[call.id]

    async def _run(self, code: str, call: ToolCall, listener: Listener) -> CallResult:
        if code == "no sandbox":
            raise SandboxError("start bubblewrap", "it is not installed", "Run `apt-get install bubblewrap`")
        if code == "no audit":
            raise AuditError("record call", "the disk is full", "Free space")
        if code == "bug":
            raise RuntimeError("canary-secret /etc/shadow")
        listener.progress("sandbox started")
        if code == "print":
            for line in range(1000):
                listener.printed(f"line {line}\n")
        if code == "flood":
            # Far more than every buffer between here and a client that does not read.
            for _ in range(2000):
                listener.printed("x" * 5000)
                await anyio.lowlevel.checkpoint()
        if code in {"wait", "print"}:
            await self.release.wait()
        await self.audit.append(
            CallFinished(
                call_id=call.id, principal=call.principal.id, ended="exited", exit_code=0, elapsed_ms=1.0, usage={}
            )
        )
        self.finished.append(call.id)
        stdout = "x" * 400_000 if code == "big" else f"echo {code}"
        content = (Image(data=PIXEL, media_type="image/png"), await self._keep(call)) if code == "plot" else ()
        return self._result(call, {"ended": "exited", "stdout": stdout}, stdout, content, failed=False)

    async def _keep(self, call: ToolCall) -> Link:
        async with collector_of(self.artifacts, call, LIMITS) as collection:
            made = await receive(collection, "plot.txt", f"made for {call.arguments['tag']}".encode())
            await collection.publish()
        return Link(
            uri=made.uri, name=made.name, media_type=made.media_type, bytes=made.bytes, sha256=made.sha256,
            risks=made.risks,
        )  # fmt: skip

    def _result(
        self, call: ToolCall, fields: dict[str, Any], text: str, more: tuple[Content, ...] = (), *, failed: bool
    ) -> CallResult:
        structured = RunResult(call_id=call.id, tag=call.arguments["tag"], profile_digest=DIGEST, **fields)
        content = (Text(text=text), *more)
        meta = {"call_id": call.id, "profile_digest": DIGEST, "audit_head": self.audit.head.hash}
        return CallResult(structured=structured.model_dump(mode="json"), content=content, failed=failed, meta=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The settings that the surface uses."""

    state_dir: Path
    data_dir: Path


@dataclass(slots=True, kw_only=True)
class FakeApp:
    """The parts of the composition root that the surface uses."""

    broker: WaitingBroker
    audit: AuditLog
    settings: Places
    artifacts: ArtifactStore
    tools: Mapping[str, Tool] = field(default_factory=lambda: {RUN.name: RUN})
    profiles: ProfileSet = field(default_factory=lambda: ProfileSet({}, {}))
    environments: Mapping[str, Environment] = field(default_factory=dict)
    states_key: bytes = b"s" * 32
    runs: Runs = field(default_factory=lambda: Runs(b"k" * 32))
    refusals: Refusals = field(default_factory=Refusals)
    version: str = "0.0.0"

    @property
    def in_force(self) -> ActivePolicy:
        """There is no policy."""
        return ActivePolicy(None, lambda: Governed(rights_of=self.guards.rights_of))

    @property
    def guards(self) -> SimpleNamespace:
        """Everybody may do the same, and nobody has budgets."""
        return SimpleNamespace(rights_of=lambda _: Rights(profiles=self.profiles, workspace=None), budgets=None)

    def redaction(self, _principal: Principal, _tool: str | None) -> tuple[str, Mapping[bytes, Any]]:
        """As shipped profiles have it; nothing is lent."""
        return "mask", {}


def as_app(app: FakeApp) -> App:
    """Take it for the composition root."""
    return cast("App", app)


def give_tokens(directory: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Write a token for each name where the server looks for them; return them by name."""
    return {name: give_token(directory, name) for name in names}


@asynccontextmanager
async def fake_app(directory: Path, *, shared: bool = False, server: str = "s_test") -> AsyncIterator[FakeApp]:
    """Open an app on an audit log in ``directory``; ``shared`` as the real one over HTTP."""
    async with AuditLog.open(directory / "audit", server) as audit:
        store = ArtifactStore(
            directory / "artifacts",
            clock=lambda: datetime.now(UTC),
            ttl=timedelta(hours=1),
            max_bytes_total=1 << 24,
            parts=4,
        )
        refusals = Refusals()
        async with store.opened(), refusals.recorded(audit):
            yield FakeApp(
                refusals=refusals,
                broker=WaitingBroker(audit=audit, artifacts=store, admission=Admission(shared=shared)),
                audit=audit,
                settings=Places(state_dir=directory, data_dir=directory / "data"),
                artifacts=store,
            )
