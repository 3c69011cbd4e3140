"""The exception for a text that is not a host, a URL or a rule, and quoting of hostile text. No I/O."""

from glovebox_sandboxes.contract.errors import RefusedError

#: How much of a hostile text is repeated in a message: enough to recognise it, too little to carry instructions.
QUOTED_CHARACTERS = 60


class InvalidTarget(RefusedError, ValueError):  # noqa: N818 - what it is, not what it does
    """A host, port, URL or pattern that is refused before any rule is looked at; ``egress.spelling``, for instance."""


def quoted(text: str) -> str:
    """Return hostile text for a message: printable ASCII in quotes, escapes for the rest, bounded."""
    escaped = ascii(text[:QUOTED_CHARACTERS])
    return escaped if len(text) <= QUOTED_CHARACTERS else f"{escaped}…"
