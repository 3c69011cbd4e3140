"""The narrowest profile of a tool that would have allowed its recorded calls. Records in, a profile out.

Only what records show is narrowed, and never below it. What was not counted, or cannot be known since arguments were
not kept, stays as it is and is reported. A suggestion is within what is in effect.

And recorded calls decided again under other profiles: what a role, a budget or a stop refused stays refused.
"""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Record
from glovebox_audit.events import (
    ArtifactCollected,
    ArtifactRefused,
    CallCancelled,
    CallDecided,
    CallFailed,
    CallFinished,
    EgressDecided,
)
from glovebox_profiles import model
from glovebox_profiles.egress.rules import EgressRule, covers_all
from glovebox_profiles.egress.rules import meet as meet_rules
from glovebox_profiles.egress.targets import parse_url
from glovebox_profiles.model import MIB, Profile, digest
from glovebox_profiles.order import KeyChange, diff, within
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.plural import counted
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
            about = {"call_id": record.call_id or "", "time": record.time, "tool": tool}
            found.otherwise.append(Otherwise(**about, was=was, now=now.effect, rule=decisive))
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


MARGIN: Final = 1.5
"""Factor over the most that was used: a call is rarely like the last."""
ROOM: Final = {
    "wall_seconds": 5, "cpu_seconds": 5, "memory": 64 * MIB, "output.bytes": MIB, "output.files": 4,
    "max_connections": 2,
}  # fmt: skip
"""The least head room: of little, half as much again is little. An import takes a second or two."""
MAX_ALLOW: Final = 32 * 1024
"""Characters of the suggested rules as JSON: a profile of 64 KiB has room for them."""
MAX_PATHS: Final = 32
"""Paths of one host that are listed: a reviewer reads no longer list. Beyond it the rule's own stay."""

_ENDS: Final = frozenset({CallCancelled.kind, CallFailed.kind, CallFinished.kind})
"""A call that ended so has all it did on record; one that is lost, or still runs, has not."""

KINDS: Final = _ENDS | {each.kind for each in (CallDecided, EgressDecided, ArtifactCollected, ArtifactRefused)}
"""The records that a suggestion is made from."""

_OUTPUT: Final = ("files.output", "limits.output.bytes", "limits.output.files")

_Asked = tuple[str, str, int, str]
"""Scheme, host, port and method."""


