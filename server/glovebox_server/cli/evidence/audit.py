"""``glovebox audit``: reads the log, checks it, and proves its content."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

import anyio
import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from rich.text import Text

from glovebox_audit import chain, read, subscription
from glovebox_audit.anchors import MAX_BYTES
from glovebox_audit.anchors import read as read_anchors
from glovebox_audit.bundle import archive, evidence
from glovebox_audit.chain import EvidenceError
from glovebox_audit.file import LOG_NAME
from glovebox_audit.printable import printable
from glovebox_audit.read import LogLine
from glovebox_audit.receipts import dsse
from glovebox_audit.receipts.dsse import MAX_KEY_BYTES, parse_public
from glovebox_audit.verifier import VerifyReport
from glovebox_audit.verify import verify as verify_log
from glovebox_sandboxes.plural import counted
from glovebox_server.cli.evidence.query import LINES
from glovebox_server.cli.options import LazyGroup, command, emit, out, parsed_file, regular_file, wants_json
from glovebox_server.cli.terminal import cell
from glovebox_server.exits import FAILED, OK
from glovebox_server.settings import Settings
from glovebox_server.upkeep.log import audit_log

#: Longest line of ``tail``; ``show`` has everything.
_LINE = 400
_Wanted = Callable[[LogLine], bool]


KEY = parsed_file("key", parse_public, MAX_KEY_BYTES)
_ANCHORS = parsed_file("anchors", read_anchors, MAX_BYTES + 1)


@click.group(
    cls=LazyGroup,
    lazy={
        "bundle": ("evidence.making:audit_bundle", "Write one file that shows what a call or a run did."),
        "prove": ("evidence.making:audit_prove", "Print the inclusion proof of one call, as JSON."),
        "query": ("evidence.query:audit_query", "Find calls, the newest first."),
        "show": ("evidence.page:audit_show", "One call as a page: what was asked, decided, done, and spent."),
    },
)
def audit() -> None:
    """What happened, and whether the log of it is whole."""


@command("tail", audit, json=LINES)
@click.option("-n", "--limit", "count", default=20, show_default=True, help="How many records.")
@click.option("-f", "--follow", is_flag=True, help="Go on as records are written.")
@click.option("--all", "everything", is_flag=True, help="Show the servers' own records too, as --json does.")
def audit_tail(settings: Settings, count: int, follow: bool, everything: bool) -> None:
    """The last records of calls."""
    log = settings.state_dir / "audit"
    wanted: _Wanted = bool if everything or wants_json() else _of_a_call
    with suppress(KeyboardInterrupt):
        count = _reach(log, count, wanted)
        if follow:
            anyio.run(_follow, log, count, wanted)
        else:
            found = [line for line in read.tail(log, count) if wanted(line)]
            _show_lines(found)
            if count and not found:
                out.print("No record of a call. `glovebox audit tail --all` shows the servers' own.")


@command("verify", audit)
@click.option("--anchor", help="SEQ:HASH noted down earlier (`glovebox audit head`): finds a log cut and rewritten.")
@click.option("--anchors", type=_ANCHORS, help="The same for each line of this file, as a server keeps them.")
@click.option("--key", "keys", multiple=True, type=KEY, help="A public key: check the signature of each seal too.")
@click.option("--proof", type=regular_file, help="Check this inclusion proof instead, with --key and nothing else.")
def audit_verify(
    settings: Settings,
    *,
    anchor: str | None,
    anchors: list[chain.Head] | None,
    keys: tuple[Ed25519PublicKey, ...],
    proof: Path | None,
) -> int:
    """Check the log, and name the line where it was changed.

    Or where lines were removed, added or reordered.
    """
    if proof is not None:
        if anchor is not None or anchors is not None or len(keys) != 1:
            words = "--proof takes one --key, the server's public key, and no --anchor, --anchors."
            raise click.UsageError(words)
        return _verify_proof(proof, keys[0])
    try:
        known = None if anchor is None else chain.parse_anchor(anchor)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", param_hint="--anchor") from None
    by_id = {dsse.key_id(key): key for key in keys}
    report = verify_log(settings.state_dir / "audit", known, anchors=anchors or [], keys=by_id)
    if not emit(asdict(report), indent=None):
        _show_report(report, anchored=known is not None or bool(anchors), signed=bool(keys))
    return OK if report.ok else FAILED


@command("seal", audit)
def audit_seal(settings: Settings) -> None:
    """Seal what is written so far, so that it can be proved."""
    directory = settings.state_dir / "audit"
    read.head(directory)  # where there is no log, none is made
    with closing(audit_log(settings)) as log:
        number = log.seal()
    done = "There is nothing to seal: no record since the last seal." if number is None else f"Sealed segment {number}."
    emit({"segment": number}, done)


@command("head", audit)
def audit_head(settings: Settings) -> None:
    """The end of the chain, to be kept elsewhere as an anchor."""
    directory = settings.state_dir / "audit"
    last = read.head(directory)
    if not emit({"anchor": f"{last.seq}:{last.hash}", **asdict(last)}, indent=None):
        out.out(f"{last.seq}:{last.hash}")


async def _follow(directory: Path, count: int, wanted: _Wanted) -> None:
    async for line in subscription.follow(directory, count):
        if wanted(line):
            _show_lines([line])


def _of_a_call(line: LogLine) -> bool:
    """Return whether a record is a call's: servers' starts add several each, one start per call from a shell."""
    kind = line.record.kind if line.record else ""
    return not kind.startswith(("server.", "profile.", "pool.", "segment."))


def _reach(directory: Path, count: int, wanted: _Wanted) -> int:
    """Return how many of the last lines hold ``count`` wanted ones; all of ``read.tail`` if there are fewer."""
    wide = count
    while True:
        lines = read.tail(directory, wide)
        places = [place for place, line in enumerate(reversed(lines), 1) if wanted(line)]
        if len(places) >= count:
            return places[count - 1] if count > 0 else 0
        if len(lines) < wide:
            return len(lines)
        wide *= 4


def not_proved(what: str, problem: Exception) -> int:
    """Print exactly why a proof does not hold."""
    shown = Text(printable(f"The {what} does not hold: {problem}."), style="red")
    emit({"ok": False, "reason": str(problem)}, shown, indent=None)
    return FAILED


def _verify_proof(file: Path, key: Ed25519PublicKey) -> int:
    """Check an inclusion proof with a public key only; return 1 and print the exact reason if it does not hold."""
    with file.open("rb") as opened:
        content = opened.read(archive.MAX_BYTES + 1)
    try:
        proved = evidence.read(content, {dsse.key_id(key): key})
    except EvidenceError as problem:
        return not_proved("proof", problem)
    records = [json.loads(record.line) for record in proved.records]
    seals = [asdict(seal) for seal in proved.seals]
    told = {"ok": True, "call_id": proved.id, "key": proved.keys[0], "records": records, "seals": seals}
    if emit(told, indent=None):
        return OK
    for record in proved.records:
        out.print(f"{record.seq}  {record.time}  {record.kind}")
    where = ", ".join(f"{seal.segment} (sealed {seal.time})" for seal in proved.seals)
    count = counted(len(proved.records), "record")
    out.print(f"{count} of {proved.id} lie in segment {where}.", style="green")
    out.print(f"signed with key {proved.keys[0]}")
    return OK


def _show_lines(lines: Iterable[LogLine]) -> None:
    for line in lines:
        record = line.record
        if emit({"unreadable": str(line.error)} if record is None else json.loads(record.line), indent=None):
            continue
        if record is None:
            out.print(f"        no record: {line.error} ({len(line.raw)} bytes)", style="red")
        else:
            text = Text(f"{record.seq:>7} {record.time} ")
            text.append(record.kind, style="bold")
            text.append(f" {record.call_id or record.server} ", style="cyan")
            text.append(_brief(record.data))
            out.print(text)


def _brief(data: Mapping[str, object]) -> str:
    parts = (f"{key}={cell(value)}" for key, value in data.items() if not isinstance(value, dict | list))
    return printable(" ".join(parts))[:_LINE]


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
