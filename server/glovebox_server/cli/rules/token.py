"""``glovebox token``: makes, lists and revokes bearer tokens; and the one that ``client-config`` shows."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from glovebox_audit.events import TokenCreated, TokenRevoked
from glovebox_server import app as apps
from glovebox_server import startup
from glovebox_server.cli import state
from glovebox_server.cli.options import LazyGroup, command, emit, err, lifetime, out
from glovebox_server.cli.terminal import table_of
from glovebox_server.errors import MisnamedError
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS
from glovebox_server.transport import tokens
from glovebox_server.transport.tokens import Token
from glovebox_server.upkeep.log import recording

#: The token that ``client-config`` prefers.
FIRST = "default"
#: Replaces a token that is not shown in a client's configuration.
PLACEHOLDER = "TOKEN"


@click.group(cls=LazyGroup)
def token() -> None:
    """Bearer tokens of callers over HTTP. A running server follows within a second."""


@command("create", token)
@click.argument("name")
@click.option("--role", help="What it may do, of policy.toml; else what policy.toml says of token:NAME.")
@click.option("--workflow", help="What its calls are part of.")
@click.option("--expires", type=lifetime, help="When it ends: 12h, 30d. Never, unless given.")
def token_create(
    settings: Settings, *, name: str, role: str | None, workflow: str | None, expires: timedelta | None
) -> None:
    """Make a token and show it, once: only its hash is kept. NAME is 1 to 32 of a-z 0-9 -."""
    made, secret = _made(settings, name, role=role, workflow=workflow, lifetime=expires)
    if emit({**_fields(made, None), "token": secret}):
        return
    out.print(secret)
    ends = "It does not expire." if made.expires is None else f"It ends {_time(made.expires)}."
    err.print(f"This is {made.principal}, shown once: only its hash is kept. {ends}")


@command("list", token)
def token_list(settings: Settings) -> None:
    """Each with its role, workflow, making, last use and end."""
    place = settings.state_dir / tokens.DIRECTORY
    found = [(each, tokens.last_used(place, each.name)) for each in tokens.load(place, None).values()]
    rows = [
        {
            "name": each.name,
            "role": each.role or "",
            "workflow": each.workflow or "",
            "made": _time(each.made) if each.made else "",
            "ends": _time(each.expires) if each.expires else "never",
            "last used": _time(used) if used else "",
        }
        for each, used in found
    ]
    emit(
        {"tokens": [_fields(each, used) for each, used in found]},
        table_of(rows) or "There are no tokens. `glovebox token create NAME` makes one.",
    )


@command("revoke", token)
@click.argument("name")
def token_revoke(settings: Settings, name: str) -> None:
    """End a token, and what is under way with it."""
    place = settings.state_dir / tokens.DIRECTORY
    if not tokens.is_name(name) or not tokens.revoke(place, name):
        fix = "`glovebox token list` shows those there are."
        raise MisnamedError(f"Revoking the token {name!r}", "there is none", fix)
    with recording(settings) as record:
        record(TokenRevoked(principal=f"token:{name}", by=f"local:{state.OPERATOR}"))
    emit(
        {"name": name, "principal": f"token:{name}", "revoked": True},
        f"token:{name} is revoked. A running server ends what is under way with it within seconds.",
    )


def to_show(
    settings: Settings, *, name: str | None, file: Path | None, role: str | None, lifetime: timedelta | None
) -> str:
    """Return the token for a client's configuration; make one only if a new name was given.

    Raises MisnamedError if only the named one's hash is kept, or the file holds none of this server's tokens.
    """
    place = settings.state_dir / tokens.DIRECTORY
    known = tokens.load(place, None)
    if file is not None:
        with file.open("rb") as opened:
            saved = opened.read(tokens.MAX_FILE_BYTES).decode("utf-8", "replace").strip()
        if not any(token.sha256 == tokens.digest_of(saved) for token in known.values()):
            fix = "`glovebox token list` shows those there are; name the file in which one of them was saved."
            raise MisnamedError(f"Reading the token in {file}", "it is none of this server's tokens", fix)
        return saved
    if name is not None and (name not in known or role or lifetime):
        made, secret = _made(settings, name, role=role, workflow=None, lifetime=lifetime)
        err.print(f"Made {made.principal}. It is shown here alone: only its hash is kept.")
        return secret
    if name is not None:
        fix = "Name the file in which it was saved with --token-file, or make another with a new name."
        raise MisnamedError(f"Showing the token {name!r}", "only its hash is kept", fix)
    told = f"No token was made: put one in the place of {PLACEHOLDER}. `--token NAME` makes one"
    err.print(f"{told}, and `--token-file FILE` shows one that was saved in a file.")
    return PLACEHOLDER


def _made(
    settings: Settings, name: str, *, role: str | None, workflow: str | None, lifetime: timedelta | None
) -> tuple[Token, str]:
    doing = f"Making the token {name!r}"
    if not tokens.is_name(name):
        raise MisnamedError(doing, "its name is not 1 to 32 of a-z 0-9 -", "Give it another.")
    _require_known(settings, doing, role=role, workflow=workflow)
    place = settings.state_dir / tokens.DIRECTORY
    made = None
    if name not in tokens.load(place, None):
        expires = None if lifetime is None else (datetime.now(UTC) + lifetime).isoformat(timespec="seconds")
        by, principal = f"local:{state.OPERATOR}", f"token:{name}"
        with recording(settings) as record:
            record(TokenCreated(principal=principal, by=by, role=role, workflow=workflow, expires=expires))
        made = tokens.create(place, name, role=role, workflow=workflow, lifetime=lifetime)
    if made is None:
        fix = f"`glovebox token revoke {name}` ends it; or give this one another name."
        raise MisnamedError(doing, "there is one of this name", fix)
    return made


def _require_known(settings: Settings, doing: str, *, role: str | None, workflow: str | None) -> None:
    """Refuse an unknown role, and a workflow that the policy, if any, does not know."""
    if role is None and workflow is None:
        return
    path = startup.policy_file(settings)
    policy = None if path is None else startup.load(path, apps.load_profiles(settings), TOOLS)
    roles, workflows = (policy.roles, policy.workflows) if policy else ({}, {})
    if role is not None and role not in roles:
        fix = (
            f"The roles are {', '.join(roles)}."
            if policy
            else "Roles are what a policy.toml says; without one, leave --role out."
        )
        raise MisnamedError(doing, f"there is no role {role!r}", fix)
    if workflow is None:
        return
    if not tokens.is_bound_name(workflow):
        fix = "A workflow is called by 1 to 64 of a-z 0-9 -, and begins with a letter."
        raise MisnamedError(doing, f"no workflow can be called {workflow!r}", fix)
    if policy and workflow not in workflows:
        fix = f"Those of [workflows] are {', '.join(workflows) or 'none'}."
        raise MisnamedError(doing, f"the policy does not know the workflow {workflow!r}", fix)


def _fields(token: Token, used: datetime | None) -> dict[str, object]:
    return {
        "name": token.name,
        "principal": token.principal,
        "role": token.role,
        "workflow": token.workflow,
        "made": token.made and token.made.isoformat(),
        "expires": token.expires and token.expires.isoformat(),
        "last_used": used and used.isoformat(),
    }


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")
