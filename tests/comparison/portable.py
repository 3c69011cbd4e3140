"""Which cases can be asked of any sandbox, and what came of one: judged by what the attack is after, not by our guards.

Nothing here may run anything; `systems.py` does, and hands over what was seen.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from glovebox_sandboxes.conformance import case as texts
from glovebox_sandboxes.conformance.case import Case

HERE = Path(__file__).parent
Word = Literal["stopped", "through", "absent", "unclear"]
"""``absent``: what is attacked does not exist there, so nothing was stopped; ``unclear``: to be looked at by hand."""
Ended = Literal["ended", "timed_out", "stopped", "failed", "running", "flood"]
#: What an attempt answers, or a program ends with, where the operation itself does not exist.
MISSING = ("AttributeError", "ImportError", "ModuleNotFoundError", "NotImplementedError", "ENOSYS")

#: What a program ends with whose Python is compiled to WebAssembly: no process can be made at all.
_NO_SUCH_CALL = "Function not implemented"


class Portable(BaseModel):
    """How it is seen that the attack of a case worked; every condition that is given is one way."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    through: str = ""
    """Of an attempt the whole answer, of a program some part of its standard output. ``{{name}}`` is ``HOST[name]``."""
    running: bool = False  # it was still running well after the time it was given
    flood: bool = False  # more came out, or was held by the caller's side, than any caller can want
    left: bool = False  # processes of it were there after the call
    same_twice: bool = False  # two runs printed the same
    shown: str = ""  # what a program prints that got as far as its attack; without it nothing is said to be stopped
    early: bool = False  # it ends by itself before the time is up, where nothing goes wrong
    control_program: bool = False
    """Run the control's program, which comes to an end, instead of one that would take a machine down."""
    claim: str = ""  # the case's claim, where only a part of it is portable

    @model_validator(mode="after")
    def _asks_something(self) -> "Portable":
        if not (self.through or self.running or self.flood or self.left or self.same_twice):
            raise ValueError("there is no way to see that the attack worked")
        return self


class Elsewhere(BaseModel):
    """Cases that say nothing about others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    reason: str
    cases: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of the shipped cases is asked, and why not the rest."""

    portable: Mapping[str, Portable]
    elsewhere: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One program in one sandbox, from outside."""

    ended: Ended
    """``timed_out``, ``stopped``: by the system, which says so, for the time or for another limit; ``failed``: it was
    not run; the last two: by us, as it went on."""
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    left: tuple[str, ...] = ()
    changed: bool = False  # whether anything that was planted on the host is different
    note: str = ""  # what the system itself said about the end


def selection() -> Selection:
    """Read ``cases.toml``; raises ``ValueError`` where it is wrong or names a case twice."""
    whole = tomllib.loads((HERE / "cases.toml").read_text(encoding="utf-8"))
    portable = {name: Portable.model_validate(entry) for name, entry in whole.pop("portable").items()}
    elsewhere: dict[str, str] = {}
    for each in [Elsewhere.model_validate(entry) for entry in whole.pop("elsewhere")]:
        for name in each.cases:
            if name in elsewhere or name in portable:
                raise ValueError(f"cases.toml: {name} is there twice")
            elsewhere[name] = each.reason
    if whole:
        raise ValueError(f"cases.toml: unknown tables {sorted(whole)}")
    return Selection(portable=portable, elsewhere=elsewhere)


def unpromised() -> dict[str, dict[str, str]]:
    """``unpromised.toml``: system → case → why its own documentation says that this is not its business."""
    whole = tomllib.loads((HERE / "unpromised.toml").read_text(encoding="utf-8"))
    return {
        system: {name: entry["reason"] for entry in entries for name in entry["cases"]}
        for system, entries in whole.items()
    }


def judge(  # noqa: PLR0911 - one line for each way to see it
    case: Case, how: Portable, seen: Seen, again: Seen | None, names: Mapping[str, Any]
) -> tuple[Word, str]:
    """What came of a case, and the words that show it."""
    if seen.changed:
        return "through", "files of the host were changed"
    if case.attempt is not None:
        return _answered(case, how, seen, names)
    shown = seen.stdout[-200:] or seen.note or seen.stderr[-300:]
    if seen.ended == "failed":
        return "unclear", seen.note
    if how.left and seen.left:
        return "through", f"left behind: {seen.left[0]}"
    if seen.ended == "flood":
        return ("through" if how.flood else "unclear"), "its output had no end"
    if seen.ended == "running":
        return ("through" if how.running or how.flood else "unclear"), f"still running after {seen.seconds:.0f} s"
    if how.through and re.search(_filled(how.through, names), seen.stdout):
        return "through", shown
    if _missing(seen.stderr):
        return "absent", seen.stderr.strip().rpartition("\n")[2][:200]
    return _ended(case, how, seen, again), shown


def _ended(case: Case, how: Portable, seen: Seen, again: Seen | None) -> Word:
    """Of a program that came to an end without its attack having worked."""
    if seen.ended == "timed_out":
        # Some keep nothing of what was printed by then. Of another limit than the time's it says nothing.
        return "stopped" if how.running or how.flood else "unclear"
    if how.shown and not re.search(how.shown, seen.stdout):
        return "unclear"
    if how.same_twice:
        return "through" if again is not None and seen.stdout == again.stdout else "stopped"
    limits = case.in_force()
    if how.running and not how.early and seen.seconds < min(limits.wall_seconds, limits.cpu_seconds):
        # Something else ended it before its time was up, which says nothing of the limit.
        return "unclear"
    return "stopped"


def _answered(case: Case, how: Portable, seen: Seen, names: Mapping[str, Any]) -> tuple[Word, str]:
    answer = texts.answers(seen.stdout).get(case.id)
    if answer is None:
        return "unclear", seen.note or seen.stderr[-300:] or f"it printed {seen.stdout[-200:]!r}"
    if re.fullmatch(_filled(how.through, names), answer, re.DOTALL):
        return "through", answer
    if answer in MISSING:
        return "absent", answer
    return "stopped", answer


def _filled(pattern: str, names: Mapping[str, Any]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: re.escape(str(names[found[1]])), pattern)


def _missing(stderr: str) -> bool:
    last = stderr.strip().rpartition("\n")[2]
    return last.startswith(MISSING) or _NO_SUCH_CALL in last


_NO_FORK = """
import errno
try:
    exec({code!r}, globals())
    answer = str(globals().get("answer", "ok"))
except OSError as problem:
    answer = errno.errorcode.get(problem.errno, type(problem).__name__)
except BaseException as problem:
    answer = type(problem).__name__
print()
print(json.dumps({{{name!r}: answer}}))
"""


def text(case: Case, how: Portable, *, forks: bool) -> str:
    """The program that is run for a case, without the names it finds; ``forks``: whether there are processes inside."""
    if case.attempt is not None:
        return texts.attempts({case.id: case.attempt}) if forks else _NO_FORK.format(code=case.attempt, name=case.id)
    return (case.control.program if how.control_program else case.program) or ""


def described(case: Case, how: Portable) -> dict[str, Any]:
    """What the page says of a case."""
    return {"id": case.id, "area": case.area, "claim": how.claim or case.claim}


def read_json(path: Path) -> dict[str, Any]:
    """A result that was kept."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise TypeError(f"{path}: not a comparison")
    return found
