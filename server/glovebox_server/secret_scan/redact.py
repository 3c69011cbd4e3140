"""Puts a word in the place of each secret in what a call gives back. Pure but for a thread for long outputs.

``patterns`` says what a secret looks like; of the values that the server itself holds every way of writing them is
looked for (``egress.credentials.redact``).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import anyio.to_thread

from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.egress.credentials.redact import Forms, Redactor, ValueSpread
from glovebox_server.secret_scan.patterns import PATTERNS, found

LOOP_BYTES: Final = 16 * 1024
"""What is looked through on the event loop; more is in a thread."""
MAX_HELD: Final = 64 * 1024
"""Characters of live output that are held back: after more without an end nothing is shown live any more."""

_VALUE: Final = re.compile(r"\[credential [^\]\n]{1,64}\]")
_OF_TOKENS: Final = f"{string.ascii_letters}{string.digits}_-./+="
"""Characters of tokens: what ends in these may be the beginning of one."""
_SHOWN: Final = 32
"""Characters that were shown and are looked at again with what follows: a word may lie across."""
_LONG: Final = ("PRIVATE KEY", "AKIA", "ASIA", "aws_secret", "AWS_SECRET", "ecretAccessKey")
"""Words of secrets that go on behind a blank or the end of a line."""


async def redacted(outcome: Outcome, values: Forms) -> tuple[Outcome, dict[str, int]]:
    """Return the same outcome without secrets in its texts and its value, and how many of each kind there were."""
    if sum(map(len, _texts_of(outcome))) > LOOP_BYTES:
        return await anyio.to_thread.run_sync(_redacted, outcome, values)
    return _redacted(outcome, values)


def text_redacted(text: str, values: Forms, count: Counter[str]) -> str:
    """Return a text with ``[secret: …]`` in the place of each secret, which are counted by kind."""
    if values:
        text = _without(text, values, count)
    data = _as_bytes(text)
    spans = sorted(found(data))
    if not spans:
        return text
    pieces, done = list[bytes](), 0
    for start, end, kind in spans:
        if start >= done:
            pieces += [data[done:start], f"[secret: {kind}]".encode()]
            count[kind] += 1
        done = max(done, end)
    return _as_text(b"".join((*pieces, data[done:])))


def _without(text: str, values: Forms, count: Counter[str]) -> str:
    redactor, before = Redactor(values), len(_VALUE.findall(text))
    try:
        text = _as_text(redactor.feed(_as_bytes(text)) + redactor.finish())
    except ValueSpread:  # what may be a value stands in more than is looked at together
        text = "[credential that may be spread over this text]"
    if (more := len(_VALUE.findall(text)) - before) > 0:
        count["credential of the server"] += more
    return text


def shown_live(show: Callable[[str], None], redact: str, values: Forms) -> Callable[[str], None]:
    """Stands before whoever shows what a program prints while it runs; what it holds back is in the result.

    Args:
        show: shows it.
        redact: the profile's choice.
        values: what the server holds.
    """
    if redact == "none":
        return show
    return _Live(show, values) if redact == "mask" else lambda _: None


class _Live:
    """Shows what no secret may begin in; from a word on that a secret of several lines has, nothing more."""

    def __init__(self, show: Callable[[str], None], values: Forms) -> None:
        self._show = show
        self._redactor = Redactor(values) if values else None
        self._held = self._last = ""
        self._over = False

    def __call__(self, text: str) -> None:
        """Take what was printed."""
        if self._over:
            return
        if self._redactor is not None:
            try:
                text = self._redactor.feed(text.encode("utf-8", "replace")).decode("utf-8", "replace")
            except ValueSpread:
                self._over = True
                return
        held = self._held + text
        cut = len(held.rstrip(_OF_TOKENS))
        self._over = len(held) - cut > MAX_HELD or any(word in self._last + held for word in _LONG)
        if self._over:
            return
        shown, self._held = held[:cut], held[cut:]
        self._last = (self._last + shown)[-_SHOWN:]
        if shown:
            self._show(text_redacted(shown, {}, Counter()))


def value_redacted(value: Any, values: Forms) -> Any:
    """Return a JSON value without secrets in its texts."""
    return _mapped(value, lambda text: text_redacted(text, values, Counter()))


def _redacted(outcome: Outcome, values: Forms) -> tuple[Outcome, dict[str, int]]:
    if not values and not _suspicious("\0".join(_texts_of(outcome))):
        return outcome, {}
    count: Counter[str] = Counter()

    def clean(text: str) -> str:
        return text_redacted(text, values, count)

    stdout, stderr = clean(outcome.stdout.text), clean(outcome.stderr.text)
    value = _mapped(outcome.value, clean)
    if not count:
        return outcome, {}
    outcome = replace(
        outcome,
        stdout=replace(outcome.stdout, text=stdout),
        stderr=replace(outcome.stderr, text=stderr),
        value=value,
    )
    return outcome, dict(sorted(count.items()))


_WORDS: Final = tuple(word.decode() for pattern in PATTERNS for word in pattern.words)


def _suspicious(text: str) -> bool:
    """Whether any pattern's word is there: most outputs have none."""
    return any(word in text for word in _WORDS)


def _texts_of(outcome: Outcome) -> list[str]:
    return [outcome.stdout.text, outcome.stderr.text, *_strings(outcome.value)]


def _strings(value: Any) -> Iterator[str]:
    """Every text in a value, and every key."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _mapped(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(key): _mapped(each, clean) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(each, clean) for each in value]
    return value


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _as_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
