"""Renders an approval request: one complete text, in which nothing hides. Pure.

Elicitation and ``glovebox approvals show`` use it. What the caller wrote can neither draw over it, reorder it, nor
imitate a line of the server: it stands behind a bar, and invisible characters are written as ``⟪U+202E⟫``. No line is
wider than ``COLUMNS``, so that none continues out of view.
"""

import difflib
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.cells import cell_len, chop_cells

from glovebox_audit.printable import UNSEEN
from glovebox_profiles.explain import explain
from glovebox_profiles.model import Profile
from glovebox_sandboxes.plural import counted
from glovebox_server.guards.approvals.question import Question

#: Emoji are written with them; in a program they show nothing.
_SELECTORS: Final = frozenset({0xFE0E, 0xFE0F})
_OPEN: Final = "⟪"
_SUSPECT: Final = re.compile("[^ -~]")
_MARKED: Final = re.compile(r"⟪U\+([0-9A-F]{4,6})⟫")
_FOREIGN: Final = re.compile(r"[^\x00-\x7f]")

#: Columns of a line; wider lines continue behind a dashed bar.
COLUMNS: Final = 80

#: Fewest columns that a piece of a line keeps for itself.
_NARROW: Final = 20

#: Before what the caller wrote.
_BAR: Final = re.compile(r" *\d* [│┆] ")

#: Letters outside ASCII that are named one by one; more are counted.
MAX_NAMED: Final = 12

#: Lines of changes; beside the whole program a longer list does not help.
MAX_CHANGED: Final = 200

#: Lines of either that are compared: at worst comparing takes the cube of them.
MAX_COMPARED: Final = 200
CHANGES: Final = (
    "An approval changes files of this host, shown whole at the end. First, what a sandbox that scans them has:"
)
"""Heads what a call that proposes changes may do, which an approval does not grant."""
_PARTS: Final = ("What it may read", "What it may write", "What it may reach", "What it may spend on one call")


def visible(text: str) -> str:
    """Return one line in which every character shows; two that differ never look the same.

    What shows nothing, moves the cursor or reorders is ``⟪U+…⟫``, and so is the sign that begins that.
    """

    def mark(found: re.Match[str]) -> str:
        character = found[0]
        code = ord(character)
        seen = character.isprintable() and code not in UNSEEN and code not in _SELECTORS and character != _OPEN
        # Letters that are written from right to left turn around the digits and signs beside them.
        seen = seen and unicodedata.bidirectional(character) not in {"R", "AL", "AN"}
        return character if seen else f"{_OPEN}U+{code:04X}⟫"

    return _SUSPECT.sub(mark, text)


def shown(question: Question) -> str:
    """Return everything that an approver must know: why, who, what it may do, what runs, what changed."""
    return "\n".join(piece for line in (*facts_of(question), *program_of(question)) for piece in fold(line))


def fold(line: str, columns: int = COLUMNS) -> Iterator[str]:
    """Yield a line in pieces that fit; a line of the server is broken between words."""
    bar = _BAR.match(line)
    mark, rest = (bar[0], line[bar.end() :]) if bar else ("", line)
    further = f"{'┆ ':>{max(len(mark), 4)}}"
    while cell_len(rest) > (room := max(_NARROW, columns - len(mark))):
        piece = chop_cells(rest[: 4 * room], room)[0]
        if not bar and " " in piece.strip():
            piece = piece[: piece.rstrip().rindex(" ") + 1]
        yield mark + piece
        mark, rest = further, rest[len(piece) :]
    yield mark + rest


def warn_of_letters(holder: str, text: str) -> Iterator[str]:
    """Yield a line that names the non-ASCII letters of a text, if any."""
    foreign = dict.fromkeys(_FOREIGN.findall(text))
    if foreign:
        named = ", ".join(f"{visible(letter)} (U+{ord(letter):04X})" for letter in list(foreign)[:MAX_NAMED])
        more = f" and {len(foreign) - MAX_NAMED} more" if len(foreign) > MAX_NAMED else ""
        held = counted(len(foreign), "character")
        yield f"Look closely: {holder} {held} outside ASCII, which may look like others: {named}{more}."


