"""What ``glovebox receipt key | show | verify`` do: from a file or a log to a console and an exit code.

Argument parsing is the command line's business. Text from receipts is shown with control characters escaped.
"""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glovebox_audit import chain
from glovebox_audit.printable import printable
from glovebox_audit.receipts import dsse, statement
from glovebox_audit.receipts.dsse import NotAReceipt
from glovebox_audit.receipts.keys import parse_public
from glovebox_audit.receipts.statement import Statement
from glovebox_audit.receipts.verify import VerifiedReceipt, of_call
from glovebox_audit.receipts.verify import verify as verify_receipt
from glovebox_server.cli.actions.query import call_named
from glovebox_server.cli.terminal import new_table, print_json, print_table
from glovebox_server.exits import FAILED, OK, USAGE
from glovebox_server.receipts import keys

_COLUMNS = 100
"""Of what is shown of a receipt, into a pipe as well: some cells hold a whole list."""


class _NoReceipt(NotAReceipt):
    """A call has none; the message is a sentence."""


def key(state_dir: Path, console: Console, err: Console, *, as_json: bool) -> int:
    """Print the public key, making a pair where there is none."""
    signer = keys.Signer.load(state_dir)
    if as_json:
        print_json(console.file, {"key_id": signer.key_id, "public_key": signer.public_pem()})
        return OK
    console.out(signer.public_pem(), end="", highlight=False)
    err.print(Text(f"key {signer.key_id}"))
    return OK


def show(state_dir: Path, console: Console, err: Console, wanted: str, *, as_json: bool) -> int:
    """Show the receipt of a call of this server, or in a file; nothing is proved."""
    if not Path(wanted).is_file() and not chain.is_name(wanted):
        return _neither(err, wanted)
    try:
        content, _ = _found(state_dir / "audit", wanted, err)
        envelope = dsse.parse(content)
        said = statement.parse(envelope.payload)
    except _NoReceipt as problem:
        err.print(Text(printable(str(problem))))
        return FAILED
    except NotAReceipt as problem:
        err.print(Text(f"Not a receipt: {printable(str(problem))}."))
        return FAILED
    if as_json:
        console.out(content.removesuffix(b"\n").decode(), highlight=False)
        return OK
    _show(console, said)
    console.print(Text(f"Says key {printable(envelope.key_id)}; prove it with `glovebox receipt verify`.", style="dim"))
    return OK


def _neither(err: Console, wanted: str) -> int:
    err.print(Text(f"{printable(wanted)[:200]!r} is neither a file nor the id of a call."))
    return USAGE


def verify(
    state_dir: Path,
    console: Console,
    err: Console,
    wanted: str,
    *,
    public_key: Path | None,
    audit: Path | None,
    as_json: bool,
) -> int:
    """Prove the receipt of a call, with its place in the log, or in a file; 1 and the reason when it does not hold.

    Without a key it is the one of this server that has to have signed it.
    """
    if Path(wanted).exists() and not Path(wanted).is_file() and not chain.is_name(wanted):  # a pipe would be waited for
        return _neither(err, wanted)
    try:
        given = keys.own_public(state_dir) if public_key is None else parse_public(_read(public_key))
    except (ValueError, OSError) as problem:
        words = (isinstance(problem, OSError) and problem.strerror) or str(problem)
        console.print(Text(printable(f"The key {public_key} cannot be used: {words}.")))
        return USAGE
    if given is None:
        console.print(Text(printable(f"No key was made in {state_dir}: name the server's public key with --key.")))
        return USAGE
    try:
        content, log = _found(audit or state_dir / "audit", wanted, err)
        audit = audit or log
        proved = verify_receipt(content, given, audit)
    except NotAReceipt as problem:
        if as_json:
            print_json(console.file, {"ok": False, "reason": str(problem)}, indent=None)
        elif isinstance(problem, _NoReceipt):
            err.print(Text(printable(str(problem))))
        else:
            console.print(Text(f"The receipt does not hold: {printable(str(problem))}.", style="red"))
        return FAILED
    if as_json:
        print_json(console.file, _report(proved, audited=audit is not None), indent=None)
    else:
        where = f"its place {proved.statement.predicate.audit.seq} in the audit log is right"
        place = where if audit else "its place in the audit log was not looked at"
        console.print(Text(f"The receipt of {proved.statement.predicate.call.id} holds: {place}.", style="green"))
        whose = ", this server's" if public_key is None else ""
        console.print(Text(f"{proved.digest}, signed with key {proved.key_id}{whose}"))
    return OK


