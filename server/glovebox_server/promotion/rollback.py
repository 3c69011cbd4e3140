"""Puts a promotion back, once: every file as it was, or none.

Must never be imported here: policy, the command line, anything async.
"""

from pathlib import Path

from glovebox_server.errors import RefusedError
from glovebox_server.promotion import journal as journals
from glovebox_server.promotion import plan, transaction
from glovebox_server.promotion.folder import opened
from glovebox_server.promotion.journal import Journal, Promotion
from glovebox_server.promotion.transaction import Record


def roll_back(journal: Journal, identifier: str, record: Record) -> Promotion:
    """Put every file of a promotion back as it was; the promotion that does it.

    Args:
        journal: of the state directory; nothing in it is interrupted.
        identifier: of the promotion.
        record: of the audit log.

    Raises:
        RefusedError: nothing was changed: there is none to put back, its folder is another, or a file changed since.
        AuditError: nor where it could not be recorded.
    """
    known = journal.all()
    promotion = next((each for each in known if each.id == identifier), None)
    if promotion is None:
        hint = "`glovebox artifact promotions` shows those that can be put back."
        raise RefusedError("promotion.unknown", f"There is no promotion {identifier}.", hint)
    by = journals.put_back(known)(identifier)
    if promotion.of or promotion.state not in journals.IN_FORCE or by:
        told = f"was put back by {by}" if by else standing(promotion, None)
        raise RefusedError(
            "promotion.unknown", f"{identifier} {told}; nothing was changed.", "Promote the files again."
        )
    with opened(Path(promotion.path)) as folder:
        transaction.require_same(folder, promotion)
        back = plan.drafted(promotion.folder, folder, plan.reversed_changes(promotion), promotion)
        return transaction.promote(folder, journal, back, lambda number: journal.contents(identifier, number), record)


def standing(promotion: Promotion, by: str | None) -> str:
    """Where a promotion stands, in words.

    Args:
        promotion: which.
        by: the promotion that put it back.
    """
    if promotion.state == "withdrawn":
        kept = f", but for {', '.join(promotion.kept)}" if promotion.kept else ""
        return f"failed or interrupted, and put back{kept}"
    if promotion.state not in journals.IN_FORCE:
        return promotion.state
    if promotion.of:
        return f"puts {promotion.of} back"
    return f"put back by {by}" if by else "in force"
