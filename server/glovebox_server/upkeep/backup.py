"""Takes a backup of a state directory that servers use; changes nothing there, and delays no call.

Rule 1  The log is cut under its own lock, at the end of a record.
Rule 2  What is visible after its record is copied before the cut (artifacts, stores, promotions): the copy's log has
        all of it. What takes rights away is copied after it (stops, tokens): what was taken by the cut stays so.
Rule 3  Left out is what is made again: the index, sockets, locks, uploads under way.
"""

import contextlib
import fcntl
import os
import secrets
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from glovebox_audit import chain, place, read
from glovebox_audit.chain import EvidenceError
from glovebox_audit.file import MAX_TORN_BYTES
from glovebox_audit.receipts.dsse import MAX_KEY_BYTES
from glovebox_audit.segments import files
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.writers import DIRECTORY as WRITERS
from glovebox_sandboxes.contract.errors import DiagnosedError, MisnamedError
from glovebox_sandboxes.host.descriptors import opened
from glovebox_server import requests, secret_files
from glovebox_server.artifacts import record
from glovebox_server.guards.approvals import store as approvals
from glovebox_server.guards.budgets import store as budgets
from glovebox_server.guards.stops.stops import stops_of
from glovebox_server.guards.watch.canaries import canaries_of
from glovebox_server.promotion import transaction
from glovebox_server.receipts import keys
from glovebox_server.stores import database
from glovebox_server.transport import tokens
from glovebox_server.upkeep.archive import ArchiveWriter, Files, most_bytes

STORES: Final = {approvals.NAME: approvals.SCHEMA, budgets.NAME: budgets.SCHEMA}
_CHUNK: Final = 1 << 20
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def take(state: Path, output: Path, *, version: str, with_keys: bool) -> tuple[str, Files]:
    """Write a backup to a new file (0600), there whole or not at all; return the end of its chain, and what is in it.

    Raises MisnamedError: the file exists; DiagnosedError: something is damaged, or cannot be read; OSError.
    """
    taken = MisnamedError(f"Backing up to {output}", "there is a file of that name", "Name another.")
    if os.path.lexists(output):
        raise taken
    read.head(state / "audit")  # where there is no log, nothing is made
    draft = output.with_name(f".{output.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, _NEW, 0o600), "wb") as file:
            out, made = ArchiveWriter(file), datetime.now(UTC)
            _add_artifacts(out, state / "artifacts", made)
            _add_stores(out, state)
            head = _add_log(out, state / "audit")
            _add_small(out, state, with_keys=with_keys)
            out.end(made=made.isoformat(), glovebox=version)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, output)
    except FileExistsError as problem:
        raise taken from problem
    finally:
        draft.unlink(missing_ok=True)
    with opened(output.absolute().parent) as folder:
        os.fsync(folder)
    return head, out.files


def _add(out: ArchiveWriter, name: str, content: bytes) -> None:
    out.add(name, len(content), [content])


def _add_file(out: ArchiveWriter, name: str, path: Path, bytes_each: int | None = None) -> str:
    with opened(path, _READ) as descriptor:
        size = os.fstat(descriptor).st_size if bytes_each is None else bytes_each
        return out.add(name, size, _chunks(descriptor, size))


def _chunks(descriptor: int, size: int) -> Iterator[bytes]:
    for at in range(0, size, _CHUNK):
        yield os.pread(descriptor, min(_CHUNK, size - at), at)


def _add_artifacts(out: ArchiveWriter, root: Path, now: datetime) -> None:
    for each in record.records(root, now):
        folder = f"artifacts/items/{each.id}"
        with contextlib.suppress(FileNotFoundError):  # it has expired since
            digest = _add_file(out, f"{folder}/content", root / "items" / each.id / "content", each.bytes)
            _add(out, f"{folder}/record.json", record.encode(each))
            if digest != each.sha256:
                fix = f"Remove {root / 'items' / each.id}, and check the disk."
                raise DiagnosedError(f"Backing up {each.uri}", "its content is not what was stored", fix)


