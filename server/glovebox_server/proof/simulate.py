"""Decides recorded calls again under other profiles, and reports which differ and which cannot be decided.

Only what profiles say is decided: what a role, a budget or a stop refused stays refused.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Record
from glovebox_profiles.model import Profile, digest
from glovebox_server.core.accept import decide
from glovebox_server.proof.sealed import Opened, arguments_of
from glovebox_server.tools.base import Tool

#: Rules of profiles (``broker.policy``): what another rule refused, no profile would have allowed.
_OF_PROFILES = frozenset(
    {"allow", "approval.ask", "profile.missing", "limits.wall_seconds", "network.allow", "network.mode"}
    | {"files.inputs", "files.workspace"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Otherwise:
    """A call that would be decided otherwise."""

    call_id: str
    time: str
    tool: str
    was: str
    """``allow``, ``deny`` or ``ask``."""
    now: str
    rule: str
    """The rule that decides now; of a call that is allowed now, the one that did not."""


@dataclass(slots=True, kw_only=True)
class Simulated:
    """The outcome of all calls."""

    same: int = 0
    otherwise: list[Otherwise] = field(default_factory=list)
    """Newest last."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Calls whose arguments were not kept, or not unchanged, by tool."""
    elsewhere: int = 0
    """Calls that a rule outside profiles refused, or whose denial was lifted."""


def simulate(
    records: Iterable[Record],
    profiles: Mapping[str, Profile],
    tools: Mapping[str, Tool],
    open_sealed: Opened | None = None,
) -> Simulated:
    """Decide recorded calls again, by candidate profiles; skip those of tools without a profile here.

    ``open_sealed`` opens sealed arguments; None without the key.
    """
    found = Simulated()
    digests = {tool: digest(profile) for tool, profile in profiles.items()}
    for record in records:
        data = record.data
        tool = str(data.get("tool"))
        if tool not in profiles or tool not in tools:
            continue
        was, rule = ("ask" if data.get("approval") else str(data.get("effect"))), str(data.get("rule"))
        if data.get("grants") or (was != "allow" and not data.get("approval") and rule not in _OF_PROFILES):
            found.elsewhere += 1
        elif data.get("profile_digest") == digests[tool]:
            found.same += 1
        elif (arguments := arguments_of(record, open_sealed)) is None:
            found.unknown[tool] = found.unknown.get(tool, 0) + 1
        else:
            now = decide(tools[tool], arguments, profiles[tool], digests[tool])
            if now.effect == was:
                found.same += 1
                continue
            decisive = rule if now.effect == "allow" else now.rule
            found.otherwise.append(
                Otherwise(
                    call_id=record.call_id or "", time=record.time, tool=tool, was=was, now=now.effect, rule=decisive
                )
            )
    found.otherwise.sort(key=lambda each: each.time)
    return found


def records(directory: Path, since: datetime, kinds: Collection[str]) -> Iterator[Record]:
    """Yield the records of these kinds since a time. Raises AuditError if there is no readable log."""
    needles = [f'"kind":"{kind}"'.encode() for kind in kinds]
    with read.opened(directory) as snapshot:
        for log, size in snapshot.newest_first():
            gaps, at, older = read.gaps_in(log, 0, size), 0, False
            log.seek(0)
            while at < size and (raw := log.readline(min(chain.MAX_LINE_BYTES, size - at))):
                if any(each in raw for each in needles) and not gaps.hold(at):
                    with suppress(EvidenceError):
                        record = chain.parse(raw)
                        if datetime.fromisoformat(record.time) < since:
                            older = True
                        elif record.kind in kinds:
                            yield record
                at += len(raw)
            if older:
                break
