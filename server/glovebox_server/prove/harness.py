"""Judging whole calls: through the broker, with real records and artifacts, on one driver.

The cases are ``conformance.call``'s. What must be so of every call is asked here of each: no secret and no
path of the host in anything a caller gets, one last record, a log that verifies, nothing left behind.
"""

import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from structlog.testing import capture_logs

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import ProfileSet, load
from glovebox_sandboxes import strict_json
from glovebox_sandboxes.conformance import trial
from glovebox_sandboxes.conformance.call import Call, CallCase
from glovebox_sandboxes.conformance.host import CANARY, Planted
from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.audit.chain import Record
from glovebox_server.audit.read import records_of
from glovebox_server.audit.verify import verify
from glovebox_server.calls import CallResult, Principal, Text, new_call_id
from glovebox_server.errors import Refused
from glovebox_server.failures import failure_of
from glovebox_server.governance import policy as policies
from glovebox_server.governance.approvals.question import Question
from glovebox_server.governance.rights import Rights, RightsOf, Roles
from glovebox_server.governance.stops.stop import new_stop, stops_of
from glovebox_server.governance.watch.canaries import canaries_of, new_canary
from glovebox_server.settings import Settings
from glovebox_server.tools.base import Tool

_ARTIFACT_BYTES = 1 << 20
"""Most that is read back of one file; the trial's profile lets out no more."""
_ENDINGS = ("call.finished", "call.cancelled", "call.failed")
_DENIED = "call.decided"

_SECTIONS: Mapping[str, str] = {
    "": 'tool = "{tool}"\ndescription = "For a proof."\nrisk = "medium"\nisolation = ["{driver}"]\napproval = "none"',
    "files": 'workspace = "read"\noutput = true\ninputs = true',
    "network": 'mode = "none"',
    "limits": 'wall_seconds = 20\ncpu_seconds = 10\nmemory = "256 MiB"\npids = 32\nscratch = "4 MiB"\n'
    'output = {{ bytes = "1 MiB", files = 16 }}\nstream = "64 KiB"\nenforce = "any"',
    "audit": "keep = []",
}
"""The trial's profile: it grants what a case could ask for but network, so that nothing is safe by its absence."""


_EXAMPLE = """
[[example]]
principal = "local:0"
call = {{ tool = "{tool}", arguments = {{ nothing = "takes this" }} }}
expect = "deny"
"""
"""Every policy ends with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What came of one case."""

    case: CallCase
    problems: tuple[str, ...]
    """One sentence for each thing that was not as it must be; empty when the claim holds."""


@dataclass(slots=True)
class _Seen:
    """One call, as its caller and its operator see it."""

    call_id: str = ""
    tool: str = ""
    result: CallResult | None = None
    told: str = ""
    """What the caller is told instead of a result."""
    how: str = ""
    """A class of ``failures``, ``profile_error`` or ``cancelled`` where there is no result."""
    records: list[Record] = field(default_factory=list)
    artifacts: dict[str, str] = field(default_factory=dict)
    uris: dict[str, str] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)
    """Names of artifacts that another caller could fetch."""
    printed: str = ""
    left: tuple[str, ...] = ()


