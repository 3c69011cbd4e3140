"""Derives what an approval is bound to, and the facts that rules examine. No store, no clock."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from glovebox_profiles.egress import parse_url
from glovebox_profiles.egress.targets import TargetError
from glovebox_profiles.model import Profile
from glovebox_profiles.policy.model import Approval
from glovebox_server.guards.approvals.question import QuestionSubject, canonical
from glovebox_server.guards.approvals.rules import (
    CHANGES_ASK,
    PROFILE_ASKS,
    WATCH_ASKS,
    Asking,
    Facts,
    applying,
    asking,
)
from glovebox_server.guards.proposal import Proposal
from glovebox_server.tools.base import Tool

Unknown = Callable[[str, str, tuple[str, ...]], tuple[str, ...]]
"""Of a kind (``program`` or ``host``) and an owner: those values that none of the owner's approved calls had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What an approved call adds to memory: one kind of value, for one owner."""

    kind: str
    owner: str
    values: tuple[str, ...]


def subject(proposal: Proposal, rules: tuple[str, ...], environment: str) -> QuestionSubject:
    """Return everything that an approval of this call is bound to.

    Raises:
        ValueError: the arguments cannot be displayed.
    """
    call, rights = proposal.call, proposal.rights
    return QuestionSubject(
        principal=call.principal.id,
        run=call.run or "",
        tool=call.tool,
        arguments=canonical(call.arguments),
        profile_digest=proposal.decision.profile_digest,
        policy_digest=rights.policy_digest or "",
        inputs=tuple((each.uri, each.sha256) for each in proposal.inputs.listed),
        workspace=workspace_identity(rights.workspace, proposal.profile),
        environment=environment,
        rules=rules,
        changes=proposal.changes,
    )


def remembered(proposal: Proposal, tool: Tool) -> tuple[Remembered, ...]:
    """Return what is remembered of the call once it is approved."""
    call, rights = proposal.call, proposal.rights
    code = call.arguments.get("code")
    # A program can run what it is given: the same one with other inputs is another.
    given = [each.sha256 for each in proposal.inputs.listed]
    program = canonical({"code": code, "inputs": given} if isinstance(code, str) else call.arguments)
    # By role, too: what a weaker role's rule has let pass is not known to a stronger one's.
    whose = "\n".join((call.principal.id, call.tool, rights.role or ""))
    rules = f"{proposal.decision.profile_digest}\n{rights.policy_digest or ''}"
    return (
        Remembered(kind="program", owner=f"{whose}\n{rules}", values=(hashlib.sha256(program.encode()).hexdigest(),)),
        Remembered(kind="host", owner=f"{whose}\n{call.run}\n{rules}", values=hosts(proposal, tool)),
    )


def facts(proposal: Proposal, tool: Tool, unknown: Unknown) -> Facts:
    """Return the facts that rules may examine."""
    call, profile = proposal.call, proposal.profile
    program, host = remembered(proposal, tool)
    networked = profile.network.mode != "none"
    return Facts(
        tool=call.tool,
        new_program=bool(unknown(program.kind, program.owner, program.values)),
        new_hosts=unknown(host.kind, host.owner, host.values),
        leaving=len(call.arguments.get("inputs", ())) if networked else 0,
        seconds=call.arguments.get("timeout_seconds") or profile.limits.wall_seconds,
    )


def rules_of(proposal: Proposal) -> tuple[Approval, ...]:
    """Return every rule that may ask about a call: of its changes, profile, watch rules and role."""
    own = (PROFILE_ASKS,) if proposal.profile.approval == "ask" else ()
    watched = (WATCH_ASKS,) if proposal.decision.rule.startswith("watch.") else ()
    changes = _changes_ask(proposal) if proposal.changes else ()
    return applying((*changes, *own, *watched, *proposal.rights.approvals), proposal.call.tool)


def _changes_ask(proposal: Proposal) -> tuple[Approval, ...]:
    """Over HTTP a caller need not be the host's user, and what is shown holds lines of the operator's files."""
    here = proposal.call.principal.transport in ("stdio", "cli")
    return (CHANGES_ASK if here else CHANGES_ASK.model_copy(update={"by": "operator"}),)


def nothing_before(_kind: str, _owner: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """Answer ``Unknown`` for an owner without earlier calls."""
    return values


def asked_about(proposal: Proposal, tool: Tool, unknown: Unknown = nothing_before) -> Asking | None:
    """Return what is asked about a call, or None."""
    asks = asking(rules_of(proposal), facts(proposal, tool, unknown))
    if asks is None or not proposal.changes:
        return asks
    return replace(asks, asked=replace(asks.asked, teaches=False))  # each change is asked about


def hosts(proposal: Proposal, tool: Tool) -> tuple[str, ...]:
    """Return reachable hosts with ports: of a request its own; of a program all that its profile allows."""
    network = proposal.profile.network
    if network.mode == "none":
        return ()
    asked = requested(tool, proposal.call.arguments)
    if asked is not None:
        return (asked,)
    return tuple(dict.fromkeys(f"{rule.host}:{port}" for rule in network.allow for port in sorted(rule.ports)))


def requested(tool: Tool, arguments: Mapping[str, object]) -> str | None:
    """Return host and port of a tool's request; None if it makes none, or it cannot be read."""
    if tool.request is None:
        return None
    try:
        target = parse_url(*tool.request(arguments))
    except TargetError:
        return None
    return f"{target.host}:{target.port}"


def workspace_identity(workspace: Path | None, profile: Profile) -> str:
    """Return device, inode and path digest of the directory that the call sees, not its content; empty for none."""
    if workspace is None or profile.files.workspace == "none":
        return ""
    try:
        found = workspace.stat()
        where = f"{found.st_dev}:{found.st_ino}"
    except OSError:
        where = "unreadable"
    return f"{where}:sha256:{hashlib.sha256(str(workspace).encode('utf-8', 'surrogateescape')).hexdigest()}"
