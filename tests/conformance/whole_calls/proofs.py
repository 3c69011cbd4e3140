"""What a case says of proof: a lock that what is in effect must match, and what is shown later of a call's records.

The log is the harness's own, copied: what is done to a copy is not done to what other cases are judged by.
"""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from glovebox_audit import chain
from glovebox_audit.bundle import archive
from glovebox_audit.bundle.archive import make, verify
from glovebox_audit.chain import EvidenceError, Head, draft
from glovebox_audit.events import ServerStopped
from glovebox_audit.file import LogFile
from glovebox_audit.receipts.dsse import parse_public, public_pem
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.verify import verify as verify_log
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.load.loader import load
from glovebox_server.proof.lock import Effective, Lock, written
from glovebox_server.receipts.keys import Signer
from glovebox_server.settings import Settings
from glovebox_server.upkeep.log import rotation


def require_locked(kind: str, profiles: ProfileSet, directory: Path) -> None:
    """Lock these profiles, do what the case says, and require what is there then to be as locked.

    Args:
        kind: ``same``; ``changed``: one limit is another since; ``signed`` and ``unsigned``: a signature is required.
        profiles: of the case.
        directory: where they lie.

    Raises:
        ProfileError: it is not, or is not signed.
    """
    place, key_file = directory / "glovebox.lock", directory / "operator.pub"
    in_force = Effective(profiles=profiles, policy=None, policy_path=None, tools={})
    place.write_bytes(written(in_force.content()))
    lock = Lock.read(place)
    if kind in {"signed", "unsigned"}:
        key = Ed25519PrivateKey.generate()
        key_file.write_text(public_pem(key.public_key()))
        if kind == "signed":
            lock.signature.write_bytes(lock.signed(key))
        lock.require_signed(key_file)
    if kind == "changed":
        for file in directory.glob("*.toml"):
            file.write_text(file.read_text().replace("pids = 32", "pids = 33"))
        in_force = replace(in_force, profiles=load([directory], check_example=None))
    lock.require(in_force)


def shown(kind: str, settings: Settings, call: str) -> str:
    """What whoever verifies is told of a call that is over.

    Args:
        kind: of its bundle: ``whole``; ``byte``: with one changed; ``less``: without one record; or of the log:
            ``kept``; ``put back``: as it was before its last record, while an anchor of that is kept elsewhere.
        settings: of the harness.
        call: its id.
    """
    signer = Signer.load(settings.state_dir)
    with tempfile.TemporaryDirectory(prefix="glovebox-proof-") as scratch:
        copy = Path(scratch) / "audit"
        # Its end first: other cases write on, and an end is never newer than the log.
        copy.mkdir(mode=0o700)
        for name in (HEAD_NAME, LOG_NAME):
            shutil.copy(settings.state_dir / "audit" / name, copy / name)
        before = {name: (copy / name).read_bytes() for name in (HEAD_NAME, LOG_NAME)}
        log = LogFile(copy, "proof", rotation(settings, signer))
        try:
            if kind in {"kept", "put back"}:
                [last] = log.commit([draft(ServerStopped(reason="the proof says so"))])
            else:
                log.seal()
        finally:
            log.close()
        if kind not in {"kept", "put back"}:
            return _verified(kind, copy, call, signer)
        if kind == "put back":
            for name, content in before.items():
                (copy / name).write_bytes(content)
            if not verify_log(copy).ok:
                return "it is not whole by itself"
        report = verify_log(copy, anchors=[Head(seq=last.seq, hash=last.hash)])
        return "; ".join(f"{each.kind}: {each.detail}" for each in report.problems) or "the log is whole"


def _verified(kind: str, log: Path, call: str, signer: Signer) -> str:
    content = make(log, "call", call, lambda: ({}, {})) or b""
    if kind == "byte":
        middle = len(content) // 2
        content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    elif kind == "less":
        told, others = archive.evidence_in(content)
        fields: dict[str, Any] = json.loads(told)
        fields["segments"][0]["records"].pop()
        content = archive.written(chain.canonical(fields) + b"\n", others)
    try:
        found = verify(content, {signer.key_id: parse_public(public_pem(signer.public).encode())}).evidence
    except EvidenceError as problem:
        return f"it does not hold: {problem}"
    return f"PROVED: {' '.join(each.kind for each in found.records)}"
