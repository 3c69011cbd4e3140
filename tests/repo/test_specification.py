"""docs/operate/specification.csv: each promise names what holds it, and what is not met stays visible."""

import csv
import io

from tests.claims import ROOT, functions, modules
from tests.conformance.whole_calls import case as call

from glovebox_sandboxes.conformance import case

TABLE = (ROOT / "docs/operate/specification.csv").read_text()
CONTROLS = {"test_wire.py": "test_w.py", "case output-depth": "case none", "run by hand with tests/tools/in_vm": ""}
CASES = {known.id for known in (*case.load(), *call.load())}


def problems(table: str) -> list[str]:
    """Return what is wrong: no bound, nobody that holds it and no word about that, or a holder that does not exist."""
    _, *rows = csv.reader(io.StringIO(table), strict=True)
    wrong = [f"{row}: incomplete" for row in rows if not all(row[:3]) or not any(row[3:])]
    for _, promise, _, held_by, _ in rows:
        wrong += [f"{promise}: there is no {holder}" for holder in held_by.split("; ") if not _exists(holder)]
    return wrong


def _exists(holder: str) -> bool:
    if holder.startswith("case "):
        return holder.removeprefix("case ") in CASES
    file, _, function = holder.partition("::")
    if file.startswith("test_"):
        return file in modules() and (not function or function in functions(file))
    return (ROOT / holder).exists()


def test_every_promise_has_a_bound_and_something_that_holds_it() -> None:
    """A test, a case, a benchmark or the constant itself; or the row says that there is none."""
    assert TABLE.count("\n") > 100
    assert problems(TABLE) == []


def test_a_promise_that_nothing_holds_is_found() -> None:
    """The control: a test or a case that does not exist, and a row without either or a reason."""
    for old, new in CONTROLS.items():
        assert len(problems(TABLE.replace(old, new, 1))) == 1, old
