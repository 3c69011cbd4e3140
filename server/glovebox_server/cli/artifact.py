"""``glovebox artifact``: lists artifacts; its other subcommands are elsewhere."""

from dataclasses import asdict
from datetime import UTC, datetime

import click

from glovebox_audit.printable import printable
from glovebox_profiles.policy.model import is_principal
from glovebox_sandboxes.plural import counted
from glovebox_server.artifacts.disk import records
from glovebox_server.artifacts.record import Artifact, id_of
from glovebox_server.cli.options import LazyGroup, command, emit, out
from glovebox_server.cli.terminal import print_table, table_of
from glovebox_server.settings import Settings

_COLUMNS = ("address", "file", "bytes", "type", "risks", "principal", "age", "of call")
_ON_TERMINAL = ("address", "file", "bytes", "risks", "age")
"""Columns that fit a line, as an address must not be broken."""
_HOUR = 60
"""Minutes."""


class _ArtifactGroup(LazyGroup):
    """``glovebox artifact URI`` is short for ``glovebox artifact save URI``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``save`` before a word that is no command."""
        known = args and (args[0] in self.list_commands(ctx) or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if known or not args else ["save", *args])


def check_principal(_ctx: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Refuse an invalid principal."""
    if value is not None and not is_principal(value):
        raise click.BadParameter("name a principal as the audit log does: local:UID or token:NAME, or oauth:….")
    return value


def check_address(_ctx: click.Context, _argument: click.Parameter, value: str) -> str:
    """Refuse an invalid address."""
    if id_of(value) is None:
        shown = repr(printable(value)[:200])
        raise click.BadParameter(f"{shown} is no address (artifact://…): `glovebox artifact list` shows them.")
    return value


@click.group(
    cls=_ArtifactGroup,
    lazy={
        "promote": ("promote:promote", "Copy artifacts into a folder, all or none."),
        "promotions": ("promote:promotions", "What was promoted, newest first, and whether it was put back."),
        "reencode": ("scan:reencode", "Make pictures anew in a sandbox, of their pixels alone."),
        "rollback": ("promote:roll_back", "Put every file of a promotion back as it was."),
        "save": ("saving:artifact_save", "Write an artifact to a new file, or to standard output."),
        "scan": ("scan:scan", "Look, in a sandbox, for what acts when files are opened."),
    },
)
def artifact() -> None:
    """Files that programs made: list, save, promote them. `glovebox artifact URI` saves, too."""


@command("list", artifact)
@click.option("--principal", callback=check_principal, help="Of this caller only: local:UID or token:NAME.")
@click.option("--call", "call_id", metavar="CALL", help="Of this call only.")
def artifact_list(settings: Settings, principal: str | None, call_id: str | None) -> None:
    """One line per artifact of any caller, newest first."""
    state_dir = settings.state_dir
    now = datetime.now(UTC)
    found = [
        each
        for each in sorted(records(state_dir / "artifacts", now), key=lambda each: each.created, reverse=True)
        if principal in {None, each.owner} and call_id in {None, each.call_id}
    ]
    if emit({"artifacts": [describe_artifact(each) for each in found]}):
        return
    columns = _ON_TERMINAL if out.is_terminal else _COLUMNS
    rows = (dict(zip(_COLUMNS, _row(each, now), strict=True)) for each in found)
    if table := table_of(({column: row[column] for column in columns} for row in rows), right=["bytes"]):
        print_table(out, table)
    out.print(f"{counted(len(found), 'artifact')}.")


def _row(artifact: Artifact, now: datetime) -> tuple[str, ...]:
    risks = counted(len(artifact.risks), "risk") if artifact.risks else "none"
    size, age = str(artifact.bytes), _age(artifact, now)
    return artifact.uri, artifact.name, size, artifact.media_type, risks, artifact.owner, age, artifact.call_id


def describe_artifact(artifact: Artifact) -> dict[str, object]:
    """Return an artifact as JSON has it."""
    told = asdict(artifact)
    del told["tool"]
    told["principal"] = told.pop("owner")
    dates = {"created": artifact.created.isoformat(), "expires": artifact.expires.isoformat()}
    return {**told, "risks": list(artifact.risks), **dates}


def _age(artifact: Artifact, now: datetime) -> str:
    minutes = max(0, int((now - artifact.created).total_seconds() // 60))
    return f"{minutes // _HOUR} h {minutes % _HOUR} min" if minutes >= _HOUR else f"{minutes} min"
