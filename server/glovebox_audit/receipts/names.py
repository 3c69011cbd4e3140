"""Names and numbers shared by the writer and the reader of receipts. Imports nothing: a server starts with it."""

from typing import Final

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"

PREDICATE_TYPE: Final = "https://glovebox.dev/attestation/call/v1"
"""A name, as in-toto demands: nothing is fetched from there. It changes when a field changes its meaning."""

_MOST_DIGITS: Final = 9
"""Of a version, that a stranger may have written."""


def is_newer(kind: object, known: str) -> bool:
    """Whether this names a later version of a type than the one that is known: ``…/v2`` of ``…/v1``."""
    family, _, version = known.rpartition("/v")
    found = kind.removeprefix(f"{family}/v") if isinstance(kind, str) and kind.startswith(f"{family}/v") else ""
    return found.isascii() and found.isdigit() and len(found) <= _MOST_DIGITS and int(found) > int(version)


MAX_SUBJECTS: Final = 512
"""Files of a call that are listed one by one; a name may be 512 bytes long, and a receipt has to fit in one record."""
MAX_EGRESS: Final = 512
"""Connections that are listed one by one: more than the shipped limits let a call attempt."""
