"""matplotlib's drawing back end in the sandbox: Agg, whose ``plt.show()`` leaves figures open to be collected.

Named by MPLBACKEND; imported by matplotlib only, never by the guest itself.
"""

import logging

from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas  # type: ignore[import-not-found]  # in the runtime
from matplotlib.backends.backend_agg import FigureManagerBase as FigureManager

__all__ = ["FigureCanvas", "FigureManager", "show"]

_MESSAGES = 100
"""Different messages that are told once each; what comes after them is told each time."""
_told: set[str] = set()


def show(*_: object, **__: object) -> None:
    """Do nothing: the job returns every open figure when the program ends."""


def _once(record: logging.LogRecord) -> bool:
    """Tell a font that is missing once, and not for each word it would draw."""
    message = record.getMessage()
    new = message not in _told
    if new and len(_told) < _MESSAGES:
        _told.add(message)
    return new


logging.getLogger("matplotlib.font_manager").addFilter(_once)
