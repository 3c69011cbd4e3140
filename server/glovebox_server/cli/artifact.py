"""``glovebox artifact``: lists files that programs made, saves them, scans them, and promotes them.

Those that scan and make anew are calls of ``run_python`` with our own program.
"""

import os
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import anyio
import click

from glovebox_audit.printable import printable
from glovebox_sandboxes.contract.errors import DiagnosedError, MisnamedError, RefusedError, SandboxError
from glovebox_sandboxes.plural import counted
from glovebox_server import app as apps
from glovebox_server import startup, workspace
from glovebox_server.artifacts.names import quoted
from glovebox_server.artifacts.record import Artifact, records
from glovebox_server.calls import CallResult, Link, Listener, Principal, Text
from glovebox_server.cli.groups import LazyGroup
from glovebox_server.cli.options import caller_id, command, emit, err, out, wants_json, word_form
from glovebox_server.cli.saving import save
from glovebox_server.cli.terminal import pick, table_of, to_minute
from glovebox_server.exits import FAILED, OK, REFUSED
from glovebox_server.guards.approvals.shown import visible, warn_of_letters
from glovebox_server.promotion import plan, proposing, reencoder, scanner, transaction
from glovebox_server.promotion.folder import TargetFolder, opened
from glovebox_server.promotion.plan import Planned
from glovebox_server.promotion.scanner import ScanFindings
from glovebox_server.promotion.transaction import Journal, Promotion, Record
from glovebox_server.settings import Settings
from glovebox_server.upkeep.log import recording

MAX_SHOWN_LINES = 400
"""Of one file's diff: a longer one is for an editor, on a copy."""


_ADDRESS = word_form("artifact://[0-9a-f]{32}", "an address is artifact://…, and `glovebox artifact list` shows them")
_ID = word_form("p_[0-9a-f]{20}", "p_ and 20 characters, as `glovebox artifact promotions` has it")


_uris = click.argument("uris", metavar="URI…", nargs=-1, required=True)
_principal = click.option(
    "--principal",
    type=caller_id,
    metavar="PRINCIPAL",
    default=lambda: f"local:{os.getuid()}",
    help="Whose it is, where it is not yours: token:NAME over HTTP.",
)


class _ArtifactGroup(LazyGroup):
    """``glovebox artifact URI`` is short for ``glovebox artifact save URI``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``save`` before a word that is no command."""
        known = args and (args[0] in self.list_commands(ctx) or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if known or not args else ["save", *args])


@click.group(cls=_ArtifactGroup)
def artifact() -> None:
    """Files that programs made: list, save, promote them. `glovebox artifact URI` saves, too."""


@command("list", artifact)
@click.option("--principal", type=caller_id, metavar="PRINCIPAL", help="Of this caller only: local:UID or token:NAME.")
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
    return told


@command("promote", artifact)
@_uris
@click.option("--into", metavar="FOLDER", required=True, help="One of those that [promote] of policy.toml names.")
@click.option("--apply", is_flag=True, help="The artifact is a patch (changes.patch): change the files that it names.")
@click.option("--expect", metavar="DIGEST", help="Do it without asking, if this is the digest of what would change.")
@click.option("--scan", is_flag=True, help="Scan each artifact first; refuse where something is found.")
@click.option("--accept-findings", "accept", is_flag=True, help="Promote despite findings of --scan, which are shown.")
def promote(
    settings: Settings, *, uris: tuple[str, ...], into: str, apply: bool, expect: str | None, scan: bool, accept: bool
) -> int:
    """Copy artifacts into a folder, all or none.

    Shows what would change, and asks. Without a terminal it only shows, with a digest for --expect.
    """
    if apply and len(uris) > 1:
        raise click.UsageError("--apply takes one patch at a time.")
    path = _target(settings, into)
    _recover(settings)
    with opened(path) as folder:
        planned = plan.planned(settings, uris, into, folder, apply=apply)
        if scan or accept:
            owners = {each.artifact.uri: each.artifact.owner for each in planned.files}
            planned = planned.scanned(find_in_artifacts(settings, owners) if owners else {})
        promotion = planned.promotion
        if not wants_json():
            _show(planned, folder)
        _require_accepted(planned, accept=accept)
        if not promotion.changes:
            emit({"promotion": None, "plan": _plan_fields(planned)})
            return OK
        if expect is None and (wants_json() or not _agreed()):
            if not emit({"promotion": None, "plan": _plan_fields(planned)}):
                err.print(f"Nothing was changed. To do it without being asked: --expect {promotion.digest}")
            return REFUSED
        if expect is not None and expect not in {promotion.digest, promotion.digest.removeprefix("sha256:")}:
            reason = f"What would change has the digest {promotion.digest}, not the expected one; nothing was changed."
            raise RefusedError("promotion.expect", reason, "Look at what would change, then expect that.")
        with _changing(settings) as (journal, record):
            done = transaction.promote(folder, journal, promotion, planned.content, record)
            _warn_if_uncleared(done)
    if not emit({"promotion": _fields(done, None), "plan": _plan_fields(planned)}):
        files = counted(len(done.changes), "file")
        out.print(f"{files} promoted: {done.id}. `glovebox artifact rollback {done.id}` puts them back.")
    return OK


