"""The table of profile values that this version lacks or has as experimental, with their sentences.

The manifest (``capabilities``) lists these, and refusals of profiles and calls use the same words. Pure; must not
import the rest of ``profiles``, which imports this.
"""

from dataclasses import dataclass
from typing import Final, Literal

from glovebox_sandboxes.drivers.registry import DRIVERS, NAMES


@dataclass(frozen=True, slots=True)
class Feature:
    """An unsupported or experimental value of a profile's key."""

    key: str
    """Of a profile, with dots."""
    value: str
    status: Literal["unsupported", "experimental"]
    """``unsupported``: refused with the reason; ``experimental``: works, with a caveat as the reason."""
    reason: str
    instead: str
    """The alternative."""


_NETWORK = 'A profile says "none", or "egress" with the hosts in network.allow.'


def _quoted(names: tuple[str, ...], joint: str) -> str:
    *most, last = (f'"{name}"' for name in names)
    return f"{', '.join(most)} {joint} {last}" if most else last


_DRIVERS = f"The drivers are {_quoted(NAMES, 'and')}."

_STABLE = _quoted(tuple(driver.name for driver in DRIVERS if not driver.experimental), "or")

_UNSUPPORTED: Final = (
    ("network.mode", "proxied", "there is no proxy to bring along: the host itself makes and decides each connection",
     _NETWORK),
    ("network.mode", "host", "a program is never given the host's network", _NETWORK),
    ("network.mode", "open", "no profile can allow every host", _NETWORK),
    ("files.workspace", "write", "nothing in a sandbox ever writes to the host",
     'Use "overlay", which gives its changes back as a patch, or "read" and write results to /output.'),
    ("isolation", "microvm", "there is no driver that starts a virtual machine",
     f"{_DRIVERS} gVisor has a kernel of its own."),
    ("isolation", "process", "no program ever runs without a sandbox", _DRIVERS),
)  # fmt: skip

FEATURES: Final = (
    *(Feature(key, value, "unsupported", reason, instead) for key, value, reason, instead in _UNSUPPORTED),
    *(
        Feature("isolation", driver.name, "experimental", driver.experimental, f"List {_STABLE} after it.")
        for driver in DRIVERS
        if driver.experimental
    ),
)
"""In the order of the profile's keys."""


def refuse_unsupported(key: str, value: object) -> object:
    """Return ``value``, or raise ValueError with the manifest's words if this version lacks it."""
    for each in FEATURES:
        if (each.key, each.value, each.status) == (key, value, "unsupported"):
            raise ValueError(f'"{value}" is not supported by this version: {each.reason}. {each.instead}')
    return value
