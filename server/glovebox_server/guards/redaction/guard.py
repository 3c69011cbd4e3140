"""Masks secrets and injected keys in results (GB-FILE-11): live output, names and the outcome.

``patterns`` says what a secret looks like; ``detector`` finds the keys that the server holds. Records, files and names
can be masked too. Pure, except for a thread for large texts.
"""

import codecs
import re
import string
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import anyio.to_thread

from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.calls import ToolCall
from glovebox_server.core.call import Call, Show
from glovebox_server.core.rights import Rights
from glovebox_server.guards.redaction.detector import Forms, KeyMasker
from glovebox_server.guards.redaction.patterns import PATTERNS, SHORTEST_SECRET, find_secrets

LOOP_BYTES: Final = 16 * 1024
"""Scanned on the event loop; more is scanned in a thread."""
_PER_TEXT: Final = 64
"""Added to the length of each text: to begin with one takes some microseconds."""
_PER_FORM: Final = 16
"""Added for each form searched: a table of them is made for each answer."""
MAX_HELD: Final = 64 * 1024
"""Characters of live output withheld: beyond it without an end, live output stops."""
_OF_TOKENS: Final = f"{string.ascii_letters}{string.digits}_-./+=%\\"
"""Characters of tokens, and what begins a sign before one: a text that ends in these may end in its beginning."""
_SHOWN: Final = 32
"""Shown characters that are searched again with what follows: a word may span both."""
_SHORTEST_RUN: Final = 16
_LONG: Final = ("PRIVATE KEY", "AKIA", "ASIA", "aws_secret", "AWS_SECRET", "ecretAccessKey")
"""Words of secrets that continue behind a blank or a line end."""
_FIRST_LINE: Final = re.compile(r"PRIVATE KEY(?: BLOCK)?-----")
_GOES_ON: Final = re.compile(
    rf"{_FIRST_LINE.pattern}|(?<![A-Z0-9])A(?:KIA|SIA)[A-Z2-7]{{16}}(?![A-Z0-9])|aws_secret|AWS_SECRET|ecretAccessKey"
)
"""Patterns of their beginnings: ASIA/Tokyo and EURASIA are none."""
_KEY_LINE: Final = re.compile(r"\s*(?:[0-9]+[-:]\s*)?(?=[a-z0-9+/=]*[A-Z])[A-Za-z0-9+/=]{16,}\s*")
"""A line of a private key as its own text; lower case alone is a path or a name."""


_T = TypeVar("_T")
SecretHook = Callable[[ToolCall, Outcome], Awaitable[None]]
"""Receives the raw outcome of a call that may hold a secret."""


async def mask(forms_of: Callable[[Rights], Forms], on_secret: SecretHook | None, call: Call) -> None:
    """Mask the outcome of a call. Outer guards see masked output; observers saw it before."""
    now = call.now
    redact, rights, counts = now.profile.result.redact, now.rights, now.redacted
    live: LiveOutput | None = None

    def values() -> Forms:
        return forms_of(rights) if rights.credentials else {}

    def wrap(show: Show) -> Show:
        nonlocal live
        live = LiveOutput(show, values) if redact == "mask" else None
        return live or (lambda _: None)

    async def transform(outcome: Outcome, normal: bool) -> Outcome:
        if live is not None and normal:  # what it withholds is dropped at any other end
            live.finish()
        raw = outcome
        outcome, secrets = await mask_outcome(outcome, values())
        counts.update(secrets)
        # An observer has scanned already; without a mask there is nothing for a rule to find.
        if on_secret is not None and not call.now.observers and (secrets or _holds_text(raw.value)):
            await on_secret(call.request, raw)
        if redact == "refuse" and counts:
            kinds = ", ".join(f"{kind} × {number}" if number > 1 else kind for kind, number in counts.items())
            call.now.withheld = Refusal(
                rule="result.redact",
                reason=f"The call ran, and its output holds what only a secret looks like ({kinds}).",
                hint="Have it put out less; the profile gives nothing back of such a call.",
            )
        return outcome

    now.mask_name = lambda name: mask_text(name, values(), counts)
    now.wrap_live.append(wrap)
    now.transforms.append(transform)


