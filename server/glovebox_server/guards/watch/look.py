"""Scans one call's output as it comes. It records and stops nothing: ``watch`` does.

Bounded: every byte is scanned once, in some 30 ms per MiB; only a possible beginning of a marker is kept.
"""

import json
import re
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.guards.redaction.detector import Detector, FormIndex
from glovebox_server.guards.redaction.patterns import SHORTEST_SECRET, find_secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a watch rule detected."""

    rule: str
    where: str
    """In what: ``arguments``, ``stdout``, ``stderr``, ``value``, ``picture``, ``file``, ``url`` or ``request``."""
    what: str
    """The id of a canary, a kind of secret, a count or a host; never a marker or a secret."""


PLACEHOLDER: Final = "placeholder:"
"""Prefix of credentials' names among the needles; canaries' ids have no colon."""


def found_of(where: str, id: str) -> Finding:  # noqa: A002 - what canaries have
    """Return the finding of a canary or of a credential's placeholder."""
    if id.startswith(PLACEHOLDER):
        return Finding(rule="placeholder", where=where, what=id.removeprefix(PLACEHOLDER))
    return Finding(rule="canary", where=where, what=id)


Piece = tuple[str, bytes]

LIVE_BYTES = 1 << 20
"""Live output that is shown if there are canaries: it is scanned on the event loop."""


class Look:
    """The findings of one call. Files may be scanned in other threads; live output on the event loop."""

    def __init__(self, needles: FormIndex, *, secrets: bool, live: bool = True) -> None:
        """Take the needles; ``live`` output is shown before all of it was scanned."""
        self._needles = needles
        self._secrets = secrets
        self._shows = live
        self._live = Detector(needles) if needles.names else None
        self._printed = 0
        self.findings: list[Finding] = []
        self.examine: Callable[[Outcome, Look], Coroutine[Any, Any, None]]
        """Examines the outcome of the call that it observes; set by ``watch``."""

    async def ended(self, outcome: Outcome) -> None:
        """Examine the whole outcome. Does not return if that stops the call."""
        await self.examine(outcome, self)

    def printed(self, show: Callable[[str], None]) -> Callable[[bytes], None]:
        """Wrap ``show`` for live output: from a canary on nothing is shown."""

        def look(data: bytes) -> None:
            if not self._shows:
                return
            if self._live is not None:
                self._printed += len(data)
                if self._printed > LIVE_BYTES or self.findings:
                    return
                if canary := self._live.feed(data):
                    self.findings.append(found_of("stdout", canary))
                    return
            show(data.decode("utf-8", "replace"))

        return look

    @property
    def is_complete(self) -> bool:
        """Return whether live output was passed on to its end."""
        return not self.findings and self._printed <= LIVE_BYTES

    def file(self) -> Callable[[bytes], None] | None:
        """Return a consumer of one output file, its name first; None if files are not searched."""
        if not self._needles.names:
            return None
        scanner = Detector(self._needles)

        def look(data: bytes) -> None:
            if canary := scanner.feed(data):
                self.findings.append(found_of("file", canary))

        return look

    def pieces(self, outcome: Outcome) -> list[Piece]:
        """Return all output of a job except files; nothing if nothing is searched."""
        if not self._needles.names and not self._secrets:
            return []
        texts = [("stdout", outcome.stdout.text), ("stderr", outcome.stderr.text)]
        found = [(where, _encoded(text)) for where, text in texts if text]
        if outcome.value is not None:
            found.append(("value", of_value(outcome.value)))
        if self._needles.names:
            changed = outcome.changes
            names = () if changed is None else (*changed.created, *changed.changed, *changed.deleted)
            found += [("file", _encoded(name)) for name in (*(each.name for each in outcome.skipped), *names)]
            reasons = [*(file.reason for file in outcome.skipped), *(copy.reason for copy in outcome.copies)]
            found += [("value", _encoded(sentence)) for sentence in (*outcome.problems, *reasons)]
            pictures = [blob.data for blob in outcome.blobs]
            pictures += [copy.data for copy in outcome.copies]
            found += [("picture", data) for data in pictures]
        return found

    def search(self, pieces: Iterable[Piece]) -> None:
        """Scan pieces in order; what is split between two of them is found too."""
        scanner = Detector(self._needles) if self._needles.names else None
        for where, data in pieces:
            if scanner is not None and (canary := scanner.feed(data)):
                self.findings.append(found_of(where, canary))
            looks = self._secrets and where in _SECRETS_IN and len(data) >= SHORTEST_SECRET
            if looks and (secret := next(find_secrets(data), None)):
                self.findings.append(Finding(rule="secrets", where=where, what=secret[2]))


def of_value(value: Any) -> bytes:
    """Encode a value as JSON without JSON's escapes: their letters would split a marker."""
    text = _encoded(json.dumps(value, ensure_ascii=False, default=str))
    for escape in _ESCAPES:  # from a pair of backslashes on; ten times as fast as one pattern
        text = text.replace(escape, b" ")
    return _CONTROL.sub(b" ", text)


def of_url(asked: str) -> list[Piece]:
    """Return a requested URL, as written and as decoded."""
    data = _encoded(asked)
    return [("url", data), ("url", unquote_to_bytes(data))] if b"%" in data else [("url", data)]


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")


_SECRETS_IN = frozenset({"stdout", "stderr", "value"})
_ESCAPES: Final = tuple(f"\\{each}".encode() for each in '\\"nrtbf')
_CONTROL: Final = re.compile(rb"\\u00[01][0-9a-f]")
