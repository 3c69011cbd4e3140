"""``glovebox canary``: plants, lists and removes canary tokens. A marker is never printed."""

import posixpath
from typing import Any

import click
from rich.text import Text

from glovebox_audit.printable import printable
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_sandboxes.plural import counted
from glovebox_server import workspace
from glovebox_server.cli.options import LazyGroup, command, emit, out
from glovebox_server.cli.terminal import pick, table_of
from glovebox_server.errors import MisnamedError
from glovebox_server.exits import OK, UNAVAILABLE, USAGE
from glovebox_server.guards.watch import canaries
from glovebox_server.guards.watch.canaries import NAME, Canary, canaries_of
from glovebox_server.settings import Settings


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
    path = posixpath.normpath(name or NAME)
    if path.startswith(("/", "../")) or path in {".", ".."}:
        raise DiagnosedError(f"plant {printable(path)}", "it is not below the workspace", "Name a path below it.")
    whole = f"{served.path}/{path}"
    if printable(whole) != whole:
        reason = "its path has what cannot be read or typed, which no tool could name"
        raise DiagnosedError(f"plant {printable(whole)}", reason, "Name a path of printable characters.")
    planted = canaries.plant(settings.state_dir, served.path, path)
    emit({"canary": _described(planted)}, f"{planted.file} is planted: {planted.id}.")


@command("list", canary)
def canary_list(settings: Settings) -> int:
    """Where they are, and whether they stand.

    Exit 4 if one cannot be read: then it is not looked for.
    """
    found = canaries_of(settings.state_dir).read()
    damaged = [pick(each, "what", "reason", "fix") for each in found.damaged]
    rows = [(each.id, each.stands, each.made, each.file) for each in found.items]
    emit(
        {"canaries": [_described(each) for each in found.items], "damaged": damaged},
        table_of(["id", "stands", "made", "file"], rows),
        *(Text(f"Not looked for: {each}", style="red") for each in found.damaged),
        f"{len(found.items)} in all.",
    )
    return UNAVAILABLE if found.damaged else OK


@command("remove", canary)
@click.argument("canary_id", metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="Every canary.")
def canary_remove(settings: Settings, canary_id: str | None, everything: bool) -> int:
    """Take one out of its workspace, and forget it."""
    if (canary_id is None) is not everything:
        raise click.UsageError("Name one canary, as `glovebox canary list` shows it, or --all.")
    files = canaries_of(settings.state_dir)
    known = {each.id: each for each in files.read().items}
    gone = [name for name in files.names() if canary_id in {None, name}]
    if canary_id is not None and not gone:
        out.print(f"There is no canary {printable(canary_id)}: `glovebox canary list` shows them.")
        return USAGE
    for name in gone:
        if name in known:
            canaries.remove(settings.state_dir, known[name])
        else:
            files.remove(name)  # damaged: where it lies is not known
    emit({"removed": gone}, f"{counted(len(gone), 'file')} removed.")
    return OK


def _described(canary: Canary) -> dict[str, Any]:
    fields: dict[str, Any] = canary.model_dump(mode="json", include={"id", "workspace", "path", "made"})
    return {**fields, "stands": canary.stands}