async def mask_outcome(outcome: Outcome, values: Forms) -> tuple[Outcome, dict[str, int]]:
    """Return the outcome with secrets masked in texts, value and names, and counts by kind."""
    texts = _texts_of(outcome)
    return await _in_time(partial(_mask_outcome, outcome, texts, values), [texts, outcome.value], values)


async def mask_value(value: Any, values: Forms) -> tuple[Any, dict[str, int]]:
    """Return a JSON value with secrets masked in its texts, and counts by kind."""
    return await _in_time(partial(_mask_value, value, values), value, values)


async def mask_content(content: bytes, values: Forms) -> tuple[bytes, dict[str, int]]:
    """Return a file's bytes with secrets masked, and counts by kind; non-UTF-8 is unchanged."""
    text, secrets = await mask_value(content.decode("utf-8", "surrogateescape"), values)
    return (text.encode("utf-8", "surrogateescape"), secrets) if secrets else (content, secrets)


def mask_text(text: str, values: Forms, count: Counter[str]) -> str:
    """Return a text with each secret replaced by ``[secret: …]``; count them by kind."""
    return _TextMasker(values, count).text(text)


class _TextMasker:
    """Masks the secrets in the texts of one answer; its tables are built once."""

    def __init__(self, values: Forms, count: Counter[str]) -> None:
        self._redactor = KeyMasker(values) if values else None
        self._shortest = min(map(len, values), default=0)
        self._count = count

    def text(self, text: str) -> str:
        if self._redactor is not None and len(text) >= self._shortest:
            before, text = self._redactor.replaced, self._redactor.whole(text)
            if more := self._redactor.replaced - before:  # a count of 0 would have the text as it was be shown
                self._count["credential of the server"] += more
        if len(text) < SHORTEST_SECRET:
            return text
        data = text.encode("utf-8", "surrogatepass")
        spans = sorted(find_secrets(data))
        if not spans:
            return text
        pieces, done = list[bytes](), 0
        for start, end, kind in spans:
            if start >= done:
                pieces += [data[done:start], f"[secret: {kind}]".encode()]
                self._count[kind] += 1
            done = max(done, end)
        return b"".join((*pieces, data[done:])).decode("utf-8", "surrogatepass")

    def value(self, value: Any) -> Any:
        """Return a masked JSON value; a private key may have a text for each line."""
        in_lines = any(_FIRST_LINE.search(text) for text in _strings(value))
        return _mapped(value, self._line if in_lines else self.text)

    def _line(self, text: str) -> str:
        if _KEY_LINE.fullmatch(text) is None:
            return self.text(text)
        self._count["private key"] += 1
        return "[secret: private key]"


class LiveOutput:
    """Shows text in which no secret may begin; stops at a word of a multi-line secret.

    What it withholds is in the result too. ``values`` is called for each output: the first key may be used while the
    program runs.
    """

    def __init__(self, show: Callable[[str], None], values: Callable[[], Forms]) -> None:
        self._show, self._values = show, values
        self._known: Forms = {}
        self._wanted: dict[bytes, str] = {}  # only grows: a key that was replaced by another may still be valid
        self._redactor: KeyMasker | None = None
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = self._last = ""
        self._over = False

    def __call__(self, text: str) -> None:
        """Take printed text."""
        if self._over:
            return
        if (values := self._values()) is not self._known:
            self._known = values
            self._wanted.update(values)
            # Only values: the rest of a longer token would be shown.
            self._held = KeyMasker(values).whole(self._held) if values else self._held
            if self._wanted:
                self._redactor = self._redactor or KeyMasker(self._wanted)
        if self._redactor is not None:
            text = self._decode(self._redactor.feed(text.encode("utf-8", "replace")))
        self._pass(text, len((self._held + text).rstrip(_OF_TOKENS)))

    def finish(self) -> None:
        """Show the rest, at a normal end of the program."""
        if not self._over:
            text = self._decode(self._redactor.finish() if self._redactor else b"", final=True)
            self._pass(text, len(self._held + text))

    def _pass(self, text: str, cut: int) -> None:
        held = self._held + text
        if len(held) - cut > MAX_HELD or _goes_on(self._last, held):
            self._over = True
            self._show("\n[the rest is shown when the program ends]\n")
            return
        shown, self._held = held[:cut], held[cut:]
        self._last = (self._last + shown)[-_SHOWN:]
        if shown:
            self._show(mask_text(shown, {}, Counter()))


