"""Apply watch rules: examine recorded calls, raise alarms, and act on them. No model is in the loop.

Counts live in this process; what is stopped stays stopped. No alarm, reason or log repeats a marker or secret. Hosts
that were requested are recorded as every connection is. Of output every byte is scanned once, in some 30 ms per MiB;
only a possible beginning of a marker is kept.
"""

import json
import logging
import posixpath
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self
from urllib.parse import unquote_to_bytes

import anyio
import anyio.to_thread

from glovebox_audit.events import WatchAlarm
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_profiles.policy.model import WatchAction
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.calls import Decision, ToolCall
from glovebox_server.core.call import Call
from glovebox_server.egress.events import EgressAttempt
from glovebox_server.guards.admission.admission import make_room
from glovebox_server.guards.redaction.detector import Detector, FormIndex, index_markers
from glovebox_server.guards.redaction.patterns import SHORTEST_SECRET, find_secrets
from glovebox_server.guards.stops.stops import Scope, Stops
from glovebox_server.guards.watch.canaries import Canary, canaries_of
from glovebox_server.secret_files import Files, StoredItems

DENIALS_IN_A_ROW: Final = 10
"""A refused model tries three or four other ways; ten different refusals in a row are a search."""
CONNECTIONS_KNOWN: Final = 50
"""Connections that teach a principal's hosts, before a new host is reported."""
QUESTIONS: Final = 20
"""Questions because of one principal within ``QUESTIONS_SECONDS``."""
QUESTIONS_SECONDS: Final = 600.0
RULES: Final[Mapping[str, WatchAction]] = {
    "canary": "stop",  # a canary is read by a tool for files, or its content is in arguments, output, a URL or a file
    "placeholder": "record",  # one stands where its key is not to stand: in a request, output or a file
    "secrets": "record",  # output has what only a secret looks like: a private key, a token of a known service
    "denials": "record",  # ``DENIALS_IN_A_ROW`` calls of a run are denied
    "new-reach": "record",  # after ``CONNECTIONS_KNOWN`` of a principal, one leads to a host that is new to it
    "questions": "record",  # people are asked ``QUESTIONS`` times for a principal
}
SLOW_SECONDS = 2.0
"""Delay of each call of a slowed run, holding nothing."""
FLAGGED_SECONDS = 600.0
MAX_KEPT = 4096
"""Counted runs, and principals. Beyond it the longest idle is evicted; of runs, of the busiest principal."""
MAX_HOSTS = 256
"""Hosts remembered of one principal: beyond it no host is new."""
LOOP_BYTES = 16 * 1024
"""Scanned on the event loop, in a quarter of a millisecond; more is scanned in a thread."""
_READS = "read_workspace_file"
_SELF = frozenset({"stop", "store"})
"""Rules whose denials are no sign: the server causes them."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a watch rule detected."""

    rule: str
    where: str
    """In what: ``arguments``, ``stdout``, ``stderr``, ``value``, ``picture``, ``file``, ``url`` or ``request``."""
    what: str
    """The id of a canary, a kind of secret, a count or a host; never a marker or a secret."""


PLACEHOLDER: Final = "placeholder:"
"""Prefix of credentials' names among the needles; canaries' ids have no colon."""


def found_of(where: str, id: str) -> Finding:  # noqa: A002 - what canaries have
    """Return the finding of a canary or of a credential's placeholder."""
    if id.startswith(PLACEHOLDER):
        return Finding(rule="placeholder", where=where, what=id.removeprefix(PLACEHOLDER))
    return Finding(rule="canary", where=where, what=id)


Piece = tuple[str, bytes]

LIVE_BYTES = 1 << 20
"""Live output that is shown if there are canaries: it is scanned on the event loop."""