class CallHarness:
    """Where cases are tried: one server's parts, with a log and a store of their own. Open it with :func:`opened`."""

    def __init__(self, app: App, host: Planted, directory: Path, logs: Sequence[Mapping[str, Any]]) -> None:
        """Take the server's parts, what is planted, a directory for profiles, and what the server logs from now on."""
        self._logs = logs
        self._app = app
        self._host = host
        self._directory = directory
        self._state = app.settings.state_dir
        self._stops = stops_of(self._state)
        # Known to the server, and in no file: a case's program puts it together.
        canary = new_canary(host.workspace, "none")
        canaries_of(self._state).add(canary.id, canary.model_dump_json().encode())
        self._marker = canary.marker

    async def judge(self, case: CallCase, driver: str) -> Judged:
        """Make the calls of one case on this driver and judge them."""
        fingerprint = self._host.fingerprint()
        earlier = await self._see(case.before, driver, {}) if case.before else _Seen()
        seen = await self._see(case, driver, earlier.uris)
        problems = [*_differences(case, seen), *self._always(seen)]
        if case.before:
            problems += self._always(earlier)
        if self._host.fingerprint() != fingerprint:
            problems.append("files of the host were changed")
        return Judged(case=case, problems=tuple(problems))

    async def control(self, case: CallCase, driver: str) -> tuple[str, ...]:
        """Make the calls of the case's control, where the guard does not apply; what was not as it says."""
        control = case.as_control()
        earlier = await self._see(case.before, driver, {}) if case.before else _Seen()
        seen = await self._see(control, driver, earlier.uris)
        return (*_differences(control, seen), *self._always(seen))

    async def _see(self, call: Call, driver: str, uris: Mapping[str, str]) -> _Seen:
        seen = _Seen()
        names = {f"host {name}": str(value) for name, value in self._host.names.items()}
        names |= {f"artifact {name}": uri for name, uri in uris.items()}
        names |= {"canary even": self._marker[::2], "canary odd": self._marker[1::2]}
        try:
            await self._make(call, driver, names, seen)
        except ValueError as problem:
            seen.how, seen.told = "invalid", str(problem)
        except ProfileError as problem:
            seen.how, seen.told = "profile_error", str(problem)
        except Exception as error:
            failure = failure_of(error)
            if failure is None:
                raise
            seen.how, seen.told = failure.classed, failure.sentence(error, seen.call_id)
        if seen.call_id:
            seen.records = list(records_of(self._state / "audit", seen.call_id))
        for record in seen.records:
            if record.kind == "sandbox.started":
                seen.left += await trial.left(record.data["measured"]["namespaces"], record.data["sandbox_id"])
        await self._fetch(call, seen)
        return seen

    async def _make(self, call: Call, driver: str, names: Mapping[str, str], seen: _Seen) -> None:
        profiles = load([self._profile(call, driver, names)], check_example=apps.check_example)
        served = self._host.root / "gone" if call.workspace == "gone" else self._app.workspace.path
        governance = replace(self._app.broker.governance, rights_of=self._rights(call, profiles, served))
        broker = replace(self._app.broker, governance=governance)
        given = strict_json.check(_filled(call.raw, names)) if call.raw is not None else _filled(call.arguments, names)
        seen.call_id, seen.tool = new_call_id(), call.tool
        with anyio.CancelScope() as scope:
            listener = _Listener(seen, [(call.cancel, scope.cancel), (call.stop, partial(self._stop, seen.call_id))])
            seen.result = await broker.submit(_principal(call.caller), call.tool, given, listener, call_id=seen.call_id)
        if scope.cancelled_caught:
            seen.how = "cancelled"
        for name in self._stops.names():
            self._stops.remove(name)

    def _stop(self, call_id: str) -> None:
        stop = new_stop("call", call_id, because="The case says so.", by="proof", made=datetime.now(UTC))
        self._stops.add(stop.id, stop.encoded())

    def _rights(self, call: Call, profiles: ProfileSet, served: Path | None) -> RightsOf:
        """What the case's policy leaves whoever calls; without one, what its profile says."""
        if not call.policy:
            rights = Rights(profiles=profiles, workspace=served)
            return lambda _: rights
        path = Path(tempfile.mkdtemp(dir=self._directory)) / "policy.toml"
        path.write_text(call.policy + _EXAMPLE.format(tool=call.tool))
        return Roles(policies.load(path, profiles, self._app.tools), profiles, served, {})

    def _profile(self, call: Call, driver: str, names: Mapping[str, str]) -> Path:
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        lines = []
        for section in {**_SECTIONS, **call.profile}:
            text = call.profile.get(section, _SECTIONS.get(section, "").format(tool=call.tool, driver=driver))
            lines += [f"[{section}]"] * bool(section) + [_filled(text, {**names, "driver": driver, "tool": call.tool})]
        if call.profiled:
            (directory / f"{call.tool}.toml").write_text("\n".join(lines))
        return directory

    async def _fetch(self, call: Call, seen: _Seen) -> None:
        """Read every artifact back as its caller, and try it as somebody else."""
        if seen.result is None:
            return
        for each in seen.result.structured.get("artifacts", ()):
            seen.uris[each["name"]] = each["uri"]
            async with self._app.artifacts.open(each["uri"], _principal(call.caller)) as reader:
                seen.artifacts[each["name"]] = (await reader.read(_ARTIFACT_BYTES)).decode("utf-8", "replace")
            stranger = _principal("another" if call.caller == "one" else "one")
            try:
                async with self._app.artifacts.open(each["uri"], stranger):
                    seen.shared.append(each["name"])
            except Refused:
                continue

    def _always(self, seen: _Seen) -> list[str]:
        """What must be so of every call, whatever the case is about."""
        found = [f"left behind: {what}" for what in seen.left]
        told = [seen.told, seen.printed]
        if seen.result is not None:
            told += [json.dumps(dict(seen.result.structured)), json.dumps(dict(seen.result.meta))]
            told += [each.text for each in seen.result.content if isinstance(each, Text)]
            found += _incomplete(self._app.tools[seen.tool], seen.result)
        recorded = [json.dumps(record.data) for record in seen.records if record.kind != "receipt.signed"]
        logged = [str(entry) for entry in self._logs]
        if any(os.environ[CANARY] in text for text in (*told, *recorded, *logged)):
            found.append("the server's secret is in what the caller, the record or the log got")
        data = self._app.settings.data_dir
        for place in (self._host.root, self._state, data):
            found += [f"a host path is in what the caller got: {text[:300]}" for text in told if str(place) in text]
        found += [f"another caller could fetch {name!r}" for name in seen.shared]
        found += _order(seen.records)
        report = verify(self._state / "audit")
        if not report.ok:
            found.append(f"the audit log does not verify: {report.problems[:1]}")
        return found


