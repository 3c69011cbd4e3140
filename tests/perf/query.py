"""How long questions to a large log take: `python -m tests.perf.query --directory DIR`, which is there the next time.

The records are real ones, of a call with a file and of one that was refused, with other ids, names, hosts and digests;
written by the log's own writer, with its segments.
"""

import argparse
import functools
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.perf.machine import ROOT

from glovebox_audit import chain, read
from glovebox_audit.chain import Draft, Record
from glovebox_audit.events import CallDecided, CallFinished
from glovebox_audit.file import LogFile
from glovebox_audit.query import ask
from glovebox_audit.query.index import NAME, Filters
from glovebox_audit.segments.rotation import Rotation
from glovebox_server.receipts.keys import Signer

EARLIER = ROOT / "tests/fixtures/earlier_log/audit"
RECORDS = 1_000_000
ROUNDS = 20
_BATCH = 500
_CLIENTS = ("Claude Code", "Cursor", "Visual Studio Code", "claude-desktop")
_HOSTS = ("docs.python.org", "example.com", "numpy.org", "pandas.pydata.org")
_WORDS = ("sales", "report", "plot", "table", "model", "result", "daily", "north", "south", "forecast")


def _templates() -> tuple[list[Record], Record]:
    """The records of a call that ran, and that of one that was refused."""
    found = [line.record for line in read.tail(EARLIER, 100) if line.record is not None and line.record.call_id]
    refused = next(each for each in found if each.data.get("effect") == "deny")
    ran = next(each for each in found if each.data.get("effect") == "allow")
    return [each for each in found if each.call_id == ran.call_id], refused


def _call(number: int, chosen: random.Random, ran: list[Record], refused: Record) -> list[Draft]:
    """The drafts of one call."""
    call_id = f"c_{number:08x}" + hashlib.sha256(b"%d" % number).hexdigest()[:18]
    whose = {
        "tool": chosen.choice(("run_python", "run_python", "read_workspace_file", "search_workspace")),
        "principal": f"token:{chosen.choice(('default', 'ci', 'alice', 'bob'))}",
        "client": chosen.choice(_CLIENTS),
    }
    if number % 4 == 0:
        reason = f"No rule of this profile names '{chosen.choice(_HOSTS)}'. Asked for host h{number}.example:443."
        whose["tool"] = "fetch_url"
        return [_draft(refused, call_id, whose, reason=reason, arguments_digest=_digest(number))]
    drafts: list[Draft] = []
    for each in ran:
        told: dict[str, object] = {}
        if each.kind == CallDecided.kind:
            told = {"arguments_digest": _digest(number)}
        elif each.kind == CallFinished.kind:
            told = {"exit_code": int(number % 10 == 1), "elapsed_ms": chosen.randrange(1, 30_000) / 8}
        elif each.kind == "artifact.collected":
            name = f"{chosen.choice(_WORDS)}/{chosen.choice(_WORDS)}-{number}.csv"
            told = {"name": name, "sha256": _digest(number)[7:], "uri": f"artifact://{_digest(-number)[7:39]}"}
        drafts.append(_draft(each, call_id, whose, **told))
    return drafts


def _draft(record: Record, call_id: str, whose: dict[str, str], **told: object) -> Draft:
    data = {**record.data, **whose, **told}
    return Draft(kind=record.kind, call_id=call_id, data=data, encoded=chain.canonical(data))


def _digest(number: int) -> str:
    return "sha256:" + hashlib.sha256(b"d%d" % number).hexdigest()


def write(state: Path, records: int, together: int = _BATCH) -> float:
    """Write a log of that many records, so many at once or those of a call; return the seconds of the longest write."""
    ran, refused = _templates()
    chosen, made, batch, call, longest = random.Random(1), 0, list[Draft](), 0, 0.0  # noqa: S311 - the same each time
    log = LogFile(state / "audit", "s_perf", Rotation(signer=Signer.load(state)))
    while made < records:
        call += 1
        batch += _call(call, chosen, ran, refused)
        if len(batch) >= together:
            began = time.perf_counter()
            made += len(log.commit(batch))
            longest = max(longest, time.perf_counter() - began)
            batch.clear()
    log.close()
    return longest


QUESTIONS: dict[str, Filters] = {
    "the newest": Filters(),
    "--tool run_python": Filters(tools=("run_python",)),
    "--principal token:ci --client Cursor --outcome failed": Filters(
        principals=("token:ci",), clients=("Cursor",), outcomes=("failed",)
    ),
    "--outcome lost (none)": Filters(outcomes=("lost",)),
    "--outcome running --tool fetch_url (none)": Filters(outcomes=("running",), tools=("fetch_url",)),
    "--grep of one call": Filters(text="h400.example"),
    "--grep of one digest": Filters(text=_digest(401)),
    "--grep of a twentieth": Filters(text="forecast/"),
    "--grep of every call": Filters(text="profile"),
    "--grep of every call, --outcome lost (none)": Filters(text="profile", outcomes=("lost",)),
    "--grep of none": Filters(text="no such text"),
}


def _quiet(_: str) -> None:
    """Nobody is told."""


def _forget(path: Path) -> None:
    """Have the kernel forget what it holds of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def timed(act: Callable[[], object]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure(directory: Path, rounds: int) -> Iterator[str]:
    """Ask every question, cold and warm."""
    told = ask.Told(say=print, progress=lambda _done, _most: None)
    index = directory / NAME
    index.unlink(missing_ok=True)
    head = read.head(directory)
    yield f"{head.seq:,} records, {head.size / 2**30:.2f} GiB"
    yield f"index made in {timed(lambda: ask.ask(directory, Filters(), 1, told)):.1f} s"
    yield f"index: {index.stat().st_size / 2**20:.0f} MiB"
    for name, filters in QUESTIONS.items():
        _forget(index)
        act = functools.partial(ask.ask, directory, filters, 20, told)
        cold = timed(act)
        warm = sorted(timed(act) for _ in range(rounds))
        found = ask.ask(directory, filters, 20, told)
        shown = f"{len(found.calls)}{'+' if found.more else ''}"
        yield f"{name}: {shown} calls, cold {cold * 1000:.0f} ms, warm {warm[len(warm) // 2] * 1000:.0f} ms"
    first = ask.ask(directory, replace(Filters(), text="h4.example"), 1, told).calls[0].call_id
    yield f"show of an old call: {timed(lambda: ask.records(directory, first, told)) * 1000:.0f} ms"


def main() -> None:
    """Write where there is nothing yet, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="State directory to keep the log in; else a temporary one.")
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    with TemporaryDirectory() as temporary:
        state: Path = given.directory or Path(temporary) / "state"
        if not (state / "audit").exists():
            print(f"written in {timed(lambda: write(state, given.records)):.0f} s")  # noqa: T201 - a program
        for line in measure(state / "audit", given.rounds):
            print(line, flush=True)  # noqa: T201 - a program


if __name__ == "__main__":
    main()