class Look:
    """The findings of one call. Files may be scanned in other threads; live output on the event loop."""

    def __init__(self, needles: FormIndex, *, secrets: bool, live: bool = True) -> None:
        """Take the needles; ``live`` output is shown before all of it was scanned."""
        self._needles = needles
        self._secrets = secrets
        self._shows = live
        self._live = Detector(needles) if needles.names else None
        self._printed = 0
        self.findings: list[Finding] = []
        self.examine: Callable[[Outcome, Look], Coroutine[Any, Any, None]]
        """Examines the outcome of the call that it observes; set by ``watch``."""

    async def ended(self, outcome: Outcome) -> None:
        """Examine the whole outcome. Does not return if that stops the call."""
        await self.examine(outcome, self)

    def printed(self, show: Callable[[str], None]) -> Callable[[bytes], None]:
        """Wrap ``show`` for live output: from a canary on nothing is shown."""

        def look(data: bytes) -> None:
            if not self._shows:
                return
            if self._live is not None:
                self._printed += len(data)
                if self._printed > LIVE_BYTES or self.findings:
                    return
                if canary := self._live.feed(data):
                    self.findings.append(found_of("stdout", canary))
                    return
            show(data.decode("utf-8", "replace"))

        return look

    @property
    def is_complete(self) -> bool:
        """Return whether live output was passed on to its end."""
        return not self.findings and self._printed <= LIVE_BYTES

    def file(self) -> Callable[[bytes], None] | None:
        """Return a consumer of one output file, its name first; None if files are not searched."""
        if not self._needles.names:
            return None
        scanner = Detector(self._needles)

        def look(data: bytes) -> None:
            if canary := scanner.feed(data):
                self.findings.append(found_of("file", canary))

        return look

    def pieces(self, outcome: Outcome) -> list[Piece]:
        """Return all output of a job except files; nothing if nothing is searched."""
        if not self._needles.names and not self._secrets:
            return []
        texts = [("stdout", outcome.stdout.text), ("stderr", outcome.stderr.text)]
        found = [(where, _encoded(text)) for where, text in texts if text]
        if outcome.value is not None:
            found.append(("value", of_value(outcome.value)))
        if self._needles.names:
            changed = outcome.changes
            names = () if changed is None else (*changed.created, *changed.changed, *changed.deleted)
            found += [("file", _encoded(name)) for name in (*(each.name for each in outcome.skipped), *names)]
            reasons = [*(file.reason for file in outcome.skipped), *(copy.reason for copy in outcome.copies)]
            found += [("value", _encoded(sentence)) for sentence in (*outcome.problems, *reasons)]
            pictures = [*(blob.data for blob in outcome.blobs), *(copy.data for copy in outcome.copies)]
            found += [("picture", data) for data in pictures]
        return found

    def search(self, pieces: Iterable[Piece]) -> None:
        """Scan pieces in order; what is split between two of them is found too."""
        scanner = Detector(self._needles) if self._needles.names else None
        for where, data in pieces:
            if scanner is not None and (canary := scanner.feed(data)):
                self.findings.append(found_of(where, canary))
            looks = self._secrets and where in _SECRETS_IN and len(data) >= SHORTEST_SECRET
            if looks and (secret := next(find_secrets(data), None)):
                self.findings.append(Finding(rule="secrets", where=where, what=secret[2]))


def of_value(value: Any) -> bytes:
    """Encode a value as JSON without JSON's escapes: their letters would split a marker."""
    text = _encoded(json.dumps(value, ensure_ascii=False, default=str))
    for escape in _ESCAPES:  # from a pair of backslashes on; ten times as fast as one pattern
        text = text.replace(escape, b" ")
    return _CONTROL.sub(b" ", text)


def of_url(asked: str) -> list[Piece]:
    """Return a requested URL, as written and as decoded."""
    data = _encoded(asked)
    return [("url", data), ("url", unquote_to_bytes(data))] if b"%" in data else [("url", data)]


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")


_SECRETS_IN = frozenset({"stdout", "stderr", "value"})
_ESCAPES: Final = tuple(f"\\{each}".encode() for each in '\\"nrtbf')
_CONTROL: Final = re.compile(rb"\\u00[01][0-9a-f]")


@dataclass(slots=True, kw_only=True)
class _Run:
    principal: str
    denied: int = 0
    slow_until: float = 0.0
    ask_until: float = 0.0
    asks: str = ""


@dataclass(slots=True, kw_only=True)
class _Caller:
    connections: int = 0
    hosts: set[str] = field(default_factory=set)
    questions: deque[float] = field(default_factory=deque)


