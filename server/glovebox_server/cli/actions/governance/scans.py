"""What ``glovebox artifact scan`` does: a call of ``run_python`` like any other, whose program is our scanner."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anyio
from rich.console import Console
from rich.text import Text as Plain

from glovebox_sandboxes.contract.errors import Diagnosed
from glovebox_server import app as apps
from glovebox_server.calls import CallResult, Principal
from glovebox_server.cli.terminal import print_json
from glovebox_server.exits import FAILED, OK
from glovebox_server.promotion import scanner
from glovebox_server.secret_scan.patterns import PATTERNS
from glovebox_server.settings import Settings

_MOST: Final = 64
"""Findings of one file that are shown."""


class ScanFailed(Diagnosed):
    """Nothing is known of what the files hold."""


class _Silent:
    """A listener of a call that nobody follows."""

    def progress(self, message: str) -> None:
        """Nobody looks."""

    def printed(self, text: str) -> None:
        """Nobody looks."""

    def ended_by(self) -> str:
        return "client"

    def waits(self) -> float:
        return 0

    async def ask(self, question: object) -> None:
        """Nobody can be asked here: an operator is."""


def scan(settings: Settings, out: Console, *, uris: Sequence[str], principal: str, as_json: bool) -> int:
    """Look into artifacts in a sandbox; see ``glovebox artifact scan``."""

    async def call() -> CallResult:
        async with apps.opened(settings, "cli", prewarm=False) as app:
            caller = Principal(id=principal, transport="cli")
            arguments = {"code": _program(), "inputs": list(uris)}
            return await app.broker.submit(caller, "run_python", arguments, _Silent(), run=app.runs.new())

    found = _findings(anyio.run(call))
    if as_json:
        print_json(out.file, {"findings": found})
    else:
        for name, lines in found.items():
            out.print(Plain(f"{name}: {'nothing was found' if not lines else ''}".rstrip()))
            for line in lines:
                out.print(Plain(f"  ! {line}"), style="yellow")
    return FAILED if any(found.values()) else OK


def _program() -> str:
    secrets = [[each.kind, each.form.pattern.decode("latin-1")] for each in PATTERNS]
    text = Path(scanner.__file__).read_text(encoding="utf-8")
    return f"{text}\nprint(json.dumps(main('/input', json.loads({json.dumps(secrets)!r}))))\n"


def _findings(result: CallResult) -> dict[str, list[str]]:
    """What the scanner said: a hostile file may have made it say anything, so that nothing but its form is believed."""
    told: Any = None
    stdout = result.structured.get("stdout")
    if not result.failed and isinstance(stdout, dict):
        try:
            told = json.loads(str(stdout.get("text", "")))
        except (ValueError, RecursionError):
            told = None
    if not isinstance(told, dict) or not all(isinstance(lines, list) for lines in told.values()):
        reason = "the scanner gave no findings: a file may have ended it, or the call was refused"
        fix = "Take the files for dangerous; `glovebox audit query --tool run_python` shows the call."
        raise ScanFailed("Scanning the artifacts", reason, fix)
    return {str(name): [str(line) for line in lines[:_MOST]] for name, lines in told.items()}
