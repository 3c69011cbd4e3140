"""Puts a backup in the place of a state directory without live servers.

Rule 1  It is unpacked and checked beside the directory, whole; then the two are exchanged in one operation. Whatever
        ends the process, a whole directory is in its place. The one that was replaced is kept.
Rule 2  What was taken away since stays so: stops, spending, and tokens that are gone. Open questions and approvals are
        withdrawn, so that no used one comes to life again.
Rule 3  Promotions are of folders that no restore turns back: those of the present directory stay.
"""

import contextlib
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from glovebox_audit import chain, place, writers
from glovebox_audit.chain import EvidenceError, draft
from glovebox_audit.events import StateRestored, TokenRevoked
from glovebox_audit.file import LogFile
from glovebox_audit.segments import files
from glovebox_audit.verify import verify
from glovebox_sandboxes.contract.errors import DiagnosedError, RefusedError
from glovebox_sandboxes.host.descriptors import opened
from glovebox_sandboxes.plural import counted
from glovebox_server import requests, secret_files
from glovebox_server.artifacts import record
from glovebox_server.guards.approvals import store as approvals
from glovebox_server.guards.approvals.store import Questions
from glovebox_server.guards.budgets import store as budgets
from glovebox_server.guards.budgets.spending import read_clocks
from glovebox_server.guards.stops.stops import stops_of
from glovebox_server.guards.watch.canaries import canaries_of
from glovebox_server.promotion import folder, transaction
from glovebox_server.receipts import keys
from glovebox_server.settings import Settings
from glovebox_server.stores import database
from glovebox_server.transport import tokens
from glovebox_server.upkeep.archive import UNCHANGED, Files, refuse, unpack
from glovebox_server.upkeep.backup import STORES, last_record
from glovebox_server.upkeep.log import audit_log

_UNFINISHED: Final = ".unfinished"
"""In a directory that is not whole yet; one without it may be that which was replaced."""
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LEDGER: Final = {
    "spent": ("budget", "key", "since"), "usage": ("since", "hours", "principal", "workflow", "tool"),
}  # fmt: skip
"""Tables of what was spent, and what a row is about."""