def facts_of(question: Question) -> Iterator[str]:
    """Yield the lines of ``shown`` before the program's, of whatever width."""
    about = question.subject
    arguments: Mapping[str, Any] = json.loads(about.arguments)
    yield f"May this call of {about.tool} run?"
    yield f"Why you are asked: {question.why}"
    client = f", by a client that calls itself {visible(json.dumps(question.client, ensure_ascii=False))}"
    yield f"Who asks: {visible(about.principal)}{client if question.client else ''}"
    yield f"Run {visible(about.run)}" + (f", workflow {visible(question.workflow)}" if question.workflow else "")
    yield f"Question {question.id}, open until {question.expires:%Y-%m-%d %H:%M:%S} UTC. {_reach(question)}"
    if about.lifted is not None:
        lifted = f"{about.lifted} {visible(about.target)}"
        yield f"An approval lifts a denial, for {lifted}; for the run, of every call of {about.tool} in it."
    names = (about.principal, question.client, about.run, question.workflow, about.target)
    yield from warn_of_letters("these names hold", "".join(filter(None, names)))
    if about.changes:
        yield CHANGES
    if question.profile:
        for section in explain(Profile.model_validate_json(question.profile)):
            if section.title in _PARTS:
                yield f"{section.title}:"
                yield from (f"  - {visible(sentence)}" for sentence in section.sentences)
    if about.workspace:
        yield "It can read the workspace, whose files may differ by the time it runs: an approval is not bound to them."
    for uri, digest in about.inputs:
        yield f"It is given {visible(uri)}, sha256 {digest}."
    yield from _proposed(about.changes.split("\n")) if about.changes else ()
    code = arguments.get("code")
    others = {name: value for name, value in arguments.items() if name != "code" or not isinstance(code, str)}
    if others:
        written = {name: json.dumps(value, ensure_ascii=False) for name, value in others.items()}
        yield from warn_of_letters("its arguments hold", "".join([*written, *written.values()]))
        yield "Its arguments:"
        yield from (f"  │ {visible(name)} = {visible(value)}" for name, value in written.items())


def _reach(question: Question) -> str:
    asked = question.asked
    whole = "for this run" if question.subject.lifted else "for identical ones of this run"
    reach = {
        "call": "An approval is for this call alone.",
        "run": f"An approval may be for this call, or {whole}.",
        "caller": "An approval is for one such call of this caller, also in another run of it, for an hour after it.",
    }[asked.reach]
    return reach + (f" It takes {counted(asked.quorum, 'yes answer')}." if asked.quorum > 1 else "")


def _proposed(lines: list[str]) -> Iterator[str]:
    # As it was before ``visible``, and without our own signs: the bar, and the arrow between sizes.
    written = "".join(line[4:] if line.startswith("  │ ") else line.replace(" → ", "") for line in lines)
    yield from warn_of_letters("what would change holds", _MARKED.sub(lambda mark: chr(int(mark[1], 16)), written))
    yield from lines


def program_of(question: Question) -> Iterator[str]:
    """Yield the lines about the program, if there is one: what changed, and last its own, each behind a bar."""
    code, before = json.loads(question.subject.arguments).get("code"), question.last_approved
    if not isinstance(code, str):
        return
    yield from warn_of_letters("the program holds", code)
    last = json.loads(before).get("code") if before else None
    if isinstance(last, str) and last != code:
        yield "What changed since the last program that was approved for this caller:"
        yield from (f"  │ {line}" for line in _changes(last, code))
    elif isinstance(last, str):
        yield "It is, character by character, the last program that was approved for this caller."
    parts = code.split("\n")
    yield f"The program, whole, {counted(len(parts), 'line')}:"
    width = len(str(len(parts)))
    yield from (f"  {number:>{width}} │ {visible(line)}" for number, line in enumerate(parts, 1))


def _changes(last: str, code: str) -> Iterator[str]:
    before, after = ([visible(line) for line in text.split("\n")] for text in (last, code))
    if max(len(before), len(after)) > MAX_COMPARED:
        yield f"… too long to be compared: {len(before)} lines then, {len(after)} now"
        return
    compared = list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
    yield from compared[:MAX_CHANGED]
    if len(compared) > MAX_CHANGED:
        yield f"… {len(compared) - MAX_CHANGED} more lines"
