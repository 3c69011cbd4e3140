"""What ``glovebox artifact promote``, ``promotions`` and ``rollback`` do."""

import sys
import termios
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text as Plain

from glovebox_audit.events import Event, draft
from glovebox_audit.printable import printable
from glovebox_sandboxes.plural import counted
from glovebox_server import app as apps
from glovebox_server.artifacts.names import quoted
from glovebox_server.cli.actions.governance import scans
from glovebox_server.cli.terminal import print_json
from glovebox_server.errors import RefusedError
from glovebox_server.exits import OK, REFUSED
from glovebox_server.guards.approvals.shown import visible, warn_of_letters
from glovebox_server.promotion import journal as journals
from glovebox_server.promotion import plan, rollback, transaction
from glovebox_server.promotion.folder import Folder, opened
from glovebox_server.promotion.journal import Journal, Promotion
from glovebox_server.promotion.plan import Planned, Target
from glovebox_server.promotion.transaction import Record, Recovered
from glovebox_server.settings import Settings
from glovebox_server.startup import policy as policies
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.log import audit_log

MAX_SHOWN_LINES = 400
"""Of one file's difference: what is longer is for an editor, on a copy."""


def promote(
    settings: Settings,
    out: Console,
    err: Console,
    *,
    uris: Sequence[str],
    into: str,
    apply: bool,
    expect: str | None,
    scan: bool,
    accept: bool,
    as_json: bool,
) -> int:
    """Put artifacts into a folder; see ``glovebox artifact promote``."""
    found = _target(settings, into)
    _recover(settings, err)
    with opened(found.path) as folder:
        planned = _planned(settings, uris, found, folder, apply=apply, scan=scan)
        promotion = planned.promotion
        if not as_json:
            _show(out, planned, found, folder)
        _require_accepted(planned, accept=accept)
        if not promotion.changes:
            if as_json:
                print_json(out.file, {"promotion": None, "plan": _plan_fields(planned)})
            return OK
        if expect is None and (as_json or not _agreed(out, err)):
            if as_json:
                print_json(out.file, {"promotion": None, "plan": _plan_fields(planned)})
            else:
                err.print(Plain(f"Nothing was changed. To do it without being asked: --expect {promotion.digest}"))
            return REFUSED
        _require_expected(promotion, expect)
        with _changing(settings, err) as (journal, record):
            done = transaction.promote(folder, journal, promotion, planned.content, record)
            _tell_uncleared(err, done)
    if as_json:
        print_json(out.file, {"promotion": _fields(done, None), "plan": _plan_fields(planned)})
    else:
        files = counted(len(done.changes), "file")
        out.print(Plain(f"{files} promoted: {done.id}. `glovebox artifact rollback {done.id}` puts them back."))
    return OK


def _planned(
    settings: Settings, uris: Sequence[str], into: Target, folder: Folder, *, apply: bool, scan: bool
) -> Planned:
    planned = plan.planned_patch(settings, uris[0], into, folder) if apply else None
    planned = planned or plan.planned(settings, uris, into, folder)
    if scan and planned.artifacts:
        return planned.scanned(scans.findings(settings, {each.uri: each.owner for each in planned.artifacts}))
    return planned


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


def listed(settings: Settings, out: Console, err: Console, *, as_json: bool) -> int:
    """Say what was promoted; see ``glovebox artifact promotions``."""
    _recover(settings, err)
    found = journals.listed(settings.state_dir)
    back = journals.put_back(found)
    if as_json:
        print_json(out.file, {"promotions": [_fields(each, back(each.id)) for each in reversed(found)]})
        return OK
    for each in reversed(found):
        told = rollback.standing(each, back(each.id))
        files = counted(len(each.changes), "file")
        when = each.made.strftime("%Y-%m-%d %H:%M")
        out.print(Plain(f"{each.id}  {when}  {files} into {each.folder}  {told}  by {each.by}"))
    out.print(Plain(f"{counted(len(found), 'promotion')}."))
    return OK


