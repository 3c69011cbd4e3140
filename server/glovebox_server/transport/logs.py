"""Logs: short lines on standard error, never on standard output, which belongs to the protocol over stdio."""

import logging
import sys
from typing import Any

import structlog


def to_stderr() -> None:
    """Send all log lines, ours from level info and others' from warning, to standard error. May be called again."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=True),
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=_logger,
        cache_logger_on_first_use=False,
    )


def _logger(*_names: Any) -> structlog.WriteLogger:
    # Looked up for every logger, because tests and supervisors replace the stream.
    return structlog.WriteLogger(sys.stderr)
