"""The narrowest profile of a tool that would have allowed its recorded calls. Records in, a profile out.

Only what records show is narrowed, and never below it. What was not counted, or cannot be known since arguments were
not kept, stays as it is and is reported. A suggestion is within what is in effect.

And recorded calls decided again under other profiles: what a role, a budget or a stop refused stays refused.
"""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from glovebox_audit import events, read
from glovebox_audit.chain import Record
from glovebox_profiles import model
from glovebox_profiles.egress import rules as egress
from glovebox_profiles.egress.targets import parse_url
from glovebox_profiles.model import MIB, Profile, digest
from glovebox_profiles.order import KeyChange, diff, within
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.plural import counted
from glovebox_server.core.call import decide
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
            found.same += now.effect == was
            if now.effect != was:
                decisive = rule if now.effect == "allow" else now.rule
                about = {"call_id": record.call_id or "", "time": record.time, "tool": tool}
                found.otherwise.append(Otherwise(**about, was=was, now=now.effect, rule=decisive))
    found.otherwise.sort(key=lambda each: each.time)
    return found


def records(directory: Path, since: datetime, kinds: Collection[str]) -> Iterator[Record]:
    """Yield the records of these kinds since a time. Raises AuditError if there is no readable log."""
    needles = [f'"kind":"{kind}"' for kind in kinds]
    with read.opened(directory) as snapshot:
        for log, size in snapshot.each(newest_first=True):
            older = False
            for record in read.records_with(log, size, needles):
                if datetime.fromisoformat(record.time) < since:
                    older = True
                elif record.kind in kinds:
                    yield record
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

_ENDS: Final = frozenset({events.CallCancelled.kind, events.CallFailed.kind, events.CallFinished.kind})
"""A call that ended so has all it did on record; one that is lost, or still runs, has not."""

KINDS: Final = _ENDS | {
    each.kind for each in (events.CallDecided, events.EgressDecided, events.ArtifactCollected, events.ArtifactRefused)
}
"""The records that a suggestion is made from."""

_OUTPUT: Final = ("files.output", "limits.output.bytes", "limits.output.files")

_Calls = Mapping[str, Mapping[str, list[Record]]]
"""Records of one tool, by call and kind; of a call that began before them, no decision. Each kind can be looked up."""
_Arguments = Mapping[str, Mapping[str, Any] | None]
"""Arguments of the calls that were allowed; None if they cannot be known."""


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


