"""The parts of events: what a call was given and gave back, as its receipt names it too, and words. Plain data.

A module of its own as that of the events is full.
"""

from dataclasses import dataclass
from typing import Literal

LossCause = Literal["log", "server"]
RemovalReason = Literal["age", "size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One artifact of an earlier call that this call was given."""

    name: str
    uri: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One thing a call gave back, by digest and size."""

    name: str
    digest: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedFile:
    """One file of a promotion."""

    name: str
    before: str | None = None
    after: str | None = None
    origin: str
    findings: int | None = None
