"""What an earlier version wrote is still read: its audit log and its receipts verify, and the log goes on.

``tests/fixtures/earlier_log`` was written before the packages had their names: a call that ran, one that was refused.
``tests/fixtures/logs`` has logs of the commits they are named by, each with a sealed segment, a receipt and a bundle.
"""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import segments

from glovebox_audit import chain
from glovebox_audit.bundle import verify as bundles
from glovebox_audit.events import ServerStopped
from glovebox_audit.log import AuditLog
from glovebox_audit.receipts import dsse
from glovebox_audit.receipts import verify as receipts
from glovebox_audit.receipts.dsse import NotAReceipt
from glovebox_audit.receipts.keys import parse_public
from glovebox_audit.receipts.names import PREDICATE_TYPE
from glovebox_audit.segments.proof import NotAProof
from glovebox_audit.verify import verify

FIXTURES = Path(__file__).parents[1] / "fixtures"
KEPT = FIXTURES / "earlier_log"
COMMITS = sorted(place.name for place in (FIXTURES / "logs").iterdir())


def copy_log(source: Path, place: Path) -> Path:
    """Copy a log, as this user's."""
    shutil.copytree(source, place)
    for path in (place, *place.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return place


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    """A copy of the log, as this user's."""
    return copy_log(KEPT / "audit", tmp_path / "audit")


@pytest.mark.parametrize("commit", COMMITS)
async def test_a_log_a_receipt_and_a_bundle_of_a_commit_verify(commit: str, tmp_path: Path) -> None:
    """Signatures checked, all segments read, and the log goes on; with one byte changed none of them holds."""
    kept = FIXTURES / "logs" / commit
    log = copy_log(kept / "audit", tmp_path / "audit")
    key = parse_public((kept / "key.pub").read_bytes())
    keys = {dsse.key_id(key): key}
    report = verify(log, keys=keys)
    assert (report.ok, report.segments) == (True, 1)
    receipt = (kept / "receipt.json").read_bytes()
    assert receipts.verify(receipt, key, log).statement.predicate.outcome.kind == "call.finished"
    bundle = (kept / "bundle.zip").read_bytes()
    assert bundles.verify(bundle, keys).report_checked
    async with AuditLog.open(log, "g1") as continued:
        await continued.append(ServerStopped(reason="test"))
    assert verify(log, keys=keys).ok
    with pytest.raises(NotAProof):
        bundles.verify(bundle.replace(b"run_python", b"run_pythoN", 1), keys)
    segment = next((log / "segments").iterdir())
    segment.write_bytes(segment.read_bytes().replace(b'"exit_code":0', b'"exit_code":1'))
    assert not verify(log, keys=keys).ok


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
