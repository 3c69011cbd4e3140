"""``glovebox bundle``: checks a bundle anywhere, without a server."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit.bundle import archive, report
from glovebox_audit.bundle import verify as verifying
from glovebox_audit.chain import EvidenceError, Record
from glovebox_audit.printable import printable
from glovebox_audit.receipts import dsse
from glovebox_sandboxes.plural import counted
from glovebox_server.cli.evidence.audit import KEY, not_proved
from glovebox_server.cli.options import LazyGroup, command, emit, out, wants_json
from glovebox_server.exits import OK, USAGE

_file = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group(cls=LazyGroup)
def bundle() -> None:
    """What one call or run did, as one file to check anywhere."""


@command("verify", bundle, opens="nothing")
@click.argument("file", type=_file)
@click.option("--key", "keys", multiple=True, type=KEY, help="The server's public key, from the server's operator.")
def bundle_verify(file: Path, keys: tuple[Ed25519PublicKey, ...]) -> int:
    """Check a bundle of `audit bundle`, offline.

    It shows what ran, what was withheld, and that no more of it is on record.
    """
    given = {dsse.key_id(key): key for key in keys}
    if not file.is_file():  # a pipe without a writer would block
        out.print(f"{file} is no file: name the bundle itself.")
        return USAGE
    with file.open("rb") as opened:
        content = opened.read(archive.MAX_BYTES + 1)
    try:
        found = verifying.verify(content, given)
    except EvidenceError as problem:
        return not_proved("bundle", problem)
    evidence = found.evidence
    calls = report.of_calls(evidence.records)
    if wants_json():
        emit(_verified_fields(found, calls, proved=bool(keys) and found.report_checked))
        return OK
    for call, records in calls.items():
        data = records[0].data
        held = counted(len(report.withheld(evidence.receipts.get(call))), "thing")
        words = f"{records[0].time}  {call}  {data.get('tool')}  {report.outcome(records)}  {held} withheld"
        out.print(words)
    first, last = evidence.seals[0], evidence.seals[-1]
    where = f"segment {first.segment}" if first is last else f"segments {first.segment} to {last.segment}"
    said = (
        f"{evidence.of} {evidence.id} is {counted(len(calls), 'call')} with {counted(len(evidence.records), 'record')},"
        f" and nothing else of it is in {where}, sealed until {last.time}"
    )
    if keys:
        but, style = ("", "green") if found.report_checked else (f" but for {archive.REPORT}", "yellow")
        out.print(f"PROVED{but} with {' '.join(evidence.keys)}: {said}.", style=style)
    else:
        out.print(f"consistent, signer unknown (no --key): {said}.", style="yellow")
    if not found.report_checked:
        out.print(f"{archive.REPORT} proves nothing: it says that it is of version {printable(evidence.version)[:40]}.")
    return OK


def _verified_fields(
    found: verifying.VerifiedBundle, calls: Mapping[str, Sequence[Record]], *, proved: bool
) -> dict[str, object]:
    evidence = found.evidence
    return {
        "ok": True,
        "proved": proved,
        "keys": evidence.keys,
        evidence.of: evidence.id,
        "calls": {
            call: {"outcome": report.outcome(records), "withheld": report.withheld(evidence.receipts.get(call))}
            for call, records in calls.items()
        },
        "records": len(evidence.records),
        "segments": [evidence.seals[0].segment, evidence.seals[-1].segment],
        "sealed": evidence.seals[-1].time,
        "report_checked": found.report_checked,
    }
