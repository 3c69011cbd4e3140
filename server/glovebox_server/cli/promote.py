"""``glovebox artifact promote``, ``promotions`` and ``rollback``."""

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.text import Text as Plain

from glovebox_audit.printable import printable
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.plural import counted
from glovebox_server import app as apps
from glovebox_server import startup
from glovebox_server.artifacts.names import quoted
from glovebox_server.cli.artifact import find_in_artifacts
from glovebox_server.cli.options import command, emit, err, out, wants_json, word_form
from glovebox_server.cli.terminal import pick, to_minute
from glovebox_server.exits import OK, REFUSED
from glovebox_server.guards.approvals.shown import visible, warn_of_letters
from glovebox_server.promotion import journal as journals
from glovebox_server.promotion import plan, transaction
from glovebox_server.promotion.folder import TargetFolder, opened
from glovebox_server.promotion.journal import Journal, Promotion
from glovebox_server.promotion.plan import Planned
from glovebox_server.promotion.transaction import Record
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.log import recording

MAX_SHOWN_LINES = 400
"""Of one file's diff: a longer one is for an editor, on a copy."""


_ID = word_form("p_[0-9a-f]{20}", "p_ and 20 characters, as `glovebox artifact promotions` has it")


@command("promote")
@click.argument("uris", metavar="URI…", nargs=-1, required=True)
@click.option("--into", metavar="FOLDER", required=True, help="One of those that [promote] of policy.toml names.")
@click.option("--apply", is_flag=True, help="The artifact is a patch (changes.patch): change the files that it names.")
@click.option("--expect", metavar="DIGEST", help="Do it without asking, if this is the digest of what would change.")
@click.option("--scan", is_flag=True, help="Look into each artifact first; refuse where something is found.")
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
        if (scan or accept) and planned.artifacts:
            planned = planned.scanned(find_in_artifacts(settings, {each.uri: each.owner for each in planned.artifacts}))
        promotion = planned.promotion
        if not wants_json():
            _show(planned, folder)
        _require_accepted(planned, accept=accept)
        if not promotion.changes:
            emit({"promotion": None, "plan": _plan_fields(planned)})
            return OK
        if expect is None and (wants_json() or not _agreed()):
            if not emit({"promotion": None, "plan": _plan_fields(planned)}):
                err.print(Plain(f"Nothing was changed. To do it without being asked: --expect {promotion.digest}"))
            return REFUSED
        _require_expected(promotion, expect)
        with _changing(settings) as (journal, record):
            done = transaction.promote(folder, journal, promotion, planned.content, record)
            _warn_if_uncleared(done)
    if not emit({"promotion": _fields(done, None), "plan": _plan_fields(planned)}):
        files = counted(len(done.changes), "file")
        out.print(Plain(f"{files} promoted: {done.id}. `glovebox artifact rollback {done.id}` puts them back."))
    return OK


@command("promotions")
def promotions(settings: Settings) -> None:
    """What was promoted, newest first, and whether it was put back. Puts back what was interrupted."""
    _recover(settings)
    found = journals.listed(settings.state_dir)
    back = journals.put_back(found)
    if emit({"promotions": [_fields(each, back.get(each.id)) for each in reversed(found)]}):
        return
    for each in reversed(found):
        standing = transaction.standing(each, back.get(each.id))
        told = f"{counted(len(each.changes), 'file')} into {each.folder}  {standing}"
        out.print(Plain(f"{each.id}  {to_minute(each.made)}  {told}  by {each.by}"))
    out.print(Plain(f"{counted(len(found), 'promotion')}."))


@command("rollback")
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
    told = {each.name: planned.findings.get(each.uri) for each in planned.artifacts}
    found = [f"{quoted(name)}: {each.told()[0]}" for name, each in told.items() if each and each.count]
    if found and not accept:
        more = f", and {counted(len(found) - 1, 'more file')}" if len(found) > 1 else ""
        reason = f"Something was found in {printable(found[0])}{more}; nothing was changed."
        raise RefusedError(
            "promotion.findings", reason, "Look at the files; then --accept-findings in place of --scan."
        )


