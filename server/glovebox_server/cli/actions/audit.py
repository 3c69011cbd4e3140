"""What the commands of ``glovebox audit`` do: from a directory to a console and an exit code.

Argument parsing is the command line's business. Text from records is shown with every control and direction character
escaped: a record may quote a hostile program, and a terminal obeys what it prints.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import anyio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from rich.console import Console
from rich.text import Text

from glovebox_audit import anchors, chain, read, subscription
from glovebox_audit.file import LOG_NAME, LogFile
from glovebox_audit.printable import printable
from glovebox_audit.read import Line
from glovebox_audit.receipts import dsse, keys
from glovebox_audit.segments import proof
from glovebox_audit.verifier.report import VerifyReport
from glovebox_audit.verify import verify as verify_log
from glovebox_sandboxes.plural import counted
from glovebox_server.cli.actions.query import call_named
from glovebox_server.cli.terminal import print_json
from glovebox_server.exits import FAILED, OK, USAGE

#: Longest line of ``tail``; ``show`` has everything.
_LINE = 400


def tail(
    directory: Path, console: Console, *, count: int, follow: bool, as_json: bool, everything: bool = False
) -> int:
    """Show the last ``count`` records and, with ``follow``, every new one until interrupted.

    A person sees the records of calls, and what is no record; ``everything`` adds the servers' own, which JSON has.
    """
    wanted = _any if everything or as_json else _of_a_call
    with suppress(KeyboardInterrupt):
        count = _reach(directory, count, wanted)
        if follow:
            anyio.run(_follow, directory, console, count, wanted, as_json)
        else:
            found = [line for line in read.tail(directory, count) if wanted(line)]
            _show_lines(console, found, as_json=as_json)
            if count and not found:
                console.print(Text("No record of a call. `glovebox audit tail --all` shows the servers' own."))
    return OK


async def _follow(directory: Path, console: Console, count: int, wanted: "_Wanted", as_json: bool) -> None:
    async for line in subscription.follow(directory, count):
        if wanted(line):
            _show_lines(console, [line], as_json=as_json)


_Wanted = Callable[[Line], bool]


def _any(_: Line) -> bool:
    return True


def _of_a_call(line: Line) -> bool:
    """Each start of a server is a handful of records, and between two calls made from a shell there is one."""
    kind = line.record.kind if line.record else ""
    return not kind.startswith(("server.", "profile.", "pool.", "segment."))


def _reach(directory: Path, count: int, wanted: _Wanted) -> int:
    """How many of the last lines hold ``count`` that are wanted; all that ``read.tail`` gives where there are fewer."""
    wide = count
    while True:
        lines = read.tail(directory, wide)
        places = [place for place, line in enumerate(reversed(lines), 1) if wanted(line)]
        if len(places) >= count:
            return places[count - 1] if count > 0 else 0
        if len(lines) < wide:
            return len(lines)
        wide *= 4


def verify(
    directory: Path,
    console: Console,
    *,
    anchor: str | None,
    anchors_file: Path | None = None,
    key_files: Sequence[Path] = (),
    everything: bool = False,
    as_json: bool,
) -> int:
    """Check the log, against ``SEQ:HASH`` and public keys too if given; 1 when it is not what was written.

    Segments that were found whole before, and are the same files, are read again only where ``everything`` is wanted.
    """
    try:
        known = None if anchor is None else chain.parse_anchor(anchor)
        given = [public_key(path) for path in key_files]
        kept = [] if anchors_file is None else _anchors(anchors_file)
        report = verify_log(
            directory, known, anchors=kept, keys={dsse.key_id(key): key for key in given}, new=not everything
        )
    except ValueError as error:
        console.print(Text(str(error)))
        return USAGE
    if as_json:
        print_json(console.file, asdict(report), indent=None)
    else:
        _show_report(console, report, anchored=known is not None or bool(kept), signed=bool(given))
    return OK if report.ok else FAILED


def not_proved(console: Console, what: str, problem: proof.NotAProof, *, as_json: bool) -> int:
    """Say exactly why something that was given as a proof does not hold."""
    if as_json:
        print_json(console.file, {"ok": False, "reason": str(problem)}, indent=None)
    else:
        console.print(Text(f"The {what} does not hold: {problem}.", style="red"))
    return FAILED


def verify_proof(file: Path, console: Console, *, key_file: Path, as_json: bool) -> int:
    """Check an inclusion proof with a public key, and nothing else; 1 and the exact reason when it does not hold."""
    try:
        given = public_key(key_file)
    except ValueError as error:
        console.print(Text(str(error)))
        return USAGE
    with file.open("rb") as opened:
        content = opened.read(proof.MAX_BYTES + 1)
    try:
        proved = proof.verify(content, given, dsse.key_id(given))
    except proof.NotAProof as problem:
        return not_proved(console, "proof", problem, as_json=as_json)
    if as_json:
        records = [json.loads(each.line) for each in proved.records]
        seals = [asdict(each) for each in proved.seals]
        told = {"ok": True, "call_id": proved.call_id, "key": proved.key_id, "records": records, "seals": seals}
        print_json(console.file, told, indent=None)
        return OK
    for record in proved.records:
        console.print(Text(f"{record.seq}  {record.time}  {record.kind}"))
    where = ", ".join(f"{seal.segment} (sealed {seal.time})" for seal in proved.seals)
    found = counted(len(proved.records), "record")
    console.print(Text(f"{found} of {proved.call_id} lie in segment {where}.", style="green"))
    console.print(Text(f"signed with key {proved.key_id}"))
    return OK


def _anchors(path: Path) -> list[chain.Head]:
    """Read anchors that a server kept; raises ValueError, with a sentence."""
    try:
        with path.open("rb") as file:
            return anchors.read(file.read(anchors.MAX_BYTES + 1))
    except (ValueError, OSError) as problem:
        words = (isinstance(problem, OSError) and problem.strerror) or str(problem)
        raise ValueError(f"The anchors {path} cannot be used: {words}.") from None


def public_key(path: Path) -> Ed25519PublicKey:
    """Read a public key; raises ValueError, with a sentence."""
    try:
        with path.open("rb") as file:
            return keys.parse_public(file.read(keys.MAX_KEY_BYTES))
    except (ValueError, OSError) as problem:
        words = (isinstance(problem, OSError) and problem.strerror) or str(problem)
        raise ValueError(f"The key {path} cannot be used: {words}.") from None


def prove(directory: Path, console: Console, err: Console, name: str) -> int:
    """Print the inclusion proof of a call's records; 1 when there is none."""
    call_id = call_named(directory, name, err)
    try:
        found = proof.prove(directory, call_id)
    except proof.NotSealed:
        hint = "`glovebox audit seal` seals it now; else the next day or 64 MiB will."
        err.print(Text(f"Records of call {call_id} are in a segment that is not sealed yet: {hint}"))
        return FAILED
    except proof.NotAProof as problem:
        err.print(Text(f"There is no proof: {problem}."))
        return FAILED
    if found is None:
        err.print(Text(f"No record of call {call_id}. `glovebox audit tail` shows the latest calls."))
        return FAILED
    console.out(found.decode(), end="", highlight=False)
    return OK