def _add_stores(out: ArchiveWriter, state: Path) -> None:
    for name, schema in STORES.items():
        path = state / database.DIRECTORY / name
        if os.path.lexists(path):
            with database.opened(path, schema) as store, contextlib.closing(sqlite3.connect(":memory:")) as copy:
                store.copy_now(copy)
                _add(out, f"{database.DIRECTORY}/{name}", copy.serialize())
    if not os.path.lexists(state / transaction.FOLDER):
        return
    with transaction.locked(state) as journal:
        # One that was interrupted is brought to its end here, by the next server, and not by a copy.
        for each in (each for each in journal.all() if each.state in transaction.ENDED):
            name = f"{transaction.FOLDER}/{each.id}"
            for old in sorted((state / name).glob("*")):
                _add_file(out, f"{name}/{old.name}", old)
            _add(out, f"{name}.json", transaction.encode(each))


def _add_log(out: ArchiveWriter, audit: Path) -> str:
    """Add the log as it is at one moment; return the end of its chain."""
    with contextlib.ExitStack() as stack:
        with opened(audit / HEAD_NAME, _READ) as lock:
            if not place.take_lock(lock, place.LOCK_WAIT_SECONDS, fcntl.LOCK_SH):
                reason = f"another process has held its lock for {place.LOCK_WAIT_SECONDS:g} seconds"
                raise DiagnosedError(f"Backing up {audit}", reason, f"Find it with `fuser {audit / HEAD_NAME}`.")
            log = stack.enter_context(opened(audit / LOG_NAME, _READ))
            size, head = os.fstat(log).st_size, os.pread(lock, chain.HEAD_BYTES + 1, 0)
            sealed = files.listed(audit)[0]
            writers = {each.name: each.read_bytes() for each in (audit / WRITERS).glob("*.json")}
        tail = os.pread(log, MAX_TORN_BYTES, max(0, size - MAX_TORN_BYTES))
        size -= len(tail) - tail.rfind(b"\n") - 1  # a crash may have left half a line
        end = last_record(log, size)
        try:
            for number in sealed:
                _add_file(out, f"audit/{files.name(number)}", audit / files.name(number))
        except FileNotFoundError as problem:
            reason = "a segment was removed meanwhile, as retention says"
            raise DiagnosedError(f"Backing up {audit}", reason, "Run the command again.") from problem
        out.add(f"audit/{LOG_NAME}", size, _chunks(log, size))
        _add(out, f"audit/{HEAD_NAME}", head)
    for name, content in writers.items():  # whose calls have no end in the copy
        if len(content) == most_bytes(f"audit/{WRITERS}/{name}"):
            _add(out, f"audit/{WRITERS}/{name}", content)
    return end


def last_record(log: int, size: int) -> str:
    """Return the record that ends there in an open file of the log, as ``SEQ:HASH``. Raises DiagnosedError."""
    try:
        return files.anchor(chain.parse(files.line_before(log, size)))
    except EvidenceError as problem:
        fix = "Run `glovebox audit verify`, and keep the directory as evidence."
        raise DiagnosedError("Reading the end of the audit log", f"it is damaged: {problem}", fix) from problem


def _add_small(out: ArchiveWriter, state: Path, *, with_keys: bool) -> None:
    kinds: list[secret_files.Files[Any]] = [stops_of(state), *([canaries_of(state)] if with_keys else [])]
    for kind in kinds:
        found = kind.read()
        for problem in found.damaged:
            raise problem
        for item in found.items:
            _add(out, f"{secret_files.FOLDER}/{kind.path.name}/{item.id}", item.model_dump_json().encode())
    if os.path.lexists(state / tokens.DIRECTORY):
        for name, token in tokens.load(state / tokens.DIRECTORY, None).items():  # the hash, also of one that is mounted
            _add(out, f"{tokens.DIRECTORY}/{name}", tokens.encode(token))
    if with_keys and os.path.lexists(state / keys.DIRECTORY):
        with secret_files.opened(state / keys.DIRECTORY, "key") as folder:
            for name in {keys.NAME, requests.KEY_NAME, requests.NOTIFY_KEY} & set(folder.names()):
                _add(out, f"{keys.DIRECTORY}/{name}", folder.read(name, MAX_KEY_BYTES))
