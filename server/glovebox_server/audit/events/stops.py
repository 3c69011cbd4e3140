"""Events of stops. They belong to no call: clients do not hear them."""

from dataclasses import dataclass
from typing import ClassVar

from glovebox_server.audit.events.base import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMade(Event):
    """Something is stopped from now on, until ``stop.lifted``: calls under way end, new ones are refused."""

    kind: ClassVar[str] = "stop.made"

    stop: str
    """Its id."""
    scope: str
    """What is named: ``call``, ``run``, ``principal``, ``workflow``, ``tool`` or ``all``."""
    name: str
    """The name; empty for everything."""
    because: str
    """Why, as the callers read it."""
    by: str
    """Who made it: a principal, or ``watch:`` and the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopLifted(Event):
    """A stop is no longer in force."""

    kind: ClassVar[str] = "stop.lifted"

    stop: str
    """Its id."""
    by: str
    """Who lifted it."""
