"""``glovebox artifact``: lists and saves; scans and makes anew, in calls of ``run_python`` with our own program."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import anyio
import click
from rich.text import Text as Plain

from glovebox_audit.printable import printable
from glovebox_profiles.policy.model import is_principal
from glovebox_sandboxes.contract.errors import DiagnosedError, MisnamedError, SandboxError
from glovebox_sandboxes.plural import counted
from glovebox_server import app as apps
from glovebox_server import workspace
from glovebox_server.artifacts.disk import records
from glovebox_server.artifacts.record import Artifact, id_of
from glovebox_server.calls import CallResult, Link, Listener, Principal, Text
from glovebox_server.cli.options import LazyGroup, command, emit, err, out, wants_json
from glovebox_server.cli.saving import save
from glovebox_server.cli.terminal import table_of
from glovebox_server.exits import FAILED, OK
from glovebox_server.promotion import reencoder, scanner, scanning
from glovebox_server.promotion.scanner import ScanFindings
from glovebox_server.settings import Settings


class _ArtifactGroup(LazyGroup):
    """``glovebox artifact URI`` is short for ``glovebox artifact save URI``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``save`` before a word that is no command."""
        known = args and (args[0] in self.list_commands(ctx) or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if known or not args else ["save", *args])


def _named_principal(value: str) -> str:
    if not is_principal(value):
        raise click.BadParameter("name a principal as the audit log does: local:UID or token:NAME, or oauth:….")
    return value


def _address(value: str) -> str:
    if id_of(value) is None:
        shown = repr(printable(value)[:200])
        raise click.BadParameter(f"{shown} is no address (artifact://…): `glovebox artifact list` shows them.")
    return value


_uris = click.argument("uris", metavar="URI…", nargs=-1, required=True)
_principal = click.option(
    "--principal",
    type=_named_principal,
    default=lambda: f"local:{os.getuid()}",
    help="Whose they are, where they are not yours: token:NAME over HTTP.",
)


@click.group(
    cls=_ArtifactGroup,
    lazy={
        "promote": ("promote:promote", "Copy artifacts into a folder, all or none."),
        "promotions": ("promote:promotions", "What was promoted, newest first, and whether it was put back."),
        "rollback": ("promote:roll_back", "Put every file of a promotion back as it was."),
    },
)
def artifact() -> None:
    """Files that programs made: list, save, promote them. `glovebox artifact URI` saves, too."""


@command("list", artifact)
@click.option("--principal", type=_named_principal, help="Of this caller only: local:UID or token:NAME.")
@click.option("--call", "call_id", metavar="CALL", help="Of this call only.")
def artifact_list(settings: Settings, principal: str | None, call_id: str | None) -> None:
    """One line per artifact of any caller, newest first."""
    now = datetime.now(UTC)
    found = [
        each
        for each in sorted(records(settings.state_dir / "artifacts", now), key=lambda each: each.created, reverse=True)
        if principal in {None, each.owner} and call_id in {None, each.call_id}
    ]
    titles = ["address", "file", "bytes", "risks", "age", "type", "principal", "of call"]
    shown = 5 if out.is_terminal else len(titles)  # an address must not be broken
    table = table_of(titles[:shown], (_row(each, now)[:shown] for each in found), right=["bytes"])
    emit({"artifacts": [describe_artifact(each) for each in found]}, table, f"{counted(len(found), 'artifact')}.")


def _row(artifact: Artifact, now: datetime) -> tuple[object, ...]:
    risks = counted(len(artifact.risks), "risk") if artifact.risks else "none"
    hours, minutes = divmod(max(0, int((now - artifact.created).total_seconds() // 60)), 60)
    age = f"{hours} h {minutes} min" if hours else f"{minutes} min"
    about = artifact.media_type, artifact.owner, artifact.call_id
    return artifact.uri, artifact.name, artifact.bytes, risks, age, *about


def describe_artifact(artifact: Artifact) -> dict[str, object]:
    """Return an artifact as JSON has it."""
    told = asdict(artifact)
    del told["tool"]
    told["principal"] = told.pop("owner")
    dates = {"created": artifact.created.isoformat(), "expires": artifact.expires.isoformat()}
    return {**told, "risks": list(artifact.risks), **dates}


@command("save", artifact)
@click.argument("uri", type=_address)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write; else stdout.")
@_principal
def artifact_save(settings: Settings, uri: str, output: Path | None, principal: str) -> None:
    """Write an artifact to a new file, or to standard output.

    Its risks are told on standard error.
    """
    if wants_json() and output is None:
        raise click.UsageError("--json says what was written: add -o FILE.")

    async def make() -> None:
        if output and (reason := workspace.objection(workspace.place(output), workspace.own(settings))):
            raise MisnamedError(f"--output {output}", f"it {reason}", "A program made it: name a file elsewhere.")
        owner = Principal(id=principal, transport="cli")
        async with apps.opened(settings, "cli", prewarm=False) as app, app.artifacts.open(uri, owner) as reader:
            if output is None:
                await reader.check()  # printed output cannot be taken back
            for risk in reader.artifact.risks:
                err.print(f"Look before you open, run, copy or apply it: {risk}.", style="yellow")
            await save(reader.chunks(), output)
            if not emit({"file": str(output), **describe_artifact(reader.artifact)}) and output is not None:
                err.print(f"{output}: {counted(reader.artifact.bytes, 'byte')}.")

    anyio.run(make)


@command("scan", artifact)
@_uris
@_principal
def scan(settings: Settings, uris: tuple[str, ...], principal: str) -> int:
    """Look, in a sandbox, for what acts when files are opened.

    And for secrets. Exit 1 where there is something.
    """
    found = find_in_artifacts(settings, dict.fromkeys(uris, principal))
    lines = {uri: list(each.lines) for uri, each in found.items()}
    if not emit({"findings": lines, "more": {uri: each.more for uri, each in found.items()}}):
        for uri, each in found.items():
            out.print(Plain(f"{uri}: {'nothing was found' if not each.count else ''}".rstrip()))
            for line in each.told():
                out.print(Plain(f"  ! {line}"), style="yellow")
    return FAILED if any(each.count for each in found.values()) else OK


@command("reencode", artifact)
@_uris
@_principal
def reencode(settings: Settings, uris: tuple[str, ...], principal: str) -> int:
    """Make pictures anew in a sandbox, of their pixels alone.

    Prints the address of each new artifact. Exit 1 where one could not be made.
    """
    results = _called(settings, dict.fromkeys(uris, principal), reencoder.program())
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
                found[uri] = await app.broker.submit(caller, "run_python", arguments, Listener(), run=run)
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