def seal(directory: Path, console: Console, open_log: Callable[[], LogFile], *, as_json: bool) -> int:
    """End the segment that is being written, so that what is in it can be proved."""
    read.head(directory)  # where there is no log, none is made
    log = open_log()
    try:
        number = log.seal()
    finally:
        log.close()
    if as_json:
        print_json(console.file, {"segment": number})
        return OK
    done = "There is nothing to seal: no record since the last seal." if number is None else f"Sealed segment {number}."
    console.print(Text(done))
    return OK


def head(directory: Path, console: Console, *, as_json: bool) -> int:
    """Print the anchor of the last record, ``SEQ:HASH``: keep it where the log's writer cannot change it."""
    last = read.head(directory)
    if as_json:
        print_json(console.file, {"anchor": f"{last.seq}:{last.hash}", **asdict(last)}, indent=None)
    else:
        console.out(f"{last.seq}:{last.hash}", highlight=False)
    return OK


def _fields(record: chain.Record) -> object:
    return json.loads(record.line)


def _show_lines(console: Console, lines: Iterable[Line], *, as_json: bool) -> None:
    for line in lines:
        record = line.record
        if as_json:
            value = {"unreadable": str(line.error)} if record is None else _fields(record)
            print_json(console.file, value, indent=None)
        elif record is None:
            console.print(Text(f"        no record: {line.error} ({len(line.raw)} bytes)", style="red"))
        else:
            text = Text(f"{record.seq:>7} {record.time} ")
            text.append(record.kind, style="bold")
            text.append(f" {record.call_id or record.server} ", style="cyan")
            text.append(_brief(record.data))
            console.print(text, soft_wrap=True)


def _brief(data: Mapping[str, object]) -> str:
    parts = (f"{key}={_cell(value)}" for key, value in data.items() if not isinstance(value, dict | list))
    return printable(" ".join(parts))[:_LINE]


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _show_report(console: Console, report: VerifyReport, *, anchored: bool, signed: bool) -> None:
    for problem in report.problems:
        file = "" if problem.file == LOG_NAME and problem.line else problem.file
        place = " ".join(filter(None, (file, f"line {problem.line}" if problem.line else "")))
        console.print(Text(f"{printable(place)}: {problem.kind}: {printable(problem.detail)}", style="red"))
    if report.omitted:
        console.print(Text(f"and {counted(report.omitted, 'more problem')}", style="red"))
    verdict = "whole" if report.ok else "NOT what was written"
    if report.problems and all(each.kind == "anchor" and each.line is None for each in report.problems):
        verdict = "not compared with the anchor; nothing else is wrong"
    against = "with the anchor" if anchored else "without an anchor, so a log put back as a whole is not seen"
    found = f"{counted(report.records, 'record')}, {counted(report.gaps, 'gap')}"
    if report.known:
        found += f", {report.known} of them found whole before (--all reads them again)"
    if report.segments:
        checked = "signatures checked" if signed else "signatures not checked without --key"
        found += f", {counted(report.segments, 'sealed segment')} ({checked})"
    if report.removed:
        found += f", segments up to {report.removed} removed on record"
    console.print(Text(f"{found}, the log is {verdict} ({against})."))
    console.print(Text(f"head {report.head.seq}:{report.head.hash}"))
