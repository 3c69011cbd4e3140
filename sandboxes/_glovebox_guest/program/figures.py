"""matplotlib's drawing back end in the sandbox: Agg, whose ``plt.show()`` leaves figures open to be collected.

Named by MPLBACKEND; imported by matplotlib only, never by the guest itself.
"""

from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas  # type: ignore[import-not-found]  # in the runtime
from matplotlib.backends.backend_agg import FigureManagerBase as FigureManager

__all__ = ["FigureCanvas", "FigureManager", "show"]


def show(*_: object, **__: object) -> None:
    """Do nothing: the job returns every open figure when the program ends."""
