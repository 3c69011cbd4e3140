"""Logs: short lines on standard error, never on standard output, which belongs to the protocol over stdio.

One renderer for our lines and for those of libraries. Whatever a line quotes, it stays one line; what has more, such as
the story of an exception, has the others indented: nobody who chooses a name or an id can forge a line.
"""

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

from glovebox_server.printable import printable

_MORE = "    | "
"""Before every line of an entry but its first."""


def to_stderr() -> None:
    """Send all log lines, ours from level info and others' from warning, to standard error. May be called again."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=True),
            _render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=_logger,
        cache_logger_on_first_use=False,
    )
    # What the standard library prints to where nobody has set up anything else, as here.
    logging.lastResort = _Foreign(logging.WARNING)


class _Foreign(logging.Handler):
    """Passes libraries' entries on to the renderer of ours: they quote what peers sent, as it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one entry."""
        log = structlog.get_logger(record.name)
        log.log(record.levelno, record.getMessage(), exc_info=record.exc_info, logger=record.name)


_plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)


def _render(logger: WrappedLogger, method: str, entry: EventDict) -> str:
    # The event is written as it is; values are quoted where they have blanks.
    entry["event"] = printable(str(entry["event"]))
    lines = str(_plain(logger, method, entry)).split("\n")
    return f"\n{_MORE}".join(printable(line) for line in lines)


def _logger(*_names: Any) -> structlog.WriteLogger:
    # Looked up for every logger, because tests and supervisors replace the stream.
    return structlog.WriteLogger(sys.stderr)
