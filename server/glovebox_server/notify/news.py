"""Turns records of the audit log into notifications. Never writes.

Of a call they have ids, names and rules: no argument, no output, and no host that it named.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import dropwhile
from pathlib import Path
from typing import Any, Final, NamedTuple

from glovebox_audit import read
from glovebox_audit.chain import Record
from glovebox_audit.events import ApprovalAnswered, ApprovalRequested, ApprovalWithdrawn, StopMade, WatchAlarm
from glovebox_sandboxes.plural import counted
from glovebox_server.guards.approvals.shown import visible

MOST: Final = 32
"""Records of one look that have a notification each. The first ones of more are summed up."""
FRESH: Final = timedelta(hours=1)
"""Older ones are summed up: it is too late to act on them."""
_NEEDLES: Final = (b'"kind":"approval.', b'"kind":"stop.made"', b'"kind":"watch.alarm"')
"""In the lines of all kinds below: parsing is expensive."""
_OVER: Final = {ApprovalAnswered.kind, ApprovalWithdrawn.kind}
_NOUNS: Final = {ApprovalRequested.kind: "approval request", StopMade.kind: "stop", WatchAlarm.kind: "watch alarm"}


class News(NamedTuple):
    """One notification: a kind of record, ``summary``, ``chain`` or ``test``; and a page of the console."""

    id: str
    about: str
    text: str
    page: str
    end: int | None = None
    """Offset in the log after what it is about."""


def look(directory: Path, at: int) -> tuple[list[News], int]:
    """Return the notifications of the log from offset ``at`` on, and where its whole lines end.

    None is of an approval that was settled meanwhile, or that only the caller's client can give. Raises like
    ``read.opened``.
    """
    found, kinds, settled = deque[tuple[Record, int, int]](maxlen=MOST), Counter[str](), set[object]()
    first: Record | None = None
    with read.opened(directory) as log:
        end = min(at, log.end)
        for file, base, size in log.files_from(max(end, log.start)):
            for begins, line, free in read.raw_lines(file, max(end - base, 0), size):
                end = base + begins + len(line) if line.endswith(b"\n") else end
                record = read.parsed(line)[0] if free and any(each in line for each in _NEEDLES) else None
                if record is not None and record.kind in _OVER and record.data.get("state") != "pending":
                    settled.add(record.data.get("approval"))
                elif record is not None and record.kind in _NOUNS and record.data.get("by") != "client":
                    found.append((record, base + begins, end))
                    kinds[record.kind] += 1
                    first = first or record
    old = (datetime.now(UTC) - FRESH).isoformat()
    fresh = list(dropwhile(lambda each: each[0].time < old, found))
    told = [_news(record, after) for record, _, after in fresh if record.data.get("approval") not in settled]
    if first is not None and (older := kinds - Counter(record.kind for record, *_ in fresh)):
        counts = ", ".join(counted(count, _NOUNS[kind]) for kind, count in sorted(older.items()))
        text = f"Not told at once, since {_clock(datetime.fromisoformat(first.time))}: {counts}."
        after = fresh[0][1] if fresh else end
        told.insert(0, News(f"{first.hash}.{after}", "summary", text, "history", after))
    return told, end


def _news(record: Record, end: int) -> News:
    data: Mapping[str, Any] = defaultdict(str, record.data)
    whose = f"{name(data['tool'])} by {name(data['principal'])}"
    if record.kind == ApprovalRequested.kind:
        until = datetime.fromisoformat(record.time) + timedelta(seconds=data["seconds"] or 0)
        text, page = f"{data['approval']}: a call of {whose} waits for approval until {_clock(until)}.", "waiting"
    elif record.kind == WatchAlarm.kind:
        found = f"{name(data['rule'])} found what it looks for in {name(data['where'])} of {whose}"
        text, page = f"The watch rule {found}. Its action: {data['action']}.", f"call/{data['call']}"
    else:
        what = f"{data['scope']} {name(data['name'])}" if data["name"] else "everything"
        text, page = f"{data['stop']}: {name(data['by'])} stopped {what}: {name(data['because'], 500)}", "now"
    return News(record.hash, record.kind, text, page, end)


def name(text: object, most: int = 128) -> str:
    """Return a stranger's text, every character visible, in backticks: Slack makes no link or mention of it."""
    whole = str(text)
    return f"`{visible(whole[:most]).replace('`', '⟪U+0060⟫')}{'…' * (len(whole) > most)}`"


def _clock(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
