"""Logs: short lines on standard error, never on standard output, which belongs to the protocol over stdio.

Our lines and those of libraries have one format: time, level, event, values; or one JSON object. Quoted text stays on
its line, and further lines, as of a traceback, are indented: no chosen name or id can forge a line.
"""

import logging
import os
import sys
from functools import cache
from typing import Any, Literal

import structlog
from structlog.typing import EventDict, WrappedLogger

from glovebox_audit.printable import printable
from glovebox_sandboxes.host.owner import server_id

_MORE = "    | "
"""Prefix of every line of an entry except the first."""
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
"""Levels that structlog has a name for; a library may have others between them."""


def to_stderr(level: str = "info", form: Literal["text", "json"] = "text") -> None:
    """Send all log lines to standard error. May be called again.

    Args:
        level: the lowest that is written; at least ``warning`` for libraries, whose lower levels quote requests.
        form: ``text`` for people, or one JSON object a line.
    """
    least = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%dT%H:%M:%SZ", utc=True),
            *([_add_server, structlog.processors.format_exc_info, _render_json] if form == "json" else [_render]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=_logger,
        cache_logger_on_first_use=False,
    )
    # On the root logger, because ``logging.debug`` and its like, which the SDK calls, install a handler if it has none:
    # https://docs.python.org/3/library/logging.html#logging.debug. With this one, no library does.
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if not isinstance(handler, _Foreign)]
    root.addHandler(_Foreign(max(least, logging.WARNING)))


def to_stderr_by_default() -> None:
    """Send log lines to standard error unless configured: structlog's own default is standard output."""
    if not structlog.is_configured():
        to_stderr()


class _Foreign(logging.Handler):
    """Passes libraries' entries on to our renderer: they quote peers' text as it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one entry; one that does not fit its arguments is written without them."""
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - the standard library would print it all as it is
            text = str(record.msg)
        log = structlog.get_logger(record.name)
        level = max(name for name in _LEVELS if name <= max(record.levelno, logging.DEBUG))
        log.log(level, text, exc_info=record.exc_info, logger=record.name)


_plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)


def _render(logger: WrappedLogger, method: str, entry: EventDict) -> str:
    # The event is written as it is; values with blanks are quoted.
    entry["event"] = _escape(str(entry["event"]))
    lines = str(_plain(logger, method, entry)).split("\n")
    return f"\n{_MORE}".join(_escape(line) for line in lines)


def _escape(text: str) -> str:
    return text if text.isascii() and text.isprintable() else printable(text)


def _add_server(_logger: WrappedLogger, _method: str, entry: EventDict) -> EventDict:
    """Add the id of this process, as its records have it; of several processes each has its own."""
    return {"server": _server_of(os.getpid()), **entry}


@cache
def _server_of(_pid: int) -> str:
    return server_id()


_json = structlog.processors.JSONRenderer()


def _render_json(logger: WrappedLogger, method: str, entry: EventDict) -> str:
    # JSON's escapes leave one control as it is.
    return str(_json(logger, method, entry)).replace("\x7f", "\\u007f")


def _logger(*_names: Any) -> structlog.WriteLogger:
    # Looked up for every logger, because tests and supervisors replace the stream.
    return structlog.WriteLogger(sys.stderr)
