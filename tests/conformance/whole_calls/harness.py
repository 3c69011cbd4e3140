"""Judging whole calls: through the broker, with real records and artifacts, on one driver.

The cases are those of ``case``. What must be so of every call is asked here of each: no secret and no
path of the host in anything a caller gets, one last record, nothing left behind; and of all of them, when the last is
over, that the log verifies.
"""

import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from structlog.testing import capture_logs
from tests.conformance.whole_calls import echoing
from tests.conformance.whole_calls.case import FOLDER_STEPS, CallCase, TrialCall
from tests.conformance.whole_calls.governed import CaseGovernance
from tests.conformance.whole_calls.over_http import OverHttp
from tests.conformance.whole_calls.promoting import CaseFolder
from tests.conformance.whole_calls.proofs import require_locked, shown
from tests.conformance.whole_calls.seen import Seen, incomplete, of_all, order, promoted, refused_requests

from glovebox_audit.chain import new_call_id
from glovebox_audit.events import RequestsRefused
from glovebox_audit.read import records_of
from glovebox_audit.verify import verify
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import load
from glovebox_profiles.policy.model import Policy
from glovebox_sandboxes import strict_json
from glovebox_sandboxes.conformance import trial
from glovebox_sandboxes.conformance.host import CANARY, Planted
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server import app as apps
from glovebox_server import startup
from glovebox_server.app import App
from glovebox_server.calls import Listener, Principal, Text, ToolCall
from glovebox_server.core.broker import Broker
from glovebox_server.core.rights import Rights, Roles
from glovebox_server.failures import failure_of
from glovebox_server.guards.registry import GuardSet
from glovebox_server.settings import Settings
from glovebox_server.transport.logs import to_stderr

_ARTIFACT_BYTES = 1 << 20
"""Most that is read back of one file; the trial's profile lets out no more."""

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


