"""The audit log of a state directory by its settings: its retention, and its opening for a command."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from glovebox_audit.events import Event, draft
from glovebox_audit.file import LogFile
from glovebox_audit.receipts.dsse import EnvelopeSigner
from glovebox_audit.segments.rotation import Retention, Rotation
from glovebox_sandboxes.host.owner import new_owner
from glovebox_server.receipts.keys import Signer
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
    owner = new_owner()
    rotates = rotation(settings, Signer.load(settings.state_dir))
    return LogFile(settings.state_dir / "audit", f"g{owner.pid}-{owner.started}", rotates)


@contextmanager
def recording(settings: Settings) -> Iterator[Callable[[Event], None]]:
    """Open the audit log for the block, and yield a function that writes one event of no call to it."""
    with closing(audit_log(settings)) as log:

        def record(event: Event) -> None:
            log.commit([draft(event)])

        yield record
