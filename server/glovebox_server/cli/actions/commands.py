"""What the commands of the command line do, apart from words and options. Each returns an exit code."""

import math
import os
import sys
import termios
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import anyio
import structlog
from rich.console import Console
from rich.text import Text as Plain

from glovebox_audit.printable import LAYOUT, printable
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.policy.rights import order_conflicts
from glovebox_sandboxes import strict_json
from glovebox_sandboxes.plural import counted
from glovebox_sandboxes.runtime.environments import Environment
from glovebox_server import app as apps
from glovebox_server import event_loop, workspace
from glovebox_server.calls import CallResult, Image, Link, Principal, Text
from glovebox_server.cli import state
from glovebox_server.cli.terminal import new_table, print_json, print_question, print_table
from glovebox_server.errors import InvalidArguments
from glovebox_server.exits import FAILED, OK, REFUSED
from glovebox_server.guards.approvals.question import Answer, Question
from glovebox_server.guards.approvals.shown import shown
from glovebox_server.secret_files import prepare_state
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS
from glovebox_server.transport import logs
from glovebox_server.upkeep.log import audit_log, retention

#: Longest line that is read for an answer: the longest that a terminal hands over (termios(3), canonical mode).
MAX_ANSWER_BYTES = 4096


class _Told:
    """A listener for a terminal: what happens now, on one line of standard error; asks whoever sits at it."""

    def __init__(self, console: Console, principal: Principal, *, asks: bool) -> None:
        self._console = console
        self._principal = principal
        self._asks = asks and console.file.isatty() and sys.stdin.isatty()

    def progress(self, message: str) -> None:
        if self._console.is_terminal:
            self._console.print(message, style="dim", markup=False, highlight=False)

    def printed(self, text: str) -> None:
        """The result shows it in full a moment later."""

    def ended_by(self) -> str:
        return "client"

    def waits(self) -> float:
        """A person sees what is waited for, and can answer here or on another terminal; the question ends the wait."""
        return math.inf if self._console.is_terminal else 0

    async def ask(self, question: Question) -> Answer | None:
        """Ask whoever made the call; None without a terminal on both sides."""
        if not self._asks:
            return None
        print_question(self._console, shown(question))
        termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed before the question was there answers nothing
        self._console.print(Plain("May it run? [y/N] "), end="")
        await anyio.wait_readable(sys.stdin)
        said = os.read(sys.stdin.fileno(), MAX_ANSWER_BYTES).decode("utf-8", "replace").strip().lower()
        return Answer(allow=said in ("y", "yes"), by=self._principal.id, channel="client", digest=question.digest)


def call(
    settings: Settings,
    out: Console,
    err: Console,
    *,
    tool: str,
    arguments: str,
    code: str | None,
    run: str | None,
    workflow: str | None,
    as_json: bool,
) -> int:
    """Make one call, with a program beside the other arguments where there is one; see ``glovebox call``."""
    logs.to_stderr("warning")  # else structlog writes to standard output, which has the result

    async def make() -> int:
        # What would stand ready after one call is of no use to anybody, and its end would be waited for.
        async with apps.opened(settings, "cli", prewarm=False) as app:
            try:
                raw = strict_json.check_shape(arguments)
            except ValueError as problem:
                raise InvalidArguments("--args", (f"must be one JSON object: {problem}",)) from None
            if not isinstance(raw, dict):
                raise InvalidArguments("--args", ("must be one JSON object",))
            if code is not None:
                if tool in TOOLS and "code" not in TOOLS[tool].arguments.model_fields:
                    raise InvalidArguments(tool, ("code: it takes no program, so neither --code nor --file",))
                if "code" in raw:
                    raise InvalidArguments(tool, ("code: --args has one, and so does --code or --file",))
                raw["code"] = code
            principal = Principal(id=f"local:{os.getuid()}", transport="cli", workflow=workflow)
            told = _Told(err, principal, asks=not as_json)
            result = await app.broker.submit(principal, tool, raw, told, run=run or app.runs.new())
            profile = app.profiles.get(tool)
            wanted = profile is not None and profile.files.workspace != "none"
            if wanted and (app.workspace.path is None or (app.workspace.closed and _was_unreadable(result))):
                err.print(str(app.workspace), markup=False, highlight=False)
        _show(result, out, as_json=as_json)
        if "refused" in result.structured:
            return REFUSED
        return FAILED if result.failed else OK

    return anyio.run(make)


def _was_unreadable(result: CallResult) -> bool:
    """Whether it failed because the host denied reading; of every other failure, what is closed is no cause."""
    error = result.structured.get("error")
    return result.failed and isinstance(error, dict) and workspace.OPENS in str(error.get("message"))


def _show(result: CallResult, out: Console, *, as_json: bool) -> None:
    if as_json:
        print_json(out.file, result.structured)
        return
    for item in result.content:
        match item:
            case Text():
                out.print(Plain(printable(item.text.removesuffix("\n"), LAYOUT)))
            case Image():
                out.print(f"[{item.media_type}, {len(item.data)} bytes]", style="cyan", markup=False)
            case Link():
                out.print(f"{item.name}  {item.uri}  {item.media_type}, {item.bytes} bytes", style="cyan", markup=False)


