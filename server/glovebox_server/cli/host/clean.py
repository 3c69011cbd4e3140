"""``glovebox clean``: removes what can go of the state and data directories."""

from dataclasses import asdict
from functools import partial

import click
from rich.text import Text as Plain

from glovebox_sandboxes.plural import counted
from glovebox_server.cli.options import CliCommand, emit, json_option, out, state_directory
from glovebox_server.cli.terminal import new_table, print_table
from glovebox_server.secret_files import prepare_state
from glovebox_server.settings import Settings
from glovebox_server.upkeep import clean as cleaning
from glovebox_server.upkeep.log import audit_log, retention


@click.command(cls=CliCommand)
@click.option("--dry-run", is_flag=True, help="Show it, and remove nothing.")
@json_option
@state_directory
def clean(settings: Settings, dry_run: bool) -> None:
    """Remove expired artifacts and leftovers of dead servers.

    And segments of the audit log that retention no longer keeps.
    """
    if settings.state_dir.exists():
        prepare_state(settings.state_dir)  # a directory that another user may fill is not searched
    kept = retention(settings)
    items = cleaning.look(settings, kept) if dry_run else cleaning.clean(settings, kept, partial(audit_log, settings))
    total = sum(item.bytes for item in items)
    if emit({"removed": not dry_run, "bytes": total, "items": [asdict(item) for item in items]}):
        return
    table = new_table("kind", "name", "bytes", "why", right=["bytes"])
    for item in items:
        table.add_row(item.kind, Plain(item.name), str(item.bytes), item.why)
    if items:
        print_table(out, table)
    words = "would be removed" if dry_run else "removed"
    out.print(Plain(f"{counted(len(items), 'item')}, {counted(total, 'byte')}, {words}."))