def _require_expected(promotion: Promotion, expect: str | None) -> None:
    if expect is not None and expect not in {promotion.digest, promotion.digest.removeprefix("sha256:")}:
        reason = f"What would change has the digest {promotion.digest}, not the expected one; nothing was changed."
        raise RefusedError("promotion.expect", reason, "Look at what would change, then expect that.")


def _target(settings: Settings, name: str) -> Path:
    path = startup.policy_file(settings)
    policy = None if path is None else startup.load(path, apps.load_profiles(settings), TOOLS)
    apps.require_locked(settings, policy, path)
    return plan.target(settings, policy.promote.into if policy else {}, name)


@contextmanager
def _changing(settings: Settings) -> Iterator[tuple[Journal, Record]]:
    """Open the journal and the audit log, after finishing interrupted promotions."""
    with journals.locked(settings.state_dir) as journal, recording(settings) as record:
        recovered = transaction.recover(journal, record)
        for promotion in recovered:
            err.print(Plain(str(promotion)), style="yellow")
        transaction.require_settled(recovered)
        yield journal, record


def _recover(settings: Settings) -> None:
    if any(each.state not in journals.ENDED for each in journals.listed(settings.state_dir)):
        with _changing(settings):
            pass


def _warn_if_uncleared(done: Promotion) -> None:
    if done.state == "moved":
        told = f"{done.id} is in force, but {Path(done.path) / done.stage} could not be cleared away."
        err.print(Plain(f"{told} `glovebox artifact promotions` tries again, and says why."), style="yellow")


def _show(planned: Planned, folder: TargetFolder) -> None:
    for number, change in enumerate(planned.promotion.changes):
        _, risks = planned.about(number)
        out.print(Plain(f"{change.name}: {planned.told(number)}"))
        lines = planned.difference(folder, number)
        for risk in (*risks, *warn_of_letters("this file holds", "".join([change.name, *(lines or ())]))):
            out.print(Plain(f"  ! {risk}"), style="yellow")
        found = planned.findings.get(change.origin)
        for finding in found.told() if found else ():
            out.print(Plain(f"  ! found: {finding}"), style="yellow")
        for line in (lines or ())[:MAX_SHOWN_LINES]:
            out.print(Plain(f"  │ {visible(line)}"))
        if lines is None:
            out.print(Plain("  It is no text, or too long to be compared: `glovebox artifact save` it to look at it."))
        elif not lines:
            out.print(Plain("  No line changes."))
        elif len(lines) > MAX_SHOWN_LINES:
            out.print(Plain(f"  … and {len(lines) - MAX_SHOWN_LINES} more lines, which are not shown."))
    if planned.same:
        out.print(Plain(f"The same already: {', '.join(planned.same)}."))
    files = counted(len(planned.promotion.changes), "file")
    out.print(Plain(f"Into {planned.promotion.folder}, {folder.path}: {files}. Digest: {planned.promotion.digest}"))


def _agreed() -> bool:
    if not (sys.stdin.isatty() and out.file.isatty() and err.file.isatty()):
        return False
    termios.tcflush(sys.stdin, termios.TCIFLUSH)  # input typed before the question answers nothing
    err.print(Plain("Put them there? [y/N] "), end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _fields(promotion: Promotion, back: str | None) -> dict[str, object]:
    told = pick(promotion, "id", "state", "by", "path", "digest")
    more = {"into": promotion.folder, "puts_back": promotion.of, "put_back_by": back, "kept": list(promotion.kept)}
    return {**told, **more, "made": promotion.made.isoformat(), "files": _files(promotion)}


def _plan_fields(planned: Planned) -> dict[str, object]:
    files = []
    for number, file in enumerate(_files(planned.promotion)):
        media_type, risks = planned.about(number)
        found = planned.findings.get(planned.promotion.changes[number].origin)
        told = {"findings": None if found is None else list(found.lines), "more_findings": found.more if found else 0}
        files.append({**file, **told, "media_type": media_type, "risks": list(risks)})
    return {"digest": planned.promotion.digest, "files": files, "same": list(planned.same)}


def _files(promotion: Promotion) -> list[dict[str, object]]:
    return [
        {"name": each.name, "origin": each.origin, "bytes": each.after.bytes if each.after else 0}
        | {side: (held := getattr(each, side)) and held.sha256 for side in ("before", "after")}
        for each in promotion.changes
    ]
