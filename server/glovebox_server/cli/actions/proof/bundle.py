"""What ``glovebox audit bundle`` and ``glovebox bundle verify`` do. Each returns an exit code."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from glovebox_audit.bundle import archive, report
from glovebox_audit.bundle import make as making
from glovebox_audit.bundle import verify as verifying
from glovebox_audit.printable import printable
from glovebox_audit.receipts import dsse
from glovebox_audit.segments.proof import NotAProof, NotSealed
from glovebox_profiles import model as profiles_model
from glovebox_profiles.errors import ProfileError
from glovebox_sandboxes.plural import counted
from glovebox_server.cli.actions.audit import not_proved, public_key
from glovebox_server.cli.actions.query import call_named, run_named
from glovebox_server.cli.actions.saving import CannotSave, NameTaken
from glovebox_server.cli.terminal import print_json
from glovebox_server.exits import FAILED, OK, USAGE
from glovebox_server.settings import Settings


def make(
    settings: Settings, out: Console, err: Console, *, call: str | None, run: str | None, output: Path, as_json: bool
) -> int:
    """Write a bundle; what of it is not sealed yet is sealed first."""
    directory = settings.state_dir / "audit"
    if run is not None:
        of, identity = "run", run_named(directory, run, err)
    else:
        of, identity = "call", call_named(directory, call or "", err)
    try:
        content = _made(settings, directory, of, identity)
    except (NotAProof, NotSealed) as problem:
        why = str(problem) or "its records go on being written: try again once the run is over"
        err.print(Text(f"There is no bundle: {why}."))
        return FAILED
    if content is None:
        err.print(Text(f"No record of {of} {identity}. `glovebox audit query` finds calls, and shows their runs."))
        return FAILED
    try:
        with output.open("xb") as file:
            file.write(content)
    except FileExistsError as error:
        raise NameTaken(output, error, "Name another file.") from error
    except OSError as error:
        raise CannotSave(output, error, "Make room, or name another file.") from error
    if as_json:
        print_json(out.file, {"file": str(output), of: identity, "bytes": len(content)})
    else:
        out.print(Text(f"{output}: {of} {identity}, {counted(len(content), 'byte')}."))
    return OK


def _made(settings: Settings, directory: Path, of: str, identity: str) -> bytes | None:
    def texts() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return _texts(settings)

    try:
        return making.make(directory, of, identity, texts)
    except NotSealed:
        from glovebox_server.upkeep.log import audit_log  # noqa: PLC0415 - only here

        log = audit_log(settings)
        try:
            log.seal()
        finally:
            log.close()
        return making.make(directory, of, identity, texts)


def _texts(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Profiles in force, of each role too, and the policy, by digest; nothing where they do not load."""
    from glovebox_server import app, workspace  # noqa: PLC0415 - brings every part
    from glovebox_server.proof.lock import policy_keys  # noqa: PLC0415 - as above
    from glovebox_server.startup.policy import governed  # noqa: PLC0415 - as above
    from glovebox_server.tools import TOOLS  # noqa: PLC0415 - as above

    try:
        profiles = app.load_profiles(settings)
        found = governed(settings, profiles, workspace.find(settings, "http"), TOOLS)
    except (ProfileError, workspace.WorkspaceRefused):
        return {}, {}
    sets = [profiles, *(each.profiles for each in found.every)]
    texts = {each.digest_for(tool): profiles_model.effective(each[tool]) for each in sets for tool in each}
    return texts, {} if found.policy is None else {found.digest or "": policy_keys(found.policy)}


def verify(file: Path, out: Console, *, key_files: Sequence[Path], as_json: bool) -> int:
    """Check a bundle, offline; 1 and the exact reason where it does not hold."""
    try:
        keys = {dsse.key_id(key): key for key in map(public_key, key_files)}
    except ValueError as problem:
        out.print(Text(str(problem)))
        return USAGE
    if not file.is_file():  # a pipe nobody writes to would be waited for
        out.print(Text(f"{file} is no file: name the bundle itself."))
        return USAGE
    with file.open("rb") as opened:
        content = opened.read(archive.MAX_BYTES + 1)
    try:
        found = verifying.verify(content, keys)
    except NotAProof as problem:
        return not_proved(out, "bundle", problem, as_json=as_json)
    evidence = found.evidence
    calls = report.of_calls(evidence.records)
    if as_json:
        told = {
            "ok": True,
            "proved": bool(keys) and found.report_checked,
            "keys": evidence.keys,
            evidence.of: evidence.id,
            "calls": {
                call: {
                    "outcome": report.outcome(each),
                    "withheld": report.withheld(evidence.receipts.get(call)),
                }
                for call, each in calls.items()
            },
            "records": len(evidence.records),
            "segments": [evidence.seals[0].segment, evidence.seals[-1].segment],
            "sealed": evidence.seals[-1].time,
            "report_checked": found.report_checked,
        }
        print_json(out.file, told)
        return OK
    for call, records in calls.items():
        data = records[0].data
        held = counted(len(report.withheld(evidence.receipts.get(call))), "thing")
        words = f"{records[0].time}  {call}  {data.get('tool')}  {report.outcome(records)}  {held} withheld"
        out.print(Text(words))
    first, last = evidence.seals[0], evidence.seals[-1]
    where = f"segment {first.segment}" if first is last else f"segments {first.segment} to {last.segment}"
    said = (
        f"{evidence.of} {evidence.id} is {counted(len(calls), 'call')} with {counted(len(evidence.records), 'record')},"
        f" and nothing else of it is in {where}, sealed until {last.time}"
    )
    if keys:
        but, style = ("", "green") if found.report_checked else (f" but for {archive.REPORT}", "yellow")
        out.print(Text(f"PROVED{but} with {' '.join(evidence.keys)}: {said}.", style=style))
    else:
        out.print(Text(f"consistent, signer unknown (no --key): {said}.", style="yellow"))
    if not found.report_checked:
        out.print(
            Text(f"{archive.REPORT} proves nothing: it says that it is of version {printable(evidence.version)[:40]}.")
        )
    return OK
