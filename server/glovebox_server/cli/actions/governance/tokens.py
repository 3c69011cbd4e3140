"""What ``glovebox token`` does: make, show, revoke tokens of callers; and the one that ``client-config`` shows."""

import os
from datetime import UTC, datetime, timedelta

from rich.console import Console
from rich.text import Text as Plain

from glovebox_sandboxes.contract.errors import Diagnosed
from glovebox_sandboxes.plural import counted
from glovebox_server import app as apps
from glovebox_server.audit.events import TokenCreated, TokenRevoked, draft
from glovebox_server.cli.terminal import new_table, print_json, print_table
from glovebox_server.exits import OK
from glovebox_server.governance import policy as policies
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS
from glovebox_server.transport import tokens
from glovebox_server.transport.tokens import Token
from glovebox_server.upkeep.log import audit_log

#: The tokens that ``client-config`` makes: of these names, the first that is free, and then with a number behind it.
FIRST, NEXT = "default", "client"


class TokenRefused(Diagnosed):
    """A token cannot be made, shown or revoked as asked."""


def create(
    settings: Settings,
    out: Console,
    err: Console,
    *,
    name: str,
    role: str | None,
    workflow: str | None,
    lifetime: timedelta | None,
    as_json: bool,
) -> int:
    """Make a token and show it; see ``glovebox token create``."""
    made, secret = _made(settings, name, role=role, workflow=workflow, lifetime=lifetime)
    if as_json:
        print_json(out.file, {**_fields(made, None), "token": secret})
        return OK
    out.print(Plain(secret))
    ends = "It does not expire." if made.expires is None else f"It ends {_time(made.expires)}."
    err.print(Plain(f"This is {made.principal}, shown once: only its hash is kept. {ends}"))
    return OK


def show(settings: Settings, out: Console, *, as_json: bool) -> int:
    """Say which tokens there are; see ``glovebox token list``."""
    place = settings.state_dir / tokens.DIRECTORY
    found = [(each, tokens.last_used(place, each.name)) for each in tokens.load(place, None).values()]
    if as_json:
        print_json(out.file, {"tokens": [_fields(each, used) for each, used in found]})
        return OK
    table = new_table("name", "role", "workflow", "made", "ends", "last used", "kept as")
    for each, used in found:
        table.add_row(
            each.name,
            each.role or "",
            each.workflow or "",
            _time(each.made) if each.made else "",
            _time(each.expires) if each.expires else "never",
            _time(used) if used else "",
            "plain" if each.plain else "hash",
        )
    if found:
        print_table(out, table, folded=False)
    else:
        out.print(Plain("There are no tokens. `glovebox token create NAME` makes one."))
    if any(each.plain for each, _ in found):
        out.print(Plain("plain: its file holds the token itself; `glovebox token migrate` keeps the hash alone."))
    return OK


def revoke(settings: Settings, out: Console, *, name: str, as_json: bool) -> int:
    """End a token; see ``glovebox token revoke``."""
    place = settings.state_dir / tokens.DIRECTORY
    if not tokens.is_name(name) or not tokens.revoke(place, name):
        fix = "`glovebox token list` shows those there are."
        raise TokenRefused(f"Revoking the token {name!r}", "there is none", fix)
    _record(settings, TokenRevoked(principal=f"token:{name}", by=f"local:{os.getuid()}"))
    if as_json:
        print_json(out.file, {"name": name, "principal": f"token:{name}", "revoked": True})
    else:
        out.print(Plain(f"token:{name} is revoked. A running server ends what is under way with it within seconds."))
    return OK


def migrate(settings: Settings, out: Console, *, as_json: bool) -> int:
    """Keep hashes alone; see ``glovebox token migrate``."""
    done = tokens.migrate(settings.state_dir / tokens.DIRECTORY)
    if as_json:
        print_json(out.file, {"migrated": done})
    else:
        said = f"Of {counted(len(done), 'token')} only the hash is kept from now on"
        out.print(Plain(f"{said}: {', '.join(done)}." if done else "Of every token only the hash is kept already."))
    return OK


def to_show(settings: Settings, err: Console) -> str:
    """A token for a client's configuration: one whose file holds it, else a new one, which is said."""
    place = settings.state_dir / tokens.DIRECTORY
    known = tokens.load(place, None)
    for name in sorted(known, key=lambda each: (each != FIRST, each)):
        text = tokens.plain_of(place, name) if known[name].plain else None
        if text is not None:
            return text
    name = FIRST if FIRST not in known else next(f"{NEXT}-{n}" for n in range(2, 1000) if f"{NEXT}-{n}" not in known)
    made, secret = _made(settings, name, role=None, workflow=None, lifetime=None)
    err.print(
        Plain(f"Made a token for these clients, {made.principal}. It is shown here alone: only its hash is kept.")
    )
    return secret


def _made(
    settings: Settings, name: str, *, role: str | None, workflow: str | None, lifetime: timedelta | None
) -> tuple[Token, str]:
    doing = f"Making the token {name!r}"
    if not tokens.is_name(name):
        raise TokenRefused(doing, "its name is not 1 to 32 of a-z 0-9 -", "Give it another.")
    _require_known(settings, doing, role=role, workflow=workflow)
    place = settings.state_dir / tokens.DIRECTORY
    made = None
    if name not in tokens.load(place, None):
        expires = None if lifetime is None else (datetime.now(UTC) + lifetime).isoformat(timespec="seconds")
        by, principal = f"local:{os.getuid()}", f"token:{name}"
        _record(settings, TokenCreated(principal=principal, by=by, role=role, workflow=workflow, expires=expires))
        made = tokens.create(place, name, role=role, workflow=workflow, lifetime=lifetime)
    if made is None:
        fix = f"`glovebox token revoke {name}` ends it; or give this one another name."
        raise TokenRefused(doing, "there is one of this name", fix)
    return made


def _record(settings: Settings, event: TokenCreated | TokenRevoked) -> None:
    log = audit_log(settings)
    try:
        log.commit([draft(event)])
    finally:
        log.close()


def _require_known(settings: Settings, doing: str, *, role: str | None, workflow: str | None) -> None:
    """Refuse a role that the policy does not have, and a workflow that it, where there is one, does not know."""
    if role is None and workflow is None:
        return
    path = policies.policy_file(settings)
    policy = None if path is None else policies.load(path, apps.load_profiles(settings), TOOLS)
    roles, workflows = (policy.roles, policy.workflows) if policy else ({}, {})
    if role is not None and role not in roles:
        fix = f"The roles are {', '.join(roles)}." if policy else "Without a policy.toml there are none."
        raise TokenRefused(doing, f"there is no role {role!r}", fix)
    if workflow is None:
        return
    if not tokens.is_bound_name(workflow):
        fix = "A workflow is called by 1 to 64 of a-z 0-9 -, and begins with a letter."
        raise TokenRefused(doing, f"no workflow can be called {workflow!r}", fix)
    if policy and workflow not in workflows:
        fix = f"Those of [workflows] are {', '.join(workflows) or 'none'}."
        raise TokenRefused(doing, f"the policy does not know the workflow {workflow!r}", fix)


def _fields(token: Token, used: datetime | None) -> dict[str, object]:
    return {
        "name": token.name,
        "principal": token.principal,
        "role": token.role,
        "workflow": token.workflow,
        "made": token.made and token.made.isoformat(),
        "expires": token.expires and token.expires.isoformat(),
        "last_used": used and used.isoformat(),
        "kept_as": "plain" if token.plain else "hash",
    }


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")
