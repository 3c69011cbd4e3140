"""The composition root: everything a server needs, put together once, taken down in order."""

import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from glovebox_audit.events import PoolChanged, ProfileLoaded, ServerStarted, ServerStopped
from glovebox_audit.log import AuditLog
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED, is_absent, load
from glovebox_profiles.model import Effect, Profile
from glovebox_profiles.policy.model import Policy
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.host.owner import new_owner
from glovebox_sandboxes.pool import pool as pools
from glovebox_sandboxes.pool.pool import SandboxProvider
from glovebox_sandboxes.pool.ready_queue import IDLE_SECONDS
from glovebox_sandboxes.runtime.environments import Environment, EnvironmentFileError
from glovebox_server import event_loop, workspace
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import Principal
from glovebox_server.core.accept import decide, validated
from glovebox_server.core.active_policy import ActivePolicy, Governed
from glovebox_server.core.broker import Broker
from glovebox_server.core.rights import Rights
from glovebox_server.errors import AuditUnavailable, InvalidArguments
from glovebox_server.guards.admission.admission import Admission
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.credentials.sources import CredentialCache
from glovebox_server.guards.journal.journal import CallJournal, sandbox_started
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.guards.registry import GuardSet
from glovebox_server.guards.stops.stops import Stops
from glovebox_server.guards.watch.watch import Watch
from glovebox_server.receipts.keys import Signer
from glovebox_server.receipts.recorder import ReceiptIssuer
from glovebox_server.requests import server_key
from glovebox_server.requests.refusals import Refusals
from glovebox_server.requests.runs import Runs
from glovebox_server.settings import Settings
from glovebox_server.startup.policy import governed, policy_file
from glovebox_server.startup.prewarm import check_preloads, prepare_sandboxes
from glovebox_server.tools import TOOLS
from glovebox_server.tools.base import Tool
from glovebox_server.upkeep.environments import required
from glovebox_server.upkeep.log import rotation
from glovebox_server.workspace import Workspace

if TYPE_CHECKING:
    from glovebox_server.guards.budgets.budgets import Budgets
    from glovebox_server.guards.budgets.spending import Left
    from glovebox_server.mcp.manifest import Manifest
    from glovebox_server.promotion.proposing import Proposals
    from glovebox_server.proof.lock import Effective, Lock
    from glovebox_server.proof.sealed import Sealer

ARTIFACT_PARTS = 4
"""Over HTTP one principal may have a quarter of the artifacts: much for one, and three more have to fill theirs before
anybody is without room."""
_SWEEP_SECONDS = 300.0
"""Between two looks for expired artifacts: they are unreadable at once, this only gives the disk back."""

