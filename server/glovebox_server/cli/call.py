"""``glovebox call``: one call from a shell."""

import io
import math
import os
import sys
import termios
from functools import partial
from typing import Any, BinaryIO

import anyio
import click

from glovebox_audit.printable import LAYOUT, printable
from glovebox_sandboxes import strict_json
from glovebox_server import app as apps
from glovebox_server import workspace
from glovebox_server.calls import CallResult, Image, Link, Listener, Principal, Text
from glovebox_server.cli.options import command, complete_tool, emit, err, out, wants_json, word_form, workflow_option
from glovebox_server.cli.terminal import print_question
from glovebox_server.errors import InvalidArgumentsError
from glovebox_server.exits import FAILED, OK, REFUSED
from glovebox_server.guards.approvals.question import ApprovalAnswer, Question
from glovebox_server.guards.approvals.shown import shown
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS

#: Bytes of arguments on standard input, as of a line from an MCP client; code of a call is far shorter.
_MAX_ARGUMENTS = 1 << 20

#: Longest answer that is read: the longest line of a terminal (termios(3), canonical mode).
MAX_ANSWER_BYTES = 4096


@command("call", makes_calls=True)
@click.argument("tool", shell_complete=complete_tool)
@click.option("--args", "arguments", default="{}", help="Arguments as a JSON object; - reads standard input.")
@click.option("--code", help="The program, for run_python; - reads standard input.")
@click.option("--file", type=click.File("rb"), help="The program, in a file; - reads standard input.")
@click.option(
    "--run",
    metavar="ID",
    type=word_form("r_[0-9a-hjkmnp-tv-z]{26}", "r_ and 26 characters, as `audit show` has it"),
    help="Continue this run, as a refusal names it; else the call is one of its own.",
)
@workflow_option
def call(
    settings: Settings,
    *,
    tool: str,
    arguments: str,
    code: str | None,
    file: BinaryIO | None,
    run: str | None,
    workflow: str | None,
) -> int:
    """Make one call of a tool, in a sandbox.

    Exit 0 fine, 1 program failed, 2 bad arguments, 3 refused, 4 unavailable.
    """
    if code is not None and file is not None:
        raise click.UsageError("--code and --file both name the program: leave one out.")
    given = sys.stdin.buffer
    if arguments == "-" and (code == "-" or file is given):
        raise click.UsageError("--args and the program cannot both read standard input.")
    arguments = _read("--args", given) if arguments == "-" else arguments
    program = _read("--code", given if code == "-" else io.BytesIO(os.fsencode(code))) if code is not None else None
    program = _read("--file", file) if file is not None else program
    return anyio.run(partial(_make_call, settings, tool, arguments, program, run=run, workflow=workflow))


async def _make_call(
    settings: Settings, tool: str, arguments: str, program: str | None, *, run: str | None, workflow: str | None
) -> int:
    # Prewarmed sandboxes are useless after one call, and their end would be waited for.
    async with apps.opened(settings, "cli") as app:
        principal = Principal(id=f"local:{os.getuid()}", transport="cli", workflow=workflow)
        filled = _parse_arguments(tool, arguments, program)
        listener = _TerminalListener(principal)
        result = await app.broker.submit(principal, tool, filled, listener, run=run or app.runs.new())
        profile = app.profiles.get(tool)
        wanted = profile is not None and profile.files.workspace != "none"
        error = result.structured.get("error")  # closed files cause no other failure than that reading was denied
        unread = result.failed and isinstance(error, dict) and workspace.OPENS in str(error.get("message"))
        if wanted and (app.workspace.path is None or (app.workspace.closed and unread)):
            err.print(str(app.workspace))
    if not emit(result.structured):
        _show(result)
    if "refused" in result.structured:
        return REFUSED
    return FAILED if result.failed else OK


def _parse_arguments(tool: str, arguments: str, program: str | None) -> dict[str, Any]:
    try:
        raw = strict_json.check_shape(arguments)
    except ValueError as problem:
        raise InvalidArgumentsError("--args", (f"must be one JSON object: {problem}",)) from None
    if not isinstance(raw, dict):
        raise InvalidArgumentsError("--args", ("must be one JSON object",))
    if program is not None:
        if tool in TOOLS and "code" not in TOOLS[tool].arguments.model_fields:
            raise InvalidArgumentsError(tool, ("code: it takes no program, so neither --code nor --file",))
        if "code" in raw:
            raise InvalidArgumentsError(tool, ("code: --args has one, and so does --code or --file",))
        raw["code"] = program
    return raw


class _TerminalListener(Listener):
    """Shows progress on one line of standard error, and asks the person there."""

    def __init__(self, principal: Principal) -> None:
        self._principal = principal
        self._asks = not wants_json() and err.file.isatty() and sys.stdin.isatty()

    def progress(self, message: str) -> None:
        if err.is_terminal:
            err.print(message, style="dim")

    def waits(self) -> float:
        """Return infinity at a terminal: a person can answer there or on another, and the question ends the wait."""
        return math.inf if err.is_terminal else 0

    async def ask(self, question: Question) -> ApprovalAnswer | None:
        """Ask the person at the terminal; None without a terminal on both sides."""
        if not self._asks:
            return None
        print_question(err, shown(question))
        termios.tcflush(sys.stdin, termios.TCIFLUSH)  # input typed before the question answers nothing
        err.print("May it run? [y/N] ", end="")
        await anyio.wait_readable(sys.stdin)
        said = os.read(sys.stdin.fileno(), MAX_ANSWER_BYTES).decode("utf-8", "replace").strip().lower()
        yes = said in ("y", "yes")
        return ApprovalAnswer(allow=yes, by=self._principal.id, channel="client", digest=question.digest)


def _show(result: CallResult) -> None:
    for item in result.content:
        match item:
            case Text():
                out.print(printable(item.text.removesuffix("\n"), LAYOUT))
            case Image():
                out.print(f"[{item.media_type}, {len(item.data)} bytes]", style="cyan")
            case Link():
                out.print(f"{item.name}  {item.uri}  {item.media_type}, {item.bytes} bytes", style="cyan")


def _read(option: str, source: BinaryIO) -> str:
    try:
        content = source.read(_MAX_ARGUMENTS + 1)
        if len(content) > _MAX_ARGUMENTS:
            raise click.UsageError(f"{option}: it has more than {_MAX_ARGUMENTS} bytes.")
        return content.decode("utf-8-sig")  # editors write the mark, and Python itself accepts it
    except UnicodeDecodeError as problem:
        raise click.UsageError(f"{option}: it is not UTF-8 at byte {problem.start}.") from None
    except OSError as problem:
        raise click.UsageError(f"{option}: it cannot be read: {problem.strerror}.") from None