class _Listener:
    """Hears what is printed, and does what the case says, once, when it matches."""

    def __init__(self, seen: _Seen, when: Sequence[tuple[str, Callable[[], None]]]) -> None:
        self._seen = seen
        self._when = [(pattern, act) for pattern, act in when if pattern]

    def progress(self, message: str) -> None:
        """Nothing is done with signs of life."""

    def printed(self, text: str) -> None:
        """Keep it."""
        self._seen.printed += text
        for each in tuple(self._when):
            pattern, act = each
            if re.search(pattern, self._seen.printed):
                self._when.remove(each)
                act()

    def ended_by(self) -> str:
        """The case is the client."""
        return "client"

    def waits(self) -> bool:
        """Nobody answers here."""
        return False

    async def ask(self, _question: Question) -> None:
        """Nobody is there to be asked."""


@asynccontextmanager
async def opened(data: Path, host: Planted) -> AsyncIterator[CallHarness]:
    """A harness, for the length of the block; its log and its store are gone after it.

    Args:
        data: directory of the sandboxes' runtime.
        host: what is planted; its workspace is the one that is served.
    """
    with tempfile.TemporaryDirectory(prefix="glovebox-proof-") as scratch:
        directory = Path(scratch)
        for name in ("profiles", "none"):
            (directory / name).mkdir()
        settings = Settings(
            workspace=host.workspace,
            profiles_dir=directory / "none",
            policy=None,  # whatever the variable says: the cases bring what is in force
            data_dir=data,
            state_dir=directory / "state",
        )
        with capture_logs() as logs:
            async with apps.opened(settings, "cli") as app:
                yield CallHarness(app, host, directory / "profiles", logs)


def _principal(caller: str) -> Principal:
    return Principal(id=f"proof:{caller}", transport="cli")


def _filled(value: Any, names: Mapping[str, str]) -> Any:
    """Put names into every text of a JSON value; one that is not known stays as it is, for the case to fail on."""
    if isinstance(value, str):
        return re.sub(r"\{\{([^{}]+)\}\}", lambda found: names.get(found[1], found[0]), value)
    if isinstance(value, dict):
        return {key: _filled(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, names) for each in value]
    return value


