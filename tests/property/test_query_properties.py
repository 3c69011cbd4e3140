"""Whatever happened to a log between two queries, they find what reading all of it finds."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures import segments
from tests.fixtures.draws import draws

from glovebox_audit import chain
from glovebox_audit.query import ask, calls
from glovebox_audit.query.ask import Told
from glovebox_audit.query.index import NAME, Filters

TOLD = Told(say=lambda _: None, progress=lambda _done, _most: None)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 6)),
        st.tuples(st.just("remove"), st.integers(1, 3)),
        st.tuples(st.just("tear"), st.just(0)),
        st.tuples(st.just("spoil"), st.integers(0, 30_000)),
        st.tuples(st.just("ask"), st.just(0)),
    ),
    min_size=2,
    max_size=8,
)


def read_whole(directory: Path) -> dict[str, str]:
    """Each call that begins in the log and how it came out, by reading all of it."""
    found: dict[str, str] = {}
    for line in segments.all_lines(directory):
        try:
            record = chain.parse(line)
        except chain.EvidenceError:
            continue
        outcome = calls.outcome(record.kind, record.data)
        if record.call_id and outcome and (record.kind == "call.decided" or record.call_id in found):
            found[record.call_id] = outcome
    return found


def answered(directory: Path, **filters: str) -> dict[str, str]:
    """The same by a query."""
    answer = ask.ask(directory, Filters(**filters), 1000, TOLD)  # type: ignore[arg-type]  # of this class
    assert (answer.more, answer.damaged) == (False, 0)
    return {call.call_id: call.outcome for call in answer.calls}


@draws(40)
@given(steps=STEPS)
def test_a_query_finds_what_reading_everything_finds(steps: list[tuple[str, int]]) -> None:
    """Over rotation, retention, torn lines, and an index of which any byte was changed."""
    with tempfile.TemporaryDirectory() as place:
        directory, count = Path(place) / "audit", 3
        segments.fill(directory, count)
        for step, number in steps:
            sealed = sorted((directory / "segments").glob("*.jsonl"))
            index = directory / NAME
            if step == "write":
                segments.fill(directory, number, first=count)
                count += number
            elif step == "remove":
                for each in sealed[:number]:
                    each.unlink()
            elif step == "tear":
                with (directory / "audit.jsonl").open("ab") as log:
                    log.write(b'{"call_id":"c_torn","da')
            elif step == "spoil" and index.exists():
                content = bytearray(index.read_bytes())
                content[number % len(content)] ^= 0xFF
                index.write_bytes(content)
                whole = read_whole(directory)
                if answered(directory) != whole or answered(directory, text="run_python") != whole:
                    index.unlink()  # one that leaves something out is not noticed
            assert answered(directory) == read_whole(directory)
        assert answered(directory, text="run_python") == read_whole(directory)