@dataclass(slots=True)
class _ObservedCall:
    allowed: bool = False
    """False if its decision is not among the records: it began before them."""
    url: tuple[str, str] | None = None
    """Digest and path of the URL in its arguments."""
    did: defaultdict[str, list[Mapping[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """The data of its other records, by kind. Refused connections count against ``network.max_connections`` too."""

    @property
    def reached(self) -> list[tuple[_Asked, str]]:
        """Return its connections, each with the digest of what was asked for."""
        return [
            (
                (str(each["scheme"]), str(each["host"]), int(each["port"]), str(each.get("method") or "CONNECT")),
                str(each.get("asked_digest")),
            )
            for each in self.did[EgressDecided.kind]
            if each.get("effect") == "allow"
        ]

    @property
    def usage(self) -> Mapping[str, Any] | None:
        """Return what was counted, with how it ended; None if it has not finished, or its end is unknown."""
        ends = self.did[CallFinished.kind]
        return {**(ends[-1].get("usage") or {}), "ended": ends[-1].get("ended")} if ends else None


@dataclass(slots=True, kw_only=True)
class Suggested:
    """A suggestion for one tool, and its evidence."""

    profile: Profile
    changes: tuple[KeyChange, ...] = ()
    """From the profile in effect."""
    based_on: dict[str, str] = field(default_factory=dict)
    """Reasons, by key."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Calls with unknown use, by the key that therefore stays."""
    calls: int = 0
    first: str = ""
    last: str = ""
    refused: int = 0
    """Calls that were refused, or asked about: no suggestion is based on them."""
    lifted: int = 0
    """Calls with a lifted denial: what it lifted is not suggested."""


class _ObservedUse:
    """The use of all calls together."""

    def __init__(self, tool: Tool, profile: Profile, open_sealed: Opened | None) -> None:
        self.tool, self.profile, self.open = tool, profile, open_sealed
        self.calls: defaultdict[str, _ObservedCall] = defaultdict(_ObservedCall)
        self.found = Suggested(profile=profile)
        self.inputs = 0
        self.unknown = 0
        self.asked_seconds = 0.0

    def decided(self, record: Record) -> None:
        data, found = record.data, self.found
        found.lifted += bool(data.get("grants"))
        if data.get("effect") != "allow":
            found.refused += 1
            return
        found.calls += 1
        found.first, found.last = min(found.first or record.time, record.time), max(found.last, record.time)
        call = self.calls[record.call_id or ""]
        call.allowed = True
        self.inputs += bool(data.get("inputs"))
        arguments = arguments_of(record, self.open)
        if arguments is None:
            self.unknown += 1
            return
        self.asked_seconds = max(self.asked_seconds, float(arguments.get("timeout_seconds") or 0))
        if self.tool.request is not None:
            method, url = self.tool.request(arguments)
            try:
                call.url = _digest(url), parse_url(method, url).path
            except RefusedError:
                call.url = None

    @property
    def open_ended(self) -> int:
        """Return the number of allowed calls without a recorded end: they run, or are lost."""
        return sum(call.allowed and not any(call.did[kind] for kind in _ENDS) for call in self.calls.values())


def suggest(records: Iterable[Record], tool: Tool, profile: Profile, open_sealed: Opened | None = None) -> Suggested:
    """Suggest a profile of a tool from records of ``KINDS``, of any tools, and the profile in effect.

    ``open_sealed`` opens sealed arguments; None without the key.
    """
    used = _ObservedUse(tool, profile, open_sealed)
    for record in records:
        if record.data.get("tool") != tool.name:
            continue
        if record.kind == CallDecided.kind:
            used.decided(record)
        else:
            used.calls[record.call_id or ""].did[record.kind].append(record.data)
    found = used.found
    if not found.calls:
        return found
    values = model.effective(profile)
    # An example of a wider profile need not hold for this one.
    values["example"] = []
    _limits(used, values["limits"])
    _files(used, values)
    if profile.network.mode == "egress" and used.open_ended:  # it may connect to more
        found.unknown["network"] = used.open_ended
    elif profile.network.mode == "egress":
        _network(used, values)
    suggested = Profile.model_validate(values, strict=False)
    if not within(suggested, profile):
        raise AssertionError(f"wider than what is in force: {tool.name}")
    found.profile = suggested
    found.changes = tuple(each for each in diff(profile, suggested) if each.key != "example")
    changed = {each.key for each in found.changes}
    found.based_on = {key: why for key, why in found.based_on.items() if key in changed}
    return found


def _limits(used: _ObservedUse, limits: dict[str, Any]) -> None:
    """Narrow time, processor time, memory and output; each stays if a call reached it, or was not counted."""
    found, bounds = used.found, used.profile.limits
    ran = [usage for call in used.calls.values() if call.allowed and (usage := call.usage) is not None]
    uncounted = found.calls - len(ran)
    for key, name, counter, unit, floor, cut in (
        ("wall_seconds", "wall_ms", "", 1000, model.WALL_SECONDS[0], "timed_out"),
        ("cpu_seconds", "cpu_ms", "cpu_from", 1000, model.CPU_SECONDS[0], "limit"),
        ("memory", "memory_peak_bytes", "memory_from", 1, model.MEMORY[0], "out_of_memory"),
    ):
        # The guest's count is a lower bound, of the program's processes: not what the limit covers.
        counted_whole = [each for each in ran if not counter or each.get(counter) == "group"]
        amounts = [float(each[name]) / unit for each in counted_whole if each.get(name) is not None]
        lacking = uncounted + len(ran) - len(amounts)
        if key == "wall_seconds":
            lacking = max(lacking, used.unknown)  # each may have asked for more time than it took
        if lacking:
            found.unknown[f"limits.{key}"] = lacking
            continue
        if any(each["ended"] == cut for each in ran):
            continue
        most = max(amounts)
        wanted = max(_with_room(key, most, MIB if key == "memory" else 1), floor)
        if key == "wall_seconds":
            wanted = max(wanted, math.ceil(used.asked_seconds))
        limits[key] = min(type(floor)(wanted), getattr(bounds, key))
        shown = f"{most / MIB:.0f} MiB" if key == "memory" else f"{most:.1f} s"
        found.based_on[f"limits.{key}"] = f"at most {shown} in {counted(found.calls, 'call')}"


def _with_room(key: str, most: float, step: int = 1) -> int:
    """Return a limit with head room over the most that was used, in whole steps."""
    return math.ceil(max(most * MARGIN, most + ROOM[key]) / step) * step


def _files(used: _ObservedUse, values: dict[str, Any]) -> None:
    found, files, output = used.found, values["files"], values["limits"]["output"]
    collected = ArtifactCollected.kind
    giving = [call.did for call in used.calls.values() if call.did[collected] or call.did[ArtifactRefused.kind]]
    # A program may have written more there than it left; a running one may still write.
    unseen = found.calls if used.tool.imports else used.open_ended
    if used.profile.files.output and unseen:
        found.unknown |= dict.fromkeys(_OUTPUT, unseen)
    elif used.profile.files.output and not giving:
        files["output"] = False
        output.update(bytes=model.OUTPUT_BYTES[0], files=model.OUTPUT_FILES[0])
        found.based_on |= dict.fromkeys(_OUTPUT, f"none of {counted(found.calls, 'call')} gave a file back")
    elif giving and not any(did[ArtifactRefused.kind] for did in giving):
        most = max(sum(int(file["bytes"]) for file in did[collected]) for did in giving)
        many = max(len(did[collected]) for did in giving)
        bound = used.profile.limits.output
        output["bytes"] = min(_with_room("output.bytes", most, MIB), bound.bytes)
        output["files"] = min(_with_room("output.files", many), bound.files)
        one_of = f"in one of {counted(found.calls, 'call')}"
        found.based_on["limits.output.bytes"] = f"at most {counted(most, 'byte')} {one_of}"
        found.based_on["limits.output.files"] = f"at most {counted(many, 'file')} {one_of}"
    if used.profile.files.inputs and not used.inputs:
        files["inputs"] = False
        found.based_on["files.inputs"] = f"none of {counted(found.calls, 'call')} took an artifact"
    if used.profile.files.workspace != "none" and "workspace" not in used.tool.needs:
        # No record says whether a program read it, or wrote in the copy for a while.
        found.unknown["files.workspace"] = found.calls


def _network(used: _ObservedUse, values: dict[str, Any]) -> None:
    found, network, rules = used.found, values["network"], used.profile.network.allow
    reached = [each for call in used.calls.values() for each in call.reached]
    if not reached:
        if "network" not in used.tool.needs and found.lifted == 0:
            network.update(mode="none", allow=[], credential=[])
            keys = ("network.mode", "network.allow", "network.credential")
            found.based_on |= dict.fromkeys(keys, f"none of {counted(found.calls, 'call')} reached a host")
        return
    paths: dict[_Asked, set[str] | None] = {}
    times: Counter[str] = Counter()
    unknown = 0
    for call in used.calls.values():
        blind = False
        for asked, of in call.reached:
            times[asked[1]] += 1
            # Of a redirect, or a program's request, only the digest is recorded.
            path = call.url[1] if call.url is not None and call.url[0] == of else None
            known = paths.setdefault(asked, set())
            if path is None or known is None or len(known | {path}) > MAX_PATHS:
                paths[asked] = None
                blind = blind or (path is None and asked[3] != "CONNECT")
            else:
                known.add(path)
        unknown += blind
    if unknown:
        found.unknown["network.allow (paths)"] = unknown
    narrowed = [each for asked, known in paths.items() for each in _rules(asked, known, rules)]
    kept = sorted(dict.fromkeys(narrowed), key=lambda each: each.host)
    tables = [rule.model_dump() for rule in kept]
    fits = len(kept) <= model.MAX_RULES and len(json.dumps(tables)) <= MAX_ALLOW
    calls = counted(found.calls, "call")
    if kept and fits and covers_all(rules, kept):
        network["allow"] = tables
        hosts = ", ".join(f"{host} {counted(many, 'time')}" for host, many in times.most_common(12))
        found.based_on["network.allow"] = f"{calls} reached: {hosts}{', …' if len(times) > 12 else ''}"  # noqa: PLR2004 - of a line
        added = {each.get("credential") for call in used.calls.values() for each in call.did[EgressDecided.kind]}
        lent = [each for each in used.profile.network.credential if each.name in added]
        network["credential"] = [each.model_dump(mode="json") for each in lent]
        found.based_on["network.credential"] = f"the others were added to no request of {calls}"
    most = max(len(call.did[EgressDecided.kind]) for call in used.calls.values())
    network["max_connections"] = min(_with_room("max_connections", most), used.profile.network.max_connections)
    found.based_on["network.max_connections"] = f"at most {most} in one of {calls}"


def _rules(asked: _Asked, known: set[str] | None, rules: Sequence[EgressRule]) -> Iterable[EgressRule]:
    """Yield the part of the rules in effect that allows this, and no more; their own paths if the path is unknown."""
    scheme, host, port, method = asked
    table: dict[str, Any] = {"host": host, "schemes": [scheme], "ports": [port], "methods": [method]}
    try:
        one = EgressRule.model_validate(table if known is None else {**table, "paths": sorted(known)})
    except ValueError:  # a path that no rule can name
        one = EgressRule.model_validate(table)
    return meet_rules(rules, [one])


def _digest(url: str) -> str:
    return "sha256:" + hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()