VERSION = installed_version("glovebox-mcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """A running Glovebox, whatever transport serves it."""

    settings: Settings
    workspace: Workspace
    tools: Mapping[str, Tool]
    profiles: ProfileSet
    environments: Mapping[str, Environment]
    """Of each tool's programs, by the tool's name."""
    broker: Broker
    guards: GuardSet
    audit: AuditLog
    artifacts: ArtifactStore
    runs: Runs
    refusals: Refusals
    """Requests that never became a call."""
    states_key: bytes = field(repr=False)
    """Binds what clients carry between asking and answering."""
    in_force: ActivePolicy
    """The operator's policy, where there is one."""
    version: str = VERSION
    ended: list[str]
    """Whoever ends the server puts the reason here, for its last record."""

    def rights_of(self, principal: Principal) -> Rights:
        """What a caller may do."""
        return self.guards.rights_of(principal)

    def redaction(self, principal: Principal, tool: str | None) -> tuple[str, Forms]:
        """Return what becomes of secrets in files of a tool's programs, and the keys that no caller may read there.

        These are the keys of the caller's rights, and of the tool's profile as it is without a role: the call that made
        a file may have had more rights than its caller has now.
        """
        rights = self.rights_of(principal)
        profile, made_by = (rights.profiles.get(tool), self.profiles.get(tool)) if tool else (None, None)
        credentials = (*rights.credentials, *(made_by.network.credential if made_by else ()))
        return profile.result.redact if profile else "mask", self.guards.credentials.forms(credentials)

    async def left(self, principal: Principal, run: str | None) -> "Sequence[Left]":
        """What is left of a caller's budgets; nothing where it has none.

        Raises:
            StoreUnusable: it cannot be read.
        """
        if self.guards.budgets is None:
            return ()
        return await self.guards.budgets.left(principal, run, self.rights_of(principal))

    async def manifest(self, rights: Rights) -> "Manifest":
        """What a caller can know before a call; asks every driver."""
        from glovebox_server.mcp import manifest as capabilities  # noqa: PLC0415 - brings the SDK, which a call from a script does without

        return await capabilities.build_manifest(
            tools=self.tools,
            rights=rights,
            environments=self.environments,
            drivers=self.broker.sandboxes.drivers,
            version=self.version,
        )


def check_example(profile: Profile, call: Mapping[str, Any]) -> tuple[Effect, str]:
    """What this server would say to a profile's example."""
    tool = TOOLS.get(profile.tool)
    if tool is None:
        return "deny", "tool.unknown"
    try:
        decision = decide(tool, validated(tool, call), profile)
    except InvalidArguments:
        return "deny", "arguments"
    return decision.effect, decision.rule


def load_profiles(settings: Settings) -> ProfileSet:
    """The shipped profiles, with the operator's in place of those of the same tool.

    Raises:
        ProfileError: one is wrong, or the directory that was set does not exist.
    """
    return load(profile_directories(settings), check_example=check_example, tools=TOOLS)


def profile_directories(settings: Settings) -> list[Path]:
    """Where profiles are loaded from; the operator's own directory may be missing where nobody named it.

    Raises:
        ProfileError: a profile lies beside that directory.
    """
    own = settings.profiles_dir
    for beside in (own.parent / f"{tool}.toml" for tool in TOOLS if own.name == "profiles"):
        if os.path.lexists(beside):
            raise ProfileError(beside, None, "", "is not in force: it lies one folder too high", f"Move it into {own}.")
    unused = "profiles_dir" not in settings.model_fields_set and is_absent(own)
    return [SHIPPED] if unused else [SHIPPED, own]


@asynccontextmanager
async def opened(
    settings: Settings,
    transport: str,
    tools_digest: Callable[[ProfileSet, Mapping[str, Environment]], str] | None = None,
    *,
    prewarm: bool = True,
) -> AsyncIterator[App]:
    """A server's parts, for the length of the block.

    Args:
        settings: where things are.
        transport: for the record: ``stdio``, ``http`` or ``cli``.
        tools_digest: for the record: of the list of tools that is shown to clients, with these profiles in force and
            these environments.
        prewarm: whether sandboxes are prepared ahead, where profiles want it.

    Raises:
        ProfileError: a profile or the policy is wrong, or the environment it names is not built; nothing was started.
        WorkspaceRefused: nor where a workspace that was named holds the server's own files.
        StateUnusable: others could read or change the state directory, or it cannot be made.
        AuditUnavailable: the log in it cannot be written.
        ArtifactsUnavailable: nor can the artifacts'.
        KeyUnusable: others could read the key that signs receipts.
        ServerKeyUnusable: or the one that binds what clients are handed.
        StopsUnusable: others could change what is stopped.
        StoreUnusable: what governs calls cannot be kept.
    """
    profiles = load_profiles(settings)
    environments = required(settings, profiles)
    owner = new_owner()
    server_id = f"g{owner.pid}-{owner.started}"
    served = workspace.find(settings, transport)
    path = policy_file(settings)  # settled here: one that is gone later is not taken for none
    place = settings if path is None else settings.model_copy(update={"policy": path})
    lock = _lock(settings)
    in_force = ActivePolicy(path, partial(_governed, place, profiles, served, lock))
    if lock is not None:
        lock.require(effective(profiles, environments, in_force.policy, path))
    # Over stdio and on the command line there is one principal, and nobody to keep anything for.
    shared = transport == "http"
    ended: list[str] = []
    store = ArtifactStore(
        settings.state_dir / "artifacts",
        clock=lambda: datetime.now(UTC),
        ttl=timedelta(hours=settings.artifact_hours),
        max_bytes_total=settings.artifact_total_mib * 2**20,
        parts=ARTIFACT_PARTS if shared else 1,
    )
    refusals = Refusals()
    sealer = _sealer(settings)
    _recover_promotions(settings)
    signer, key = Signer.load(settings.state_dir), server_key.load(settings.state_dir)
    async with (
        AuditLog.open(settings.state_dir / "audit", server_id, rotation(settings, signer)) as audit,
        Stops.opened(settings.state_dir, audit) as stops,
        Watch.opened(settings.state_dir, audit, stops, in_force.policy.watch if in_force.policy else {}) as watch,
        Approvals.opened(settings.state_dir, audit, TOOLS, partial(_packages, environments)) as approvals,
        store,
        _budgets(settings, in_force) as budgets,
        registry.opened(settings.data_dir, server_id) as available,
        pools.open_pool(partial(_record, audit), sandbox_started, shared=shared) as pool,
        _on_record(
            audit,
            ServerStarted(
                version=VERSION,
                pid=os.getpid(),
                transport=transport,
                tools_digest=tools_digest and tools_digest(profiles, environments),
                receipt_key=signer.key_id,
                policy_digest=in_force.now.digest,
                lock_digest=None if lock is None else lock.digest,
            ),
            ended,
        ),
        refusals.recorded(audit),
        anyio.create_task_group() as tasks,
    ):
        sandboxes = SandboxProvider(drivers=available, pool=pool, prewarm=prewarm)
        for tool, profile in profiles.items():
            source = "shipped" if profiles.source(tool).parent == SHIPPED else "operator"
            await audit.append(ProfileLoaded(tool=tool, digest=profiles.digest_for(profile.tool), source=source))
        tasks.start_soon(refusals.follow, audit)
        tasks.start_soon(in_force.follow, audit, watch.act)
        if transport != "cli" and settings.audit_anchor is not None:
            from glovebox_audit import anchors  # noqa: PLC0415 - only here

            every = settings.audit_anchor_minutes * 60
            tasks.start_soon(anchors.follow, lambda: audit.head, settings.audit_anchor, every)
        if transport != "cli":
            await check_preloads(profiles, sandboxes, settings.state_dir)
        tasks.start_soon(_sweep, store)
        guards = GuardSet(
            rights_of=in_force.rights_of, admission=Admission(pool.call, shared=shared), sandboxes=sandboxes,
            artifacts=store, stops=stops, approvals=approvals, budgets=budgets, watch=watch,
            credentials=CredentialCache(tasks), proposals=partial(_proposals, settings, audit, in_force),
        )  # fmt: skip
        receipts = ReceiptIssuer(log=audit, signer=signer, version=VERSION, server_id=server_id)
        journal = CallJournal(receipts=receipts, forms_of=guards.forms_of, sealer=sealer)
        broker = Broker(tools=TOOLS, guards=guards, sandboxes=sandboxes, artifacts=store, journal=journal)
        app = App(
            settings=settings,
            workspace=served,
            tools=TOOLS,
            profiles=profiles,
            environments=environments,
            broker=broker,
            guards=guards,
            audit=audit,
            artifacts=store,
            refusals=refusals,
            runs=Runs(server_key.derived(key, "runs")),
            states_key=server_key.derived(key, "request states"),
            in_force=in_force,
            ended=ended,
        )
        try:
            if prewarm:
                tasks.start_soon(prepare_in_force, in_force, guards)
                tasks.start_soon(prepare_masked, in_force, guards)
            yield app
        finally:
            tasks.cancel_scope.cancel()
            guards.hiding.close()


def _proposals(settings: Settings, audit: AuditLog, in_force: ActivePolicy) -> "Proposals":
    from glovebox_server.promotion.proposing import Proposals  # noqa: PLC0415 - only for calls that propose changes

    return Proposals(
        settings=settings, audit=audit, into=lambda: in_force.policy.promote.into if in_force.policy else {}
    )


def _sealer(settings: Settings) -> "Sealer | None":
    if settings.audit_arguments_key is None:
        return None
    from glovebox_server.proof.sealed import Sealer  # noqa: PLC0415 - only here

    return Sealer.load(settings.audit_arguments_key)


def _lock(settings: Settings) -> "Lock | None":
    """The lock that was asked for, signed where that was asked for too.

    Raises:
        ProfileError: it is not there, is none, or is not signed so.
    """
    if settings.locked is None:
        if settings.require_signed is None:
            return None
        reason = "is required to have signed a lock, and there is none"
        raise ProfileError(settings.require_signed, None, "", reason, "Add --locked FILE, or GLOVEBOX_LOCKED.")
    from glovebox_server.proof.lock import Lock  # noqa: PLC0415 - only here

    found = Lock.read(settings.locked)
    if settings.require_signed is not None:
        from glovebox_server.proof import signature  # noqa: PLC0415 - only here

        signature.require(found, settings.require_signed)
    return found


def require_locked(settings: Settings, policy: Policy | None, path: Path | None) -> None:
    """Refuse a policy that is not the one of the lock, where one was asked for; for what reads it without a server.

    Raises:
        ProfileError: the first difference; or the lock is none, or is not signed as was asked.
    """
    lock = _lock(settings)
    if lock is not None:
        lock.require_policy(policy, path)


def _governed(settings: Settings, profiles: ProfileSet, served: Workspace, lock: "Lock | None") -> Governed:
    found = governed(settings, profiles, served, TOOLS)
    if lock is not None:
        lock.require_policy(found.policy, settings.policy)
    return found


def effective(
    profiles: ProfileSet, environments: Mapping[str, Environment], policy: Policy | None, path: Path | None
) -> "Effective":
    """What a lock is made of, or compared with."""
    from glovebox_server.mcp import catalogue  # noqa: PLC0415 - brings the SDK
    from glovebox_server.proof.lock import Effective  # noqa: PLC0415 - only here

    tools = {
        entry.name: {"listed": catalogue.digest_tools([entry]), "packages": _packages(environments, entry.name)}
        for entry in catalogue.list_tools(TOOLS.values(), profiles, environments)
    }
    return Effective(profiles=profiles, policy=policy, policy_path=path, tools=tools)


def _recover_promotions(settings: Settings) -> None:
    """Bring promotions that were interrupted to an end, before anybody reads what they were changing."""
    if os.path.lexists(settings.state_dir / "promotions"):
        from glovebox_server.upkeep import promotions  # noqa: PLC0415 - only where something was promoted

        promotions.recover(settings)


@asynccontextmanager
async def _budgets(settings: Settings, in_force: ActivePolicy) -> AsyncIterator["Budgets | None"]:
    """The budgets, where any role has some."""
    if not in_force.now.budgeted:
        yield None
        return
    from glovebox_server.guards.budgets.budgets import opened as opened_budgets  # noqa: PLC0415 - brings SQLite

    async with opened_budgets(settings.state_dir) as found:
        yield found


@asynccontextmanager
async def _on_record(audit: AuditLog, started: ServerStarted, ended: list[str]) -> AsyncIterator[None]:
    """From the record of a server's start to that of its end, however the block ends."""
    await audit.append(started)
    try:
        yield
    except anyio.get_cancelled_exc_class():
        ended.append("interrupted")
        raise
    finally:
        reason = ended[0] if ended else "done"
        with anyio.CancelScope(shield=True):
            await audit.append(ServerStopped(reason=reason, longest_stall_ms=event_loop.longest_stall_ms()))


def _packages(environments: Mapping[str, Environment], tool: str) -> str:
    """Digest of what a tool's programs import from; empty for a tool that runs none."""
    if not TOOLS[tool].imports:
        return ""
    try:
        return environments[tool].locked()
    except EnvironmentFileError:
        return environments[tool].fits


async def prepare_in_force(in_force: ActivePolicy, guards: GuardSet) -> None:
    """Prepare sandboxes for what is in force, now and after each change."""
    while True:
        changed = in_force.changed
        await prepare_sandboxes(in_force.now.every, guards)
        await changed.wait()


async def prepare_masked(in_force: ActivePolicy, guards: GuardSet) -> None:
    """Prepare sandboxes anew when other files are hidden from programs, as long as any are called."""
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


async def _record(audit: AuditLog, event: pools.PoolEvent) -> None:
    # What calls need of the log they write themselves, and hear of it there.
    with suppress(AuditUnavailable):
        await audit.append(PoolChanged(**asdict(event)))
