"""What ``glovebox artifact`` does. Whoever may read the state directory may read what is in it, whoever's it is."""

from datetime import UTC, datetime
from pathlib import Path

import anyio
from rich.console import Console
from rich.text import Text as Plain

from glovebox_sandboxes.plural import counted
from glovebox_server import app as apps
from glovebox_server import workspace
from glovebox_server.artifacts.disk import records
from glovebox_server.artifacts.record import Artifact
from glovebox_server.calls import Principal
from glovebox_server.cli.actions.saving import save
from glovebox_server.cli.terminal import new_table, print_json, print_table
from glovebox_server.exits import OK
from glovebox_server.settings import Settings
from glovebox_server.workspace import WorkspaceRefused

_COLUMNS = ("address", "file", "bytes", "type", "risks", "principal", "age", "of call")
_ON_TERMINAL = ("address", "file", "bytes", "risks", "age")
"""What fits into a line, as an address must not be broken."""
_HOUR = 60
"""Minutes."""


def listed(state_dir: Path, out: Console, *, principal: str | None, call_id: str | None, as_json: bool) -> int:
    """Show the artifacts that have not expired; see ``glovebox artifact list``."""
    now = datetime.now(UTC)
    found = [
        each
        for each in sorted(records(state_dir / "artifacts", now), key=lambda each: each.created, reverse=True)
        if principal in {None, each.owner} and call_id in {None, each.call_id}
    ]
    if as_json:
        print_json(out.file, {"artifacts": [_described(each) for each in found]})
        return OK
    columns = _ON_TERMINAL if out.is_terminal else _COLUMNS
    table = new_table(*columns, right=["bytes"])
    for artifact in found:
        row = dict(zip(_COLUMNS, _row(artifact, now), strict=True))
        table.add_row(*(Plain(row[column]) for column in columns))
    if found:
        print_table(out, table, folded=False)
    out.print(Plain(f"{counted(len(found), 'artifact')}."))
    return OK


def saved(
    settings: Settings, out: Console, err: Console, *, uri: str, output: Path | None, principal: str, as_json: bool
) -> int:
    """Write an artifact's content; see ``glovebox artifact save``."""

    async def make() -> int:
        if output and (reason := workspace.objection(workspace.place(output), workspace.own(settings))):
            raise WorkspaceRefused(f"--output {output}", f"it {reason}", "A program made it: name a file elsewhere.")
        owner = Principal(id=principal, transport="cli")
        async with apps.opened(settings, "cli", prewarm=False) as app, app.artifacts.open(uri, owner) as reader:
            if output is None:
                await reader.check()  # what was printed cannot be taken back
            for risk in reader.artifact.risks:
                err.print(f"Look before you open, run, copy or apply it: {risk}.", style="yellow", markup=False)
            await save(reader.chunks(), output)
            if as_json:
                print_json(out.file, {"file": str(output), **_described(reader.artifact)})
            elif output is not None:
                err.print(Plain(f"{output}: {counted(reader.artifact.bytes, 'byte')}."))
        return OK

    return anyio.run(make)


def _row(artifact: Artifact, now: datetime) -> tuple[str, ...]:
    risks = counted(len(artifact.risks), "risk") if artifact.risks else "none"
    size, age = str(artifact.bytes), _age(artifact, now)
    return artifact.uri, artifact.name, size, artifact.media_type, risks, artifact.owner, age, artifact.call_id


def _described(artifact: Artifact) -> dict[str, object]:
    return {
        "uri": artifact.uri,
        "name": artifact.name,
        "sha256": artifact.sha256,
        "bytes": artifact.bytes,
        "media_type": artifact.media_type,
        "risks": list(artifact.risks),
        "call_id": artifact.call_id,
        "principal": artifact.owner,
        "client": artifact.client,
        "run": artifact.run,
        "workflow": artifact.workflow,
        "created": artifact.created.isoformat(),
        "expires": artifact.expires.isoformat(),
    }


def _age(artifact: Artifact, now: datetime) -> str:
    minutes = max(0, int((now - artifact.created).total_seconds() // 60))
    return f"{minutes // _HOUR} h {minutes % _HOUR} min" if minutes >= _HOUR else f"{minutes} min"
