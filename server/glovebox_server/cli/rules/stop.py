"""``glovebox stop``, ``resume`` and ``stops``; and ``canary``, whose marker is never printed."""

import os
import posixpath
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from glovebox_audit.place import AuditError
from glovebox_audit.printable import printable
from glovebox_audit.query import ask
from glovebox_audit.query.index import Filters
from glovebox_profiles.errors import nearest
from glovebox_sandboxes.contract.errors import DiagnosedError, MisnamedError
from glovebox_sandboxes.plural import counted
from glovebox_server import workspace
from glovebox_server.cli import options, state
from glovebox_server.cli.evidence.audit import indexed
from glovebox_server.cli.groups import LazyGroup
from glovebox_server.cli.options import caller_id, command, emit, err, wants_json
from glovebox_server.cli.terminal import pick, styled, table_of
from glovebox_server.exits import NO_SERVER, OK, UNAVAILABLE
from glovebox_server.guards.stops import stops as store
from glovebox_server.guards.watch import canaries
from glovebox_server.requests import has_key
from glovebox_server.secret_files import Files, SecretFileError
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS
from glovebox_server.transport import tokens
from glovebox_server.upkeep import stopping

_ID = r"[0-9a-z]{26}"


# A mistyped name would stop no call.
_call = options.word_form(f"c_{_ID}", "name a call's id, as c_01h…: `glovebox audit query` shows them")
_run = options.word_form(f"r_{_ID}", "name a run's id, as r_01h…: `glovebox audit show CALL` names it")


@command("stop", opens="settings")
@click.option("--call", metavar="ID", type=_call, help="This call.")
@click.option("--run", metavar="ID", type=_run, help="All calls of this run.")
@click.option("--principal", metavar="ID", type=caller_id, help="All calls of this caller, as token:ci or local:1000.")
@click.option("--workflow", metavar="NAME", type=options.workflow_name, help="All calls of this workflow.")
@click.option("--tool", metavar="NAME", type=click.Choice([*TOOLS]), help="All calls of this tool.")
@click.option("--all", "everything", is_flag=True, help="Everything.")
@click.option("--because", default="The operator gave no reason.", help="Why, in a sentence: callers read it.")
def stop(settings: Settings, *, everything: bool, because: str, **given: str | None) -> int:
    """End running calls within a second, and refuse new ones.

    In all servers of the state directory, also after a restart, until `glovebox resume`. --all: of every directory
    there is. Exit 5: it is stored, and no server is live there.
    """
    given["all"] = "" if everything else None
    named = [(scope, name) for scope in store.SCOPES if (name := given[scope]) is not None]
    if len(named) != 1:
        raise click.UsageError("Say what to stop by one of --call, --run, --principal, --workflow, --tool and --all.")
    ((scope, name),) = named
    if not because.strip() or len(because) > store.MAX_BECAUSE:
        raise click.BadParameter(f"say it in 1 to {store.MAX_BECAUSE} characters.", param_hint="--because")
    settings = state.locate(settings, guesses=everything)
    places = [settings.state_dir]
    if everything:
        on_line = click.get_current_context().get_parameter_source("state_dir") is ParameterSource.COMMANDLINE
        places = state.find_directories(settings, named=on_line)
    if name.startswith("token:"):
        _require_token(settings, name.removeprefix("token:"))
    why = printable(because.strip())[: store.MAX_BECAUSE]
    found = store.new_stop(scope, name, because=why, by=state.OPERATOR, made=datetime.now(UTC))
    code = _stop_in_all(settings, places, found)
    if scope in ("run", "workflow") or name.startswith("oauth:"):
        _warn_if_unseen(settings, scope, name)
    if code == NO_SERVER and not wants_json():
        err.print("No server is live there: the stop is stored for those that begin later.", style="yellow")
    return code


@command("resume")
@click.argument("stop_id", metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="Every stop.")
def resume(settings: Settings, stop_id: str | None, everything: bool) -> None:
    """Lift a stop, or all of them."""
    files = store.stops_of(settings.state_dir)
    lifted = _chosen(files, ("Lifting a stop", "`glovebox stops list`"), stop_id, everything=everything)
    stopping.lift(settings, lifted, state.OPERATOR)
    where = state.describe(settings.state_dir, state.live_servers(settings.state_dir))
    emit({"lifted": lifted}, f"{counted(len(lifted), 'stop')} lifted in {where}.")


