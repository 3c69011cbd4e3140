"""``glovebox clean``: removes what can go of the state and data directories."""

from dataclasses import asdict
from functools import partial

import click

from glovebox_sandboxes.plural import counted
from glovebox_server.cli.options import command, emit
from glovebox_server.cli.terminal import table_of
from glovebox_server.secret_files import prepare_state
from glovebox_server.settings import Settings
from glovebox_server.upkeep import clean as cleaning
from glovebox_server.upkeep.log import audit_log, retention


@command("clean")
@click.option("--dry-run", is_flag=True, help="Show it, and remove nothing.")
def clean(settings: Settings, dry_run: bool) -> None:
    """Remove expired artifacts and leftovers of dead servers.

    And segments of the audit log that retention no longer keeps.
    """
    if settings.state_dir.exists():
        prepare_state(settings.state_dir)  # a directory that another user may fill is not searched
    kept = retention(settings)
    items = cleaning.look(settings, kept) if dry_run else cleaning.clean(settings, kept, partial(audit_log, settings))
    total = sum(item.bytes for item in items)
    rows = [{"kind": each.kind, "name": each.name, "bytes": str(each.bytes), "why": each.why} for each in items]
    words = "would be removed" if dry_run else "removed"
    emit(
        {"removed": not dry_run, "bytes": total, "items": [asdict(item) for item in items]},
        table_of(rows, right=["bytes"]),
        f"{counted(len(items), 'item')}, {counted(total, 'byte')}, {words}.",
    )
