"""What ``glovebox artifact scan`` and ``reencode`` do: calls of ``run_python`` as any, whose program is ours."""

from collections.abc import Mapping, Sequence

import anyio
from rich.console import Console
from rich.text import Text as Plain

from glovebox_audit.printable import printable
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server import app as apps
from glovebox_server.calls import CallResult, Link, Principal, Text
from glovebox_server.cli.terminal import print_json
from glovebox_server.exits import FAILED, OK
from glovebox_server.promotion import reencoder, scanner, scanning
from glovebox_server.promotion.scanner import Found
from glovebox_server.settings import Settings


class ScanFailed(DiagnosedError):  # noqa: N818 - until its area merges it
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
    """Look into artifacts in sandboxes; see ``glovebox artifact scan``."""
    found = findings(settings, dict.fromkeys(uris, principal))
    if as_json:
        lines = {uri: list(each.lines) for uri, each in found.items()}
        print_json(out.file, {"findings": lines, "more": {uri: each.more for uri, each in found.items()}})
    else:
        for uri, each in found.items():
            out.print(Plain(f"{uri}: {'nothing was found' if not each.count else ''}".rstrip()))
            for line in each.told():
                out.print(Plain(f"  ! {line}"), style="yellow")
    return FAILED if any(each.count for each in found.values()) else OK


def findings(settings: Settings, owners: Mapping[str, str]) -> dict[str, Found]:
    """What is found in each artifact, in a sandbox of its own: of one file no other can have a say.

    Args:
        settings: what is the server's own.
        owners: by address, whose it is; the calls are theirs.

    Raises:
        ScanFailed: of one of them nothing is known.
    """
    return {uri: _findings(result) for uri, result in _called(settings, owners, scanner.program()).items()}


def reencode(settings: Settings, out: Console, *, uris: Sequence[str], principal: str, as_json: bool) -> int:
    """Make pictures anew in sandboxes; see ``glovebox artifact reencode``."""
    results = _called(settings, dict.fromkeys(uris, principal), reencoder.program())
    made = {uri: _made(result) for uri, result in results.items()}
    failed = {uri: _why(result) for uri, result in results.items() if made[uri] is None}
    if as_json:
        told = {uri: link and {"uri": link.uri, "name": link.name, "sha256": link.sha256} for uri, link in made.items()}
        print_json(out.file, {"made": told, "failed": failed})
    else:
        for uri, link in made.items():
            out.print(Plain(f"{uri}: {failed[uri]}", "yellow") if link is None else Plain(f"{link.uri}  {link.name}"))
    return FAILED if failed else OK


def _made(result: CallResult) -> Link | None:
    links = [each for each in result.content if isinstance(each, Link)]
    return links[0] if len(links) == 1 and not result.failed else None


def _why(result: CallResult) -> str:
    stderr = result.structured.get("stderr")
    said = str(stderr.get("text", "")).strip() if isinstance(stderr, dict) else ""
    told = said or " ".join(each.text for each in result.content if isinstance(each, Text))
    return printable(" ".join(told.split()))[:300] or "the call gave no picture; `glovebox audit tail` shows it"


def _called(settings: Settings, owners: Mapping[str, str], code: str) -> dict[str, CallResult]:
    """What a call with this program gave for each artifact, each made for its owner."""

    async def call() -> dict[str, CallResult]:
        found = {}
        async with apps.opened(settings, "cli", prewarm=False) as app:
            for uri, owner in owners.items():
                caller, arguments = Principal(id=owner, transport="cli"), {"code": code, "inputs": [uri]}
                run = app.runs.new()
                found[uri] = await app.broker.submit(caller, "run_python", arguments, _Silent(), run=run)
        return found

    return anyio.run(call)


def _findings(result: CallResult) -> Found:
    stdout = result.structured.get("stdout")
    try:
        return scanning.findings_of(str(stdout["text"]) if not result.failed and isinstance(stdout, dict) else "")
    except scanning.Unanswered:
        reason = "the scanner gave no findings: a file may have ended it, or the call was refused"
        fix = "Take the files for dangerous; `glovebox audit query --tool run_python` shows the call."
        raise ScanFailed("Scanning the artifacts", reason, fix) from None
