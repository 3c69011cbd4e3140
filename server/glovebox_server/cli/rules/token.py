"""``glovebox token``: makes, lists and revokes bearer tokens; and the one that ``client-config`` shows."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from glovebox_audit.events import TokenCreated, TokenRevoked
from glovebox_server import app as apps
from glovebox_server import startup
from glovebox_server.cli import state
from glovebox_server.cli.options import LazyGroup, command, emit, err, lifetime, out, workflow_name
from glovebox_server.cli.terminal import pick, table_of, to_minute
from glovebox_server.errors import MisnamedError
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS
from glovebox_server.transport import tokens
from glovebox_server.transport.tokens import Token
from glovebox_server.upkeep.log import recording

#: Replaces a token that is not shown in a client's configuration.
PLACEHOLDER = "TOKEN"


@click.group(cls=LazyGroup)
def token() -> None:
    """Bearer tokens of callers over HTTP. A running server follows within a second."""


@command("create", token)
@click.argument("name")
@click.option("--role", help="What it may do, of policy.toml; else what policy.toml says of token:NAME.")
@click.option("--workflow", type=workflow_name, metavar="NAME", help="What its calls are part of.")
@click.option("--expires", type=lifetime, help="When it ends: 12h, 30d. Never, unless given.")
def token_create(
    settings: Settings, *, name: str, role: str | None, workflow: str | None, expires: timedelta | None
) -> None:
    """Make a token and show it, once: only its hash is kept. NAME is 1 to 32 of a-z 0-9 -."""
    made, secret = _made(settings, name, role=role, workflow=workflow, lifetime=expires)
    if emit({**_fields(made, None), "token": secret}):
        return
    out.print(secret)
    ends = "It does not expire." if made.expires is None else f"It ends {to_minute(made.expires)}."
    err.print(f"This is {made.principal}, shown once: only its hash is kept. {ends}")


@command("list", token)
def token_list(settings: Settings) -> None:
    """Each with its role, workflow, making, last use and end."""
    place = settings.state_dir / tokens.DIRECTORY
    found = [(each, tokens.last_used(place, each.name)) for each in tokens.load(place, None).values()]
    rows = [(each.name, each.role, each.workflow, each.made, each.expires or "never", used) for each, used in found]
    table = table_of(["name", "role", "workflow", "made", "ends", "last used"], rows)
    told = table or "There are no tokens. `glovebox token create NAME` makes one."
    emit({"tokens": [_fields(each, used) for each, used in found]}, told)


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
    """Return the token for a client's configuration: of a file, or one that is made; else what stands for it.

    Raises MisnamedError if there is one of that name, or the file holds none of this server's tokens.
    """
    if name is not None:
        made, secret = _made(settings, name, role=role, workflow=None, lifetime=lifetime)
        err.print(f"Made {made.principal}. It is shown here alone: only its hash is kept.")
        return secret
    if file is None:
        told = f"No token was made: put one in the place of {PLACEHOLDER}. `--token NAME` makes one"
        err.print(f"{told}, and `--token-file FILE` shows one that was saved in a file.")
        return PLACEHOLDER
    with file.open("rb") as opened:
        saved = opened.read(tokens.MAX_FILE_BYTES).decode("utf-8", "replace").strip()
    known = tokens.load(settings.state_dir / tokens.DIRECTORY, None).values()
    if not any(each.sha256 == tokens.digest_of(saved) for each in known):
        fix = "`glovebox token list` shows those there are; name the file in which one of them was saved."
        raise MisnamedError(f"Reading the token in {file}", "it is none of this server's tokens", fix)
    return saved


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
        raise MisnamedError(doing, "there is one of this name, of which only the hash is kept", fix)
    return made


def _require_known(settings: Settings, doing: str, *, role: str | None, workflow: str | None) -> None:
    """Refuse an unknown role, and a workflow that the policy, if any, does not know."""
    policy = None
    if (role or workflow) and (path := startup.policy_file(settings)) is not None:
        policy = startup.load(path, apps.load_profiles(settings), TOOLS)
    known = {"role": policy.roles if policy else {}, "workflow": policy.workflows if policy else {workflow: None}}
    for what, given in (("role", role), ("workflow", workflow)):
        if given is not None and given not in known[what]:
            fix = f"Those of policy.toml are {', '.join(map(str, known[what])) or 'none'}."
            raise MisnamedError(doing, f"there is no {what} {given!r}", fix)


def _fields(token: Token, used: datetime | None) -> dict[str, object]:
    times = {"made": token.made, "expires": token.expires, "last_used": used}
    told = {name: moment and moment.isoformat() for name, moment in times.items()}
    return pick(token, "name", "principal", "role", "workflow") | told