class CallHarness:
    """Where cases are tried: one server's parts, with a log and a store of their own. Open it with :func:`opened`."""

    def __init__(self, app: App, host: Planted, directory: Path, logs: Sequence[Mapping[str, Any]]) -> None:
        """Take the server's parts, what is planted, a directory for profiles, and what the server logs from now on."""
        self._logs = logs
        self._app = app
        self._host = host
        self._directory = directory
        self._state = app.settings.state_dir

    async def judge(self, case: CallCase, driver: str) -> Judged:
        """Make the calls of one case on this driver and judge them."""
        fingerprint = self._host.fingerprint()
        problems = await self._tried(case.calls(), driver)
        if self._host.fingerprint() != fingerprint:
            problems.append("files of the host were changed")
        return Judged(case=case, problems=tuple(problems))

    async def control(self, case: CallCase, driver: str) -> tuple[str, ...]:
        """Make the calls of the case's control, where the guard does not apply; what was not as it says."""
        return tuple(await self._tried(case.as_control(), driver))

    async def _tried(self, calls: Sequence[TrialCall], driver: str) -> list[str]:
        """Make calls one after the other; what was not as they say."""
        problems: list[str] = []
        uris: dict[str, str] = {}
        place = Path(tempfile.mkdtemp(dir=self._state))
        async with AsyncExitStack() as opened:
            governance = await opened.enter_async_context(CaseGovernance.opened(self._app, place))
            folder: CaseFolder | None = None
            if any(call.folder is not None for call in calls):
                path = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="glovebox-proof-")))
                folder = CaseFolder(app=self._app, path=path, workspace=self._host.workspace)
            for number, call in enumerate(calls, 1):
                seen, counted = await self._all(call, driver, uris, governance, folder)
                found = [*of_all(call, seen), *(problem for each in seen for problem in self._always(each))]
                found += [] if call.counted is None else refused_requests(call.counted, counted)
                uris |= {f"artifact {name}": uri for name, uri in seen[-1].uris.items()}
                uris[f"handle {call.caller}"] = seen[-1].handle
                for step in call.then:
                    if folder is not None and step in FOLDER_STEPS:
                        seen[-1].promotions.append(await folder.happens(step, seen[-1].uris))
                    else:
                        await governance.happens(step, self._asked(call, seen[-1]), seen[-1].question)
                if folder is not None:
                    seen[-1].folder = folder.held()
                found += promoted(call, seen[-1])
                problems += found if number == len(calls) else [f"call {number}: {each}" for each in found]
        return problems

    async def _all(
        self,
        call: TrialCall,
        driver: str,
        given: Mapping[str, str],
        governance: CaseGovernance,
        folder: CaseFolder | None = None,
    ) -> tuple[list[Seen], list[RequestsRefused]]:
        """Make a call as often as it says; what was seen, and the records of requests that became no calls."""
        marker = governance.marker
        names = {f"host {name}": str(value) for name, value in self._host.names.items()}
        names |= given
        names |= {"canary": marker, "canary even": marker[::2], "canary odd": marker[1::2]}
        try:
            guards = await self._guards(call, driver, names, governance)
        except ProfileError as problem:
            return [Seen(how="profile_error", told=str(problem))], []
        if folder is not None:
            guards = replace(guards, proposals=folder.proposals)
        stop = partial(governance.stop, "call")
        seen = [Seen(call_id=new_call_id(), tool=call.tool) for _ in range(call.times)]
        counted: list[RequestsRefused] = []
        async with AsyncExitStack() as opened:
            if call.echoes:
                guards = replace(guards, gates=await opened.enter_async_context(echoing.opened()))
            broker = replace(self._app.broker, guards=guards)
            make = partial(self._make, broker, call, names, stop)
            if call.token:
                way = await opened.enter_async_context(OverHttp.opened(self._app, broker, call, governance.place))
                make = partial(way.make, call, _filled(call.arguments, names), _filled(call.handle, names))
            if call.at_once:
                async with anyio.create_task_group() as tasks:
                    for each in seen:
                        tasks.start_soon(make, each)
            else:
                for each in seen:
                    await make(each)
            if call.token:
                counted = await way.counted()
        for each in seen:
            await self._look(call, each)
        return seen, counted

    async def _guards(
        self, call: TrialCall, driver: str, names: Mapping[str, str], governance: CaseGovernance
    ) -> GuardSet:
        """Return the server's guards, with the profile and policy that the case brings."""
        place = self._profile(call, driver, names)
        profiles = load([place], check_example=apps.check_example)
        if call.locked:
            require_locked(call.locked, profiles, place)
        served = self._host.root / "gone" if call.workspace == "gone" else self._app.workspace.path
        policy = self._policy(call, profiles)
        plain = Rights(profiles=profiles, workspace=served)
        rights_of = (lambda _: plain) if policy is None else Roles(policy, profiles, served, {})
        return await governance.of(policy, rights_of)

    async def _make(
        self, broker: Broker, call: TrialCall, names: Mapping[str, str], stop: Callable[[str], None], seen: Seen
    ) -> None:
        about = self._asked(call, seen)
        seen.began = about.received
        with anyio.CancelScope() as scope:
            listener = _Listener(seen, [(call.cancel, scope.cancel), (call.stop, partial(stop, seen.call_id))])
            try:
                raw = call.raw
                given = _filled(call.arguments, names) if raw is None else strict_json.check(_filled(raw, names))
                seen.result = await broker.submit(
                    about.principal, call.tool, given, listener, call_id=seen.call_id, run=about.run
                )
            except ValueError as problem:
                seen.how, seen.told = "invalid", str(problem)
            except Exception as error:
                failure = failure_of(error)
                if failure is None:
                    raise
                seen.how, seen.told = failure.classed, failure.sentence(error, seen.call_id)
        if scope.cancelled_caught:
            seen.how = "cancelled"

    async def _look(self, call: TrialCall, seen: Seen) -> None:
        """See what is left of a call that is over: records, processes, files."""
        seen.records = list(records_of(self._state / "audit", seen.call_id))
        for record in seen.records:
            if record.kind == "sandbox.started":
                ago = (datetime.now(UTC) - datetime.fromisoformat(record.time)).total_seconds()
                namespaces, name = record.data["measured"]["namespaces"], record.data["sandbox_id"]
                seen.left += await trial.left(namespaces, name, trial.now() - ago)
        if call.shown:
            shows = partial(shown, call.shown, self._app.settings, seen.call_id)
            seen.verified = await anyio.to_thread.run_sync(shows)
        await self._fetch(call, seen)

    def _asked(self, call: TrialCall, seen: Seen) -> ToolCall:
        """Whose a call is."""
        principal = _principal(call.caller)
        run = self._app.runs.of_client(principal.id, call.run)
        return ToolCall(
            id=seen.call_id,
            principal=principal,
            session=None,
            tool=call.tool,
            arguments={},
            received=datetime.now(UTC),
            run=run,
        )

    def _policy(self, call: TrialCall, profiles: ProfileSet) -> Policy | None:
        if not call.policy:
            return None
        path = Path(tempfile.mkdtemp(dir=self._directory)) / "policy.toml"
        path.write_text(call.policy + _EXAMPLE.format(tool=call.tool))
        return startup.load(path, profiles)

    def _profile(self, call: TrialCall, driver: str, names: Mapping[str, str]) -> Path:
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        lines = []
        for section in {**_SECTIONS, **call.profile}:
            text = call.profile.get(section, _SECTIONS.get(section, "").format(tool=call.tool, driver=driver))
            lines += [f"[{section}]"] * bool(section) + [_filled(text, {**names, "driver": driver, "tool": call.tool})]
        if call.profiled:
            (directory / f"{call.tool}.toml").write_text("\n".join(lines))
        return directory

    async def _fetch(self, call: TrialCall, seen: Seen) -> None:
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
            except RefusedError:
                continue

    def _always(self, seen: Seen) -> list[str]:
        """What must be so of every call, whatever the case is about."""
        found = [f"left behind: {what}" for what in seen.left]
        told = [seen.told, seen.printed]
        if seen.result is not None:
            told += [json.dumps(dict(seen.result.structured)), json.dumps(dict(seen.result.meta))]
            told += [each.text for each in seen.result.content if isinstance(each, Text)]
            found += incomplete(self._app.tools[seen.tool], seen.result)
        recorded = [json.dumps(record.data) for record in seen.records if record.kind != "receipt.signed"]
        logged = [str(entry) for entry in self._logs]
        if any(os.environ[CANARY] in text for text in (*told, *recorded, *logged)):
            found.append("the server's secret is in what the caller, the record or the log got")
        data = self._app.settings.data_dir
        for place in (self._host.root, self._state, data):
            found += [f"a host path is in what the caller got: {text[:300]}" for text in told if str(place) in text]
        found += [f"another caller could fetch {name!r}" for name in seen.shared]
        return found + order(seen.records)


