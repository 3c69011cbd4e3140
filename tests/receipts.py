"""Receipts for tests: a call's records written to a real log, with a key of the test's own."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.model import Profile
from glovebox_server.app import check_example
from glovebox_server.audit.events import (
    ArtifactCollected,
    ArtifactRefused,
    CallDecided,
    CallFinished,
    EgressDecided,
    Input,
    Output,
    SandboxStarted,
)
from glovebox_server.audit.log import AuditLog
from glovebox_server.broker.calls import Decision, Principal, ToolCall
from glovebox_server.receipts.keys import Signer
from glovebox_server.receipts.recorder import CallRecorder, Receipt, ReceiptIssuer
from glovebox_server.receipts.verify import of_call

CALL_ID = "c_" + "0" * 26
CODE = "print('höhe')"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
FIELDS: tuple[dict[str, Any], ...] = (
    {"field": "uid", "planned": 65532, "inside": 65532, "outside": "not measurable: no pid", "verdict": "ok"},
)


def call_of(call_id: str = CALL_ID, code: str = CODE) -> ToolCall:
    """A call of ``run_python``."""
    return ToolCall(
        id=call_id,
        principal=Principal(id="local:1", transport="cli"),
        session=None,
        tool="run_python",
        arguments={"code": code, "inputs": (), "timeout_seconds": None},
        received=datetime(2026, 11, 20, 12, tzinfo=UTC),
    )


def profile() -> Profile:
    """The shipped one."""
    found = load([SHIPPED], check_example=check_example).get("run_python")
    assert found is not None
    return found


@dataclass
class CallHarness:
    """A log, and what one needs to have receipts written to it."""

    audit: AuditLog
    directory: Path
    office: ReceiptIssuer

    async def recorder(self, call_id: str = CALL_ID, *, files: int = 1, egress: int = 1) -> CallRecorder:
        """A call that has run, before its last word."""
        call = call_of(call_id)
        ledger = self.office.recorder(call, profile())
        allowed = Decision(effect="allow", rule="allow", reason="It may.", hint="", profile_digest="sha256:p")
        given = Input(name="in.csv", uri="artifact://" + "1" * 32, sha256="2" * 64, bytes=3)
        await ledger.append(CallDecided.of(call, allowed, keep_arguments=False, inputs=(given,)))
        await ledger.append(
            SandboxStarted(
                call_id=call_id, sandbox_id="s1", driver="bubblewrap", level="namespaces", plan_digest="sha256:plan",
                measured={}, fields=FIELDS, host={"kernel": "6.1"}, verified=True,
            )
        )  # fmt: skip
        for number in range(egress):
            await ledger.append(
                EgressDecided(
                    call_id=call_id, scheme="https", host="docs.python.org", port=443, method="GET", path=f"/{number}",
                    effect="allow", rule="network.allow[0]", address="93.184.216.34",
                )
            )  # fmt: skip
        for number in range(files):
            await ledger.append(
                ArtifactCollected(
                    call_id=call_id, name=f"{number}.txt", uri="artifact://" + f"{number:032x}",
                    sha256=f"{number:064x}", bytes=1, media_type="text/plain",
                )
            )  # fmt: skip
        await ledger.append(ArtifactRefused(call_id=call_id, name="x\udcff", reason="no UTF-8"))
        return ledger

    async def receipt(self, call_id: str = CALL_ID, **numbers: int) -> Receipt:
        """A finished call."""
        ledger = await self.recorder(call_id, **numbers)
        return await ledger.close(finished(call_id))

    def content(self, call_id: str = CALL_ID) -> bytes:
        """The receipt's bytes."""
        found = of_call(self.directory, call_id)
        assert found is not None
        return found


def finished(call_id: str = CALL_ID) -> CallFinished:
    """The last word."""
    output = Output(name="stdout", digest="sha256:" + "3" * 64, bytes=6)
    return CallFinished(
        call_id=call_id, ended="exited", exit_code=0, elapsed_ms=12.5, usage={"cpu_ms": 1.0}, outputs=(output,)
    )


@asynccontextmanager
async def desk(directory: Path, key: Ed25519PrivateKey = KEY) -> AsyncIterator[CallHarness]:
    """A log in ``directory`` and an office that signs with ``key``."""
    async with AuditLog.open(directory, "g1") as audit:
        yield CallHarness(audit, directory, ReceiptIssuer(log=audit, signer=Signer(key), version="1.2", server_id="g1"))


def public() -> Ed25519PublicKey:
    """The key that receipts of ``desk`` are verified with."""
    return KEY.public_key()


def said(content: bytes) -> dict[str, Any]:
    """The statement in a receipt, read without our code."""
    statement: dict[str, Any] = json.loads(base64.b64decode(json.loads(content)["payload"]))
    return statement
