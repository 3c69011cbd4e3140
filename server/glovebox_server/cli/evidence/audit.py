"""``glovebox audit``: reads the log, checks it, and proves its content."""

import json
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import anyio
import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from rich.status import Status
from rich.text import Text

from glovebox_audit import chain, read, subscription
from glovebox_audit.bundle import archive, evidence
from glovebox_audit.chain import EvidenceError
from glovebox_audit.printable import cell, printable
from glovebox_audit.query import ask
from glovebox_audit.query.calls import CallSummary
from glovebox_audit.query.index import Filters
from glovebox_audit.query.outcomes import OUTCOMES
from glovebox_audit.read import LogLine
from glovebox_audit.receipts import dsse
from glovebox_audit.segments import anchors
from glovebox_audit.segments.files import LOG_NAME
from glovebox_audit.verify import VerifyReport, verify
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_sandboxes.plural import counted
from glovebox_server.cli import options
from glovebox_server.cli.groups import LazyGroup
from glovebox_server.cli.options import command, emit, err, out, wants_json
from glovebox_server.cli.terminal import styled, table_of
from glovebox_server.exits import FAILED, OK
from glovebox_server.settings import Settings
from glovebox_server.upkeep.log import audit_log

#: Longest line of ``tail``; ``show`` has everything.
_LINE = 400
LINES = "Print the records, one JSON object per line."
_Wanted = Callable[[LogLine], bool]
T = TypeVar("T")


KEY = options.parsed_file("key", dsse.parse_public, dsse.MAX_KEY_BYTES)
_PROOF = options.parsed_file("proof", bytes, archive.MAX_BYTES + 1)
_ANCHORS = options.parsed_file("anchors", anchors.read, anchors.MAX_BYTES + 1)


@click.group(
    cls=LazyGroup,
    lazy={
        "bundle": ("evidence.receipt:audit_bundle", "Write one file that shows what a call or a run did."),
        "prove": ("evidence.receipt:audit_prove", "Print the inclusion proof of one call, as JSON."),
        "show": ("evidence.page:audit_show", "One call as a page: what was asked, decided, done, and spent."),
    },
)
def audit() -> None:
    """Read the audit log, and verify it."""


@command("tail", audit, json=LINES)
@click.option("-n", "--limit", "count", default=20, show_default=True, help="How many records.")
@click.option("-f", "--follow", is_flag=True, help="Continue as records are written.")
@click.option("--all", "everything", is_flag=True, help="Show the servers' own records too, as --json does.")
def audit_tail(settings: Settings, count: int, follow: bool, everything: bool) -> None:
    """The last records of calls."""
    log = settings.state_dir / "audit"
    wanted: _Wanted = bool if everything or wants_json() else _of_a_call
    with suppress(KeyboardInterrupt):
        lines = _last(log, count, wanted)
        if follow:
            anyio.run(_follow, log, len(lines), wanted)
            return
        found = [line for line in lines if wanted(line)]
        _show_lines(found)
        if count > 0 and not found:
            out.print("No record of a call. `glovebox audit tail --all` shows the servers' own.")


@command("verify", audit)
@click.option("--anchor", help="SEQ:HASH noted down earlier (`glovebox audit head`): finds a log cut and rewritten.")
@click.option("--anchors", type=_ANCHORS, help="The same for each line of this file, as a server keeps them.")
@click.option("--key", "keys", multiple=True, type=KEY, help="A public key: check the signature of each seal too.")
@click.option(
    "--proof", metavar="FILE", type=_PROOF, help="Check this inclusion proof instead, with --key and nothing else."
)
def audit_verify(
    settings: Settings,
    *,
    anchor: str | None,
    anchors: list[chain.Head] | None,
    keys: tuple[Ed25519PublicKey, ...],
    proof: bytes | None,
) -> int:
    """Check the log, and name the line where it was changed.

    Or where lines were removed, added or reordered.
    """
    if proof is not None:
        if anchor is not None or anchors is not None or len(keys) != 1:
            raise click.UsageError("--proof takes one --key, the server's public key, and no --anchor, --anchors.")
        return _verify_proof(proof, keys[0])
    try:
        known = None if anchor is None else chain.parse_anchor(anchor)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", param_hint="--anchor") from None
    by_id = {dsse.key_id(key): key for key in keys}
    report = verify(settings.state_dir / "audit", known, anchors=anchors or [], keys=by_id)
    if not emit(asdict(report), indent=None):
        _show_report(report, anchored=known is not None or bool(anchors), signed=bool(keys))
    return OK if report.ok else FAILED


