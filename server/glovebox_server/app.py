"""The composition root: builds every part of a server once, and takes them down in order."""

import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from glovebox_audit.events import PoolChanged, ProfileLoaded, ServerStarted, ServerStopped
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.query import current
from glovebox_audit.segments import anchors
from glovebox_profiles.compile import ProfileSet, to_spec
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED, is_absent, load
from glovebox_profiles.model import Effect, Profile
from glovebox_profiles.policy.model import Policy
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.host.owner import server_id
from glovebox_sandboxes.pool.pool import Pool, SandboxProvider
from glovebox_sandboxes.runtime.environments import Environment
from glovebox_sandboxes.worker.client import WorkerClient
from glovebox_sandboxes.worker.messages import Message
from glovebox_sandboxes.worker.queue import IDLE_SECONDS
from glovebox_server import event_loop, workspace
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import Principal
from glovebox_server.core.broker import Broker
from glovebox_server.core.call import decide, validate_arguments
from glovebox_server.core.rights import ActivePolicy, Governed
from glovebox_server.errors import InvalidArgumentsError
from glovebox_server.guards.admission.admission import Admission
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.budgets.budgets import opened as open_budgets
from glovebox_server.guards.credentials.sources import CredentialCache
from glovebox_server.guards.journal.journal import CallJournal, SandboxDescriber
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.guards.registry import GuardSet
from glovebox_server.guards.stops.stops import Stops
from glovebox_server.guards.watch.watch import Watch
from glovebox_server.promotion.proposing import Proposals
from glovebox_server.proof.lock import Effective, Lock
from glovebox_server.proof.sealed import Sealer
from glovebox_server.receipts.keys import Signer
from glovebox_server.receipts.recorder import ReceiptIssuer
from glovebox_server.requests import Refusals, Runs, derive_key, load_key
from glovebox_server.settings import Settings
from glovebox_server.startup import check_preloads, governed, policy_file, prepare_sandboxes
from glovebox_server.tools import TOOLS
from glovebox_server.tools.base import Tool
from glovebox_server.upkeep.keeping import required
from glovebox_server.upkeep.log import recover, rotation
from glovebox_server.workspace import Workspace

ARTIFACT_PARTS = 4
"""Fraction of the artifacts that one principal may have over HTTP: three more must fill theirs before others
lack room."""
_SWEEP_SECONDS = 300.0
"""Expired artifacts are unreadable at once; the sweep only frees the disk."""
VERSION = installed_version("glovebox-mcp")


@dataclass(slots=True, kw_only=True)
class App:
    """A running Glovebox, independent of its transport: first what is read, then what is opened."""

    settings: Settings
    transport: str
    server_id: str
    workspace: Workspace
    tools: Mapping[str, Tool] = field(default_factory=lambda: TOOLS)
    in_force: ActivePolicy
    artifacts: ArtifactStore
    signer: Signer
    sealer: Sealer | None
    runs: Runs
    states_key: bytes = field(repr=False)
    """Authenticates the state that clients carry between a question and its answer."""
    version: str = VERSION
    ended: list[str] = field(default_factory=list)
    """The reason of the server's end, for its last record."""
    refusals: Refusals = field(default_factory=Refusals)
    audit: AuditLog = field(init=False)
    tasks: TaskGroup = field(init=False)
    guards: GuardSet = field(init=False)
    broker: Broker = field(init=False)

    @property
    def profiles(self) -> ProfileSet:
        """Return the profiles in effect, before any role."""
        return self.in_force.now.profiles

    @property
    def environments(self) -> Mapping[str, Environment]:
        """Return the environment of each tool's programs."""
        return self.in_force.now.environments

    def redaction(self, principal: Principal, tool: str | None) -> tuple[str, Forms]:
        """Return how secrets in files of a tool's programs are treated, and the keys that no caller may read there.

        The keys are those of the caller's rights and of the tool's profile without a role: the call that made a file
        may have had more rights than its caller has now.
        """
        rights = self.guards.rights_of(principal)
        profile, made_by = (rights.profiles.get(tool), self.profiles.get(tool)) if tool else (None, None)
        credentials = (*rights.credentials, *(made_by.network.credential if made_by else ()))
        return profile.result.redact if profile else "mask", self.guards.credentials.forms(credentials)


