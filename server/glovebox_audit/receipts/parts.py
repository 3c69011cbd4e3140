"""Names what a call was given and gave back, for its records and its receipt. Plain data, no I/O."""

from dataclasses import dataclass


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