def roll_back(settings: Settings, out: Console, err: Console, *, identifier: str, as_json: bool) -> int:
    """Put a promotion back; see ``glovebox artifact rollback``."""
    with _changing(settings, err) as (journal, record):
        done = rollback.roll_back(journal, identifier, record)
        _tell_uncleared(err, done)
    if as_json:
        print_json(out.file, {"promotion": _fields(done, None)})
    else:
        out.print(Plain(f"{counted(len(done.changes), 'file')} of {identifier} put back."))
    return OK


def _target(settings: Settings, name: str) -> Target:
    path = policies.policy_file(settings)
    policy = None if path is None else policies.load(path, apps.load_profiles(settings), TOOLS)
    apps.require_locked(settings, policy, path)
    return plan.target(settings, policy.promote.into if policy else {}, name)


@contextmanager
def _changing(settings: Settings, err: Console) -> Iterator[tuple[Journal, Record]]:
    """The journal and the audit log, with nothing in them that was interrupted."""
    with journals.locked(settings.state_dir) as journal:
        log = audit_log(settings)

        def record(event: Event) -> None:
            log.commit([draft(event)])

        try:
            recovered = transaction.recover(journal, record)
            _tell(err, recovered)
            transaction.require_settled(recovered)
            yield journal, record
        finally:
            log.close()


def _recover(settings: Settings, err: Console) -> None:
    if journals.interrupted(journals.listed(settings.state_dir)):
        with _changing(settings, err):
            pass


def _tell(err: Console, recovered: Iterable[Recovered]) -> None:
    for each in recovered:
        err.print(Plain(str(each)), style="yellow")


def _tell_uncleared(err: Console, done: Promotion) -> None:
    if done.state == "moved":
        told = f"{done.id} is in force, but {Path(done.path) / done.stage} could not be cleared away."
        err.print(Plain(f"{told} `glovebox artifact promotions` tries again, and says why."), style="yellow")


def _show(out: Console, planned: Planned, into: Target, folder: Folder) -> None:
    for number, change in enumerate(planned.promotion.changes):
        media_type, risks = planned.about(number)
        before = f"{change.before.bytes} → " if change.before else ""
        word = "changes" if change.before else "new"
        told = f"{word}, {before}{counted(change.after.bytes, 'byte')}, {media_type}" if change.after else "goes"
        if change.before and change.after and change.before.mode != change.after.mode:
            told += f", mode {change.before.mode:03o} → {change.after.mode:03o}"
        out.print(Plain(f"{change.name}: {told}"))
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
    out.print(Plain(f"Into {into.name}, {into.path}: {files}. Digest: {planned.promotion.digest}"))


def _agreed(out: Console, err: Console) -> bool:
    """Whether somebody who saw what would change said yes."""
    if not (sys.stdin.isatty() and out.file.isatty() and err.file.isatty()):
        return False
    termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed before the question was there answers nothing
    err.print(Plain("Put them there? [y/N] "), end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _fields(promotion: Promotion, back: str | None) -> dict[str, object]:
    return {
        "id": promotion.id,
        "state": promotion.state,
        "made": promotion.made.isoformat(),
        "by": promotion.by,
        "into": promotion.folder,
        "path": promotion.path,
        "digest": promotion.digest,
        "puts_back": promotion.of,
        "put_back_by": back,
        "kept": list(promotion.kept),
        "files": _files(promotion),
    }


def _plan_fields(planned: Planned) -> dict[str, object]:
    files = []
    for number, file in enumerate(_files(planned.promotion)):
        media_type, risks = planned.about(number)
        found = planned.findings.get(planned.promotion.changes[number].origin)
        findings = None if found is None else list(found.lines)
        more = found.more if found else 0
        told = {"media_type": media_type, "risks": list(risks), "findings": findings, "more_findings": more}
        files.append({**file, **told})
    return {"digest": planned.promotion.digest, "files": files, "same": list(planned.same)}


def _files(promotion: Promotion) -> list[dict[str, object]]:
    return [
        {
            "name": each.name,
            "before": each.before and each.before.sha256,
            "after": each.after and each.after.sha256,
            "bytes": each.after.bytes if each.after else 0,
            "origin": each.origin,
        }
        for each in promotion.changes
    ]
