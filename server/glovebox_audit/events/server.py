"""Events of a server as a whole: its start and end, profiles, the sandboxes it prepares."""

from collections.abc import Mapping
from typing import Any

from glovebox_audit.events.base import Event


class ServerStarted(Event, kind="server.started"):
    """A server process opened the log and is about to accept calls."""

    version: str
    """Version of Glovebox."""
    pid: int
    """Process id on the host."""
    transport: str
    """``stdio``, ``http`` or ``cli``."""
    tools_digest: str | None = None
    """Digest of ``tools/list`` as clients get it whom no role withholds a tool: a change of names, schemas or
    descriptions changes it."""
    receipt_key: str | None = None
    """Id of the key that signs receipts from now on."""
    policy_digest: str | None = None
    """Digest of the policy in force, where there is one."""
    lock_digest: str | None = None
    """Digest of the lock that all in force agrees with, where one was asked for."""


class ServerStopped(Event, kind="server.stopped"):
    """A server process ends in good order. Missing after a crash."""

    reason: str
    """Why, in a few words: ``stdin closed``, ``SIGTERM``."""
    longest_stall_ms: float | None = None
    """Longest time in which nobody was served, since it began to serve; null where that is not measured."""


class RequestsRefused(Event, kind="requests.refused"):
    """Requests were refused before they became calls. Counts alone, at most every five seconds."""

    since: str
    """When the first of them came: RFC 3339, UTC."""
    count: int
    """How many there were."""
    refused: tuple[Mapping[str, Any], ...]
    """``principal`` (absent for strangers; ``others`` beyond 32), ``rule`` (``other`` beyond 8 of one caller) and
    ``count``: nothing that a request held."""


class PolicyChanged(Event, kind="policy.changed"):
    """Another policy is in force from now on; calls under way keep what they were decided with."""

    policy_digest: str
    """Digest of the policy."""
    before: str
    """Digest of the one that was in force."""


class PolicyRefused(Event, kind="policy.refused"):
    """The policy's file was changed, and cannot be in force: the one before stays."""

    where: str
    """Line and key of what is wrong; empty where it is the file as a whole. The server's own log says what it is."""
    policy_digest: str
    """Digest of the policy that stays in force."""


class ProfileLoaded(Event, kind="profile.loaded"):
    """A profile is in force from now on."""

    tool: str
    """The tool it governs."""
    digest: str
    """Digest of the profile."""
    source: str
    """``shipped`` or ``operator``."""
    unsafe: tuple[str, ...] = ()
    """Its keys that weaken isolation, each with the reason given: ``key: because``."""


class PoolChanged(Event, kind="pool.changed"):
    """Sandboxes of a plan are prepared ahead of their calls, or no longer."""

    what: str
    """``opened``, ``limited`` (by the host's memory), ``failed``, ``recovered`` or ``cleared``."""
    driver: str
    """The driver that prepares them."""
    plan_digest: str
    """Digest of their plan."""
    ready: int
    """How many wait."""
    most: int
    """How many may."""
    reason: str = ""
    """Why, where that is not plain."""
