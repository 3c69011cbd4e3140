"""Names and numbers shared by the writer and the reader of receipts. Imports nothing: a server starts with it."""

from typing import Final

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"

PREDICATE_TYPE: Final = "https://glovebox.dev/attestation/call/v1"
"""A name, as in-toto demands; never fetched. It changes when a field changes its meaning."""

_MOST_DIGITS: Final = 9
"""Digits of a version, which a stranger may have written."""


def is_newer(kind: object, known: str) -> bool:
    """Return whether ``kind`` is a later version of the known type: ``…/v2`` of ``…/v1``."""
    family, _, version = known.rpartition("/v")
    found = kind.removeprefix(f"{family}/v") if isinstance(kind, str) and kind.startswith(f"{family}/v") else ""
    return found.isascii() and found.isdigit() and len(found) <= _MOST_DIGITS and int(found) > int(version)


MAX_SUBJECTS: Final = 512
"""Files of a call listed one by one: a name may have 512 bytes, and a receipt must fit in one record."""
MAX_EGRESS: Final = 512
"""Connections listed one by one: more than the shipped limits let a call attempt."""
