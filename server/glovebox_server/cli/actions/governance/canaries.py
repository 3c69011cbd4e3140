"""What ``glovebox canary`` does. Each returns an exit code. A marker is printed nowhere."""

import posixpath
from datetime import UTC
from typing import Any

from rich.console import Console
from rich.text import Text as Plain

from glovebox_audit.printable import printable
from glovebox_sandboxes.plural import counted
from glovebox_server import workspace
from glovebox_server.cli.terminal import new_table, print_json, print_table
from glovebox_server.exits import OK, UNAVAILABLE, USAGE
from glovebox_server.guards.watch import canaries
from glovebox_server.guards.watch.canaries import NAME, Canary, CanaryProblem, canaries_of
from glovebox_server.settings import Settings
from glovebox_server.workspace import WorkspaceRefused


def plant(settings: Settings, out: Console, *, name: str | None, as_json: bool) -> int:
    """Plant one; see ``glovebox canary plant``."""
    served = workspace.find(settings, "cli")
    if served.path is None:
        raise WorkspaceRefused("Planting a canary", served.reason, "Name the workspace with --workspace.")
    path = posixpath.normpath(name or NAME)
    if path.startswith(("/", "../")) or path in {".", ".."}:
        raise CanaryProblem(f"plant {printable(path)}", "it is not below the workspace", "Name a path below it.")
    whole = f"{served.path}/{path}"
    if printable(whole) != whole:
        reason = "its path has what cannot be read or typed, which no tool could name"
        raise CanaryProblem(f"plant {printable(whole)}", reason, "Name a path of printable characters.")
    planted = canaries.plant(settings.state_dir, served.path, path)
    if as_json:
        print_json(out.file, {"canary": _described(planted)})
    else:
        out.print(Plain(f"{planted.file} is planted: {planted.id}."))
    return OK


def listed(settings: Settings, out: Console, *, as_json: bool) -> int:
    """Show them; see ``glovebox canary list``."""
    found = canaries_of(settings.state_dir).read()
    if as_json:
        damaged = [{"what": each.what, "reason": each.reason, "fix": each.fix} for each in found.damaged]
        print_json(out.file, {"canaries": [_described(each) for each in found.items], "damaged": damaged})
        return UNAVAILABLE if damaged else OK
    table = new_table("id", "stands", "made", "file")
    for each in found.items:
        made = f"{each.made.astimezone(UTC):%Y-%m-%d %H:%M}"
        table.add_row(each.id, "yes" if each.stands else "no", made, Plain(str(each.file)))
    if found.items:
        print_table(out, table, folded=False)
    for problem in found.damaged:
        out.print(Plain(f"Not looked for: {problem}"), style="red")
    words = "1 canary" if len(found.items) == 1 else f"{len(found.items)} canaries"
    out.print(Plain(f"{words}."))
    return UNAVAILABLE if found.damaged else OK


def remove(settings: Settings, out: Console, canary_id: str | None, *, as_json: bool) -> int:
    """Remove one, or all; see ``glovebox canary remove``."""
    files = canaries_of(settings.state_dir)
    known = {each.id: each for each in files.read().items}
    gone = [name for name in files.names() if canary_id in {None, name}]
    if canary_id is not None and not gone:
        out.print(Plain(f"There is no canary {printable(canary_id)}: `glovebox canary list` shows them."))
        return USAGE
    for name in gone:
        if name in known:
            canaries.remove(settings.state_dir, known[name])
        else:
            files.remove(name)  # damaged: where it lies is not known
    if as_json:
        print_json(out.file, {"removed": gone})
    else:
        out.print(Plain(f"{counted(len(gone), 'file')} removed."))
    return OK


def _described(canary: Canary) -> dict[str, Any]:
    fields: dict[str, Any] = canary.model_dump(mode="json", include={"id", "workspace", "path", "made"})
    return {**fields, "stands": canary.stands}