@command("seal", audit)
def audit_seal(settings: Settings) -> None:
    """Seal what is written so far, so that it can be proved."""
    read.head(settings.state_dir / "audit")  # where there is no log, none is made
    with closing(audit_log(settings)) as log:
        number = log.seal()
    done = "There is nothing to seal: no record since the last seal." if number is None else f"Sealed segment {number}."
    emit({"segment": number}, done)


@command("head", audit)
def audit_head(settings: Settings) -> None:
    """The end of the chain, to be kept elsewhere as an anchor."""
    last = read.head(settings.state_dir / "audit")
    anchor = f"{last.seq}:{last.hash}"
    emit({"anchor": anchor, **asdict(last)}, anchor, indent=None)


async def _follow(directory: Path, count: int, wanted: _Wanted) -> None:
    async for line in subscription.follow(directory, count):
        if wanted(line):
            _show_lines([line])


def _of_a_call(line: LogLine) -> bool:
    """Return whether a record is a call's: servers' starts add several each, one start per call from a shell."""
    kind = line.record.kind if line.record else ""
    return not kind.startswith(("server.", "profile.", "pool.", "segment."))


def _last(directory: Path, count: int, wanted: _Wanted) -> list[LogLine]:
    """Return the last lines, of which ``count`` are wanted; all there are if there are fewer."""
    wide = count
    while True:
        lines = read.tail(directory, wide)
        places = [at for at, line in enumerate(lines) if wanted(line)]
        if len(places) >= count or len(lines) < wide:
            return lines[places[-count] :] if 0 < count <= len(places) else lines
        wide *= 4


def not_proved(what: str, problem: Exception) -> int:
    """Print exactly why a proof does not hold."""
    emit({"ok": False, "reason": str(problem)}, styled(f"The {what} does not hold: {problem}.", "red"), indent=None)
    return FAILED


def _verify_proof(content: bytes, key: Ed25519PublicKey) -> int:
    """Check an inclusion proof with a public key only; return 1 and print the exact reason if it does not hold."""
    try:
        proved = evidence.read(content, {dsse.key_id(key): key})
    except EvidenceError as problem:
        return not_proved("proof", problem)
    records = [json.loads(record.line) for record in proved.records]
    seals = [seal.model_dump() for seal in proved.seals]
    told = {"ok": True, "call_id": proved.id, "key": proved.keys[0], "records": records, "seals": seals}
    lines = [f"{record.seq}  {record.time}  {record.kind}" for record in proved.records]
    where = ", ".join(f"{seal.segment} (sealed {seal.time})" for seal in proved.seals)
    holds = Text(f"{counted(len(lines), 'record')} of {proved.id} lie in segment {where}.", style="green")
    emit(told, *lines, holds, f"signed with key {proved.keys[0]}", indent=None)
    return OK


def _show_lines(lines: Iterable[LogLine]) -> None:
    for line in lines:
        record = line.record
        if record is None:
            text = Text(f"        no record: {line.error} ({len(line.raw)} bytes)", style="red")
            emit({"unreadable": str(line.error)}, text, indent=None)
            continue
        parts = (f"{key}={cell(value)}" for key, value in record.data.items() if not isinstance(value, dict | list))
        text = Text.assemble(f"{record.seq:>7} {record.time} ", (record.kind, "bold"))
        text.append(f" {record.call_id or record.server} ", style="cyan")
        text.append(printable(" ".join(parts))[:_LINE])
        emit(json.loads(record.line), text, indent=None)


def _show_report(report: VerifyReport, *, anchored: bool, signed: bool) -> None:
    for problem in report.problems:
        file = "" if problem.file == LOG_NAME and problem.line else problem.file
        place = " ".join(filter(None, (file, f"line {problem.line}" if problem.line else "")))
        out.print(f"{printable(place)}: {problem.kind}: {printable(problem.detail)}", style="red")
    if report.omitted:
        out.print(f"and {counted(report.omitted, 'more problem')}", style="red")
    verdict = "whole" if report.ok else "NOT what was written"
    if report.problems and all(each.kind == "anchor" and each.line is None for each in report.problems):
        verdict = "not compared with the anchor; nothing else is wrong"
    against = "with the anchor" if anchored else "without an anchor, so a log put back as a whole is not seen"
    found = f"{counted(report.records, 'record')}, {counted(report.gaps, 'gap')}"
    if report.segments:
        checked = "signatures checked" if signed else "signatures not checked without --key"
        found += f", {counted(report.segments, 'sealed segment')} ({checked})"
    if report.removed:
        found += f", segments up to {report.removed} removed on record"
    out.print(f"{found}, the log is {verdict} ({against}).")
    out.print(f"head {report.head.seq}:{report.head.hash}")


