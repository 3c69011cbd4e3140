"""Make and lift stops in a state directory, with their records: for the commands and the console."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glovebox_audit import writers
from glovebox_audit.chain import draft
from glovebox_audit.events import StopLifted
from glovebox_server.guards.stops import stops
from glovebox_server.guards.stops.stops import Stop
from glovebox_server.secret_files import prepare_state
from glovebox_server.settings import Settings
from glovebox_server.upkeep.log import recording, writing


def put_in_effect(settings: Settings, place: Path, stop: Stop) -> dict[str, Any]:
    """Make a stop in a state directory; return the live servers, whether it is stored whole, and why it has no record.

    Values are JSON's. The stop comes before its record: a log that is locked, or a disk that hangs, delays it by
    ``RECORD_SECONDS`` and no more. Raises SecretFileError.
    """
    servers = []
    with suppress(OSError):  # which are live is worth knowing; the stop comes first
        servers = writers.live(place / "audit")
    prepare_state(place)
    problem = "the log did not answer in time; it may get there yet."

    def write() -> None:
        nonlocal problem
        try:
            with recording(settings.model_copy(update={"state_dir": place})) as record:
                record(stops.made(stop))
            problem = ""
        except Exception as raised:  # noqa: BLE001 - whatever it is, the stop is made
            problem = str(raised)

    writer = threading.Thread(target=write, daemon=True)  # the log may be locked, or its disk may hang
    writer.start()
    writer.join(stops.RECORD_SECONDS)
    whole = stops.stops_of(place).add(stop.id, stop.encoded(), instead=b"")
    writer.join(stops.RECORD_SECONDS)
    return {"directory": str(place), "servers": servers, "whole": whole, "problem": problem}


def lift(settings: Settings, names: Sequence[str], by: str) -> None:
    """Lift stops by their ids, after it is on record. Raises AuditError."""
    if names:
        with writing(settings) as log:
            log.commit([draft(StopLifted(stop=name, by=by)) for name in names], {})
    for name in names:
        stops.stops_of(settings.state_dir).remove(name)