@command("promotions", artifact)
def promotions(settings: Settings) -> None:
    """List promotions, newest first, with those that were put back. Puts back what was interrupted."""
    _recover(settings)
    found = transaction.listed(settings.state_dir)
    back = transaction.put_back(found)
    if emit({"promotions": [_fields(each, back.get(each.id)) for each in reversed(found)]}):
        return
    for each in reversed(found):
        standing = transaction.standing(each, back.get(each.id))
        told = f"{counted(len(each.changes), 'file')} into {each.folder}  {standing}"
        out.print(f"{each.id}  {to_minute(each.made)}  {told}  by {each.by}")
    out.print(f"{counted(len(found), 'promotion')}.")


@command("rollback", artifact)
@click.argument("promotion", metavar="ID", type=_ID)
def roll_back(settings: Settings, promotion: str) -> None:
    """Put every file of a promotion back as it was.

    Or none, where one changed since. `artifact promotions` has the ID.
    """
    with _changing(settings) as (journal, record):
        done = transaction.roll_back(journal, promotion, record)
        _warn_if_uncleared(done)
    emit({"promotion": _fields(done, None)}, f"{counted(len(done.changes), 'file')} of {promotion} put back.")


def _require_accepted(planned: Planned, *, accept: bool) -> None:
    told = {each.artifact.name: each.findings for each in planned.files}
    found = [f"{quoted(name)}: {each.told()[0]}" for name, each in told.items() if each and each.count]
    if found and not accept:
        more = f", and {counted(len(found) - 1, 'more file')}" if len(found) > 1 else ""
        reason = f"Something was found in {printable(found[0])}{more}; nothing was changed."
        fix = "Look at the files; then --accept-findings in place of --scan."
        raise RefusedError("promotion.findings", reason, fix)


def _target(settings: Settings, name: str) -> Path:
    path = startup.policy_file(settings)
    policy = None if path is None else startup.load(path, apps.load_profiles(settings))
    apps.require_locked(settings, policy, path)
    return plan.target(settings, policy.promote.into if policy else {}, name)


@contextmanager
def _changing(settings: Settings) -> Iterator[tuple[Journal, Record]]:
    """Open the journal and the audit log, after finishing interrupted promotions."""
    with transaction.locked(settings.state_dir) as journal, recording(settings) as record:
        recovered = transaction.recover(journal, record)
        for promotion in recovered:
            err.print(str(promotion), style="yellow")
        transaction.require_settled(recovered)
        yield journal, record


def _recover(settings: Settings) -> None:
    if any(each.state not in transaction.ENDED for each in transaction.listed(settings.state_dir)):
        with _changing(settings):
            pass


def _warn_if_uncleared(done: Promotion) -> None:
    if done.state == "moved":
        told = f"{done.id} is in effect, but {Path(done.path) / done.stage} could not be cleared away."
        err.print(f"{told} `glovebox artifact promotions` tries again, and says why.", style="yellow")