def suggest(records: Iterable[Record], tool: Tool, profile: Profile, open_sealed: Opened | None = None) -> Suggested:
    """Suggest a profile of a tool from records of ``KINDS``, of any tools, and the profile in effect.

    ``open_sealed`` opens sealed arguments; None without the key.
    """
    calls: defaultdict[str, defaultdict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.data.get("tool") == tool.name:
            calls[record.call_id or ""][record.kind].append(record)
    decisions = [record for did in calls.values() for record in did[events.CallDecided.kind]]
    allowed = [record for record in decisions if record.data.get("effect") == "allow"]
    found = Suggested(profile=profile, calls=len(allowed), refused=len(decisions) - len(allowed))
    found.lifted = sum(bool(record.data.get("grants")) for record in decisions)
    if not allowed:
        return found
    found.first, found.last = min(each.time for each in allowed), max(each.time for each in allowed)
    values = model.effective(profile)
    # An example of a wider profile need not hold for this one.
    values["example"] = []
    arguments = {record.call_id or "": arguments_of(record, open_sealed) for record in allowed}
    _limits(found, values["limits"], calls, arguments)
    if profile.files.inputs and not any(record.data.get("inputs") for record in allowed):
        values["files"]["inputs"] = False
        found.based_on["files.inputs"] = f"none of {counted(found.calls, 'call')} took an artifact"
    # These run, or are lost.
    open_ended = sum(not any(calls[call][kind] for kind in _ENDS) for call in arguments)
    _files(found, values, tool, calls, open_ended)
    if profile.network.mode == "egress" and open_ended:  # it may connect to more
        found.unknown["network"] = open_ended
    elif profile.network.mode == "egress":
        _network(found, values["network"], tool, calls, arguments)
    suggested = Profile.model_validate(values, strict=False)
    if not within(suggested, profile):
        raise AssertionError(f"wider than what is in effect: {tool.name}")
    found.profile = suggested
    found.changes = tuple(each for each in diff(profile, suggested) if each.key != "example")
    changed = {each.key for each in found.changes}
    found.based_on = {key: why for key, why in found.based_on.items() if key in changed}
    return found


def _limits(found: Suggested, limits: dict[str, Any], calls: _Calls, arguments: _Arguments) -> None:
    """Narrow time, processor time, memory and output; each stays if a call reached it, or was not counted."""
    finished = events.CallFinished.kind
    ends = [calls[call][finished][-1].data for call in arguments if calls[call][finished]]
    usages = [end.get("usage") or {} for end in ends]
    for key, name, counter, unit, floor, cut in (
        ("wall_seconds", "wall_ms", "", 1000, model.WALL_SECONDS[0], "timed_out"),
        ("cpu_seconds", "cpu_ms", "cpu_from", 1000, model.CPU_SECONDS[0], "limit"),
        ("memory", "memory_peak_bytes", "memory_from", 1, model.MEMORY[0], "out_of_memory"),
    ):
        # The guest's count is a lower bound, of the program's processes: not what the limit covers.
        counted_whole = [each for each in usages if not counter or each.get(counter) == "group"]
        amounts = [float(each[name]) / unit for each in counted_whole if each.get(name) is not None]
        lacking, asked = found.calls - len(amounts), 0
        if key == "wall_seconds":  # each may have asked for more time than it took
            lacking = max(lacking, sum(each is None for each in arguments.values()))
            asked = max(math.ceil(float((each or {}).get("timeout_seconds") or 0)) for each in arguments.values())
        if lacking:
            found.unknown[f"limits.{key}"] = lacking
        elif not any(end.get("ended") == cut for end in ends):
            most = max(amounts)
            wanted = max(_with_room(key, most, MIB if key == "memory" else 1), floor, asked)
            limits[key] = min(type(floor)(wanted), limits[key])
            shown = f"{most / MIB:.0f} MiB" if key == "memory" else f"{most:.1f} s"
            found.based_on[f"limits.{key}"] = f"at most {shown} in {counted(found.calls, 'call')}"


def _with_room(key: str, most: float, step: int = 1) -> int:
    """Return a limit with head room over the most that was used, in whole steps."""
    return math.ceil(max(most * MARGIN, most + ROOM[key]) / step) * step


def _files(found: Suggested, values: dict[str, Any], tool: Tool, calls: _Calls, open_ended: int) -> None:
    files, output, within_calls = values["files"], values["limits"]["output"], counted(found.calls, "call")
    collected = [did[events.ArtifactCollected.kind] for did in calls.values() if did[events.ArtifactCollected.kind]]
    refused = any(did[events.ArtifactRefused.kind] for did in calls.values())
    # A program may have written more there than it left; a running one may still write.
    unseen = found.calls if tool.imports else open_ended
    if files["output"] and unseen:
        found.unknown |= dict.fromkeys(_OUTPUT, unseen)
    elif files["output"] and not collected and not refused:
        files["output"] = False
        output.update(bytes=model.OUTPUT_BYTES[0], files=model.OUTPUT_FILES[0])
        found.based_on |= dict.fromkeys(_OUTPUT, f"none of {within_calls} gave a file back")
    elif collected and not refused:
        most = max(sum(int(file.data["bytes"]) for file in given) for given in collected)
        many = max(map(len, collected))
        output["bytes"] = min(_with_room("output.bytes", most, MIB), output["bytes"])
        output["files"] = min(_with_room("output.files", many), output["files"])
        found.based_on["limits.output.bytes"] = f"at most {counted(most, 'byte')} in one of {within_calls}"
        found.based_on["limits.output.files"] = f"at most {counted(many, 'file')} in one of {within_calls}"
    if files["workspace"] != "none" and "workspace" not in tool.needs:
        # No record says whether a program read it, or wrote in the copy for a while.
        found.unknown["files.workspace"] = found.calls


def _network(found: Suggested, network: dict[str, Any], tool: Tool, calls: _Calls, arguments: _Arguments) -> None:
    rules, within_calls = found.profile.network.allow, counted(found.calls, "call")
    connections = [(call, each.data) for call, did in calls.items() for each in did[events.EgressDecided.kind]]
    reached = [(call, data) for call, data in connections if data.get("effect") == "allow"]
    if not reached:
        if "network" not in tool.needs and found.lifted == 0:
            network.update(mode="none", allow=[], credential=[])
            keys = ("network.mode", "network.allow", "network.credential")
            found.based_on |= dict.fromkeys(keys, f"none of {within_calls} reached a host")
        return
    urls = {call: _url(tool, each) for call, each in arguments.items() if each is not None}
    paths: defaultdict[tuple[str, str, int, str], set[str | None]] = defaultdict(set)
    unknown = set()
    for call, data in reached:
        asked = str(data["scheme"]), str(data["host"]), int(data["port"]), str(data.get("method") or "CONNECT")
        digest_asked, path = urls.get(call) or ("", None)
        if digest_asked != data.get("asked_digest"):
            # Of a redirect, or a program's request, only the digest is recorded.
            path = None
        paths[asked].add(path)
        if path is None and asked[3] != "CONNECT":
            unknown.add(call)
    if unknown:
        found.unknown["network.allow (paths)"] = len(unknown)
    methods: defaultdict[tuple[str, str, int, frozenset[str]], set[str]] = defaultdict(set)
    for (scheme, host, port, method), known in paths.items():
        listed = frozenset(each for each in known if each is not None)
        methods[scheme, host, port, listed if len(listed) == len(known) <= MAX_PATHS else frozenset()].add(method)
    narrowed = [rule for asked, of in methods.items() for rule in egress.meet(rules, [_rule(*asked, of)])]
    kept = sorted(dict.fromkeys(narrowed), key=lambda each: each.host)
    tables = [rule.model_dump() for rule in kept]
    fits = len(kept) <= model.MAX_RULES and len(json.dumps(tables)) <= MAX_ALLOW
    if kept and fits and egress.covers_all(rules, kept):
        network["allow"] = tables
        times = Counter(data["host"] for _, data in reached)
        hosts = ", ".join(f"{host} {counted(many, 'time')}" for host, many in times.most_common(12))
        found.based_on["network.allow"] = f"{within_calls} reached: {hosts}{', …' if len(times) > 12 else ''}"  # noqa: PLR2004 - of a line
        added = {data.get("credential") for _, data in connections}
        network["credential"] = [each for each in network["credential"] if each["name"] in added]
        found.based_on["network.credential"] = f"the others were added to no request of {within_calls}"
    most = max(Counter(call for call, _ in connections).values())
    network["max_connections"] = min(_with_room("max_connections", most), network["max_connections"])
    found.based_on["network.max_connections"] = f"at most {most} in one of {within_calls}"


def _url(tool: Tool, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the digest and the path of the URL in a call's arguments; None without one."""
    if tool.request is None:
        return None
    method, url = tool.request(arguments)
    with suppress(RefusedError):
        path = parse_url(method, url).path
        return "sha256:" + hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest(), path
    return None


def _rule(scheme: str, host: str, port: int, paths: Collection[str], methods: Collection[str]) -> egress.EgressRule:
    """Return a rule for this and no more; without paths, for all of them."""
    table: dict[str, Any] = {"host": host, "schemes": [scheme], "ports": [port], "methods": sorted(methods)}
    with suppress(ValueError):  # a path that no rule can name
        return egress.EgressRule.model_validate({**table, "paths": sorted(paths)} if paths else table)
    return egress.EgressRule.model_validate(table)
