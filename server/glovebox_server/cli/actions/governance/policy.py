"""What ``glovebox policy`` prints, and its exit codes: 0 fine, 1 a widening, 2 an error in the policy or a name."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.policy import diff as comparing
from glovebox_profiles.policy import explain as explaining
from glovebox_profiles.policy.load import read
from glovebox_profiles.policy.model import Policy, digest, is_principal
from glovebox_profiles.policy.rights import combined, order_conflicts, roles_in_force
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.plural import counted
from glovebox_server import workspace
from glovebox_server.app import load_profiles
from glovebox_server.cli.actions.profiles import described, say, say_change
from glovebox_server.cli.terminal import print_json
from glovebox_server.exits import FAILED, OK, USAGE
from glovebox_server.guards.watch.rules import actions
from glovebox_server.settings import Settings
from glovebox_server.startup.policy import load, policy_file, workspaces
from glovebox_server.tools import TOOLS
from glovebox_server.transport import tokens


def check(settings: Settings, path: Path | None, out: Console, *, as_json: bool) -> int:
    """Load a policy and decide its examples; print the line and the problem where it fails.

    Raises:
        ProfileError: there is none, or a profile is wrong.
        WorkspaceRefused: a role's folder must not be served.
    """
    own, path = path is None, path or _file(settings)
    profiles = load_profiles(settings)
    try:
        found = load(path, profiles, TOOLS)
        if own:  # one that is named may be for another machine
            workspaces(found, settings, path)
    except ProfileError as error:
        if not as_json:
            raise
        print_json(out.file, {"path": str(path), "errors": [described(item) for item in (error, *error.more)]})
        return USAGE
    if as_json:
        told = {"roles": list(found.roles), "examples": len(found.example), "errors": []}
        told["warnings"] = list(order_conflicts(found))
        print_json(out.file, {"path": str(path), "digest": digest(found), **told})
        return OK
    amounts = f"{counted(len(found.roles), 'role')}, {counted(len(found.example), 'example')}"
    say(out, f"{path}: {amounts}, no error.\n{digest(found)}")
    for warning in order_conflicts(found):
        say(out, f"Warning: {warning}")
    return OK


def explain(
    settings: Settings,
    out: Console,
    *,
    principal: str,
    workflow: str | None,
    roles: tuple[str, ...],
    scopes: tuple[str, ...],
    as_json: bool,
) -> int:
    """Print in plain words what one principal may do; of a token that there is, with what it is bound to.

    Raises:
        ProfileError: there is no policy, or it is wrong, or it has no such workflow, role or scope.
        TokenFilesError: others could read the tokens.
    """
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
        if as_json:
            print_json(out.file, {"principal": principal, "roles": [], "refused": asdict(names), "sections": []})
            return OK
        say(out, f"{principal} may call nothing ({names.rule}): {names}")
        return OK
    rights = combined(policy, names, profiles)
    served = workspace.find(settings, "http" if principal.startswith(("token:", "oauth:")) else "stdio")
    where = str(served.path) if served.path else "none, unless the server is started with one"
    sections = explaining.explain(rights, profiles, principal=principal, served=where)
    if as_json:
        told = {"principal": principal, "roles": list(names), "refused": None}
        print_json(out.file, {**told, "sections": [asdict(each) for each in sections]})
        return OK
    say(out, explaining.render(sections))
    return OK


def diff(settings: Settings, a: Path, b: Path, out: Console, *, as_json: bool) -> int:
    """Print what changes from ``a`` to ``b``; 1 if anything widens.

    Raises:
        ProfileError: one does not load.
    """
    before, after = _read(a), _read(b)
    changes = comparing.diff(before, after, load_profiles(settings), actions({}))
    widened = any(each.direction == "widening" for each in changes)
    if as_json:
        print_json(out.file, {"widening": widened, "changes": [asdict(each) for each in changes]})
        return FAILED if widened else OK
    for each in changes:
        say_change(out, each)
    say(out, "Something widens." if widened else "Nothing widens.")
    return FAILED if widened else OK


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
    """The role and the workflow of a token, where it is there and nothing else was named."""
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
