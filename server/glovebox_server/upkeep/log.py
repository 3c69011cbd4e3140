"""The audit log of a state directory by its settings: its retention, and its opening for a command."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Final

from glovebox_audit.chain import draft
from glovebox_audit.event import Event
from glovebox_audit.file import LogFile
from glovebox_audit.receipts.dsse import EnvelopeSigner
from glovebox_audit.segments.rotation import Retention, Rotation
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.host.owner import server_id
from glovebox_server.promotion import transaction
from glovebox_server.receipts.keys import Signer
from glovebox_server.secret_files import SecretFileError
from glovebox_server.settings import Settings


def retention(settings: Settings) -> Retention:
    """Return what of the audit log may be removed: nothing unless a setting says so."""
    days, mib = settings.audit_keep_days, settings.audit_keep_mib
    return Retention(seconds=None if days is None else days * 86400, bytes=None if mib is None else mib * 2**20)


def rotation(settings: Settings, signer: EnvelopeSigner) -> Rotation:
    """Return how the audit log rotates."""
    return Rotation(signer=signer, retention=retention(settings))


def audit_log(settings: Settings) -> LogFile:
    """Return the audit log, opened for writing without serving clients."""
    return LogFile(settings.state_dir / "audit", server_id(), rotation(settings, Signer.load(settings.state_dir)))


#: A process is one writer of a log: of its threads, as the console has, one at a time.
_turn: Final = threading.Lock()


@contextmanager
def writing(settings: Settings) -> Iterator[LogFile]:
    """Open the audit log for the block, once no other thread has it open."""
    with _turn, closing(audit_log(settings)) as log:
        yield log


@contextmanager
def recording(settings: Settings) -> Iterator[Callable[[Event], None]]:
    """Open the audit log for the block, and yield a function that writes one event of no call to it."""
    with writing(settings) as log:

        def record(event: Event) -> None:
            log.commit([draft(event)])

        yield record


_log = logging.getLogger(__name__)


def recover(settings: Settings) -> None:
    """Undo or finish interrupted promotions, unless a process is at it. Raises AuditError if not recorded first."""
    try:
        if all(each.state in transaction.ENDED for each in transaction.listed(settings.state_dir)):
            return
        with transaction.locked(settings.state_dir, seconds=0) as journal, recording(settings) as record:
            for recovered in transaction.recover(journal, record):
                _log.warning("%s", recovered)
    except RefusedError:
        _log.warning("A promotion is under way: its process brings it to an end.")
    except SecretFileError as problem:  # no call needs it
        _log.warning("%s", problem)