def check_example(profile: Profile, call: Mapping[str, Any]) -> tuple[Effect, str]:
    """Decide an example of a profile as this server would."""
    tool = TOOLS.get(profile.tool)
    if tool is None:
        return "deny", "tool.unknown"
    try:
        decision = decide(tool, validate_arguments(tool, call), profile, "not asked for")
    except InvalidArgumentsError:
        return "deny", "arguments"
    return decision.effect, decision.rule


def load_profiles(settings: Settings) -> ProfileSet:
    """Return the shipped profiles; the operator's replace those of the same tool.

    Raises ProfileError if a profile is invalid, or the configured directory does not exist.
    """
    return load(profile_directories(settings), check_example=check_example, tools=TOOLS)


def profile_directories(settings: Settings) -> list[Path]:
    """Return the profile directories; the default one may be missing. Raises ProfileError for a profile beside it."""
    own = settings.profiles_dir
    for beside in (own.parent / f"{tool}.toml" for tool in TOOLS if own.name == "profiles"):
        if os.path.lexists(beside):
            raise ProfileError(beside, None, "", "has no effect: it lies one folder too high", f"Move it into {own}.")
    unused = "profiles_dir" not in settings.model_fields_set and is_absent(own)
    return [SHIPPED] if unused else [SHIPPED, own]


@asynccontextmanager
async def opened(settings: Settings, transport: str, *, worker: bool = False) -> AsyncIterator[App]:
    """Open a server's parts for the length of the block; the stack takes them down in reverse.

    ``transport`` is ``stdio``, ``http`` or ``cli``. Only over HTTP several principals are possible. With ``worker``, a
    process of its own that prepares sandboxes is started; without, one that runs is used.

    Raises:
        ProfileError: A profile or the policy is invalid, or the environment it names is not built.
        MisnamedError: A named workspace holds the server's own files.
        SecretFileError: Others could read or change the state directory, a key, or the stops.
        AuditError: The log cannot be written.
        ArtifactStoreError: The artifacts cannot be written.
        StoreError: A store that governs calls cannot be written. In each case nothing was started.
    """
    app = _read(settings, transport)
    async with AsyncExitStack() as stack:
        tasks, watch = await _open_parts(app, stack, worker=worker)
        try:
            await _begin(app, tasks, watch, worker=worker)
            yield app
        finally:
            tasks.cancel_scope.cancel()
            app.guards.hiding.close()


async def _open_parts(app: App, stack: AsyncExitStack, *, worker: bool) -> tuple[TaskGroup, Watch]:
    settings, state, policy, enter = app.settings, app.settings.state_dir, app.in_force, stack.enter_async_context
    shared = app.transport == "http"
    audit = app.audit = await enter(AuditLog.open(state / "audit", app.server_id, rotation(settings, app.signer)))
    stops = await enter(Stops.opened(state, audit))
    watch = await Watch.opened(state, audit, stops, policy.policy.watch if policy.policy else {})
    approvals = await enter(Approvals.opened(state, audit, TOOLS, lambda tool: _packages(app.environments, tool)))
    await enter(app.artifacts.opened())
    budgets = await enter(open_budgets(state)) if policy.now.budgeted else None
    drivers = await enter(registry.opened(settings.data_dir, app.server_id))
    client = WorkerClient(state, settings.data_dir, partial(_tell, app), shared=shared, starts=worker)
    stack.callback(client.close)
    await enter(_on_record(app))
    await enter(app.refusals.recorded(audit))
    tasks = app.tasks = await enter(anyio.create_task_group())
    sandboxes = SandboxProvider(drivers=drivers, pool=Pool(SandboxDescriber(), shared=shared, worker=client))
    guards = app.guards = GuardSet(
        rights_of=policy.rights_of if policy.follows else policy.now.rights_of,  # what is off is not entered
        admission=Admission(shared=shared), sandboxes=sandboxes, artifacts=app.artifacts,
        stops=stops, approvals=approvals, budgets=budgets, watch=watch,
        credentials=CredentialCache(tasks), proposals=partial(_proposals, app),
    )  # fmt: skip
    receipts = ReceiptIssuer(log=audit, signer=app.signer, version=VERSION, server_id=app.server_id)
    journal = CallJournal(receipts=receipts, forms_of=guards.forms_of, sealer=app.sealer)
    app.broker = Broker(tools=TOOLS, guards=guards, sandboxes=sandboxes, artifacts=app.artifacts, journal=journal)
    return tasks, watch