def _chosen(files: Files[Any], doing: tuple[str, str], identifier: str | None, *, everything: bool) -> list[str]:
    """Return the names of one file, or of all; ``doing`` says what is done, and the command that lists them."""
    what = doing[0].rpartition(" ")[2]
    if (identifier is None) is not everything:
        raise click.UsageError(f"Name one {what}, as {doing[1]} shows it, or --all.")
    found = [name for name in files.names() if identifier in {None, name}]
    if identifier is not None and not found:
        raise MisnamedError(doing[0], f"there is no {what} {printable(identifier)}", f"{doing[1]} shows them.")
    return found


@click.group(cls=LazyGroup)
def stops() -> None:
    """Stops in effect: see `glovebox stop` and `glovebox resume`."""


@command("list", stops)
def stops_list(settings: Settings) -> int:
    """The stops in effect, the oldest first.

    Exit 4 if one cannot be read: then everything is stopped.
    """
    files = store.stops_of(settings.state_dir)
    found = files.read()
    if has_key(settings.state_dir) and not os.path.lexists(files.path):
        fix = "Run `glovebox resume --all`: it makes it anew, and nothing is stopped then."
        gone = SecretFileError(store.KIND, files.path, "it is gone, with the stops in it", fix)
        found = replace(found, damaged=(gone,))
    damaged = [pick(each, "what", "reason", "fix") for each in found.damaged]
    rows = [(each.id, _words(each), each.made, each.by, each.because) for each in found.items]
    table = table_of(["id", "what", "made", "by", "because"], rows)
    where = state.describe(settings.state_dir, state.live_servers(settings.state_dir))
    told = f"{counted(len(found.items), 'stop')} in effect in {where}."
    if not emit({"stops": [_described(each) for each in found.items], "damaged": damaged}, table, told):
        for problem in found.damaged:
            err.print(f"Everything is stopped: {problem}", style="red")
    return UNAVAILABLE if found.damaged else OK


def _stop_in_all(settings: Settings, places: list[Path], stop: store.Stop) -> int:
    """Stop in each directory, and print what came of it; raise what failed if nothing came of any."""
    outcomes: list[dict[str, Any]] = []
    problems: list[DiagnosedError] = []
    for place in places:
        try:
            outcomes.append(state.run_as_owner(place, partial(stopping.put_in_effect, settings, place, stop)))
        except DiagnosedError as problem:  # the other directories are not to wait for this one
            problems.append(problem)
    if not outcomes:
        raise problems[0]
    told, lines = [], []
    for outcome in outcomes:
        place, servers = outcome["directory"], outcome["servers"]
        undo = f"glovebox resume {stop.id}{f' --state-dir {place}' * (len(places) > 1)}"
        told.append(f"{_words(stop)} is stopped in {state.describe(place, servers)}: {stop.id}. `{undo}` lifts it.")
        if not outcome["whole"]:
            words = "The disk has no room for what is stopped, so everything is"
            lines.append(f"{words}, until `{undo}`. Free space there.")
        if outcome["problem"]:
            lines.append(f"It is in effect, and not in the audit log: {outcome['problem']}")
    value = {
        "stop": _described(stop),
        "recorded": not any(outcome["problem"] for outcome in outcomes),
        "everything": stop.scope == "all" or not all(outcome["whole"] for outcome in outcomes),
        "directories": [{key: outcome[key] for key in ("directory", "servers")} for outcome in outcomes],
    }
    emit(value, *told)
    for line in (*lines, *problems):
        err.print(str(line), style="red")
    if problems:
        return UNAVAILABLE
    return OK if any(outcome["servers"] for outcome in outcomes) else NO_SERVER


