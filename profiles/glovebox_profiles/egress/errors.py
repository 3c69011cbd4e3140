"""The one way this package says that a text is not a host, a URL or a rule. No I/O."""

#: How much of a hostile text is repeated in a message: enough to recognise it, too little to carry instructions.
QUOTED_CHARACTERS = 60


class InvalidTarget(ValueError):  # noqa: N818 - what it is, not what it does
    """A host, port, URL or pattern that is refused before any rule is looked at."""

    def __init__(self, rule: str, reason: str, hint: str) -> None:
        """Name the rule (``egress.spelling``, ``egress.address``, …), say why in one sentence, and what would do."""
        super().__init__(f"{reason} {hint}")
        self.rule = rule
        self.reason = reason
        self.hint = hint


def quoted(text: str) -> str:
    """Return hostile text for a message: printable ASCII in quotes, escapes for the rest, bounded."""
    shown = ascii(text[:QUOTED_CHARACTERS])
    return shown if len(text) <= QUOTED_CHARACTERS else f"{shown}…"
