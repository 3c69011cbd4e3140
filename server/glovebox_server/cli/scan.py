"""``glovebox artifact scan`` and ``reencode``: ordinary calls of ``run_python`` with our own program."""

import os
from collections.abc import Mapping

import anyio
import click
from rich.text import Text as Plain

from glovebox_audit.printable import printable
from glovebox_sandboxes.contract.errors import DiagnosedError, SandboxError
from glovebox_server import app as apps
from glovebox_server.calls import CallResult, Link, Principal, SilentListener, Text
from glovebox_server.cli.artifact import check_principal
from glovebox_server.cli.options import command, emit, out
from glovebox_server.exits import FAILED, OK
from glovebox_server.promotion import reencoder, scanner, scanning
from glovebox_server.promotion.scanner import ScanFindings
from glovebox_server.settings import Settings


@command("scan")
@click.argument("uris", metavar="URI…", nargs=-1, required=True)
@click.option("--principal", callback=check_principal, help="Whose they are, where they are not yours: token:NAME.")
def scan(settings: Settings, uris: tuple[str, ...], principal: str | None) -> int:
    """Look, in a sandbox, for what acts when files are opened.

    And for secrets. Exit 1 where there is something.
    """
    whose = principal or f"local:{os.getuid()}"
    found = find_in_artifacts(settings, dict.fromkeys(uris, whose))
    lines = {uri: list(each.lines) for uri, each in found.items()}
    if not emit({"findings": lines, "more": {uri: each.more for uri, each in found.items()}}):
        for uri, each in found.items():
            out.print(Plain(f"{uri}: {'nothing was found' if not each.count else ''}".rstrip()))
            for line in each.told():
                out.print(Plain(f"  ! {line}"), style="yellow")
    return FAILED if any(each.count for each in found.values()) else OK


@command("reencode")
@click.argument("uris", metavar="URI…", nargs=-1, required=True)
@click.option("--principal", callback=check_principal, help="Whose they are, where they are not yours: token:NAME.")
def reencode(settings: Settings, uris: tuple[str, ...], principal: str | None) -> int:
    """Make pictures anew in a sandbox, of their pixels alone.

    Prints the address of each new artifact. Exit 1 where one could not be made.
    """
    whose = principal or f"local:{os.getuid()}"
    results = _called(settings, dict.fromkeys(uris, whose), reencoder.program())
    made = {uri: _made(result) for uri, result in results.items()}
    failed = {uri: _why(result) for uri, result in results.items() if made[uri] is None}
    new = {uri: link and {"uri": link.uri, "name": link.name, "sha256": link.sha256} for uri, link in made.items()}
    if not emit({"made": new, "failed": failed}):
        for uri, link in made.items():
            out.print(Plain(f"{uri}: {failed[uri]}", "yellow") if link is None else Plain(f"{link.uri}  {link.name}"))
    return FAILED if failed else OK


def find_in_artifacts(settings: Settings, owners: Mapping[str, str]) -> dict[str, ScanFindings]:
    """Scan each artifact in a sandbox of its own: no file can influence the findings of another.

    ``owners`` has the owner of each address; the calls are theirs. Raises DiagnosedError if a scan fails.
    """
    return {uri: _findings(result) for uri, result in _called(settings, owners, scanner.program()).items()}


def _made(result: CallResult) -> Link | None:
    links = [each for each in result.content if isinstance(each, Link)]
    return links[0] if len(links) == 1 and not result.failed else None


def _why(result: CallResult) -> str:
    stderr = result.structured.get("stderr")
    said = str(stderr.get("text", "")).strip() if isinstance(stderr, dict) else ""
    told = said or " ".join(each.text for each in result.content if isinstance(each, Text))
    return printable(" ".join(told.split()))[:300] or "the call gave no picture; `glovebox audit tail` shows it"


def _called(settings: Settings, owners: Mapping[str, str], code: str) -> dict[str, CallResult]:
    """Return the result of a call with this program for each artifact, made for its owner."""

    async def call() -> dict[str, CallResult]:
        found = {}
        async with apps.opened(settings, "cli", prewarm=False) as app:
            for uri, owner in owners.items():
                caller, arguments = Principal(id=owner, transport="cli"), {"code": code, "inputs": [uri]}
                run = app.runs.new()
                found[uri] = await app.broker.submit(caller, "run_python", arguments, SilentListener(), run=run)
        return found

    return anyio.run(call)


def _findings(result: CallResult) -> ScanFindings:
    stdout = result.structured.get("stdout")
    try:
        return scanning.findings_of(str(stdout["text"]) if not result.failed and isinstance(stdout, dict) else "")
    except SandboxError:
        reason = "the scanner gave no findings: a file may have ended it, or the call was refused"
        fix = "Take the files for dangerous; `glovebox audit query --tool run_python` shows the call."
        raise DiagnosedError("Scanning the artifacts", reason, fix) from None