def _show(planned: Planned, folder: TargetFolder) -> None:
    for file in planned.files:
        name, lines = file.change.name, file.difference(folder)
        out.print(f"{name}: {file.told()}")
        found = [f"found: {each}" for each in (file.findings.told() if file.findings else ())]
        for risk in (*file.risks, *warn_of_letters("this file holds", "".join([name, *(lines or ())])), *found):
            out.print(f"  ! {risk}", style="yellow")
        for line in (lines or ())[:MAX_SHOWN_LINES]:
            out.print(f"  │ {visible(line)}")
        if lines is None:
            out.print("  It is no text, or too long to be compared: `glovebox artifact save` it to look at it.")
        elif not lines:
            out.print("  No line changes.")
        elif len(lines) > MAX_SHOWN_LINES:
            out.print(f"  … and {len(lines) - MAX_SHOWN_LINES} more lines, which are not shown.")
    if planned.same:
        out.print(f"The same already: {', '.join(planned.same)}.")
    files = counted(len(planned.files), "file")
    out.print(f"Into {planned.promotion.folder}, {folder.path}: {files}. Digest: {planned.promotion.digest}")


def _agreed() -> bool:
    if not (sys.stdin.isatty() and out.file.isatty() and err.file.isatty()):
        return False
    termios.tcflush(sys.stdin, termios.TCIFLUSH)  # input typed before the question answers nothing
    err.print("Put them there? [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _fields(promotion: Promotion, back: str | None) -> dict[str, object]:
    told = pick(promotion, "id", "state", "by", "path", "digest", "kept", "made")
    more = {"into": promotion.folder, "puts_back": promotion.of, "put_back_by": back}
    return {**told, **more, "files": _files(promotion)}


def _plan_fields(planned: Planned) -> dict[str, object]:
    files = _files(planned.promotion)
    for told, file in zip(files, planned.files, strict=True):
        found = file.findings
        told.update({"findings": found and found.lines, "more_findings": found.more if found else 0})
        told.update(pick(file, "media_type", "risks"))
    return {"digest": planned.promotion.digest, "files": files, "same": planned.same}


def _files(promotion: Promotion) -> list[dict[str, object]]:
    return [
        {"name": each.name, "origin": each.origin, "bytes": each.after.bytes if each.after else 0}
        | {side: (held := getattr(each, side)) and held.sha256 for side in ("before", "after")}
        for each in promotion.changes
    ]


@command("save", artifact)
@click.argument("uri", type=_ADDRESS)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write; else stdout.")
@_principal
def artifact_save(settings: Settings, uri: str, output: Path | None, principal: str) -> None:
    """Write an artifact to a new file, or to standard output.

    Prints its risks on standard error.
    """
    if wants_json() and output is None:
        raise click.UsageError("--json says what was written: add -o FILE.")

    async def make() -> None:
        if output and (reason := workspace.objection(workspace.place(output), workspace.own(settings))):
            raise MisnamedError(f"--output {output}", f"it {reason}", "A program made it: name a file elsewhere.")
        owner = Principal(id=principal, transport="cli")
        async with apps.opened(settings, "cli") as app, app.artifacts.open(uri, owner) as reader:
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
            out.print(f"{uri}: {'nothing was found' if not each.count else ''}".rstrip())
            for line in each.told():
                out.print(f"  ! {line}", style="yellow")
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
            out.print(f"{link.uri}  {link.name}" if link else f"{uri}: {failed[uri]}", style=None if link else "yellow")
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
        async with apps.opened(settings, "cli") as app:
            for uri, owner in owners.items():
                caller, arguments = Principal(id=owner, transport="cli"), {"code": code, "inputs": [uri]}
                run = app.runs.new()
                found[uri] = await app.broker.submit(caller, "run_python", arguments, Listener(), run=run)
        return found

    return anyio.run(call)


def _findings(result: CallResult) -> ScanFindings:
    stdout = result.structured.get("stdout")
    try:
        return proposing.findings_of(str(stdout["text"]) if not result.failed and isinstance(stdout, dict) else "")
    except SandboxError:
        reason = "the scanner gave no findings: a file may have ended it, or the call was refused"
        fix = "Take the files for dangerous; `glovebox audit query --tool run_python` shows the call."
        raise DiagnosedError("Scanning the artifacts", reason, fix) from None
