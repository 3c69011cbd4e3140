"""``glovebox approvals``: an answer given here is that of the user who runs the command."""

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Final

import click

from glovebox_audit.printable import printable
from glovebox_profiles.policy.model import Reach
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.plural import counted
from glovebox_server.cli import state
from glovebox_server.cli.groups import LazyGroup
from glovebox_server.cli.options import command, emit, err, out
from glovebox_server.cli.terminal import pick, print_question, table_of
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.question import MAX_REASON, ApprovalAnswer
from glovebox_server.guards.approvals.rules import permanent
from glovebox_server.guards.approvals.shown import shown
from glovebox_server.guards.approvals.store import Questions, Standing, State
from glovebox_server.guards.budgets.spending import read_clocks
from glovebox_server.secret_files import prepare_state
from glovebox_server.settings import Settings
from glovebox_server.stores.database import Database
from glovebox_server.upkeep.log import recording

_OPEN: Final[tuple[State, ...]] = ("pending", "allowed")
_LEAST: Final = 6
"""Shortest prefix of an id, ``a_`` included."""
_WATCH_SECONDS: Final = 0.25
_COLUMNS: Final = ("id", "state", "principal", "tool", "for", "left", "why")


@click.group(cls=LazyGroup)
def approvals() -> None:
    """Answer calls that wait for approval, and see what was granted."""


@command("list", approvals)
@click.option("--all", "everything", is_flag=True, help="Those that are over too, of the last seven days.")
def approvals_list(settings: Settings, everything: bool) -> None:
    """Questions that wait, and approvals that are valid; the newest first."""
    found = _standings(settings, () if everything else _OPEN)
    table = table_of(_COLUMNS, map(_row, found))
    emit({"approvals": [_described(each) for each in found]}, table or "No call waits for approval.")


@command("show", approvals)
@click.argument("wanted", metavar="ID")
def approvals_show(settings: Settings, wanted: str) -> None:
    """Show what would run, its rights, and why it is asked. ID is a question's, or its beginning."""
    with _store(settings) as database:
        found = _named(database, wanted)
    if emit(_described(found, whole=True)):
        return
    if found.state != "pending":
        told = f"It is {found.state}{f' by {found.used_by}' * bool(found.used_by)}"
        for each in found.answers:
            told += f"; {each.by} said {'yes' if each.allow else 'no'}{f': {each.reason}' * bool(each.reason)}"
        out.print(f"{told}.")
    if found.question.folder:
        out.print(f"Folder on this host, which clients are not shown: {found.question.folder}")
    print_question(out, shown(found.question))


@command("allow", approvals)
@click.argument("wanted", metavar="ID")
@click.option("--run", "for_run", is_flag=True, help="For identical calls of the run too, where the rule permits it.")
@click.option("--rule", is_flag=True, help="Print the change that would lift the denial for good; answer nothing.")
def approvals_allow(settings: Settings, wanted: str, for_run: bool, rule: bool) -> None:
    """Say yes to a question. Look at it first: `approvals show`."""
    if rule and for_run:
        raise click.UsageError("--rule answers nothing, so there is no yes that --run could be about.")
    if rule:
        _show_rule(settings, wanted)
    else:
        _answer(settings, wanted, allow=True, reach="run" if for_run else "call")


@command("deny", approvals)
@click.argument("wanted", metavar="ID")
@click.option("--reason", default="", help="Why, in at most 500 characters: the model reads it.")
def approvals_deny(settings: Settings, wanted: str, reason: str) -> None:
    """Deny a question, or withdraw an approval that is still valid.

    The same call is not asked about again until its time is over.
    """
    if len(reason) > MAX_REASON:
        raise click.BadParameter(f"say it in at most {MAX_REASON} characters.", param_hint="--reason")
    _answer(settings, wanted, allow=False, reach="call", reason=reason)


@command("revoke", approvals)
@click.argument("wanted", metavar="ID")
def approvals_revoke(settings: Settings, wanted: str) -> None:
    """Withdraw an approval or a grant; no call passes on it any more. What runs continues: see `glovebox stop`."""
    with _store(settings) as database, recording(settings) as record:
        identifier = _named(database, wanted).question.id
        database.transact_now(lambda db: Questions(db, read_clocks(), record).withdraw(identifier, state.OPERATOR))
        found = _named(database, identifier)
    emit(_described(found), f"{identifier} is withdrawn: no call passes on it any more.")


@command("grants", approvals)
def approvals_grants(settings: Settings) -> None:
    """Denials that somebody lifted, and for how long."""
    found = [each for each in _standings(settings, ("allowed",)) if each.question.subject.lifted]
    table = table_of(_COLUMNS, map(_row, found))
    emit({"grants": [_described(each) for each in found]}, table or "Nothing is granted beyond the policy.")