class Watch:
    """The watch rules of one server process."""

    def __init__(
        self, audit: AuditLog, stops: Stops, canaries: Files[Canary], actions: Mapping[str, WatchAction]
    ) -> None:
        """Take the parts; ``opened`` is the public way."""
        self._audit = audit
        self._stops = stops
        self.canaries = canaries
        self.actions = {**RULES, **actions}
        self.runs: OrderedDict[str, _Run] = OrderedDict()
        """Counted runs; without any, calls are neither slowed nor asked about."""
        self._callers: OrderedDict[str, _Caller] = OrderedDict()
        self.known: StoredItems[Canary] | None = None
        """Canaries at the last look; None before it, and if they are not searched."""
        self._told: set[str] = set()
        self.needles = index_markers({})
        self._paths: Mapping[str, str] = {}

    @classmethod
    async def opened(cls, state_dir: Path, audit: AuditLog, stops: Stops, actions: Mapping[str, WatchAction]) -> Self:
        """Watch with the policy's actions of rules.

        Raises SecretFileError: others could change the list of canaries.
        """
        canaries = canaries_of(state_dir)
        await anyio.to_thread.run_sync(canaries.prepare)
        return cls(audit, stops, canaries, actions)

    def act(self, actions: Mapping[str, WatchAction]) -> None:
        """Apply another policy's actions from now on."""
        self.actions = {**RULES, **actions}
        if self.actions["canary"] == "off":
            self.known, self.needles, self._paths = None, index_markers({}), {}

    async def slow(self, call: Call) -> None:
        """Delay a call whose run is slowed; it holds nothing meanwhile."""
        run = self.runs.get(_key(call.request))
        if run is not None and run.slow_until > anyio.current_time():
            call.delay = max(call.delay, SLOW_SECONDS)

    def ask(self, call: Call) -> None:
        """Have a person asked about a call whose run is asked about."""
        now, run = call.now, self.runs.get(_key(call.request))
        if run is not None and run.ask_until > anyio.current_time() and now.decision.effect != "deny":
            reason = f"A watch rule ({run.asks}) wants a person to approve each call of this run for now."
            rule = f"watch.{run.asks}"
            now.decision = replace(now.decision, effect="ask", rule=rule, reason=reason, hint="Ask the operator.")

    async def look_at_decision(self, call: Call) -> None:
        """Look at a decision that is on record; show a call the canaries of its workspace."""
        now = call.now
        await self.decided(call.request, now.decision, now.rights.workspace)
        if now.decision.effect == "allow" and now.rights.workspace is not None:
            now.reveal += await self.planted(now.rights.workspace)

    async def observe(self, call: Call) -> None:
        """Look through raw output for canary tokens and secrets, before anything is masked (GB-LIFE-10, GB-LIFE-11)."""
        look = self.look(call.now.placeholders)
        look.examine = partial(self.ended, call.request)
        call.now.observers.append(look)
        call.now.inspect_file = look.file

    def look(self, placeholders: Mapping[str, str] = MappingProxyType({})) -> Look:
        """Return a scanner of the call's output, also for its placeholders, by their credential's name."""
        secrets, needles = self.actions["secrets"], self.needles
        if placeholders and self.actions["placeholder"] != "off":
            needles = index_markers({PLACEHOLDER + name: each for name, each in placeholders.items()}, needles.names)
        # A secret is found only in whole output: what may be withheld then must not be shown before.
        return Look(needles, secrets=secrets != "off", live=secrets != "stop")

    async def planted(self, workspace: Path) -> tuple[str, ...]:
        """Return paths of the searched canaries that lie in a workspace as they were planted."""
        if self.known is None:
            return ()
        there = [each for each in self.known.items if each.workspace == str(workspace)]
        if not there:
            return ()
        return await anyio.to_thread.run_sync(lambda: tuple(each.path for each in there if each.stands))

    async def decided(self, call: ToolCall, decision: Decision, workspace: Path | None) -> None:
        """Examine a recorded decision on a call that reads this workspace."""
        if decision.rule in _SELF:
            return
        await self._asked(call, workspace if decision.effect == "allow" else None)
        if self.actions["denials"] != "off":
            key = _key(call)
            if decision.effect == "deny":
                run = self._run(call)
                run.denied += 1
                if run.denied % DENIALS_IN_A_ROW == 0:
                    await self._alarm(call, Finding(rule="denials", where="calls", what=f"{run.denied} in a row"))
            elif key in self.runs:
                self.runs[key].denied = 0

    async def questioned(self, call: ToolCall) -> None:
        """Count an approval request that a call causes."""
        if self.actions["questions"] == "off":
            return
        caller, now = self._caller(call), anyio.current_time()
        caller.questions.append(now)
        while caller.questions[0] < now - QUESTIONS_SECONDS:
            caller.questions.popleft()
        if len(caller.questions) >= QUESTIONS:
            caller.questions.clear()
            await self._alarm(call, Finding(rule="questions", where="calls", what=f"{QUESTIONS} questions"))

    async def connecting(self, call: ToolCall, attempt: EgressAttempt) -> None:
        """Examine a recorded connection attempt, before anything is dialled."""
        self._know_canaries()
        if self.needles.names:
            await self._search(call, Look(self.needles, secrets=False), of_url(attempt.asked))
        if attempt.strayed is not None:
            await self._alarm(call, Finding(rule="placeholder", where="request", what=attempt.strayed))
        if attempt.target is None or attempt.decision.effect != "allow" or self.actions["new-reach"] == "off":
            return
        caller, host = self._caller(call), attempt.target.host
        caller.connections += 1
        if host in caller.hosts or len(caller.hosts) >= MAX_HOSTS:
            return
        caller.hosts.add(host)
        if caller.connections > CONNECTIONS_KNOWN:
            await self._alarm(call, Finding(rule="new-reach", where="url", what=host))

    async def ended(self, call: ToolCall, outcome: Outcome, look: Look) -> None:
        """Examine an outcome before its caller gets it. Does not return if that stops the call."""
        await self._search(call, look, look.pieces(outcome))

    async def look_for_secrets(self, call: ToolCall, outcome: Outcome) -> None:
        """Search secrets in an outcome that is not scanned otherwise."""
        await self.ended(call, outcome, self.look())

    async def _asked(self, call: ToolCall, workspace: Path | None) -> None:
        self._know_canaries()
        if not self.needles.names:
            return
        if workspace is not None and call.tool == _READS:
            canary = self._paths.get(_file(workspace, str(call.arguments.get("path"))))
            if canary is not None:
                await self._alarm(call, Finding(rule="canary", where="arguments", what=canary))
                return
        pieces: list[Piece] = [("arguments", of_value(dict(call.arguments)))]
        if isinstance(url := call.arguments.get("url"), str):
            pieces += of_url(url)
        await self._search(call, Look(self.needles, secrets=False), pieces)

    def _know_canaries(self) -> None:
        if self.actions["canary"] == "off":
            return
        found = self.canaries.look()
        if found is not self.known:
            told = {str(each) for each in found.damaged}
            for words in told - self._told:
                _log.error("a canary is not looked for: %s", words)
            self.known, self._told = found, told
            self.needles = index_markers({each.id: each.marker for each in found.items})
            self._paths = {_file(each.workspace, each.path): each.id for each in found.items}

    async def _search(self, call: ToolCall, look: Look, pieces: Sequence[Piece]) -> None:
        if sum(len(data) for _, data in pieces) > LOOP_BYTES:
            await anyio.to_thread.run_sync(look.search, pieces)
        else:
            look.search(pieces)
        told: set[str] = set()
        for finding in look.findings:
            if finding.rule not in told:  # ten places make one alarm
                told.add(finding.rule)
                await self._alarm(call, finding)

    async def _alarm(self, call: ToolCall, finding: Finding) -> None:
        action = self.actions[finding.rule]
        if action == "off":
            return
        whose: dict[str, Any] = {
            "call": call.id, "tool": call.tool, "principal": call.principal.id, "client": call.principal.client,
            "run": call.run, "workflow": call.principal.workflow,
        }  # fmt: skip
        alarm = WatchAlarm(rule=finding.rule, action=action, where=finding.where, what=finding.what, **whose)
        try:
            await (self._stops.record(alarm) if action == "stop" else self._audit.append(alarm))
        except AuditError as problem:
            _log.error("an alarm of the watch rule %s is not recorded: %s", finding.rule, problem)
        run = self._run(call)
        if action == "slow":
            run.slow_until = anyio.current_time() + FLAGGED_SECONDS
        elif action == "ask":
            run.ask_until, run.asks = anyio.current_time() + FLAGGED_SECONDS, finding.rule
        elif action == "stop":
            because = f"A watch rule ({finding.rule}) found what it looks for."
            await self._stops.make(*self._whom(call), because=because, by=f"watch:{finding.rule}")
            await anyio.lowlevel.checkpoint()  # a call that is stopped itself ends here

    def _run(self, call: ToolCall) -> _Run:
        key = _key(call)
        run = self.runs.setdefault(key, _Run(principal=call.principal.id))
        self.runs.move_to_end(key)
        if len(self.runs) > MAX_KEPT:
            make_room(self.runs, lambda _, each: each.principal)
        return run

    def _caller(self, call: ToolCall) -> _Caller:
        caller = self._callers.setdefault(call.principal.id, _Caller())
        self._callers.move_to_end(call.principal.id)
        if len(self._callers) > MAX_KEPT:
            self._callers.popitem(last=False)
        return caller

    def _whom(self, call: ToolCall) -> tuple[Scope, str]:
        if self._stops.crowded:  # a caller that begins run after run must not use up all places
            return "principal", call.principal.id
        return ("run", call.run) if call.run else ("call", call.id)


def _key(call: ToolCall) -> str:
    return call.run or call.principal.id


def _file(workspace: Path | str, path: str) -> str:
    """Return the host path of a tool's path; links are not followed, since content is searched too."""
    inside = posixpath.normpath("/" + posixpath.join("/workspace", path).lstrip("/"))
    return f"{workspace}/{inside.removeprefix('/workspace/')}"
