"""matplotlib's drawing back end in the sandbox: Agg, whose ``plt.show()`` leaves figures open to be collected.

Named by MPLBACKEND; imported by matplotlib only, never by the guest itself.
"""

import logging
import os
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found]  # in the runtime
from matplotlib.backends.backend_agg import FigureManagerBase as FigureManager

__all__ = ["FigureCanvas", "FigureManager", "show"]

_MESSAGES = 100
"""Different messages that are logged once each; those after them are logged each time."""
_told: set[str] = set()
_PICTURES = ("png", "jpg", "jpeg", "webp")


class FigureCanvas(FigureCanvasAgg):  # type: ignore[misc]  # as above
    """Draws as Agg does, and records whether ``/output`` has a current picture of its figure."""

    _saved = ""

    def print_figure(self, filename: Any, *args: Any, **kwargs: Any) -> Any:
        self._saved = ""
        done = super().print_figure(filename, *args, **kwargs)
        if isinstance(filename, (str, os.PathLike)):
            path = os.path.abspath(os.fsdecode(filename))
            ending = str(kwargs.get("format") or path.rpartition(".")[2]).lower()
            if path.startswith("/output/") and ending in _PICTURES:
                self._saved = path
                self.figure.stale = False  # until something in it is changed
        return done

    def draw(self) -> None:
        if self.figure.stale:
            self._saved = ""
        super().draw()

    def is_in_output(self) -> bool:
        """Return whether a file in ``/output`` shows the figure."""
        return bool(self._saved) and not self.figure.stale and os.path.isfile(self._saved)


def show(*_: object, **__: object) -> None:
    """Do nothing: the job returns every open figure when the program ends."""


def _once(record: logging.LogRecord) -> bool:
    """Log a missing font once, and not for each word it would draw."""
    message = record.getMessage()
    new = message not in _told
    if new and len(_told) < _MESSAGES:
        _told.add(message)
    return new


logging.getLogger("matplotlib.font_manager").addFilter(_once)
