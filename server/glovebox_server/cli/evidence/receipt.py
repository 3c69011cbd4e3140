"""``glovebox receipt`` and ``bundle``, and ``audit bundle | prove``: what is checked anywhere."""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from rich.table import Table
from rich.text import Text

from glovebox_audit import chain, read
from glovebox_audit.bundle import archive, evidence, report
from glovebox_audit.chain import EvidenceError
from glovebox_audit.printable import cell, printable
from glovebox_audit.query import calls
from glovebox_audit.receipts import dsse, statement
from glovebox_audit.receipts.statement import IsolationField, IsolationFound, Statement, of_call
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_sandboxes.plural import counted
from glovebox_server.cli.evidence.audit import KEY, find_call, find_run, not_proved
from glovebox_server.cli.groups import LazyGroup
from glovebox_server.cli.options import command, emit, err, out, parsed_file, wants_json
from glovebox_server.cli.saving import write_new_file
from glovebox_server.cli.terminal import print_table, table_of
from glovebox_server.exits import FAILED, OK
from glovebox_server.receipts import bundling, keys
from glovebox_server.settings import Settings

_COLUMNS = 100
"""Width of a printed receipt, into a pipe as well: some cells hold a whole list."""


@click.group(cls=LazyGroup)
def receipt() -> None:
    """Signed proof of what one call was, got and did."""


@command("key", receipt)
def receipt_key(settings: Settings) -> None:
    """The public key, for those who verify; made where there is none."""
    signer = keys.Signer.load(settings.state_dir)
    pem = dsse.public_pem(signer.public)
    if emit({"key_id": signer.key_id, "public_key": pem}):
        return
    out.out(pem, end="")
    err.print(f"key {signer.key_id}")


@command("show", receipt, json="Print the receipt itself, as `receipt verify` takes it.")
@click.argument("wanted", metavar="CALL|FILE")
def receipt_show(settings: Settings, wanted: str) -> int:
    """Show a receipt: of a call made here, or in a file."""
    try:
        content, log = _find(settings.state_dir / "audit", wanted)
        envelope = dsse.parse(content)
        said = statement.parse(envelope.payload)
        fields = _fields(said, log)
    except EvidenceError as problem:
        return not_proved("receipt", problem)
    if wants_json():
        out.out(content.removesuffix(b"\n").decode())
        return OK
    _show(said, fields)
    out.print(f"Says key {printable(envelope.key_id)}; prove it with `glovebox receipt verify`.", style="dim")
    return OK


@command("verify", receipt)
@click.argument("wanted", metavar="CALL|FILE")
@click.option("--key", type=KEY, help="Public key; else that of this server.")
@click.option("--audit", type=click.Path(path_type=Path, file_okay=False), help="Log to find its place in.")
def receipt_verify(settings: Settings, wanted: str, key: Ed25519PublicKey | None, audit: Path | None) -> int:
    """Prove a receipt, of a call made here or in a file.

    Exit 1 and the reason if it does not hold.
    """
    state = settings.state_dir
    try:
        content, log = _find(audit or state / "audit", wanted)
        given = key or keys.own_public(state)
        if given is None:
            fix = "Name the server's public key with --key."
            raise MisnamedError("Proving a receipt", f"no key was made in {state}", fix)
        audit = audit or log
        proved = statement.verify(content, given, audit)
    except EvidenceError as problem:
        return not_proved("receipt", problem)
    told = {"ok": True, "digest": proved.digest, "key": proved.key_id, "audit_checked": audit is not None}
    if not emit({**told, "statement": json.loads(proved.statement.model_dump_json(exclude_unset=True))}, indent=None):
        where = f"its place {proved.statement.predicate.audit.seq} in the audit log is right"
        place = where if audit else "its place in the audit log was not looked at"
        out.print(f"The receipt of {proved.statement.predicate.call.id} holds: {place}.", style="green")
        whose = ", this server's" if key is None else ""
        out.print(f"{proved.digest}, signed with key {proved.key_id}{whose}")
    return OK


def _find(log: Path, wanted: str) -> tuple[bytes, Path | None]:
    """Return a file's receipt, or a call's with its log.

    Raises EvidenceError if a call has none; MisnamedError if it names neither, or several calls.
    """
    path = Path(wanted)
    if path.is_file() or not chain.is_name(wanted):
        if not path.is_file():  # a pipe without a writer would block
            why = f"{printable(wanted)[:200]!r} is neither a file nor the id of a call"
            raise MisnamedError("Finding the receipt", why, "Name either.")
        with path.open("rb") as file:
            return file.read(dsse.MAX_BYTES + 2), None
    call_id = find_call(log, wanted)
    found = of_call(log, call_id)
    if found is None:
        why = "it is not known, was refused, has not ended, or its receipt was lost"
        raise EvidenceError(f"there is none of call {call_id}: {why}; see `glovebox audit show`")
    return found, log


def _facts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield all that a receipt says, by its keys; of a list one line each, with the same key."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _facts(each, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for each in value:
            said = ", ".join(f"{name} {part}" for name, part in _facts(each)) if isinstance(each, dict) else str(each)
            yield key, said
    elif value is not None:
        yield key, str(value)


def _fields(said: Statement, log: Path | None) -> Iterable[IsolationField]:
    """Return the fields of the isolation, with those of the log's table."""
    found = said.predicate.isolation
    if found is None or found.table is None or log is None:
        return found.fields if found else ()
    tables = read.records_about(log, {found.table}, said.predicate.audit.seq)
    return IsolationFound.model_validate(calls.completed(found.model_dump(), tables), extra="ignore").fields


