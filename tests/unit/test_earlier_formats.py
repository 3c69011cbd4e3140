"""What an earlier version wrote is still read, by a stranger who has ``glovebox_audit`` alone too.

``tests/fixtures/earlier_log`` was written before the packages had their names: a call that ran, one that was refused.
``tests/fixtures/logs`` has logs of the commits they are named by, each with a sealed segment, a receipt and a bundle.
"""

import base64
import json
import shutil
import subprocess  # noqa: TID251 - a process without our packages
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import segments
from tests.fixtures.audit_logs import verify

from glovebox_audit import chain
from glovebox_audit.bundle import archive
from glovebox_audit.chain import EvidenceError
from glovebox_audit.events import ServerStopped
from glovebox_audit.log import AuditLog
from glovebox_audit.receipts import dsse
from glovebox_audit.receipts import statement as receipts
from glovebox_audit.receipts.dsse import PREDICATE_TYPE, parse_public

FIXTURES = Path(__file__).parents[1] / "fixtures"
KEPT = FIXTURES / "earlier_log"
ENDED, CHANGED = b'"exit_code":0', b'"exit_code":1'


@pytest.mark.parametrize("kept", [KEPT, *sorted((FIXTURES / "logs").iterdir())], ids=lambda path: path.name)
async def test_an_earlier_log_and_its_proofs_verify(kept: Path, tmp_path: Path) -> None:
    """All segments and signatures of the log, which goes on, its receipt and bundle; not with one byte changed."""
    log = tmp_path / "audit"
    shutil.copytree(kept / "audit", log)
    for path in (log, *log.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    key = parse_public((kept / "key.pub").read_bytes())
    keys = {dsse.key_id(key): key}
    sealed = list((log / "segments").glob("*"))
    report = verify(log, keys=keys)
    assert (report.problems, report.segments) == ((), len(sealed))
    receipt = (kept / "receipt.json").read_bytes()
    assert receipts.verify(receipt, key, log).statement.predicate.outcome.kind == "call.finished"
    async with AuditLog.open(log, "g1") as continued:
        assert (await continued.append(ServerStopped(reason="test"))).seq == report.head.seq + 1
    assert verify(log, keys=keys).ok
    for file in [*sealed, log / "audit.jsonl"]:
        file.write_bytes(file.read_bytes().replace(ENDED, CHANGED))
    assert not verify(log, keys=keys).ok
    if kept != KEPT:
        bundle = (kept / "bundle.zip").read_bytes()
        assert archive.verify(bundle, keys).report_checked
        with pytest.raises(EvidenceError):
            archive.verify(bundle.replace(b"run_python", b"run_pythoN", 1), keys)


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
    with pytest.raises(EvidenceError, match=reason):
        receipts.verify(signed(change), segments.PUBLIC)


LAST = Path(__file__).parents[1] / "fixtures" / "logs" / "11a23de"
ABSENT = (
    "glovebox_server",
    "glovebox_profiles",
    "_glovebox_guest",
    "mcp",
    "mcp_types",
    "starlette",
    "uvicorn",
    "docker",
    "requests",
    "anyio",
    "click",
    "rich",
    "structlog",
    "platformdirs",
    "h11",
    "httpx2",
    "jwt",
)
PROGRAM = f"""
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def run(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-I", "-c", PROGRAM, module, *arguments]
    return subprocess.run(argv, capture_output=True, check=False, text=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "file", "changed"),
    [("verify-bundle", "bundle.zip", b"run_python"), ("verify-receipt", "receipt.json", b"payloadType")],
)
def test_a_proof_is_verified_where_no_server_is(kind: str, file: str, changed: bytes, tmp_path: Path) -> None:
    """It holds; with one byte changed it does not. The control: the server cannot be imported there."""
    found = run("glovebox_audit", kind, str(LAST / file), "--key", str(LAST / "key.pub"))
    assert (found.returncode, found.stdout.split()[:2]) == (0, ["PROVED", "with"]), found.stderr
    (tmp_path / file).write_bytes((LAST / file).read_bytes().replace(changed, changed.swapcase(), 1))
    assert run("glovebox_audit", kind, str(tmp_path / file), "--key", str(LAST / "key.pub")).returncode == 1
    assert "ModuleNotFoundError: glovebox_server" in run("glovebox_server", "--help").stderr


def test_a_receipt_is_found_in_a_copy_of_its_log() -> None:
    """With the log; a log that is not there is an error, not a proof."""
    asked = ("glovebox_audit", "verify-receipt", str(LAST / "receipt.json"), "--key", str(LAST / "key.pub"), "--audit")
    found = run(*asked, str(LAST / "audit"))
    assert found.returncode == 0, found.stderr
    assert run(*asked, str(LAST)).returncode == 2
