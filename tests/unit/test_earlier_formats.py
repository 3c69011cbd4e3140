"""What an earlier version wrote is still read: its audit log and its receipts verify, and the log goes on.

``tests/fixtures/earlier_log`` was written before the packages had their names: a call that ran, one that was refused.
"""

import shutil
from pathlib import Path

import pytest

from glovebox_server.audit.events import ServerStopped
from glovebox_server.audit.log import AuditLog
from glovebox_server.audit.verify import verify
from glovebox_server.receipts import verify as receipts
from glovebox_server.receipts.keys import parse_public

KEPT = Path(__file__).parents[1] / "fixtures" / "earlier_log"


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    """A copy of the log, as this user's."""
    place = tmp_path / "audit"
    shutil.copytree(KEPT / "audit", place)
    place.chmod(0o700)
    for each in place.iterdir():
        each.chmod(0o600)
    return place


def test_an_earlier_log_verifies(audit: Path) -> None:
    """As it was kept; with one byte changed it does not (the control)."""
    assert verify(audit).problems == ()
    log = audit / "audit.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"exit_code":0', b'"exit_code":1'))
    assert not verify(audit).ok


async def test_an_earlier_log_is_continued(audit: Path) -> None:
    """The chain goes on from its last record."""
    async with AuditLog.open(audit, "g1") as log:
        before = log.head.seq
        assert (await log.append(ServerStopped(reason="test"))).seq == before + 1
    assert verify(audit).ok


def test_an_earlier_receipt_verifies(audit: Path) -> None:
    """With the public key alone, and its place in the log."""
    key = parse_public((KEPT / "key.pub").read_bytes())
    found = receipts.verify((KEPT / "receipt.json").read_bytes(), key, audit)
    assert found.statement.predicate.outcome.kind == "call.finished"