def _read(settings: Settings, transport: str) -> App:
    """Read everything, before anything starts."""
    path = policy_file(settings)  # resolved here: a file that disappears later is not read as "no policy"
    found = profile_directories(settings)  # the same is true of the operator's own
    if path is not None:
        settings = settings.model_copy(update={"policy": path})
    served = workspace.find(settings, transport)

    def read() -> Governed:
        """Read all that rights are made of, as the lock has it."""
        profiles, lock = load(found, check_example=check_example, tools=TOOLS), _lock(settings)
        environments = required(settings, profiles)
        now = replace(governed(settings, profiles, served, lock), profiles=profiles, environments=environments)
        if lock is None:
            return now
        lock.require(effective(profiles, environments, now.policy, path))
        return replace(now, lock_digest=lock.digest)

    policy = ActivePolicy(path, read, partial(_files, settings) if path or len(found) > 1 else None)
    sealer = None if settings.audit_arguments_key is None else Sealer.load(settings.audit_arguments_key)
    if os.path.lexists(settings.state_dir / "promotions"):
        recover(settings)  # before the files that they were changing are read
    store = ArtifactStore(
        settings.state_dir / "artifacts", clock=lambda: datetime.now(UTC), ttl=timedelta(hours=settings.artifact_hours),
        max_bytes_total=settings.artifact_total_mib * 2**20, parts=ARTIFACT_PARTS if transport == "http" else 1,
    )  # fmt: skip
    signer, key = Signer.load(settings.state_dir), load_key(settings.state_dir)
    return App(
        settings=settings, transport=transport, server_id=server_id(), workspace=served, in_force=policy,
        artifacts=store, signer=signer, sealer=sealer, runs=Runs(derive_key(key, "runs")),
        states_key=derive_key(key, "request states"),
    )  # fmt: skip


async def _begin(app: App, tasks: TaskGroup, watch: Watch, *, worker: bool) -> None:
    """Record what is in effect, and start what runs beside calls."""
    settings, profiles, audit = app.settings, app.profiles, app.audit

    async def try_preloads(found: Governed) -> None:
        await check_preloads(found.profiles, app.broker.sandboxes, settings.state_dir)

    for tool, profile in profiles.items():
        source = "shipped" if profiles.source(tool).parent == SHIPPED else "operator"
        await audit.append(ProfileLoaded(tool=tool, digest=profiles.digests[profile.tool], source=source))
    tasks.start_soon(app.refusals.follow, audit)
    tasks.start_soon(app.in_force.follow, audit, watch.act)
    if app.transport != "cli":
        tasks.start_soon(current.follow, lambda: audit.head, settings.state_dir / "audit")
        if settings.notify is not None:
            from glovebox_server.notify import sender  # noqa: PLC0415 - what is off is not imported

            tasks.start_soon(sender.follow, settings, audit, sender.Target(settings))
        if settings.audit_anchor is not None:
            every = settings.audit_anchor_minutes * 60
            tasks.start_soon(anchors.follow, lambda: audit.head, settings.audit_anchor, every)
        await try_preloads(app.in_force.now)
        app.in_force.check = try_preloads
    tasks.start_soon(_sweep, app.artifacts)
    if worker:
        tasks.start_soon(prepare_in_force, app.in_force, app.guards)
        tasks.start_soon(prepare_masked, app.in_force, app.guards)


def _proposals(app: App) -> Proposals:
    policy = app.in_force
    return Proposals(
        settings=app.settings, audit=app.audit, into=lambda: policy.policy.promote.into if policy.policy else {}
    )


def _files(settings: Settings) -> list[Path]:
    """Return the files besides the policy that decide what may be in effect; the directory stands for what comes."""
    own, lock = settings.profiles_dir, settings.locked
    locks = [lock, lock.with_name(f"{lock.name}.sig"), settings.require_signed] if lock else []
    return [own, *sorted(own.glob("*.toml")), *(each for each in locks if each)]


