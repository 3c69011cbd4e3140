"""``glovebox audit show``: one call as a page, in the order in which a person asks. The rest is JSON's."""

import json

import click
from rich.text import Text

from glovebox_audit import events, read
from glovebox_audit.printable import printable
from glovebox_audit.query import ask, story
from glovebox_audit.segments.files import LOG_NAME
from glovebox_server.cli.evidence.audit import LINES, find_call, indexed
from glovebox_server.cli.options import command, err, out, wants_json
from glovebox_server.cli.terminal import print_json
from glovebox_server.exits import FAILED, OK
from glovebox_server.settings import Settings

_WIDTH = 10


@command("show", json=LINES)
@click.argument("call_id", metavar="[CALL]", default="last")
def audit_show(settings: Settings, call_id: str) -> int:
    """One call as a page: what was asked, decided, done, and spent.

    CALL is its id, the beginning of it, or `last`, which it is where none is given.
    """
    directory = settings.state_dir / "audit"
    call_id = find_call(directory, call_id)
    records = indexed(ask.records, directory, call_id)
    around = indexed(story.around, directory, records) if records else []
    if wants_json():
        tables = {str(each.data.get("digest")): each for each in around if each.kind == events.SandboxTable.kind}
        for record in [*tables.values(), *records]:
            print_json(out.file, json.loads(record.line), indent=None)
    elif records:
        before = ""
        for title, words, style in story.rows(records, around):
            line = Text(("" if title == before else title).ljust(_WIDTH), style="cyan")
            before = title or before
            out.print(line.append(printable(words), style=style or "default"))
    else:
        with read.opened(directory) as snapshot:  # retention may have removed others
            numbers = snapshot.sealed
        files = f"the segments {numbers[0]} to {numbers[-1]} and {LOG_NAME}" if numbers else LOG_NAME
        err.print(f"No record of call {call_id} in {files}. `glovebox audit tail` shows the latest calls.")
    return OK if records else FAILED