def _incomplete(tool: Tool, result: CallResult) -> list[str]:
    try:
        tool.result.model_validate_json(json.dumps(dict(result.structured)))
    except ValueError as problem:
        return [f"the structured result does not fit the tool's model: {problem}"]
    shown = _shown(result)
    printed = (result.structured.get("stdout") or {}).get("text", "")
    refusal = (result.structured.get("refused") or {}).get("reason", "")
    whole = printed in shown and refusal in shown
    return [] if whole else ["the text does not hold what the structured result does"]


def _shown(result: CallResult | None) -> str:
    return "\n".join(each.text for each in result.content if isinstance(each, Text)) if result else ""


def _order(records: Sequence[Record]) -> list[str]:
    kinds = [record.kind for record in records]
    if not kinds:
        return []
    found = [] if kinds[0] == _DENIED else [f"the first record is {kinds[0]}"]
    endings = [kind for kind in kinds if kind in _ENDINGS]
    wanted = 1 if records[0].data.get("effect") == "allow" else 0
    if len(endings) != wanted:
        found.append(f"there are {len(endings)} last records instead of {wanted}: {kinds}")
    return found


def _differences(wanted: Call, seen: _Seen) -> list[str]:
    """Everything that is not as the case says."""
    found = _ending(wanted, seen)
    structured = dict(seen.result.structured) if seen.result else {}
    for name, pattern in wanted.result.items():
        text = _plain(_at(structured, name))
        if not re.fullmatch(pattern, text, re.DOTALL):
            found.append(f"{name} of the result is {text[:500]!r} and not {pattern}")
    if wanted.text and not re.search(wanted.text, _shown(seen.result)):
        found.append(f"its text is {_shown(seen.result)[:500]!r} and does not match {wanted.text}")
    if wanted.artifacts is not None:
        found += _files(wanted.artifacts, seen.artifacts)
    kinds = " ".join(record.kind for record in seen.records)
    if wanted.audit and not re.fullmatch(wanted.audit, kinds):
        found.append(f"its records are {kinds!r} and not {wanted.audit}")
    return found + _recorded(wanted.records, seen.records)


def _ending(wanted: Call, seen: _Seen) -> list[str]:
    found = []
    if seen.how in ("refused", "unknown tool"):  # no case is about these: it was not tried
        found.append(f"it was not begun: {seen.told[:500]!r}")
    for how in ("invalid", "unavailable", "profile_error"):
        pattern = getattr(wanted, how)
        if bool(pattern) != (seen.how == how) or (pattern and not re.search(pattern, seen.told)):
            found.append(f"it was told {seen.how or 'nothing'}: {seen.told[:500]!r} instead of {how}: {pattern!r}")
    refusal = (seen.result.structured.get("refused") if seen.result else None) or {}
    if refusal.get("rule", "") != wanted.refused:
        found.append(f"it was refused by {refusal or 'nothing'} instead of {wanted.refused or 'nothing'}")
    if bool(wanted.cancel) != (seen.how == "cancelled"):
        found.append(f"it was {'not ' if wanted.cancel else ''}cancelled")
    if wanted.failed is not None and (seen.result is None or seen.result.failed != wanted.failed):
        found.append(f"its result {'does not say' if wanted.failed else 'says'} that it failed")
    return found


def _files(wanted: Mapping[str, str], fetched: Mapping[str, str]) -> list[str]:
    if set(wanted) != set(fetched):
        return [f"the files {sorted(fetched)} could be fetched instead of {sorted(wanted)}"]
    return [
        f"{name!r} holds {fetched[name][:200]!r} and not {pattern}"
        for name, pattern in wanted.items()
        if not re.fullmatch(pattern, fetched[name], re.DOTALL)
    ]


def _recorded(wanted: Mapping[str, str], records: Sequence[Record]) -> list[str]:
    found = []
    for place, pattern in wanted.items():
        kind, _, name = place.partition("/")
        texts = [_plain(_at(record.data, name)) for record in records if record.kind == kind]
        if not any(re.fullmatch(pattern, text, re.DOTALL) for text in texts):
            found.append(f"{place} of the records is {texts} and not {pattern}")
    return found


def _at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