def _lock(settings: Settings) -> Lock | None:
    """Return the requested lock. Raises ProfileError if it is missing, invalid, or not signed as required."""
    if settings.locked is None:
        if settings.require_signed is None:
            return None
        reason = "is required to have signed a lock, and there is none"
        raise ProfileError(settings.require_signed, None, "", reason, "Add --locked FILE, or GLOVEBOX_LOCKED.")
    found = Lock.read(settings.locked)
    if settings.require_signed is not None:
        found.require_signed(settings.require_signed)
    return found


def require_locked(settings: Settings, policy: Policy | None, path: Path | None) -> None:
    """Refuse a policy that differs from the requested lock; for commands that read it without a server.

    Raises ProfileError with the first difference; or if the lock is invalid, or not signed as required.
    """
    lock = _lock(settings)
    if lock is not None:
        lock.require_policy(policy, path)


def effective(
    profiles: ProfileSet, environments: Mapping[str, Environment], policy: Policy | None, path: Path | None
) -> Effective:
    """Return what a lock is made of, or compared with."""
    from glovebox_server.mcp import catalogue  # noqa: PLC0415 - imports the SDK

    tools = {
        entry.name: {"listed": catalogue.digest_tools([entry]), "packages": _packages(environments, entry.name)}
        for entry in catalogue.list_tools(TOOLS.values(), profiles, environments)
    }
    return Effective(profiles=profiles, policy=policy, policy_path=path, tools=tools)


@asynccontextmanager
async def _on_record(app: App) -> AsyncIterator[None]:
    """Record the server's start, and its end however the block ends."""
    tools_digest = None
    if app.transport != "cli":
        from glovebox_server.mcp import catalogue  # noqa: PLC0415 - imports the SDK, which a call from a script does without

        listed = catalogue.list_tools(TOOLS.values(), app.profiles, app.environments)
        tools_digest = catalogue.digest_tools(listed)
    started = ServerStarted(
        version=VERSION, pid=os.getpid(), transport=app.transport, tools_digest=tools_digest,
        receipt_key=app.signer.key_id, policy_digest=app.in_force.now.digest,
        lock_digest=app.in_force.now.lock_digest,
    )  # fmt: skip
    await app.audit.append(started)
    try:
        yield
    except anyio.get_cancelled_exc_class():
        app.ended.append("interrupted")
        raise
    finally:
        reason = app.ended[0] if app.ended else "done"
        with anyio.CancelScope(shield=True):
            await app.audit.append(ServerStopped(reason=reason, longest_stall_ms=event_loop.longest_stall_ms()))


def _packages(environments: Mapping[str, Environment], tool: str) -> str:
    """Return the digest of what a tool's programs import from; empty for a tool that runs none."""
    if not TOOLS[tool].imports:
        return ""
    try:
        return environments[tool].locked()
    except MisnamedError:
        return environments[tool].fits


async def prepare_in_force(in_force: ActivePolicy, guards: GuardSet) -> None:
    """Prepare sandboxes for the policy in effect, now and after each change."""
    while True:
        changed = in_force.changed
        await prepare_sandboxes(in_force.now.every, guards)
        await changed.wait()
        guards.sandboxes.pool.keep_only(
            to_spec(each, workspace=rights.workspace)
            for rights in in_force.now.every for each in rights.profiles.values()
        )  # fmt: skip


async def prepare_masked(in_force: ActivePolicy, guards: GuardSet) -> None:
    """Prepare sandboxes anew when other files are hidden from programs, as long as calls use any."""
    hiding = guards.hiding
    while True:
        await hiding.changed.wait()
        hiding.changed = anyio.Event()
        if time.monotonic() - hiding.used_at < IDLE_SECONDS:
            await prepare_sandboxes(in_force.now.every, guards)


async def _sweep(store: ArtifactStore) -> None:
    while True:
        await anyio.sleep(_SWEEP_SECONDS)
        await store.sweep()


def _tell(app: App, message: Message) -> None:
    """Record a change of the worker's sandboxes."""
    told = {name: message[name] for name in ("what", "driver", "ready", "most", "reason")}
    app.tasks.start_soon(_record, app.audit, PoolChanged(plan_digest=message["plan"], **told))


async def _record(audit: AuditLog, event: PoolChanged) -> None:
    # Calls write the records they need themselves, and report failures of the log there.
    with suppress(AuditError):
        await audit.append(event)
