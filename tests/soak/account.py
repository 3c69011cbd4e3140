"""Holds an audit log against what callers saw: each call once, with exactly one end. No I/O."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from glovebox_audit.chain import Record

ENDS = ("call.finished", "call.cancelled", "call.failed", "call.lost")
#: Seconds around a full disk in which a record may be missing: a call's last words wait for the log's writer.
NEAR = 2.0
MAX_TOLD = 10


@dataclass(slots=True)
class Account:
    """Sums over all calls."""

    sent: int = 0
    recorded: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    """By the kind of the record that ended the call; ``denied`` for those that never ran. All together."""
    never_arrived: int = 0  # the caller left before the server had the call
    not_recorded_on_a_full_disk: int = 0  # the caller was told so, and nothing ran
    problems: list[str] = field(default_factory=list)


def accounted(records: Sequence[Record], answers: Mapping[str, str], windows: Sequence[tuple[float, float]]) -> Account:
    """Account for every call."""
    account = Account(sent=len(answers))
    of_call: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.call_id is not None:
            of_call[record.call_id].append(record)
    account.recorded = len(of_call)
    ended: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    problems: list[str] = []
    for call, found in of_call.items():
        seen[_tag(found[0])] += 1
        # Any other denial is of a call that the run needed.
        end = _end([record.kind for record in found], denied=found[0].data.get("rule") == "limits.wall_seconds")
        caller = answers.get(_tag(found[0]), "")
        if end and (end != "call.lost" or (_overlaps(found[:-1], windows) and _no_result(caller))):
            ended[end] += 1
        else:
            kinds = [record.kind for record in found]
            problems.append(f"{call} has the records {kinds}; its caller saw: {caller[:200]}")
    problems += [f"{tag!r} is recorded {times} times" for tag, times in seen.items() if times > 1]
    problems += [f"{tag!r} was never sent" for tag in seen if tag not in answers]
    for tag in answers.keys() - seen.keys():
        if answers[tag] == "left":
            account.never_arrived += 1
        elif "Audit unavailable" in answers[tag]:
            account.not_recorded_on_a_full_disk += 1
        else:
            problems.append(f"{tag!r} is in no record; its caller saw: {answers[tag][:200]}")
    account.ended = dict(ended)
    account.problems = problems[:MAX_TOLD]
    return account


def _end(kinds: Sequence[str], *, denied: bool) -> str:
    """How a call ended, from the kinds of its records; empty where these are not what one call leaves."""
    if kinds.count("call.decided") != 1 or kinds[0] != "call.decided":
        return ""
    if denied:
        return "denied" if len(kinds) == 1 else ""
    ends = [kind for kind in kinds if kind in ENDS]
    # What is lost has no receipt; everything else has one.
    wanted = ends if ends == ["call.lost"] else [*ends, "receipt.signed"]
    receipts = kinds.count("receipt.signed") == wanted.count("receipt.signed")
    return ends[0] if len(ends) == 1 and receipts and list(kinds[-len(wanted) :]) == wanted else ""


def _no_result(answer: str) -> bool:
    return answer == "left" or answer.startswith("error: ") or "unavailable (call c_" in answer


def _tag(decided: Record) -> str:
    found = re.match(r"number = -?\d+\n", str(decided.data.get("arguments", {}).get("code", "")))
    return found[0] if found else ""


def _overlaps(found: Sequence[Record], windows: Sequence[tuple[float, float]]) -> bool:
    """Whether the disk was full after these records of a call: while its next one was due."""
    last = datetime.fromisoformat(found[-1].time).timestamp()
    return any(end + NEAR >= last and began - 12 <= last for began, end in windows)