def _report(proved: VerifiedReceipt, *, audited: bool) -> dict[str, object]:
    said = json.loads(proved.statement.model_dump_json(exclude_unset=True))
    return {"ok": True, "digest": proved.digest, "key": proved.key_id, "audit_checked": audited, "statement": said}


def _found(log: Path, wanted: str, err: Console) -> tuple[bytes, Path | None]:
    """The receipt in a file, or of a call, and the log that has it.

    Raises:
        NotAReceipt: the call has none.
        NoSuchCall: it is the beginning of several calls.
    """
    if Path(wanted).is_file() or not chain.is_name(wanted):
        return _read(Path(wanted)), None
    call_id = call_named(log, wanted, err)
    found = of_call(log, call_id)
    if found is None:
        why = "it is not known, was refused, has not ended, or its receipt was lost"
        raise _NoReceipt(f"No receipt of call {call_id}: {why}. `glovebox audit show` says what is recorded.")
    return found, log


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(dsse.MAX_BYTES + 2)


def _show(console: Console, said: Statement) -> None:
    """The facts in the order a reader asks: what, how isolated, what it reached, how it ended, what it gave."""
    told = said.predicate
    facts = [
        ("call", f"{told.call.id}, {told.call.tool}, by {told.call.principal}, {told.call.received}"),
        *((name, value) for name in ("client", "run", "workflow") if (value := getattr(told.call, name)) is not None),
        ("arguments", told.call.arguments),
        ("code", told.call.code or "none"),
        ("profile", f"{told.policy.profile}, rule {told.policy.rule}"),
        *((("approved", told.policy.approval),) if told.policy.approval else ()),
        *(("lifted", each) for each in told.policy.grants),
        *([("role", f"{told.policy.role}, policy {told.policy.policy}")] if told.policy.role is not None else []),
        *(("input", f"{each.name}, {each.bytes} bytes, {each.digest}") for each in told.inputs),
    ]
    if told.isolation is None:
        facts.append(("isolation", "no sandbox came to be measured"))
    else:
        found = told.isolation
        verdict = "as planned" if found.verified else "NOT as planned"
        facts.append(("isolation", f"{found.driver}, {found.level}, {verdict}; plan {found.plan}"))
        facts += [(f"  {name}", value) for name, value in found.host.items()]
    facts += [
        ("connection", f"{each.effect} {each.method or ''} {each.scheme}://{each.host}:{each.port} ({each.rule})")
        for each in told.egress
    ]
    outcome = told.outcome.model_dump(exclude_none=True, exclude={"usage"})
    facts.append(("outcome", ", ".join(f"{name} {value}" for name, value in outcome.items())))
    facts += [("subject", f"{each.name} {each.digest.get('sha256', '')}") for each in said.subject]
    facts += [("withheld", each) for each in told.withheld]
    facts.append(("audit", f"{told.audit.seq}:{told.audit.hash}, {told.audit.time}"))
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(Text(printable(name), style="cyan"), Text(printable(value)))
    print_table(console, table, wide=_COLUMNS)
    _show_fields(console, said)


def _show_fields(console: Console, said: Statement) -> None:
    if said.predicate.isolation is None or not said.predicate.isolation.fields:
        return
    table = new_table("isolation", "planned", "inside", "outside", "verdict")
    table.columns[0].min_width = 36  # the longest of them
    for each in said.predicate.isolation.fields:
        values = (each.planned, each.inside, each.outside)
        style = {"ok": "green", "differs": "red"}.get(each.verdict, "yellow")
        cells = ("" if value is None else _cell(value) for value in values)
        table.add_row(each.field, *(Text(printable(cell)) for cell in cells), Text(each.verdict, style=style))
    print_table(console, table, wide=_COLUMNS)


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