#: Delay before a person wants to see progress.
_PATIENCE_SECONDS = 1.0
_STYLES = {"succeeded": "green", "running": "cyan", "denied": "yellow", "ask": "yellow"}


@command("query", audit)
@click.option("--tool", "tools", multiple=True, help="Calls of this tool.")
@click.option("--principal", "principals", multiple=True, help="Calls of this caller, as token:ci or local:1000.")
@click.option("--client", "clients", multiple=True, help="Calls of this program, as it is shown; '' for none.")
@click.option("--run", "runs", multiple=True, help="Calls of this run, as `audit show` has it: r_ and 26 characters.")
@click.option("--workflow", "workflows", multiple=True, help="Calls of this workflow; '' for none.")
@click.option("--rule", "rules", multiple=True, help="Calls decided by this rule, as network.allow.")
@click.option("--host", "hosts", multiple=True, help="Calls that asked for a connection to this host.")
@click.option("--outcome", "outcomes", multiple=True, type=click.Choice(OUTCOMES), help="Calls that came out so.")
@options.time_option("--since", "Not before this time (UTC), local day (yesterday), or 2h ago.")
@options.time_option("--until", "Before this time, or the beginning of this day: today.")
@click.option("--grep", "text", help="Calls of which a record has this text, in upper or lower case.")
@click.option(
    "-n", "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many, the newest first."
)
def audit_query(settings: Settings, *, text: str | None, limit: int, **given: Any) -> int:
    """Find calls, the newest first.

    Those that fit every option; of a repeated one, any of its values.
    """
    filters = Filters(text=None if text is None else text.casefold(), **given)
    found = indexed(ask.ask, settings.state_dir / "audit", filters, limit)
    titles = ["time", "call", "outcome", "tool", "by", "client", "ms"]
    table = table_of(titles, map(_row, found.calls), right=["ms"])
    emit(asdict(found), table or "No call fits.")
    if found.more and not wants_json():
        err.print(f"The newest {counted(len(found.calls), 'call')}; there are more (--limit).", style="dim")
    if found.damaged:
        words = f"{counted(found.damaged, 'call')} left out: the record was changed. Run `glovebox audit verify`."
        err.print(words, style="red")
    return FAILED if found.damaged else OK


def indexed(find: Callable[..., T], *given: object) -> T:
    """Find something in the index, and show the progress of bringing that up to date, once it takes long."""
    status, began = Status(Text("Indexing the log"), console=err), time.monotonic()

    def progress(done: int, most: int) -> None:
        if err.is_terminal and time.monotonic() - began > _PATIENCE_SECONDS:
            status.update(Text(f"Indexing the log: {done / most:.0%}"))
            status.start()

    try:
        return find(*given, ask.Told(say=lambda words: err.print(words, style="dim"), progress=progress))
    finally:
        status.stop()


def _row(call: CallSummary) -> tuple[object, ...]:
    more = {"denied": call.rule, "ask": call.rule, "error": call.error}
    more["failed"] = f"exit {call.exit_code}" if call.exit_code else None
    words = ": ".join(filter(None, (call.outcome, more.get(call.outcome))))
    outcome = styled(words, _STYLES.get(call.outcome, "red"))
    ms = None if call.elapsed_ms is None else f"{call.elapsed_ms:.0f}"
    return call.time[:19].replace("T", " "), call.call_id, outcome, call.tool, call.principal, call.through, ms


def find_call(directory: Path, name: str) -> str:
    """Return the id of the call that a person means: by id, by prefix, or by ``last``.

    Raises MisnamedError if there is none, or several; AuditError if the log cannot be read.
    """
    if not chain.is_name(name):
        what = f"Finding the call {printable(name)[:200]!r}"
        raise MisnamedError(what, "it is not the id of a call", "Give c_ and 26 characters, the beginning, or `last`.")
    found = indexed(ask.named, directory, name)
    if len(found) > 1:
        more = " …" if len(found) == ask.MOST_NAMED else ""
        reason = f"it is the beginning of several calls: {', '.join(found)}{more}"
        raise MisnamedError(f"Finding the call {name}", reason, "Give more of its id.")
    return found[0] if found else name


def find_run(directory: Path, name: str) -> str:
    """Return the id of the run that a person means: by id, or by ``last``, that of the newest call.

    Raises MisnamedError if there is no newest call, or it has no run; AuditError if the log cannot be read.
    """
    if name != ask.LAST:
        return name
    found = indexed(ask.ask, directory, Filters(), 1).calls
    if not found or found[0].run is None:
        fix = f"Name the call with --call {found[0].call_id if found else 'CALL'}."
        raise MisnamedError("Finding the last run", "the newest call is of no run", fix)
    return found[0].run