class _Listener(Listener):
    """Hears what is printed, and does what the case says, once, when it matches."""

    def __init__(self, seen: Seen, when: Sequence[tuple[str, Callable[[], None]]]) -> None:
        self._seen = seen
        self._when = [(pattern, act) for pattern, act in when if pattern]

    def printed(self, text: str) -> None:
        """Keep it."""
        self._seen.printed += text
        for each in tuple(self._when):
            pattern, act = each
            if re.search(pattern, self._seen.printed):
                self._when.remove(each)
                act()


@asynccontextmanager
async def opened(data: Path, host: Planted) -> AsyncIterator[CallHarness]:
    """A harness, for the length of the block; its log and its store are gone after it.

    Args:
        data: directory of the sandboxes' runtime.
        host: what is planted; its workspace is the one that is served.

    Raises:
        AssertionError: the log of all that was called does not verify.
    """
    with tempfile.TemporaryDirectory(prefix="glovebox-proof-") as scratch:
        directory = Path(scratch)
        for name in ("profiles", "none"):
            (directory / name).mkdir()
        settings = Settings(
            workspace=host.workspace,
            profiles_dir=directory / "none",
            policy=None,  # whatever the variable says: the cases bring what is in effect
            data_dir=data,
            state_dir=directory / "state",
        )
        to_stderr("debug")  # through structlog, also what the standard library's loggers get
        with capture_logs() as logs:
            async with apps.opened(settings, "cli") as app:
                yield CallHarness(app, host, directory / "profiles", logs)
        report = verify(settings.state_dir / "audit")
        assert report.ok, f"the audit log does not verify: {report.problems[:3]}"


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
