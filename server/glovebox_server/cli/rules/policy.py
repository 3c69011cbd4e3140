"""``glovebox policy``: checks it, explains it for one caller, compares two."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.explain import render
from glovebox_profiles.policy import diff as comparing
from glovebox_profiles.policy import explain as explaining
from glovebox_profiles.policy.load import read
from glovebox_profiles.policy.model import Policy, digest, is_principal
from glovebox_profiles.policy.rights import combine_roles, order_conflicts, roles_in_force
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.plural import counted
from glovebox_server import workspace
from glovebox_server.app import load_profiles
from glovebox_server.cli.options import LazyGroup, command, emit, out
from glovebox_server.cli.rules.showing import described, show_widening
from glovebox_server.exits import OK, USAGE
from glovebox_server.guards.watch.rules import actions
from glovebox_server.settings import Settings
from glovebox_server.startup.policy import load, policy_file, workspaces
from glovebox_server.tools import TOOLS
from glovebox_server.transport import tokens


@click.group(cls=LazyGroup)
def policy() -> None:
    """Who may call what, how much of it, and who is asked."""


@command("check", policy, opens="settings")
@click.argument("path", required=False, type=click.Path(path_type=Path))
def policy_check(settings: Settings, path: Path | None) -> int:
    """Load the policy, or PATH, and decide its examples."""
    own, path = path is None, path or _file(settings)
    profiles = load_profiles(settings)
    try:
        found = load(path, profiles, TOOLS)
        if own:  # one that is named may be for another machine
            workspaces(found, settings, path)
    except ProfileError as error:
        if emit({"path": str(path), "errors": [described(item) for item in (error, *error.more)]}):
            return USAGE
        raise
    warnings = list(order_conflicts(found))
    counts = {"roles": list(found.roles), "examples": len(found.example), "errors": [], "warnings": warnings}
    if emit({"path": str(path), "digest": digest(found), **counts}):
        return OK
    amounts = f"{counted(len(found.roles), 'role')}, {counted(len(found.example), 'example')}"
    out.print(f"{path}: {amounts}, no error.\n{digest(found)}")
    for warning in warnings:
        out.print(f"Warning: {warning}")
    return OK


@command("explain", policy)
@click.argument("principal")
@click.option("--workflow", help="What it works in.")
@click.option("--role", "roles", multiple=True, help="Role that its token gives.")
@click.option("--scope", "scopes", multiple=True, help="Scope of its OAuth token.")
def policy_explain(
    settings: Settings, *, principal: str, workflow: str | None, roles: tuple[str, ...], scopes: tuple[str, ...]
) -> None:
    """What PRINCIPAL may do, spend and is asked about, in plain words. PRINCIPAL is as token:NAME or local:1000."""
    path = _file(settings)
    if not is_principal(principal):
        fix = "Write it as in the audit log: local:1000, token:NAME or oauth:ISSUER#SUBJECT."
        raise ProfileError(path, None, "", f'"{principal}" is no principal', fix)
    profiles = load_profiles(settings)
    policy = load(path, profiles, TOOLS)
    roles, workflow = _bound(settings, principal, roles, workflow)
    _known(path, "workflow", (workflow,) if workflow else (), policy.workflows)
    _known(path, "role", roles, policy.roles)
    _known(path, "scope", scopes, policy.scopes)
    names = roles_in_force(policy, principal, (*roles, *(policy.scopes[each] for each in scopes)), workflow)
    if isinstance(names, Refusal):
        if emit({"principal": principal, "roles": [], "refused": asdict(names), "sections": []}):
            return
        out.print(f"{principal} may call nothing ({names.rule}): {names}")
        return
    rights = combine_roles(policy, names, profiles)
    served = workspace.find(settings, "http" if principal.startswith(("token:", "oauth:")) else "stdio")
    where = str(served.path) if served.path else "none, unless the server is started with one"
    sections = explaining.explain(rights, profiles, principal=principal, served=where)
    fields = {"principal": principal, "roles": list(names), "refused": None}
    if not emit({**fields, "sections": [asdict(section) for section in sections]}):
        out.print(render(sections))


@command("diff", policy, opens="settings")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
def policy_diff(settings: Settings, a: Path, b: Path) -> int:
    """Compare two policies, with your profiles; exit 1 if one is wider."""
    before, after = _read(a), _read(b)
    changes = comparing.diff(before, after, load_profiles(settings), actions({}))
    return show_widening({"changes": [asdict(each) for each in changes]}, {"": changes})


def _read(path: Path) -> Policy:
    if path.is_dir():
        raise ProfileError(path, None, "", "is a directory", "Name a policy.")
    return read(path)


def _file(settings: Settings) -> Path:
    path = policy_file(settings)
    if path is None:
        place = settings.profiles_dir.absolute().parent / "policy.toml"
        fix = f"Write {place}, or name one with --policy; see docs/operate/policy.md."
        raise ProfileError(place, None, "", "there is no policy, so everybody has what the profiles say", fix)
    return path


def _bound(
    settings: Settings, principal: str, roles: tuple[str, ...], workflow: str | None
) -> tuple[tuple[str, ...], str | None]:
    """Return the role and the workflow of a token, if it exists and no others were named."""
    kind, _, name = principal.partition(":")
    place = settings.state_dir / tokens.DIRECTORY
    if kind != "token" or not place.exists():
        return roles, workflow
    found = tokens.load(place, None).get(name)
    if found is None:
        return roles, workflow
    return roles or ((found.role,) if found.role else ()), workflow or found.workflow


def _known(path: Path, what: str, given: tuple[str, ...], names: Any) -> None:
    for each in given:
        if each not in names:
            raise ProfileError(path, None, "", f'there is no {what} "{each}"', nearest(each, names))
