"""Find what each page shows, in the audit log, its index and the stores. Blocking: a worker thread calls it."""

import base64
import functools
import json
import shutil
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives import serialization
from markupsafe import Markup, escape

from glovebox_audit import chain, read, writers
from glovebox_audit.events import ReceiptSigned
from glovebox_audit.place import AuditError
from glovebox_audit.query import ask, index, story
from glovebox_audit.query.calls import CallSummary
from glovebox_audit.query.index import Filters, Totals
from glovebox_audit.query.outcomes import OUTCOMES
from glovebox_audit.receipts import dsse
from glovebox_profiles.explain import explain
from glovebox_sandboxes.plural import counted
from glovebox_server.app import load_profiles
from glovebox_server.artifacts.record import records
from glovebox_server.console.highlight import MAX_CHARACTERS, highlighted
from glovebox_server.console.live import LiveCalls
from glovebox_server.console.people import Person
from glovebox_server.errors import StoreError
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.question import Question
from glovebox_server.guards.approvals.shown import facts_of, program_of, visible
from glovebox_server.guards.approvals.store import Questions, Standing
from glovebox_server.guards.budgets import store as budgets
from glovebox_server.guards.budgets.spending import read_clocks
from glovebox_server.guards.stops import stops
from glovebox_server.promotion import transaction
from glovebox_server.receipts.keys import Signer
from glovebox_server.settings import Settings
from glovebox_server.startup import policy_file
from glovebox_server.stores import database
from glovebox_server.upkeep.readiness import Readiness, can_write, is_built

ROWS: Final = 50
"""Calls on one page of the history."""
_RECENT: Final = timedelta(minutes=15)
_MOST_LISTED: Final = 200
_QUIET: Final = ask.Told(say=lambda _: None, progress=lambda *_: None)
_COLUMNS: Final = ("tool", "principal", "client", "run", "workflow", "rule", "host", "outcome")

_REFUSED: Final = frozenset({"denied", "ask"})
_STYLES: Final = frozenset({"green", "red", "yellow", "cyan"})
_DEEDS: Final = (
    ("run_python", "ran", "program"),
    ("read_workspace_file", "read", "file"),
    ("fetch_url", "fetched", "page"),
)

View = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """The pages of one state directory."""

    settings: Settings
    live: LiveCalls

    @property
    def _log(self) -> Path:
        return self.settings.state_dir / "audit"

    def head(self) -> View:
        """Return the end of the log and the time of this look: what every page has."""
        found: View = {"time": _clock(datetime.now(UTC)), "head": "", "problem": self.live.problem}
        try:
            last = read.head(self._log)
            found["head"] = f"{last.seq}:{last.hash[:12]}"
        except AuditError as problem:
            found["problem"] = str(problem)
        return found

    def now(self) -> View:
        """Return what runs, and what is stopped."""
        running, more = self.live.listed()
        found = stops.stops_of(self.settings.state_dir).read()
        moment = datetime.now(UTC)
        said, waiting, unread = "", 0, list[str]()
        try:  # what can be stopped is shown whatever else cannot be read
            said = self._recently(moment - _RECENT)
            waiting = len(self._standings())
        except (AuditError, StoreError) as problem:
            unread.append(str(problem))
        return {
            "calls": [{"age": _age(datetime.fromisoformat(each.time), moment), "call": each} for each in running],
            "more": more,
            "stops": [{"stop": each, "what": words_of(each)} for each in found.items],
            "damaged": [str(each) for each in found.damaged],
            "said": said,
            "waiting": waiting,
            "unread": unread,
        }

    def waiting(self, person: Person) -> View:
        """Return the questions that wait, those alike together, and those that were settled of late."""
        pending = [_question(each) for each in self._standings()]
        alike = Counter(each["wants"] for each in pending)
        first = {each["wants"]: number for number, each in enumerate(reversed(pending))}
        pending.sort(key=lambda each: first[each["wants"]])
        settled = [each for each in self._standings(settled=True) if each.state != "pending"][:ROWS]
        own = [answer for each in settled for answer in each.answers if answer.by == person.principal]
        after = statistics.median([each.after for each in own] or [0.0])
        told = f"Of {counted(len(own), 'question')} in seven days you said yes to {sum(each.allow for each in own)}"
        return {
            "pending": pending,
            "alike": alike,
            "settled": [_question(each) for each in settled],
            "own": f"{told}, half of them within {after:.0f} s." if own else "",
        }

    def history(self, asked: Mapping[str, str]) -> View:
        """Return the calls that fit a form's fields, the newest first. Raises ValueError for a field that is none."""
        given = {name: text for name in (*_COLUMNS, "since", "until") if (text := asked.get(name, "").strip())}
        wanted: View = {f"{name}s": (given[name],) for name in _COLUMNS if name in given}
        wanted |= {name: _moment(given[name]) for name in ("since", "until") if name in given}
        filters = Filters(**wanted)
        found = ask.ask(self._log, filters, ROWS, _QUIET)
        older = {**given, "until": found.calls[-1].time} if found.more else None
        if given.keys() <= index.COUNTED:
            said = sentence(ask.totals(self._log, filters, _QUIET), "In all that fits")
        else:
            said = sentence(_counted(found.calls), "In the calls below")
        return {
            "calls": found.calls, "damaged": found.damaged, "given": given, "older": older, "outcomes": OUTCOMES,
            "said": said if found.calls else "No call fits.",
        }  # fmt: skip

    def call(self, name: str) -> View | None:
        """Return one call, by its id or the beginning of it; None if there is none, or several."""
        directory = self._log
        ids = ask.named(directory, name, _QUIET)
        found = ask.records(directory, ids[0], _QUIET) if len(ids) == 1 else []
        if not found:
            return None
        receipt = next((each for each in reversed(found) if each.kind == ReceiptSigned.kind), None)
        key = Signer.load(self.settings.state_dir).public
        form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        return {
            "id": ids[0],
            "rows": _grouped(story.rows(found, story.around(directory, found, _QUIET))),
            "receipt": None if receipt is None else chain.canonical(receipt.data.get("envelope")).decode(),
            "key": base64.b64encode(key.public_bytes(*form)).decode(),
            "key_id": dsse.key_id(key),
            "run": str(found[0].data.get("run") or ""),
        }

    def profiles(self) -> View:
        """Return what each tool may do, in words. Raises ProfileError."""
        found = load_profiles(self.settings)
        tools = [
            {"profile": profile, "digest": found.digests[tool], "source": str(found.source(tool)),
             "sections": explain(profile)}
            for tool, profile in found.items()
        ]  # fmt: skip
        return {"tools": tools, "digest": found.digest, "policy": str(policy_file(self.settings) or "")}

    def artifacts(self) -> View:
        """Return the files that programs made, newest first, and what was promoted."""
        now = datetime.now(UTC)
        found = sorted(records(self.settings.state_dir / "artifacts", now), key=lambda each: each.created, reverse=True)
        promotions = transaction.listed(self.settings.state_dir)
        back = transaction.put_back(promotions)
        return {
            "artifacts": [{"artifact": each, "age": _age(each.created, now)} for each in found[:_MOST_LISTED]],
            "more": max(0, len(found) - _MOST_LISTED),
            "promotions": [
                {"promotion": each, "standing": transaction.standing(each, back.get(each.id))}
                for each in promotions[: -_MOST_LISTED - 1 : -1]
            ],
        }

    def health(self) -> View:
        """Return whether calls can be served, by which servers, and what they have spent since yesterday."""
        directory = self.settings.state_dir
        log = self._log
        found = Readiness(runtime=is_built(self.settings.data_dir), log=not log.exists() or can_write(log), policy=True)
        spent: list[dict[str, str | int | float]] = []
        if (path := directory / database.DIRECTORY / budgets.NAME).exists():
            since = datetime.now(UTC) - timedelta(days=1)
            with database.opened(path, budgets.SCHEMA) as kept:
                spent = kept.query_now(lambda connection: budgets.used(connection, since, ("principal", "tool")))
        free = shutil.disk_usage(directory).free // 2**20
        return {"ready": found, "servers": writers.live(log), "spent": spent[:_MOST_LISTED], "free": free}

    def _recently(self, since: datetime) -> str:
        found = ask.ask(self._log, Filters(since=since), _MOST_LISTED, _QUIET)
        more = f", of which the newest {_MOST_LISTED} calls are counted" if found.more else ""
        return sentence(_counted(found.calls), f"Since {_clock(since)}{more}")

    def _standings(self, *, settled: bool = False) -> list[Standing]:
        """Return the questions that wait, or with those that are over too."""
        if not store.path(self.settings.state_dir).exists():
            return []
        with store.opened(self.settings.state_dir) as kept:
            found = kept.query_now(lambda db: Questions(db, read_clocks()).standings())
        return found if settled else [each for each in found if each.state == "pending" and each.left > 0]