def _goes_on(last: str, text: str) -> bool:
    """Return whether a multi-line secret begins in a text; searching only its words is faster."""
    both = last + text
    return any(word in both for word in _LONG) and any(match.end() > len(last) for match in _GOES_ON.finditer(both))


_Masked = tuple[_T, dict[str, int]]


async def _in_time(work: Callable[[], _Masked[_T]], texts: Any, values: Forms) -> _Masked[_T]:
    """Do this in a thread if it takes long for these texts; counts no further than needed."""
    left = LOOP_BYTES - _PER_FORM * len(values)
    for text in _strings(texts):
        left -= len(text) + _PER_TEXT
        if left < 0:
            return await anyio.to_thread.run_sync(work)
    return work()


def _mask_value(value: Any, values: Forms) -> _Masked[Any]:
    count: Counter[str] = Counter()
    return _TextMasker(values, count).value(value), dict(sorted(count.items()))


def _texts_of(outcome: Outcome) -> list[Any]:
    """Return all texts of an outcome but its value, as ``_mask_outcome`` puts them back."""
    changes = outcome.changes
    return [
        outcome.stdout.text,
        outcome.stderr.text,
        [(file.name, file.reason) for file in outcome.skipped],
        # A program can write these itself: they come through its own pipe.
        [copy.reason for copy in outcome.shown],
        [blob.shown and blob.shown.reason for blob in outcome.blobs],
        changes and [changes.created, changes.changed, changes.deleted],
    ]


def _mask_outcome(outcome: Outcome, texts: list[Any], values: Forms) -> _Masked[Outcome]:
    whole = "" if values else "\0".join(_strings([texts, outcome.value]))
    if not values and not any(word in whole for word in _WORDS):
        return outcome, {}
    count: Counter[str] = Counter()
    mask = _TextMasker(values, count)
    stdout, stderr, skipped, shown, pictures, changes = _mapped(texts, mask.text)
    made, changed, deleted = map(tuple, changes or ((), (), ()))
    value = mask.value(outcome.value)
    if not count:
        return outcome, {}
    outcome = replace(
        outcome,
        stdout=replace(outcome.stdout, text=stdout),
        stderr=replace(outcome.stderr, text=stderr),
        value=value,
        skipped=tuple(
            replace(file, name=name, reason=reason)
            for file, (name, reason) in zip(outcome.skipped, skipped, strict=True)
        ),
        shown=tuple(replace(copy, reason=reason) for copy, reason in zip(outcome.shown, shown, strict=True)),
        blobs=tuple(
            blob if blob.shown is None else replace(blob, shown=replace(blob.shown, reason=reason))
            for blob, reason in zip(outcome.blobs, pictures, strict=True)
        ),
        changes=outcome.changes and replace(outcome.changes, created=made, changed=changed, deleted=deleted),
    )
    return outcome, dict(sorted(count.items()))


_WORDS: Final = tuple(word.decode() for pattern in PATTERNS for word in pattern.words)


def _strings(value: Any) -> Iterator[str]:
    """Yield every text and key in a value; an empty one for all else, which takes time too."""
    if isinstance(value, str):
        yield value
        return
    yield ""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _holds_text(value: Any) -> bool:
    """Return whether a value has a text long enough for a secret, or for its beginning."""
    return any(len(text) >= _SHORTEST_RUN for text in _strings(value))


def _mapped(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        kept: dict[str, Any] = {}
        for key, each in value.items():
            name = clean(key)
            # Two that are replaced alike stay two.
            kept[f"{name} ({len(kept) + 1})" if name in kept else name] = _mapped(each, clean)
        return kept
    if isinstance(value, list | tuple):
        return [_mapped(item, clean) for item in value]
    return value
