"""``glovebox artifact``: lists them; what opens the server's parts is imported when it is used."""

from dataclasses import asdict
from datetime import UTC, datetime

import click

from glovebox_profiles.policy.model import is_principal
from glovebox_sandboxes.plural import counted
from glovebox_server.artifacts.record import Artifact, records
from glovebox_server.cli.options import LazyGroup, command, emit, out
from glovebox_server.cli.terminal import table_of
from glovebox_server.settings import Settings


class _ArtifactGroup(LazyGroup):
    """``glovebox artifact URI`` is short for ``glovebox artifact save URI``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``save`` before a word that is no command."""
        known = args and (args[0] in self.list_commands(ctx) or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if known or not args else ["save", *args])


def named_principal(value: str) -> str:
    """Refuse an invalid principal."""
    if not is_principal(value):
        raise click.BadParameter("name a principal as the audit log does: local:UID or token:NAME, or oauth:….")
    return value


@click.group(
    cls=_ArtifactGroup,
    lazy={
        "promote": ("promote:promote", "Copy artifacts into a folder, all or none."),
        "promotions": ("promote:promotions", "What was promoted, newest first, and whether it was put back."),
        "reencode": ("promote:reencode", "Make pictures anew in a sandbox, of their pixels alone."),
        "rollback": ("promote:roll_back", "Put every file of a promotion back as it was."),
        "save": ("promote:artifact_save", "Write an artifact to a new file, or to standard output."),
        "scan": ("promote:scan", "Look, in a sandbox, for what acts when files are opened."),
    },
)
def artifact() -> None:
    """Files that programs made: list, save, promote them. `glovebox artifact URI` saves, too."""


@command("list", artifact)
@click.option(
    "--principal", type=named_principal, metavar="PRINCIPAL", help="Of this caller only: local:UID or token:NAME."
)
@click.option("--call", "call_id", metavar="CALL", help="Of this call only.")
def artifact_list(settings: Settings, principal: str | None, call_id: str | None) -> None:
    """One line per artifact of any caller, newest first."""
    now = datetime.now(UTC)
    found = [
        each
        for each in sorted(records(settings.state_dir / "artifacts", now), key=lambda each: each.created, reverse=True)
        if principal in {None, each.owner} and call_id in {None, each.call_id}
    ]
    titles = ["address", "file", "bytes", "risks", "age", "type", "principal", "of call"]
    shown = 5 if out.is_terminal else len(titles)  # an address must not be broken
    table = table_of(titles[:shown], (_row(each, now)[:shown] for each in found), right=["bytes"])
    emit({"artifacts": [describe_artifact(each) for each in found]}, table, f"{counted(len(found), 'artifact')}.")


def _row(artifact: Artifact, now: datetime) -> tuple[object, ...]:
    risks = counted(len(artifact.risks), "risk") if artifact.risks else "none"
    hours, minutes = divmod(max(0, int((now - artifact.created).total_seconds() // 60)), 60)
    age = f"{hours} h {minutes} min" if hours else f"{minutes} min"
    about = artifact.media_type, artifact.owner, artifact.call_id
    return artifact.uri, artifact.name, artifact.bytes, risks, age, *about


def describe_artifact(artifact: Artifact) -> dict[str, object]:
    """Return an artifact as JSON has it."""
    told = asdict(artifact)
    del told["tool"]
    told["principal"] = told.pop("owner")
    dates = {"created": artifact.created.isoformat(), "expires": artifact.expires.isoformat()}
    return {**told, "risks": list(artifact.risks), **dates}