def doctor(settings: Settings, out: Console, *, as_json: bool) -> int:
    """Say what this host can enforce; see ``glovebox doctor``."""
    from glovebox_server.cli.actions import doctor as looking  # noqa: PLC0415 - brings every driver

    settings = state.locate(settings)
    return anyio.run(lambda: looking.run(settings, out, as_json=as_json))


def prove(settings: Settings, out: Console, err: Console, *, names: tuple[str, ...], as_json: bool) -> int:
    """Try every claim on this host; see ``glovebox doctor --prove``."""
    from glovebox_server.prove import scorecard  # noqa: PLC0415 - brings every driver and the cases

    return anyio.run(lambda: scorecard.run(settings, out, err, names=names, as_json=as_json))


def capabilities(settings: Settings, out: Console, *, as_json: bool) -> int:
    """Say what a caller can have; see ``glovebox capabilities``."""
    from glovebox_server.cli.actions import capabilities as card  # noqa: PLC0415 - brings every driver and the SDK

    return anyio.run(lambda: card.run(settings, out, as_json=as_json))


def serve(
    settings: Settings,
    *,
    transport: str,
    host: str,
    port: int,
    allowed_hosts: tuple[str, ...],
    trusted_proxies: tuple[str, ...] = (),
    log: tuple[str, Literal["text", "json"]] = ("info", "text"),
    oauth: Mapping[str, Any] | None = None,
    workflow: str | None = None,
) -> int:
    """Serve until the clients or a signal end it; see ``glovebox serve``."""
    from glovebox_server.mcp import catalogue  # noqa: PLC0415 - brings the SDK
    from glovebox_server.transport import serve as transports  # noqa: PLC0415 - brings the SDK
    from glovebox_server.transport.oauth.authority import OAuth, Scopes  # noqa: PLC0415 - brings the SDK

    logs.to_stderr(*log)
    log_lines = structlog.get_logger(__name__)

    async def make() -> int:
        def tools_digest(profiles: ProfileSet, environments: Mapping[str, Environment]) -> str:
            return catalogue.digest(catalogue.listed(TOOLS.values(), profiles, environments))

        async with apps.opened(settings, transport, tools_digest) as app:
            app.in_force.require(workflow)
            policy = app.in_force.policy
            for warning in order_conflicts(policy) if policy else ():
                log_lines.warning(f"Policy: {warning}")
            named = policy is not None and all(role.workspace for role in policy.roles.values())
            if (app.workspace.path is None and not named) or app.workspace.closed:
                log_lines.warning(str(app.workspace))
            if transport == "stdio":
                event_loop.settled()
                app.ended.append(await transports.serve_stdio(app, workflow=workflow))
            else:
                options = given(settings, "state_dir")

                def ready(url: str) -> None:
                    event_loop.settled()
                    transports.announced(url, allowed_hosts, options)

                served = transports.serve_http(
                    app,
                    host=host,
                    port=port,
                    allowed_hosts=allowed_hosts,
                    trusted_proxies=trusted_proxies,
                    policy=app.in_force,
                    oauth=None if oauth is None else OAuth(**oauth),
                    scopes=Scopes(
                        roles=app.in_force.scopes,
                        refuses=lambda principal, tool: app.rights_of(principal).refusal(tool) is not None,
                    ),
                    workflow=workflow,
                    on_ready=ready,
                )
                app.ended.append(await served)
        return OK

    return event_loop.run(make)


def clean(settings: Settings, out: Console, *, dry_run: bool, as_json: bool) -> int:
    """Remove what is of no use any more, or only show it; see ``glovebox clean``."""
    from glovebox_server.upkeep import clean as cleaning  # noqa: PLC0415 - only here

    if settings.state_dir.exists():
        prepare_state(settings.state_dir)  # nothing is looked for in what somebody else may fill
    kept = retention(settings)
    items = cleaning.look(settings, kept) if dry_run else cleaning.clean(settings, kept, partial(audit_log, settings))
    total = sum(item.bytes for item in items)
    if as_json:
        print_json(out.file, {"removed": not dry_run, "bytes": total, "items": [asdict(item) for item in items]})
        return OK
    table = new_table("kind", "name", "bytes", "why", right=["bytes"])
    for item in items:
        table.add_row(item.kind, Plain(item.name), str(item.bytes), item.why)
    if items:
        print_table(out, table)
    words = "would be removed" if dry_run else "removed"
    out.print(Plain(f"{counted(len(items), 'item')}, {counted(total, 'byte')}, {words}."))
    return OK


def given(settings: Settings, *names: str) -> list[str]:
    """Those of these directories that are not the default, as options with absolute paths."""
    found = [name for name in names if name in settings.model_fields_set]
    return [word for name in found for word in (f"--{name.replace('_', '-')}", str(getattr(settings, name).absolute()))]
