"""``glovebox policy``: checks it, explains it for one caller, compares two; and ``usage``."""

import csv
import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from glovebox_audit.printable import printable
from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.explain import render
from glovebox_profiles.policy import diff as comparing
from glovebox_profiles.policy import explain as explaining
from glovebox_profiles.policy.load import read
from glovebox_profiles.policy.model import SPENDING, digest
from glovebox_profiles.policy.rights import combine_roles, order_conflicts, roles_in_force
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.plural import counted
from glovebox_server import workspace
from glovebox_server.app import load_profiles
from glovebox_server.cli.groups import LazyGroup
from glovebox_server.cli.options import caller_id, command, emit, err, out, time_option, wants_json
from glovebox_server.cli.rules.profiles import described, show_widening
from glovebox_server.cli.terminal import table_of
from glovebox_server.exits import OK, USAGE
from glovebox_server.guards.budgets import store
from glovebox_server.guards.budgets.store import BY, used
from glovebox_server.guards.watch.watch import RULES
from glovebox_server.settings import Settings
from glovebox_server.startup import load, policy_file, workspaces
from glovebox_server.stores import database
from glovebox_server.transport import tokens


@click.group(cls=LazyGroup)
def policy() -> None:
    """Check, explain and compare policies."""


@command("check", policy, opens="settings")
@click.argument("path", required=False, type=click.Path(path_type=Path))
def policy_check(settings: Settings, path: Path | None) -> int:
    """Load the policy, or PATH, and decide its examples."""
    own, path = path is None, path or _file(settings)
    profiles = load_profiles(settings)
    try:
        found = load(path, profiles)
        if own:  # one that is named may be for another machine
            workspaces(found, settings, path)
    except ProfileError as error:
        if emit({"path": str(path), "errors": [described(item) for item in (error, *error.more)]}):
            return USAGE
        raise
    warnings = list(order_conflicts(found))
    counts = {"roles": list(found.roles), "examples": len(found.example), "errors": [], "warnings": warnings}
    amounts = f"{counted(len(found.roles), 'role')}, {counted(len(found.example), 'example')}"
    told = [f"{path}: {amounts}, no error.\n{digest(found)}", *(f"Warning: {warning}" for warning in warnings)]
    emit({"path": str(path), "digest": digest(found), **counts}, *told)
    return OK


@command("explain", policy)
@click.argument("principal", type=caller_id)
@click.option("--workflow", help="What it works in.")
@click.option("--role", "roles", multiple=True, help="Role that its token gives.")
@click.option("--scope", "scopes", multiple=True, help="Scope of its OAuth token.")
def policy_explain(
    settings: Settings, *, principal: str, workflow: str | None, roles: tuple[str, ...], scopes: tuple[str, ...]
) -> None:
    """Explain in plain words what PRINCIPAL may do. PRINCIPAL is token:NAME or local:1000."""
    path = _file(settings)
    profiles = load_profiles(settings)
    policy = load(path, profiles)
    kind, _, name = principal.partition(":")
    place = settings.state_dir / tokens.DIRECTORY
    bound = tokens.load(place, None).get(name) if kind == "token" and place.exists() else None
    if bound is not None:
        roles, workflow = roles or ((bound.role,) if bound.role else ()), workflow or bound.workflow
    _known(path, "workflow", (workflow,) if workflow else (), policy.workflows)
    _known(path, "role", roles, policy.roles)
    _known(path, "scope", scopes, policy.scopes)
    names = roles_in_force(policy, principal, (*roles, *(policy.scopes[each] for each in scopes)), workflow)
    if isinstance(names, Refusal):
        told = {"principal": principal, "roles": [], "refused": asdict(names), "sections": []}
        emit(told, f"{principal} may call nothing ({names.rule}): {names}")
        return
    served = workspace.find(settings, "http" if principal.startswith(("token:", "oauth:")) else "stdio")
    where = str(served.path) if served.path else "none, unless the server is started with one"
    rights = combine_roles(policy, names, profiles)
    sections = explaining.explain(rights, profiles, principal=principal, served=where)
    fields = {"principal": principal, "roles": list(names), "refused": None}
    emit({**fields, "sections": [asdict(section) for section in sections]}, render(sections))


@command("diff", policy, opens="settings")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
def policy_diff(settings: Settings, a: Path, b: Path) -> int:
    """Compare two policies, with your profiles; exit 1 if one is wider."""
    for path in (a, b):
        if path.is_dir():
            raise ProfileError(path, None, "", "is a directory", "Name a policy.")
    before, after = read(a), read(b)
    changes = comparing.diff(before, after, load_profiles(settings), RULES)
    return show_widening({"changes": [asdict(each) for each in changes]}, {"": changes})


def _file(settings: Settings) -> Path:
    path = policy_file(settings)
    if path is None:
        place = settings.profiles_dir.absolute().parent / "policy.toml"
        fix = f"Write {place}, or name one with --policy; see docs/operate/policy.md."
        raise ProfileError(place, None, "", "there is no policy, so everybody has what the profiles say", fix)
    return path


def _known(path: Path, what: str, given: tuple[str, ...], names: Any) -> None:
    for each in given:
        if each not in names:
            raise ProfileError(path, None, "", f'there is no {what} "{each}"', nearest(each, names))


def _by(value: str) -> tuple[str, ...]:
    """Parse ``principal,tool``."""
    names = tuple(dict.fromkeys(filter(None, value.split(","))))
    if not set(names) <= set(BY):
        raise click.BadParameter(f"{value!r} is not some of {','.join(BY)}.")
    return names


@command("usage")
@click.option(
    "--by", metavar="NAMES", type=_by, default="principal,tool", show_default=True, help=f"Some of {','.join(BY)}."
)
@time_option("--since", "Since this time, day, or 7d ago.", "7d")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
def usage(settings: Settings, *, by: tuple[str, ...], since: datetime, as_csv: bool) -> None:
    """Show what calls have spent, where policy.toml has budgets."""
    if as_csv and wants_json():
        raise click.UsageError("Choose one of --csv and --json.")
    path = settings.state_dir / database.DIRECTORY / store.NAME
    found: list[dict[str, Any]] = []
    if os.path.lexists(path):
        with database.opened(path, store.SCHEMA) as kept:
            found = kept.query_now(lambda connection: used(connection, since, by))
    elif not as_csv and not wants_json():
        err.print("Nothing is counted: no server of this state directory has had a policy with budgets.")
    if as_csv:
        writer = csv.writer(out.file, lineterminator="\n")
        writer.writerow([*by, *SPENDING, "lost"])
        for row in found:
            writer.writerow([_cell(value) if name in by else value for name, value in row.items()])
        return
    titles = [each.replace("_seconds", " s").replace("_bytes", " B") for each in SPENDING]
    shown = ([value if name in by else _amount(value) for name, value in row.items()] for row in found)
    table = table_of([*by, *titles, "lost"], shown, right=[*titles, "lost"])
    emit({"since": since.isoformat(timespec="seconds"), "by": list(by), "usage": found}, table)


def _amount(number: float) -> str:
    return f"{number:,.3f}".rstrip("0").rstrip(".") if isinstance(number, float) else f"{number:,}"


def _cell(text: str) -> str:
    """Return a cell that no spreadsheet reads as a formula, and no terminal as a command."""
    plain = printable(text)
    return f"'{plain}" if plain.startswith(("=", "+", "-", "@")) else plain
