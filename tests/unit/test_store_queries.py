"""What a call asks of a store is found by an index: no statement of it looks through all that was ever kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fixtures.approving import a_desk, proposal
from tests.unit.test_budget_store import ME, WORST, Kept, budget, kept

from glovebox_server.guards.approvals.store import Questions
from glovebox_server.guards.budgets.spending import lines_of
from glovebox_server.guards.budgets.store import Ledger, ReservationRequest
from glovebox_server.stores.database import Database

__all__ = ["kept"]


@contextmanager
def scanned(database: Database) -> Iterator[set[str]]:
    """Yield the tables that the block's statements go through, as SQLite plans them; known once it has ended."""
    connection, told, found = database._connection, list[str](), set[str]()
    connection.set_trace_callback(told.append)
    yield found
    connection.set_trace_callback(None)
    planned = [each for each in told if each.split()[0] in ("SELECT", "INSERT", "UPDATE", "DELETE")]
    assert len(planned) > 5
    for each in planned:
        steps = connection.execute(f"EXPLAIN QUERY PLAN {each}").fetchall()
        found |= {detail for *_, detail in steps if detail.startswith("SCAN")}


async def test_a_question_its_answer_and_its_use_find_what_they_need(tmp_path: Path) -> None:
    """And each look of a call that waits, which comes five times a second."""
    async with a_desk(tmp_path / "state") as desk:
        database = desk.approvals.database()
        with scanned(database) as found:
            question = await desk.asked(proposal())
            await desk.answer(question)
            assert (await desk.decided(proposal())).effect == "allow"
            known = Questions(database._connection, desk.clock())
            known.grants(question.subject)
            known.undecided()
            known.last_approved("local:1000", "run_python")
        assert found == set()


def test_a_reservation_and_its_settling_find_what_they_need(kept: Kept) -> None:
    """The clock is one row."""
    with scanned(kept.kept) as found:
        asked = kept.reserve(budget(calls=9))
        kept.settle(asked)
        one = ReservationRequest(call_id="", spender=ME, lines=lines_of([budget(calls=9)], ME), worst=WORST)
        assert kept.do(Ledger.spend, asked=one) is None
        kept.left(budget(calls=9))
    assert found == {"SCAN clock"}