def sentence(found: Totals, begin: str) -> str:
    """Return what was done, in a sentence for anybody."""
    ran, came = Counter[str](), Counter[str]()
    for (tool, outcome), number in found.calls.items():
        came[outcome] += number
        ran[tool] += number if outcome not in _REFUSED else 0
    parts = [f"{verb} {counted(ran.pop(tool), noun)}" for tool, verb, noun in _DEEDS if ran[tool]]
    parts += [f"made {counted(ran.total(), 'other call')}"] if ran.total() else []
    did = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:]))) or "ran nothing"
    who = counted(found.callers, "caller") if found.callers else "no caller"
    asked = f", {counted(came['ask'], 'question')} asked" if came["ask"] else ""
    return f"{begin}, {who} {did}; {counted(came['denied'], 'request')} refused{asked}."


def _counted(calls: Iterable[CallSummary]) -> Totals:
    calls = [*calls]
    found = Counter((each.tool, each.outcome) for each in calls)
    return Totals(calls=found, callers=len({each.principal for each in calls}))


def words_of(stop: stops.Stop) -> str:
    """Return what a stop stops."""
    return "everything" if stop.scope == "all" else f"{stop.scope} {stop.name}"


def _question(each: Standing) -> View:
    question, short = each.question, len(each.question.subject.arguments) <= MAX_CHARACTERS
    return {
        "id": question.id, "digest": question.digest, "state": each.state, "why": question.why,
        "principal": question.subject.principal, "tool": question.subject.tool, "callers": each.callers,
        "left": max(0, round(each.left)), "made": _clock(question.made), "folder": question.folder,
        "may_run": question.asked.reach == "run", "answers": each.answers,
        **(_texts(question) if each.state == "pending" or short else _elsewhere(question)),
        "version": f"{each.state} {len(each.answers)} {each.callers}", "used_by": each.used_by,
        "wants": (question.subject.tool, question.subject.arguments),
    }  # fmt: skip


@functools.lru_cache(maxsize=64)
def _texts(question: Question) -> View:
    """Return what a question says, made once: open pages ask for it every two seconds."""
    lines = Markup("\n")
    return {"facts": lines.join(facts_of(question)), "program": lines.join(_program(question))}


def _elsewhere(question: Question) -> View:
    return {"facts": f"It is long: glovebox approvals show {question.id}", "program": ""}


def _program(question: Question) -> list[Markup]:
    """Return the lines about a question's program as HTML; its own have their colours."""
    lines = [*program_of(question)]
    if not lines:
        return []
    program = highlighted([visible(line) for line in json.loads(question.subject.arguments)["code"].split("\n")])
    before, numbered = lines[: -len(program)], lines[-len(program) :]
    bars = [line[: line.index("│") + 2] for line in numbered]
    return [*map(escape, before), *(escape(bar) + line for bar, line in zip(bars, program, strict=True))]


def _grouped(rows: Iterable[story.Row]) -> list[View]:
    """Return rows by their labels: an empty one is that of the row before."""
    found: list[View] = []
    for label, words, style in rows:
        if label and not (found and found[-1]["label"] == label):
            found.append({"label": label, "lines": []})
        found[-1]["lines"].append({"words": words, "style": style if style in _STYLES else ""})
    return found


def _moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _clock(moment: datetime) -> str:
    return f"{moment:%H:%M:%S} UTC"


def _age(begin: datetime, now: datetime) -> str:
    seconds = max(0, int((now - begin).total_seconds()))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds} s"
