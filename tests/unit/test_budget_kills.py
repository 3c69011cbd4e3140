"""Servers killed while they write: what was told is kept, what was in flight counts as spent."""

import os
import signal
import sqlite3
import subprocess  # noqa: TID251 - whole processes, to be killed
import sys
import time
from contextlib import closing
from pathlib import Path

from tests.unit.test_budget_store import ME, budget

from glovebox_sandboxes.host.owner import is_orphan
from glovebox_server.guards.budgets import store
from glovebox_server.guards.budgets.spending import lines_of, read_clocks
from glovebox_server.stores import database

# Forked, since starting an interpreter for each would be most of the test. A connection must not cross a fork: each
# opens its own. It says before and after each transaction where it is.
SPENDER = """
import os, pathlib, signal, sys
from glovebox_sandboxes.host.owner import new_mark
from glovebox_server.stores import database
from glovebox_server.guards.budgets import store
from glovebox_server.guards.budgets.spending import lines_of
from glovebox_server.guards.budgets.store import ReservationRequest
from glovebox_server.guards.budgets.spending import read_clocks
from tests.unit.test_budget_store import ME, WORST, budget

lines = lines_of([budget(every="run", per="run", calls=10**9, wall_seconds=10**9)], ME)

def spend(number):
    mark = new_mark()
    with database.opened(pathlib.Path(sys.argv[1]), store.SCHEMA, lock_wait=60) as kept:
        for n in range(10**9):
            asked = ReservationRequest(call_id=f"c_{number}_{n}", spender=ME, lines=lines, worst=WORST)
            os.write(1, b"r")
            kept.transact_now(lambda one: store.Ledger(one, read_clocks()).reserve(mark, asked))
            os.write(1, b"R")
            if number == 1 and n == 2:
                os.kill(os.getpid(), signal.SIGSTOP)  # killed here, so that one call surely is in flight
            spent = {"calls": 1, "wall_seconds": 7}
            os.write(1, b"s")
            kept.transact_now(lambda one: store.Ledger(one, read_clocks()).settle(asked.call_id, spent))
            os.write(1, b"S")

number = 0
while sys.stdin.readline():
    number += 1
    child = os.fork()
    if child == 0:
        spend(number)
    os.write(1, f"<{child}>".encode())
    os.waitpid(child, 0)
    os.write(1, b"X")
"""


def test_after_kills_the_sums_are_exact(tmp_path: Path, kills: int) -> None:
    """Reserved or settled as told; of each killed process only the one transaction it was in can be either way."""
    path = tmp_path / "governance" / store.NAME
    lines = lines_of([budget(every="run", per="run", calls=10**9, wall_seconds=10**9)], ME)
    with database.opened(path, store.SCHEMA):
        pass
    command = [sys.executable, "-c", SPENDER, str(path)]
    cwd = Path(__file__).parents[2]
    told, settled, unsure = 0, 0, 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for number in range(kills):
            parent.stdin.write(b"\n")
            parent.stdin.flush()
            heard = b""
            while heard.count(b"S") < 2 or b">" not in heard or (number == 0 and heard.count(b"R") < 3):
                heard += os.read(parent.stdout.fileno(), 4096)
            child = int(heard.partition(b"<")[2].partition(b">")[0])
            time.sleep(number % 20 / 4000)
            os.kill(child, signal.SIGKILL)
            while b"X" not in heard:
                heard += os.read(parent.stdout.fileno(), 4096)
            words = heard.replace(f"<{child}>".encode(), b"").rstrip(b"X").decode()
            told += words.count("R")
            settled += words.count("S")
            unsure += words[-1] in "rs"
        parent.stdin.close()
    with database.opened(path, store.SCHEMA) as kept:
        (lost,) = kept.query_now(lambda one: one.execute("SELECT count(*) FROM reserved").fetchone())
        kept.transact_now(lambda one: store.Ledger(one, read_clocks()).tidy(is_orphan))
        calls = kept.query_now(lambda one: store.Ledger(one, read_clocks()).left(lines))
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("SELECT count(*) FROM reserved").fetchone() == (0,)
        (used, gone) = connection.execute("SELECT sum(calls), sum(lost) FROM usage").fetchone()
    assert gone == lost
    left = {each.what: each.left for each in calls}
    spent = 10**9 - left["calls"]
    # Every call is in the sums once: those that were settled, and those that were in flight.
    assert spent == used
    assert told <= spent <= told + unsure
    assert settled <= spent - gone <= settled + unsure
    assert abs((10**9 - left["wall_seconds"]) - ((spent - gone) * 0.007 + gone * 10)) < 1e-3
    assert gone > 0
