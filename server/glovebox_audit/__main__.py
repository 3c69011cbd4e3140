"""``python -m glovebox_audit``: verify a bundle or a receipt offline, without a Glovebox."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from glovebox_audit.bundle import archive
from glovebox_audit.chain import EvidenceError
from glovebox_audit.place import AuditError
from glovebox_audit.receipts import dsse
from glovebox_audit.receipts import statement as receipts
from glovebox_audit.receipts.dsse import MAX_KEY_BYTES, parse_public


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if the file holds, 1 if not, and 2 if it or the key cannot be read; print one sentence."""
    parser = argparse.ArgumentParser(prog="python -m glovebox_audit", description=main.__doc__)
    parser.add_argument("kind", choices=("verify-bundle", "verify-receipt"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--key", type=Path, required=True, help="the server's public key, as PEM")
    parser.add_argument("--audit", type=Path, help="directory of the log, or of a copy, that a receipt belongs to")
    given = parser.parse_args(argv)
    try:
        key = parse_public(_read(given.key, MAX_KEY_BYTES))
        content = _read(given.file, archive.MAX_BYTES)
        if given.kind == "verify-bundle":
            found = archive.verify(content, {dsse.key_id(key): key}).evidence
            proved = f"{found.of} {found.id}, {len(found.records)} records"
        else:
            receipt = receipts.verify(content, key, given.audit)
            proved = f"call {receipt.statement.predicate.call.id}"
    except (OSError, ValueError, AuditError) as problem:
        print(problem, file=sys.stderr)  # noqa: T201 - a program
        return 2
    except EvidenceError as problem:
        print(f"It does not hold: {problem}.", file=sys.stderr)  # noqa: T201 - a program
        return 1
    print(f"PROVED with {dsse.key_id(key)}: {proved}.")  # noqa: T201 - a program
    return 0


def _read(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most + 1)


if __name__ == "__main__":
    sys.exit(main())
