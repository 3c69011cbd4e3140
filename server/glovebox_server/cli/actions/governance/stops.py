"""What ``glovebox stop``, ``resume`` and ``stops`` do: record it, then do it. Each returns an exit code."""

import os
import threading
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.text import Text as Plain

from glovebox_sandboxes.plural import counted
from glovebox_server.audit.events import Event, StopLifted, draft
from glovebox_server.cli.terminal import new_table, print_json, print_table
from glovebox_server.exits import OK, UNAVAILABLE, USAGE
from glovebox_server.governance import server_key
from glovebox_server.governance.stops.stop import MAX_BECAUSE, Scope, Stop, StopsUnusable, new_stop, stops_of
from glovebox_server.governance.stops.stops import RECORD_SECONDS, made
from glovebox_server.printable import printable
from glovebox_server.secret_files import prepare_state
from glovebox_server.settings import Settings
from glovebox_server.upkeep.log import audit_log

__all__ = ["MAX_BECAUSE", "listed", "resume", "stop"]


def stop(
    settings: Settings, out: Console, err: Console, *, scope: Scope, name: str, because: str, as_json: bool
) -> int:
    """Stop something; see ``glovebox stop``."""
    prepare_state(settings.state_dir)
    found = new_stop(scope, name, because=printable(because.strip())[:MAX_BECAUSE], by=_me(), made=datetime.now(UTC))
    recording = _Recording(settings, made(found))
    recording.wait(RECORD_SECONDS)
    whole = stops_of(settings.state_dir).add(found.id, found.encoded(), instead=b"")
    recorded = recording.wait(RECORD_SECONDS)
    if as_json:
        body = {"stop": _described(found), "recorded": recorded, "everything": not whole or scope == "all"}
        print_json(out.file, body)
    else:
        out.print(Plain(f"{_words(found)} is stopped: {found.id}. `glovebox resume {found.id}` lifts it."))
    if not whole:
        words = "The disk has no room for what is stopped, so everything is"
        err.print(Plain(f"{words}, until `glovebox resume {found.id}`. Free space there."), style="red")
    if not recorded:
        err.print(Plain(f"It is in force, and not in the audit log: {recording.problem}"), style="red")
    return OK


def resume(settings: Settings, out: Console, stop_id: str | None, *, as_json: bool) -> int:
    """Lift one stop, or all; see ``glovebox resume``."""
    prepare_state(settings.state_dir)
    files = stops_of(settings.state_dir)
    names = files.names()
    lifted = names if stop_id is None else [name for name in names if name == stop_id]
    if stop_id is not None and not lifted:
        out.print(Plain(f"There is no stop {printable(stop_id)}: `glovebox stops list` shows them."))
        return USAGE
    if lifted:
        log = audit_log(settings)
        try:
            log.commit([draft(StopLifted(stop=name, by=_me())) for name in lifted], {})
        finally:
            log.close()
    for name in lifted:
        files.remove(name)
    if as_json:
        print_json(out.file, {"lifted": lifted})
    else:
        out.print(Plain(f"{counted(len(lifted), 'stop')} lifted."))
    return OK


def listed(settings: Settings, out: Console, err: Console, *, as_json: bool) -> int:
    """Show the stops in force; see ``glovebox stops list``."""
    files = stops_of(settings.state_dir)
    found = files.read()
    if server_key.exists(settings.state_dir) and not os.path.lexists(files.path):
        fix = "Run `glovebox resume --all`: it makes it anew, and nothing is stopped then."
        found = replace(found, damaged=(StopsUnusable(files.path, "it is gone, with the stops in it", fix),))
    if as_json:
        damaged = [{"what": each.what, "reason": each.reason, "fix": each.fix} for each in found.damaged]
        print_json(out.file, {"stops": [_described(each) for each in found.items], "damaged": damaged})
        return UNAVAILABLE if damaged else OK
    table = new_table("id", "what", "made", "by", "because")
    for each in found.items:
        made_at = f"{each.made.astimezone(UTC):%Y-%m-%d %H:%M}"
        table.add_row(each.id, Plain(_words(each)), made_at, Plain(each.by), Plain(each.because))
    if found.items:
        print_table(out, table, folded=False)
    for problem in found.damaged:
        err.print(Plain(f"Everything is stopped: {problem}"), style="red")
    out.print(Plain(f"{counted(len(found.items), 'stop')} in force."))
    return UNAVAILABLE if found.damaged else OK


class _Recording:
    """One record on its way into the log, in a thread: the log may be held, or its disk may hang."""

    def __init__(self, settings: Settings, event: Event) -> None:
        self._settings = settings
        self._event = event
        self._done = threading.Event()
        self.problem = "the log did not answer in time; it may get there yet."
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            log = audit_log(self._settings)
            try:
                log.commit([draft(self._event)], {})
            finally:
                log.close()
        except Exception as problem:  # noqa: BLE001 - whatever it is, the stop is made
            self.problem = str(problem)
        else:
            self.problem = ""
        self._done.set()

    def wait(self, seconds: float) -> bool:
        """Wait for its end; whether it is in the log."""
        self._done.wait(seconds)
        return not self.problem


def _me() -> str:
    return f"local:{os.getuid()}"


def _words(stop: Stop) -> str:
    return "everything" if stop.scope == "all" else f"{stop.scope} {stop.name}"


def _described(stop: Stop) -> dict[str, Any]:
    return stop.model_dump(mode="json", exclude={"version"})
