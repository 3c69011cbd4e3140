"""What ``glovebox approvals`` does. An answer given here is that of the user who runs the command."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glovebox_audit import read
from glovebox_audit.chain import Record
from glovebox_audit.events import Event, draft
from glovebox_audit.printable import printable
from glovebox_sandboxes.plural import counted
from glovebox_server.cli.state import OPERATOR
from glovebox_server.cli.terminal import new_table, print_json, print_question, print_table
from glovebox_server.errors import RefusedError
from glovebox_server.exits import OK
from glovebox_server.guards.approvals import answering, store
from glovebox_server.guards.approvals import stats as counting
from glovebox_server.guards.approvals.question import MAX_REASON, Answer, Reach
from glovebox_server.guards.approvals.states import State
from glovebox_server.guards.approvals.store import Standing
from glovebox_server.secret_files import prepare_state
from glovebox_server.settings import Settings
from glovebox_server.stores.database import Database
from glovebox_server.upkeep.log import audit_log

_OPEN: Final[tuple[State, ...]] = ("pending", "allowed")
_LEAST: Final = 6
"""Characters of an id that may stand for it, ``a_`` included."""
_WATCH_SECONDS: Final = 0.25
_KINDS: Final = (b'"approval.', b'"call.decided"')


def listed(settings: Settings, out: Console, *, everything: bool, as_json: bool) -> int:
    """Show questions; see ``glovebox approvals list``."""
    found = _standings(settings, () if everything else _OPEN)
    if as_json:
        print_json(out.file, {"approvals": [_described(each) for each in found]})
    elif found:
        print_table(out, _table(found), folded=False)
    else:
        out.print(Text("Nobody waits for an answer."))
    return OK


def grants(settings: Settings, out: Console, *, as_json: bool) -> int:
    """Show what was lifted; see ``glovebox approvals grants``."""
    found = [each for each in _standings(settings, ("allowed",)) if each.question.subject.lifted]
    if as_json:
        print_json(out.file, {"grants": [_described(each) for each in found]})
    elif found:
        print_table(out, _table(found), folded=False)
    else:
        out.print(Text("Nothing is granted beyond the policy."))
    return OK


def show(settings: Settings, out: Console, wanted: str, *, as_json: bool) -> int:
    """Show one question whole; see ``glovebox approvals show``."""
    from glovebox_server.guards.approvals.shown import shown  # noqa: PLC0415 - brings profiles

    with _store(settings) as database:
        found = _named(database, wanted)
    if as_json:
        print_json(out.file, _described(found, whole=True))
        return OK
    if found.state != "pending":
        said = [
            f"; {each.by} said {'yes' if each.allow else 'no'}{f': {each.reason}' * bool(each.reason)}"
            for each in found.answers
        ]
        out.print(Text(f"It is {found.state}{f' by {found.used_by}' * bool(found.used_by)}{''.join(said)}."))
    if found.question.folder:
        out.print(Text(f"Folder on this host, which clients are not shown: {found.question.folder}"))
    print_question(out, shown(found.question))
    return OK


def as_rule(settings: Settings, out: Console, wanted: str, *, as_json: bool) -> int:
    """Show the change that would make a yes permanent; see ``glovebox approvals allow --rule``."""
    from glovebox_server.guards.approvals.lifting import permanent  # noqa: PLC0415 - brings profiles and policy

    with _store(settings) as database:
        about = _named(database, wanted).question.subject
    if about.lifted is None:
        names = " and ".join(about.rules)
        reason = f"This question lifts no denial: it is asked since {names} of a profile or the policy wants it."
        raise RefusedError(
            "approval.rule", reason, "Change that rule, if it asks too often: `glovebox approvals stats`."
        )
    lines = permanent(about.lifted, about.target, about.tool)
    if as_json:
        print_json(out.file, {"lifts": {"what": about.lifted, "target": about.target}, "diff": list(lines)})
        return OK
    for line in lines:
        out.print(Text(line))
    then = ", then restart the server" if about.lifted == "host" else "; servers follow within seconds"
    out.print(Text(f"Nothing was answered. Make the change yourself{then}."))  # profiles are read at the start
    return OK


def answer(
    settings: Settings, out: Console, wanted: str, *, allow: bool, reach: Reach, as_json: bool, reason: str = ""
) -> int:
    """Answer a question; see ``glovebox approvals allow`` and ``deny``."""
    with _store(settings) as database, _recording(settings) as record:
        before = _named(database, wanted)
        question = before.question
        said = printable(reason.strip())[:MAX_REASON]
        given = Answer(allow=allow, by=_self(), channel="operator", reach=reach, digest=question.digest, reason=said)
        try:
            found = database.transact_now(lambda db: answering.answer(db, question.id, given, store.now(), record))
        except RefusedError as objection:
            record(answering.refused(question.id, given, objection))
            raise
    if as_json:
        print_json(out.file, _described(found))
        return OK
    out.print(Text(f"{question.id} is {found.state}{_more(before, found)}."))
    return OK


def _more(before: Standing, now: Standing) -> str:
    """What an answer did beside what the state says."""
    if now.state == "pending":
        yes = sum(each.allow for each in now.answers)
        return f": {yes} of {now.question.asked.quorum} have said yes"
    if before.state != "allowed":
        return ""
    if before.used_by:
        return f": the yes is taken back, and no further call passes on it; the last that did is {before.used_by}"
    return ": the yes is taken back, and no call has used it"


def revoke(settings: Settings, out: Console, wanted: str, *, as_json: bool) -> int:
    """Take a yes back; see ``glovebox approvals revoke``."""
    with _store(settings) as database, _recording(settings) as record:
        identifier = _named(database, wanted).question.id
        database.transact_now(lambda db: answering.withdraw(db, identifier, _self(), store.now(), record))
        found = _named(database, identifier)
    if as_json:
        print_json(out.file, _described(found))
        return OK
    out.print(Text(f"{identifier} is withdrawn: no call passes on it any more."))
    return OK


def watch(settings: Settings, out: Console, err: Console, *, as_json: bool) -> int:
    """Print questions as they come; see ``glovebox approvals watch``."""
    told: set[str] = set()
    if err.is_terminal:
        err.print("Waiting for questions; interrupt to end.", style="dim")
    while True:
        pending = _standings(settings, ("pending",))
        for each in reversed(pending):
            if each.question.id in told:
                continue
            if as_json:
                print_json(out.file, _described(each), indent=None)
            else:
                out.print(Text(f"{each.question.id}  {each.question.subject.principal}  {each.question.why}"))
            out.file.flush()
        told = {each.question.id for each in pending}
        time.sleep(_WATCH_SECONDS)


def stats(settings: Settings, out: Console, *, since: datetime, as_json: bool) -> int:
    """Say how often people are asked; see ``glovebox approvals stats``."""
    found = counting.counted(_records(settings), since)
    if as_json:
        print_json(out.file, asdict(found))
        return OK
    rate = "nobody answered" if found.approval_rate is None else f"{found.approval_rate:.0%} of them yes"
    took = "" if found.median_seconds is None else f", after {found.median_seconds:.1f} seconds (median)"
    out.print(Text(f"{counted(found.calls, 'call')}, {counted(found.asked, 'question')}: "
                   f"{found.prompts_per_100_calls:g} for 100 calls."))  # fmt: skip
    out.print(Text(f"{counted(found.answered, 'answer')}, {rate}{took}."))
    for rule, times in found.by_rule.items():
        out.print(Text(f"  {rule}: {times}"))
    return OK


@contextmanager
def _store(settings: Settings) -> Iterator[Database]:
    prepare_state(settings.state_dir)
    with store.opened(settings.state_dir) as database:
        yield database


@contextmanager
def _recording(settings: Settings) -> Iterator[answering.Record]:
    """Write events to the audit log of the state directory."""
    log = audit_log(settings)

    def record(event: Event) -> None:
        log.commit([draft(event)])

    try:
        yield record
    finally:
        log.close()


def _standings(settings: Settings, states: Sequence[State]) -> list[Standing]:
    if not store.path(settings.state_dir).exists():
        return []

    def found(database: Database) -> list[Standing]:
        at = store.now()
        return database.query_now(lambda db: store.standings(db, at))

    with _store(settings) as database:
        standings = found(database)
    return [each for each in standings if not states or (each.state in states and each.left > 0)]


def _named(database: Database, wanted: str) -> Standing:
    """The question of an id, or of the beginning of one.

    Raises:
        RefusedError: it means none, or several.
    """
    at = store.now()
    found = database.query_now(lambda db: store.standings(db, at))
    exact = [each for each in found if each.question.id == wanted]
    begun = [each for each in found if len(wanted) >= _LEAST and each.question.id.startswith(wanted)]
    if not exact and len(begun) != 1:
        if begun:
            reason = f"{wanted} is the beginning of {counted(len(begun), 'question')}."
            raise RefusedError("approval.unknown", reason, "Give the whole id.")
        raise store.unknown_question()
    return (exact or begun)[0]


def _self() -> str:
    return f"local:{OPERATOR}"


def _table(found: Sequence[Standing]) -> Table:
    table = new_table("id", "state", "principal", "tool", "for", "left", "why", whole=True)
    for each in found:
        about = each.question.subject
        over = each.state not in _OPEN or each.left <= 0
        left = "" if over else f"{max(0, each.left) / 60:.0f} min"
        cells = (each.question.id, each.state, about.principal, about.tool, each.reach, left)
        table.add_row(*(Text(cell) for cell in cells), Text(each.question.why))
    return table


def _described(each: Standing, *, whole: bool = False) -> dict[str, Any]:
    question = each.question
    about, asked = question.subject, question.asked
    found: dict[str, Any] = {
        "id": question.id,
        "state": each.state,
        "digest": question.digest,
        "rules": list(about.rules),
        "why": question.why,
        "principal": about.principal,
        "client": question.client,
        "run": about.run,
        "workflow": question.workflow,
        "tool": about.tool,
        "lifts": None if about.lifted is None else {"what": about.lifted, "target": about.target},
        "asked": asdict(asked),
        "reach": each.reach,
        "made": question.made.isoformat(),
        "seconds_left": round(max(0.0, each.left), 1),
        "callers": each.callers,
        "asked_by": each.asked_by,
        "used_by": each.used_by or None,
        "answers": [
            {"by": one.by, "allow": one.allow, "channel": one.channel, "reason": one.reason or None}
            for one in each.answers
        ],
    }
    if whole:
        found |= {
            "arguments": json.loads(about.arguments),
            "last_approved": None if question.last_approved is None else json.loads(question.last_approved),
            "profile": json.loads(question.profile),
            "profile_digest": about.profile_digest,
            "policy_digest": about.policy_digest,
            "inputs": [{"uri": uri, "sha256": digest} for uri, digest in about.inputs],
            "folder": question.folder or None,
            "workspace_may_change": question.workspace_may_change,
        }
    return found


def _records(settings: Settings) -> Iterator[Record]:
    """Records of decisions and of questions, in the order of the log."""
    with read.opened(settings.state_dir / "audit") as snapshot:
        for number in snapshot.sealed:
            with snapshot.segment(number) as (file, size):
                yield from _of_interest(read.lines(file, 0, size))
        if snapshot.log is not None:
            yield from _of_interest(read.lines(snapshot.log, 0, snapshot.size))


def _of_interest(lines: Iterator[read.Line]) -> Iterator[Record]:
    for line in lines:
        if line.record is not None and any(kind in line.raw for kind in _KINDS):
            yield line.record