def _show(said: Statement, fields: Iterable[IsolationField]) -> None:
    """Print what a receipt says, as its documented keys have it, and then the isolation's fields as a table."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    told = said.predicate.model_dump(mode="json", exclude={"isolation": {"fields"}})
    for name, value in _facts({**told, "subject": [each.model_dump(mode="json") for each in said.subject]}):
        table.add_row(Text(printable(name), style="cyan"), Text(printable(value)))
    print_table(out, table, wide=_COLUMNS)
    styles = {"ok": "green", "differs": "red", "not measurable": "yellow"}
    rows = []
    for each in fields:
        verdict = Text(each.verdict, styles[each.verdict])
        rows.append((each.field, cell(each.planned), cell(each.inside), cell(each.outside), verdict))
    if isolation := table_of(["isolation", "planned", "inside", "outside", "verdict"], rows):
        isolation.columns[0].no_wrap = True
        print_table(out, isolation, wide=_COLUMNS)


@click.group(cls=LazyGroup)
def bundle() -> None:
    """Bundle one call or run in a file, to check anywhere."""


@command("verify", bundle, opens="nothing")
@click.argument("content", metavar="FILE", type=parsed_file("bundle", bytes, archive.MAX_BYTES + 1))
@click.option("--key", "keys", multiple=True, type=KEY, help="The server's public key, from the server's operator.")
def bundle_verify(content: bytes, keys: tuple[Ed25519PublicKey, ...]) -> int:
    """Check a bundle of `audit bundle`, offline.

    It shows what ran, what was withheld, and that no more of it is on record.
    """
    given = {dsse.key_id(key): key for key in keys}
    try:
        found = archive.verify(content, given)
    except EvidenceError as problem:
        return not_proved("bundle", problem)
    if emit(_verified_fields(found, signed=bool(keys))):
        return OK
    made, calls = found.evidence, report.of_calls(found.evidence.records)
    for call, records in calls.items():
        held = counted(len(report.withheld(made.receipts.get(call))), "thing")
        began, outcome = records[0], report.outcome(records)
        out.print(f"{began.time}  {call}  {began.data.get('tool')}  {outcome}  {held} withheld")
    first, last = made.seals[0], made.seals[-1]
    where = f"segment {first.segment}" if first is last else f"segments {first.segment} to {last.segment}"
    said = (
        f"{made.of} {made.id} is {counted(len(calls), 'call')} with {counted(len(made.records), 'record')},"
        f" and nothing else of it is in {where}, sealed until {last.time}"
    )
    if keys:
        but, style = ("", "green") if found.report_checked else (f" except {archive.REPORT}", "yellow")
        out.print(f"PROVED{but} with {' '.join(made.keys)}: {said}.", style=style)
    else:
        out.print(f"consistent, signer unknown (no --key): {said}.", style="yellow")
    if not found.report_checked:
        out.print(f"{archive.REPORT} proves nothing: it says that it is of version {printable(made.version)[:40]}.")
    return OK


def _verified_fields(found: archive.VerifiedBundle, *, signed: bool) -> dict[str, object]:
    made = found.evidence
    return {
        "ok": True,
        "proved": signed and found.report_checked,
        "keys": made.keys,
        made.of: made.id,
        "calls": {
            call: {"outcome": report.outcome(records), "withheld": report.withheld(made.receipts.get(call))}
            for call, records in report.of_calls(made.records).items()
        },
        "records": len(made.records),
        "segments": [made.seals[0].segment, made.seals[-1].segment],
        "sealed": made.seals[-1].time,
        "report_checked": found.report_checked,
    }


@command("bundle")
@click.option("--call", metavar="CALL", help="Of this call.")
@click.option("--run", metavar="ID", help="Of all calls of this run, as `audit show` has it, or `last`.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="A new file.")
def audit_bundle(settings: Settings, call: str | None, run: str | None, output: Path) -> int:
    """Write one file that shows what a call or a run did.

    And that there is no more of it: for `bundle verify`, anywhere. Seals what is not sealed yet.
    """
    if (call is None) == (run is None):
        raise click.UsageError("Name one: --call CALL or --run ID.")
    directory = settings.state_dir / "audit"
    if run is not None:
        of, identity = "run", find_run(directory, run)
    else:
        of, identity = "call", find_call(directory, call or "")
    try:
        content = bundling.make(settings, of, identity)
    except EvidenceError as problem:
        err.print(f"There is no bundle: {problem}.")
        return FAILED
    write_new_file(output, content)
    fields = {"file": str(output), of: identity, "bytes": len(content)}
    emit(fields, f"{output}: {of} {identity}, {counted(len(content), 'byte')}.")
    return OK


@command("prove", json="")
@click.argument("call_id", metavar="CALL")
def audit_prove(settings: Settings, call_id: str) -> int:
    """Print the inclusion proof of one call, as JSON.

    Its records, and that they lie in a sealed segment.
    """
    directory = settings.state_dir / "audit"
    call_id = find_call(directory, call_id)
    try:
        found = evidence.prove(directory, "call", call_id, partial(bundling.texts, settings))
    except EvidenceError as problem:
        hint = "`glovebox audit seal` seals it now; else the next day or 16 MiB will."
        unsealed = f"Records of call {call_id} are in a segment that is not sealed yet: {hint}"
        err.print(unsealed if problem.kind == "unsealed" else f"There is no proof: {problem}.")
        return FAILED
    out.out(found.decode(), end="")
    return OK