def _require_token(settings: Settings, name: str) -> None:
    """Refuse an unknown token: if its name is misspelt, its caller would continue."""
    place = settings.state_dir / tokens.DIRECTORY
    try:
        known = state.run_as_owner(settings.state_dir, lambda: list(tokens.load(place, None)) if place.exists() else [])
    except DiagnosedError:  # a file that is damaged is no reason not to stop
        return
    if name not in known:
        named = [f"token:{each}" for each in known]
        raise MisnamedError(f"Stopping token:{name}", "no token has this name", nearest(f"token:{name}", named))


def _warn_if_unseen(settings: Settings, scope: store.Scope, name: str) -> None:
    """Warn of a name without calls on record; it may be stopped before its first call, or be misspelt."""
    by_scope = {"run": Filters(runs=(name,)), "workflow": Filters(workflows=(name,))}
    asked = settings.state_dir / "audit", by_scope.get(scope, Filters(principals=(name,))), 1
    seen = False
    with suppress(DiagnosedError, AuditError):
        seen = state.run_as_owner(settings.state_dir, lambda: bool(indexed(ask.ask, *asked).calls))
    if not seen:
        words = f"No call of {scope} {name} is on record. It is stopped before its first call, or misspelt."
        err.print(words, style="yellow")


def _words(stop: store.Stop) -> str:
    return "everything" if stop.scope == "all" else f"{stop.scope} {stop.name}"


def _described(stop: store.Stop) -> dict[str, Any]:
    return stop.model_dump(mode="json", exclude={"version"})


@click.group(cls=LazyGroup)
def canary() -> None:
    """Files whose content stops any call that sends it."""


@command("plant", canary)
@click.option("--name", help="Its path in the workspace; else deploy-credentials.env.")
def canary_plant(settings: Settings, name: str | None) -> None:
    """Put one into the workspace; servers know it at once."""
    served = workspace.find(settings, "cli")
    if served.path is None:
        raise MisnamedError("Planting a canary", served.reason, "Name the workspace with --workspace.")
    path = posixpath.normpath(name or canaries.NAME)
    if path.startswith(("/", "../")) or path in {".", ".."}:
        raise DiagnosedError(f"plant {printable(path)}", "it is not below the workspace", "Name a path below it.")
    whole = f"{served.path}/{path}"
    if printable(whole) != whole:
        reason = "its path has what cannot be read or typed, which no tool could name"
        raise DiagnosedError(f"plant {printable(whole)}", reason, "Name a path of printable characters.")
    planted = canaries.plant(settings.state_dir, served.path, path)
    emit({"canary": _fields_of(planted)}, f"{planted.file} is planted: {planted.id}.")


@command("list", canary)
def canary_list(settings: Settings) -> int:
    """List them, and whether they stand.

    Exit 4 if one cannot be read: then it is not looked for.
    """
    found = canaries.canaries_of(settings.state_dir).read()
    damaged = [pick(each, "what", "reason", "fix") for each in found.damaged]
    rows = [(each.id, each.stands, each.made, each.file) for each in found.items]
    table = table_of(["id", "stands", "made", "file"], rows)
    told = [styled(f"Not looked for: {each}", "red") for each in found.damaged]
    value = {"canaries": [_fields_of(each) for each in found.items], "damaged": damaged}
    emit(value, table, *told, f"{len(found.items)} in all.")
    return UNAVAILABLE if found.damaged else OK


@command("remove", canary)
@click.argument("canary_id", metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="Every canary.")
def canary_remove(settings: Settings, canary_id: str | None, everything: bool) -> None:
    """Take one out of its workspace, and forget it."""
    files = canaries.canaries_of(settings.state_dir)
    gone = _chosen(files, ("Removing a canary", "`glovebox canary list`"), canary_id, everything=everything)
    known = {each.id: each for each in files.read().items}
    for name in gone:
        if name in known:
            canaries.remove(settings.state_dir, known[name])
        else:
            files.remove(name)  # damaged: where it lies is not known
    emit({"removed": gone}, f"{counted(len(gone), 'file')} removed.")


def _fields_of(canary: canaries.Canary) -> dict[str, Any]:
    fields: dict[str, Any] = canary.model_dump(mode="json", include={"id", "workspace", "path", "made"})
    return {**fields, "stands": canary.stands}
