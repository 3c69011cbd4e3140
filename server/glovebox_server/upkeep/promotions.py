"""Finishes interrupted promotions when a server starts. It reports what it cannot put back."""

import logging

from glovebox_server.errors import RefusedError
from glovebox_server.promotion import journal as journals
from glovebox_server.promotion import transaction
from glovebox_server.secret_files import SecretFileError
from glovebox_server.settings import Settings
from glovebox_server.upkeep.log import recording

_log = logging.getLogger(__name__)


def recover(settings: Settings) -> None:
    """Undo or finish interrupted promotions, unless a process is at it. Raises AuditError if not recorded first."""
    try:
        if not journals.interrupted(journals.listed(settings.state_dir)):
            return
        with journals.locked(settings.state_dir, seconds=0) as journal, recording(settings) as record:
            for recovered in transaction.recover(journal, record):
                _log.warning("%s", recovered)
    except RefusedError:
        _log.warning("A promotion is under way: whoever does it brings it to an end.")
    except SecretFileError as problem:  # no call needs it
        _log.warning("%s", problem)
