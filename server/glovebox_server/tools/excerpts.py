"""Cuts what a program put out to what a result holds. Pure: the broker keeps the whole as artifacts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_sandboxes.contract.pictures import share

MAX_OUTPUT: Final = 16 * 1024
"""Bytes of UTF-8 of a program's output in ``content``, and again in ``structuredContent``: about 5,000 tokens each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The first three quarters and the last quarter of the bytes that a result holds of one text."""

    text: str
    shown: int
    """Bytes of the whole that are in it."""
    whole: bytes


def cut_output(outcome: Outcome) -> tuple[Outcome, Mapping[str, Excerpt]]:
    """Return the outcome with at most ``MAX_OUTPUT`` bytes of output, and what was cut of it by name.

    Short texts leave the others what they do not need.
    """
    value = outcome.value if isinstance(outcome.value, dict) else {}
    texts = {"stdout": outcome.stdout.text, "stderr": outcome.stderr.text, "value": value.get("value")}
    whole = {name: text.encode("utf-8", "replace") for name, text in texts.items() if isinstance(text, str)}
    room = share(map(len, whole.values()), MAX_OUTPUT)
    excerpts = {name: _excerpt(data, room) for name, data in whole.items() if len(data) > room}
    if not excerpts:
        return outcome, {}
    kept = {name: excerpt.text for name, excerpt in excerpts.items()}
    cut = replace(
        outcome,
        stdout=replace(outcome.stdout, text=kept.get("stdout", outcome.stdout.text)),
        stderr=replace(outcome.stderr, text=kept.get("stderr", outcome.stderr.text)),
        value={**value, "value": kept["value"]} if "value" in kept else outcome.value,
    )
    return cut, excerpts


def _excerpt(data: bytes, room: int) -> Excerpt:
    tail_bytes = room // 4
    # Half a character at an edge is left out.
    head, tail = (
        part.decode("utf-8", "ignore") for part in (data[: room - tail_bytes], data[len(data) - tail_bytes :])
    )
    shown = len(head.encode()) + len(tail.encode())
    return Excerpt(text=f"{head}\n[… {len(data) - shown} bytes left out …]\n{tail}", shown=shown, whole=data)
