"""What an earlier version wrote is still read: its audit log and its receipts verify, and the log goes on.

``tests/fixtures/earlier_log`` was written before the packages had their names: a call that ran, one that was refused.
"""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import segments

from glovebox_server.audit import chain
from glovebox_server.audit.events import ServerStopped
from glovebox_server.audit.log import AuditLog
from glovebox_server.audit.verify import verify
from glovebox_server.receipts import verify as receipts
from glovebox_server.receipts.dsse import NotAReceipt
from glovebox_server.receipts.keys import parse_public
from glovebox_server.receipts.names import PREDICATE_TYPE

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


def signed(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The earlier receipt's statement with a change, signed with a key of our own."""
    payload = json.loads(base64.b64decode(json.loads((KEPT / "receipt.json").read_bytes())["payload"]))
    change(payload)
    return chain.canonical(segments.SIGNER.sign(json.dumps(payload).encode()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.update(predicateType=PREDICATE_TYPE[:-1] + "2"), r"made by a newer Glovebox \(https://glovebox"),
        (lambda x: x["predicate"].update(later=1), "made by a newer Glovebox, that says predicate.later"),
        (lambda x: x["predicate"].pop("call"), "cannot be read by this version: predicate.call"),
        (lambda x: x.update(predicateType=PREDICATE_TYPE[:-1] + "0"), "cannot be read by this version: predicateType"),
    ],
)
def test_a_receipt_of_a_later_version_is_refused_as_such(change: Callable[[Any], None], reason: str) -> None:
    """A later type, or a field that is not known; as it was it holds (the control)."""
    assert receipts.verify(signed(lambda _: None), segments.PUBLIC)
    with pytest.raises(NotAReceipt, match=reason):
        receipts.verify(signed(change), segments.PUBLIC)
