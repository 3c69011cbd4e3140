"""Events of files that left quarantine for a folder of the operator's, and of those that were put back."""

from dataclasses import dataclass

from glovebox_audit.events.base import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedFile:
    """One file of a promotion."""

    name: str
    """Relative to the folder."""
    before: str | None = None
    """Digest of what it held; absent where there was none."""
    after: str | None = None
    """Digest of what it is to hold; absent where it is to go."""
    origin: str
    """The artifact that its content comes from, or the promotion that is put back."""
    findings: int | None = None
    """How many things a scan found in that artifact, which were accepted; absent where it was not looked into."""


class ProposalScanned(Event, kind="proposal.scanned"):
    """An artifact that a call proposes was looked into, or could not be. On disk before anybody is asked about it.

    What its caller proposes again is not looked into again.
    """

    asked_by: str
    """Id of the call."""
    principal: str
    """Id of the caller."""
    name: str
    """The artifact's name."""
    uri: str
    """Its address."""
    sha256: str
    """Hex digest of its content."""
    findings: tuple[str, ...] | None = None
    """What was found, as the scanner says, which a file may have taken over; absent where that is nothing."""
    more: int | None = None
    """How many more were found, which are not listed; absent where there are none."""
    not_scanned: str | None = None
    """Why it was not looked into; absent where it was."""
    sandbox_id: str | None = None
    """Id of the sandbox that did; absent where there was none."""
    driver: str | None = None
    """Which driver made it."""
    level: str | None = None
    """Strength class reached."""
    plan_digest: str | None = None
    """Digest of the plan that was executed."""


class PromotionApplied(Event, kind="promotion.applied"):
    """Files are about to be put into a folder that the operator named. On disk before the first is."""

    promotion: str
    """Its id."""
    by: str
    """Who does it: ``local:<uid>``, or the caller that proposed it."""
    asked_by: str | None = None
    """Id of the call that proposed it; absent where none did."""
    folder: str
    """The folder's name in the policy."""
    digest: str
    """Of all that was shown before somebody said yes."""
    files: tuple[PromotedFile, ...]
    """Each with ``name``, ``before``, ``after``, ``origin``, an artifact, and ``findings`` where it was scanned."""


class PromotionRolledBack(Event, kind="promotion.rolled_back"):
    """Files are about to be put back as they were before a promotion. On disk before the first is."""

    promotion: str
    """Id of the one whose changes go."""
    rollback: str | None = None
    """Id of the one that puts them back, where somebody asked for it."""
    by: str
    """Who does it: ``local:<uid>``."""
    folder: str
    """The folder's name in the policy."""
    because: str
    """``operator``: somebody asked for it; ``failed``: not all could be put there; ``interrupted``: it ended midway."""
    files: tuple[PromotedFile, ...]
    """Each with ``name``, ``before``, ``after`` and ``origin``: as they are to be then, where they were changed."""