def restore(settings: Settings, backup: Path, *, by: str) -> dict[str, Any]:
    """Put a backup in the place of the state directory; return what is recorded of it, and what was dropped.

    Raises DiagnosedError, RefusedError or OSError: nothing was changed.
    """
    state = settings.state_dir.resolve()
    # A FIFO in its place must not hang the command.
    with os.fdopen(os.open(backup, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        secret_files.prepare_state(state)
        is_empty = not any(state.iterdir())
        with _alone(state) as before, _staging(state) as staging:
            with _named(staging):
                made, found = unpack(file, partial(_write, staging))
                _require_whole(staging, found)
                with opened(staging / "audit" / files.LOG_NAME) as log_file:
                    head = last_record(log_file, os.fstat(log_file).st_size)
            _take_over(state, staging)
            with contextlib.closing(audit_log(settings.model_copy(update={"state_dir": staging}))) as log:
                withdrawn = _withdraw(staging, log, by)
                lost = _take_rights(state, staging)
                done = StateRestored(by=by, made=made, head=head, before=before)
                log.commit([*(draft(TokenRevoked(principal=f"token:{name}", by=by)) for name in lost), draft(done)])
            with _named(staging):
                for each in verify(staging / "audit").problems:
                    raise DiagnosedError(f"audit/{each.file}:{each.line}", f"{each.kind}: {each.detail}", UNCHANGED)
            replaced = _exchange(state, staging, is_empty=is_empty)
    return {**asdict(done), "withdrawn": withdrawn, "tokens_left_out": lost, "replaced": replaced and str(replaced)}


@contextlib.contextmanager
def _named(staging: Path) -> Iterator[None]:
    """Name what is wrong as a part of the backup, and not by its place of a moment."""
    try:
        yield
    except (DiagnosedError, RefusedError) as problem:
        what = getattr(problem, "what", "")
        if what == "Reading the backup":
            raise
        reason = f"{what}: {problem.reason}".replace(f"{staging}/", "").replace(str(staging), "it").rstrip(".")
        raise DiagnosedError("Checking the backup", reason, UNCHANGED) from problem


@contextlib.contextmanager
def _alone(state: Path) -> Iterator[str | None]:
    """Hold the log's lock, so that no server can start; yield the end of its chain, if it says one."""
    with place.opened(state / "audit") as directory:
        head = directory.open(files.HEAD_NAME, 0)
        try:
            directory.lock(head)
            if servers := writers.live(state / "audit"):
                reason = f"{counted(len(servers), 'live server')} there ({', '.join(servers)})"
                raise DiagnosedError(f"Restoring {state}", reason, "Stop them first, or name another directory.")
            before = None
            with contextlib.suppress(EvidenceError):
                before = files.anchor(chain.parse_head(os.pread(head, chain.HEAD_BYTES + 1, 0)))
            yield before
        finally:
            os.close(head)


@contextlib.contextmanager
def _staging(state: Path) -> Iterator[Path]:
    """Make the directory beside it in which all is made ready; remove it, unless it took the other's place."""
    staging = state.with_name(f".{state.name}.restoring")
    if (staging / _UNFINISHED).exists():
        shutil.rmtree(staging)
    elif staging.exists():  # a restore was killed at its exchange, perhaps behind it
        staging.rename(_aside(state))
    staging.mkdir(mode=0o700)
    (staging / _UNFINISHED).touch()
    try:
        yield staging
    finally:
        if (staging / _UNFINISHED).exists():
            shutil.rmtree(staging)


def _aside(state: Path) -> Path:
    return state.with_name(f"{state.name}.before-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}")


def _write(staging: Path, name: str, chunks: Iterable[bytes]) -> None:
    path = staging
    for part in name.split("/")[:-1]:  # of a known form, without a step up
        path /= part
        path.mkdir(mode=0o700, exist_ok=True)
    with os.fdopen(os.open(staging / name, _NEW, 0o600), "wb") as out:
        for chunk in chunks:
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())


def _require_whole(staging: Path, found: Files) -> None:
    """Read everything as servers will. Raises what they would raise."""
    if f"audit/{files.LOG_NAME}" not in found:
        refuse("it has no audit log")
    _require_artifacts(staging, found)
    for kind in (stops_of(staging), canaries_of(staging)):
        kind.prepare()
        for problem in kind.read().damaged:
            raise problem
    for name in (each for each in STORES if (staging / database.DIRECTORY / each).exists()):
        with database.opened(staging / database.DIRECTORY / name, STORES[name]):
            pass
    if (staging / tokens.DIRECTORY).exists():
        tokens.load(staging / tokens.DIRECTORY, None)
    for each in transaction.listed(staging):
        if each.state not in transaction.ENDED:
            refuse(f"the promotion {each.id} has not ended")
    if (staging / keys.DIRECTORY).exists():
        keys.Signer.load(staging)
        requests.load_key(staging)


def _require_artifacts(staging: Path, found: Files) -> None:
    for path in sorted(staging.glob("artifacts/items/*")):
        with contextlib.suppress(OSError, ValueError):
            item = record.decode((path / "record.json").read_bytes())
            if item.id == path.name and found.get(f"{path.relative_to(staging)}/content") == [item.bytes, item.sha256]:
                continue
        refuse(f"the record and the content of artifact://{path.name} do not fit")


def _take_over(state: Path, staging: Path) -> None:
    """Take over keys, if the backup has none, and promotions; of what was spent the more counts."""
    if not (staging / keys.DIRECTORY).exists() and (state / keys.DIRECTORY).exists():
        shutil.copytree(state / keys.DIRECTORY, staging / keys.DIRECTORY, symlinks=True)
    if (state / transaction.FOLDER).exists():
        shutil.copytree(state / transaction.FOLDER, staging / transaction.FOLDER, symlinks=True, dirs_exist_ok=True)
    spent = state / database.DIRECTORY / budgets.NAME
    if os.path.lexists(spent):
        with database.opened(spent, budgets.SCHEMA) as one:
            rows = {table: one.query_now(partial(_rows, table)) for table in (*_LEDGER, "clock")}
        with database.opened(staging / database.DIRECTORY / budgets.NAME, budgets.SCHEMA) as other:
            other.transact_now(partial(_merge, rows))


def _rows(table: str, connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    return list(connection.execute(f"SELECT * FROM {table}"))  # noqa: S608 - a name of ours


def _merge(rows: dict[str, list[tuple[Any, ...]]], connection: sqlite3.Connection) -> None:
    for table, key in _LEDGER.items():
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        more = ", ".join(f"{name} = max({name}, excluded.{name})" for name in names if name not in key)
        marks = ", ".join("?" * len(names))
        statement = f"INSERT INTO {table} VALUES ({marks}) ON CONFLICT ({', '.join(key)}) DO UPDATE SET {more}"  # noqa: S608 - names of ours
        connection.executemany(statement, rows[table])
    if latest := max(rows["clock"] + _rows("clock", connection), default=None):  # the time of budgets never goes back
        connection.execute("DELETE FROM clock")
        connection.execute("INSERT INTO clock VALUES (?, ?, ?, ?)", latest)


def _withdraw(staging: Path, log: LogFile, by: str) -> int:
    """Withdraw what is open, each on record; return how many."""

    def work(connection: sqlite3.Connection) -> int:
        known = Questions(connection, read_clocks(), lambda event: log.commit([draft(event)]))
        for each in (found := known.standings(("pending", "allowed"))):
            known.withdraw(each.question.id, by)
        return len(found)

    if not approvals.path(staging).exists():
        return 0
    with approvals.opened(staging) as store:
        return store.transact_now(work)


def _take_rights(state: Path, staging: Path) -> list[str]:
    """Take over stops and canaries, and drop the tokens that are gone here or made anew; return their names."""
    for here, there in ((stops_of(state), stops_of(staging)), (canaries_of(state), canaries_of(staging))):
        found = here.read()
        for problem in found.damaged:
            raise problem
        for item in found.items:
            if item.id not in there.names():
                there.add(item.id, item.model_dump_json().encode())
    ours, theirs = (each / tokens.DIRECTORY for each in (staging, state))
    if not (ours.exists() and theirs.exists()):
        return []
    present = {(name, each.sha256) for name, each in tokens.load(theirs, None).items()}
    gone = [name for name, each in tokens.load(ours, None).items() if (name, each.sha256) not in present]
    for name in gone:
        tokens.revoke(ours, name)
    return gone


def _exchange(state: Path, staging: Path, *, is_empty: bool) -> Path | None:
    """Put the new directory in the place of the old one; return where that is now."""
    for each, _, _ in os.walk(staging):
        with opened(each) as descriptor:
            os.fsync(descriptor)
    with folder.opened(state.parent) as parent:
        (staging / _UNFINISHED).unlink()
        try:
            parent.exchange(state.name, staging.name)
        except OSError as problem:
            (staging / _UNFINISHED).touch()
            fix = "Name another directory with --state-dir, on a local file system and no mount, and serve that one."
            raise DiagnosedError(f"Exchanging {state}", f"{problem.strerror}; nothing was changed", fix) from problem
        aside = None if is_empty else _aside(state)
        with contextlib.suppress(OSError):  # it is done, whatever becomes of the old one
            # A server that waits for the lock to write there finds its file replaced, and does not start.
            head, copy = staging / "audit" / files.HEAD_NAME, staging / "audit" / f".{files.HEAD_NAME}"
            shutil.copy2(head, copy)
            copy.replace(head)
            if aside is None:
                shutil.rmtree(staging)
            else:
                parent.move(staging.name, aside.name)
            os.fsync(parent.descriptor)
    return aside