@command("watch", approvals)
def approvals_watch(settings: Settings) -> None:
    """Print each question as it comes, until interrupted.

    With --json one object for each line.
    """
    told: set[str] = set()
    if err.is_terminal:
        err.print("Waiting for questions; interrupt to end.", style="dim")
    while True:
        pending = _standings(settings, ("pending",))
        for each in reversed(pending):
            if each.question.id not in told:
                line = f"{each.question.id}  {each.question.subject.principal}  {each.question.why}"
                emit(_described(each), line, indent=None)
                out.file.flush()
        told = {each.question.id for each in pending}
        time.sleep(_WATCH_SECONDS)


def _show_rule(settings: Settings, wanted: str) -> None:
    with _store(settings) as database:
        about = _named(database, wanted).question.subject
    if about.lifted is None:
        names = " and ".join(about.rules)
        reason = f"This question lifts no denial: it is asked since {names} of a profile or the policy wants it."
        raise RefusedError("approval.rule", reason, "Change that rule, if it asks too often.")
    lines = permanent(about.lifted, about.target, about.tool)
    then = ", then restart the server" if about.lifted == "host" else "; servers follow within seconds"
    told = f"Nothing was answered. Make the change yourself{then}."  # profiles are read at the start
    emit({"lifts": {"what": about.lifted, "target": about.target}, "diff": list(lines)}, *lines, told)


def _answer(settings: Settings, wanted: str, *, allow: bool, reach: Reach, reason: str = "") -> None:
    with _store(settings) as database, recording(settings) as record:
        before = _named(database, wanted)
        question = before.question
        said = printable(reason.strip())[:MAX_REASON]
        given = ApprovalAnswer(
            allow=allow, by=state.OPERATOR, channel="operator", reach=reach, digest=question.digest, reason=said
        )
        found = store.give(database, record, question.id, given)
    emit(_described(found), f"{question.id} is {found.state}{_more(before, found)}.")


def _more(before: Standing, now: Standing) -> str:
    """Return the effects of an answer that the state does not show."""
    if now.state == "pending":
        return f": {sum(each.allow for each in now.answers)} of {now.question.asked.quorum} have said yes"
    if before.state != "allowed":
        return ""
    if before.used_by:
        return f": the approval is withdrawn, and no further call passes on it; the last that did is {before.used_by}"
    return ": the approval is withdrawn, and no call has used it"


def _store(settings: Settings) -> AbstractContextManager[Database]:
    prepare_state(settings.state_dir)
    return store.opened(settings.state_dir)


def _standings(settings: Settings, states: Sequence[State]) -> list[Standing]:
    """Return the requests in these states that are not over; all where no state is named."""
    if not store.path(settings.state_dir).exists():
        return []
    with _store(settings) as database:
        found = _all(database)
    return [each for each in found if not states or (each.state in states and each.left > 0)]


def _all(database: Database) -> list[Standing]:
    return database.query_now(lambda db: Questions(db, read_clocks()).standings())


def _named(database: Database, wanted: str) -> Standing:
    """Return the request of an id, or of a prefix. Raises RefusedError if there is none, or several."""
    found = _all(database)
    exact = [each for each in found if each.question.id == wanted]
    begun = [each for each in found if len(wanted) >= _LEAST and each.question.id.startswith(wanted)]
    if not exact and len(begun) > 1:
        reason = f"{wanted} is the beginning of {counted(len(begun), 'question')}."
        raise RefusedError("approval.unknown", reason, "Give the whole id.")
    if not exact and not begun:
        raise store.unknown_question()
    return (exact or begun)[0]


def _row(each: Standing) -> tuple[str, ...]:
    asked, about = each.question, each.question.subject
    left = f"{each.left / 60:.0f} min" if each.state in _OPEN and each.left > 0 else ""
    return asked.id, each.state, about.principal, about.tool, each.reach, left, asked.why


def _described(each: Standing, *, whole: bool = False) -> dict[str, Any]:
    question = each.question
    about = question.subject
    found = pick(question, "id", "digest", "why", "client", "workflow", "asked_by", "made")
    found |= pick(about, "principal", "run", "tool") | pick(each, "state", "reach", "callers")
    found |= {
        "rules": about.rules,
        "lifts": None if about.lifted is None else {"what": about.lifted, "target": about.target},
        "asked": asdict(question.asked),
        "seconds_left": round(max(0.0, each.left), 1),
        "used_by": each.used_by or None,
        "answers": [pick(one, "by", "allow", "channel") | {"reason": one.reason or None} for one in each.answers],
    }
    if whole:
        found |= pick(about, "profile_digest", "policy_digest") | {
            "arguments": json.loads(about.arguments),
            "last_approved": None if question.last_approved is None else json.loads(question.last_approved),
            "profile": json.loads(question.profile),
            "inputs": [{"uri": uri, "sha256": digest} for uri, digest in about.inputs],
            "folder": question.folder or None,
            "workspace_may_change": bool(about.workspace),
        }
    return found
