"""What came of one call of a case, and everything in it that is not as the case says."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.conformance.whole_calls.case import TrialCall

from glovebox_audit.chain import Record
from glovebox_audit.events import RequestsRefused
from glovebox_server.calls import CallResult, Text
from glovebox_server.tools.base import Tool

_ENDINGS = ("call.finished", "call.cancelled", "call.failed")
_DENIED = "call.decided"


@dataclass(slots=True)
class Seen:
    """One call, as its caller and its operator see it."""

    call_id: str = ""
    tool: str = ""
    result: CallResult | None = None
    told: str = ""
    """What the caller is told instead of a result."""
    how: str = ""
    """A class of ``failures``, ``profile_error``, ``cancelled`` or an HTTP status where there is no result."""
    records: list[Record] = field(default_factory=list)
    artifacts: dict[str, str] = field(default_factory=dict)
    uris: dict[str, str] = field(default_factory=dict)
    handle: str = ""
    """Of its run, as the caller was given it over HTTP."""
    shared: list[str] = field(default_factory=list)
    """Names of artifacts that another caller could fetch."""
    promotions: list[str] = field(default_factory=list)
    """What came of each step that is about the folder."""
    folder: dict[str, str] = field(default_factory=dict)
    printed: str = ""
    verified: str = ""
    """What whoever verifies what is shown of it is told."""
    left: tuple[str, ...] = ()
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def refusal(self) -> Mapping[str, Any]:
        """Why policy refused it; empty where it did not."""
        return (self.result.structured.get("refused") if self.result else None) or {}

    @property
    def question(self) -> str:
        """Id of the question that was put about it, or answered; empty where there is none."""
        found = [record.data.get("approval") for record in self.records if record.kind == _DENIED]
        return str(next(filter(None, found), ""))


def incomplete(tool: Tool, result: CallResult) -> list[str]:
    """What its result lacks, or tells in one of its two forms alone."""
    try:
        tool.result.model_validate_json(json.dumps(dict(result.structured)))
    except ValueError as problem:
        return [f"the structured result does not fit the tool's model: {problem}"]
    text = shown(result)
    printed = (result.structured.get("stdout") or {}).get("text", "")
    refusal = (result.structured.get("refused") or {}).get("reason", "")
    whole = printed in text and refusal in text
    return [] if whole else ["the text does not hold what the structured result does"]


def shown(result: CallResult | None) -> str:
    """The text that a model reads."""
    return "\n".join(each.text for each in result.content if isinstance(each, Text)) if result else ""


def order(records: Sequence[Record]) -> list[str]:
    """What is wrong in which records there are of a call."""
    kinds = [record.kind for record in records]
    if not kinds:
        return []
    found = [] if kinds[0] == _DENIED else [f"the first record is {kinds[0]}"]
    endings = [kind for kind in kinds if kind in _ENDINGS]
    wanted = 1 if records[0].data.get("effect") == "allow" else 0
    if len(endings) != wanted:
        found.append(f"there are {len(endings)} last records instead of {wanted}: {kinds}")
    return found


def differences(wanted: TrialCall, seen: Seen) -> list[str]:
    """Everything that is not as the case says."""
    found = _ending(wanted, seen)
    structured = dict(seen.result.structured) if seen.result else {}
    for name, pattern in wanted.result.items():
        text = _plain(_at(structured, name))
        if not re.fullmatch(pattern, text, re.DOTALL):
            found.append(f"{name} of the result is {text[:500]!r} and not {pattern}")
    if wanted.text and not re.search(wanted.text, shown(seen.result)):
        found.append(f"its text is {shown(seen.result)[:500]!r} and does not match {wanted.text}")
    if wanted.artifacts is not None:
        found += _files(wanted.artifacts, seen.artifacts)
    if not re.search(wanted.verified, seen.verified):
        found.append(f"whoever verifies is told {seen.verified[:500]!r} and not {wanted.verified}")
    kinds = " ".join(record.kind for record in seen.records)
    if wanted.audit and not re.fullmatch(wanted.audit, kinds):
        found.append(f"its records are {kinds!r} and not {wanted.audit}")
    return [*found, *_recorded(wanted.records, seen.records), *_waited(wanted.waits, seen)]


def of_all(wanted: TrialCall, seen: Sequence[Seen]) -> list[str]:
    """The same of a call that was made several times."""
    if wanted.through is None:
        return [problem for each in seen for problem in differences(wanted, each)]
    refused = [each for each in seen if each.refusal]
    through = sum(each.result is not None and not each.refusal and not each.how for each in seen)
    found = [] if through == wanted.through else [f"{through} of {len(seen)} got through instead of {wanted.through}"]
    found += [f"it was told {each.how}: {each.told[:500]!r}" for each in seen if each.how and not each.refusal]
    return found + [problem for each in refused for problem in differences(wanted, each)]


def refused_requests(wanted: Mapping[str, int], records: Sequence[RequestsRefused]) -> list[str]:
    """What is not as the case says in the records of requests that became no calls."""
    rows = [(row["rule"], row["count"]) for record in records for row in record.refused]
    if len(records) == bool(wanted) and sorted(rows) == sorted(wanted.items()):
        return []
    return [f"{len(records)} records count {rows} refused requests, and not one {dict(wanted)}"]


def _ending(wanted: TrialCall, seen: Seen) -> list[str]:
    found = []
    if seen.how in ("refused", "unknown tool"):  # no case is about these: it was not tried
        found.append(f"it was not begun: {seen.told[:500]!r}")
    for how in ("invalid", "unavailable", "profile_error"):
        pattern = getattr(wanted, how)
        if bool(pattern) != (seen.how == how) or (pattern and not re.search(pattern, seen.told)):
            found.append(f"it was told {seen.how or 'nothing'}: {seen.told[:500]!r} instead of {how}: {pattern!r}")
    if seen.refusal.get("rule", "") != wanted.refused:
        found.append(f"it was refused by {seen.refusal or 'nothing'} instead of {wanted.refused or 'nothing'}")
    if bool(wanted.cancel) != (seen.how == "cancelled"):
        found.append(f"it was {'not ' if wanted.cancel else ''}cancelled")
    if (str(wanted.status) if wanted.status else "") != (seen.how if seen.how.isdecimal() else ""):
        found.append(f"it was answered with {seen.how or 'a result'} instead of {wanted.status or 'a result'}")
    if wanted.failed is not None and (seen.result is None or seen.result.failed != wanted.failed):
        found.append(f"its result {'does not say' if wanted.failed else 'says'} that it failed")
    return found


def promoted(wanted: TrialCall, seen: Seen) -> list[str]:
    """What is not as the case says in the folder that is promoted into."""
    came = " ".join(seen.promotions)
    found = [] if came == wanted.promotions else [f"promoting came to {came!r} instead of {wanted.promotions!r}"]
    return found if wanted.folder is None else [*found, *_files(wanted.folder, seen.folder)]


def _files(wanted: Mapping[str, str], fetched: Mapping[str, str]) -> list[str]:
    if set(wanted) != set(fetched):
        return [f"the files are {sorted(fetched)} instead of {sorted(wanted)}"]
    return [
        f"{name!r} holds {fetched[name][:200]!r} and not {pattern}"
        for name, pattern in wanted.items()
        if not re.fullmatch(pattern, fetched[name], re.DOTALL)
    ]


def _recorded(wanted: Mapping[str, str], records: Sequence[Record]) -> list[str]:
    found = []
    for place, pattern in wanted.items():
        kind, _, name = place.partition("/")
        texts = [_plain(_at(record.data, name)) for record in records if record.kind == kind]
        if not any(re.fullmatch(pattern, text, re.DOTALL) for text in texts):
            found.append(f"{place} of the records is {texts} and not {pattern}")
    return found


def _waited(seconds: float, seen: Seen) -> list[str]:
    decided = [datetime.fromisoformat(record.time) for record in seen.records if record.kind == _DENIED]
    if not seconds or (decided and (decided[0] - seen.began).total_seconds() >= seconds):
        return []
    return [f"it was decided at {decided}, less than {seconds:g} s after {seen.began}"]


def _at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
