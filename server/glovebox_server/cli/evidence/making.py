"""``glovebox audit bundle`` and ``audit prove``: what a call or run did, to check anywhere."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from glovebox_audit.bundle import make as making
from glovebox_audit.chain import EvidenceError
from glovebox_profiles import model as profiles_model
from glovebox_profiles.errors import ProfileError
from glovebox_sandboxes.plural import counted
from glovebox_server import app, workspace
from glovebox_server.cli.evidence.query import find_call, find_run
from glovebox_server.cli.options import command, emit, err, out
from glovebox_server.cli.saving import write_new_file
from glovebox_server.errors import MisnamedError
from glovebox_server.exits import FAILED, OK
from glovebox_server.proof.lock import policy_keys
from glovebox_server.settings import Settings
from glovebox_server.startup import governed
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.log import audit_log


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
        content = _made(settings, directory, of, identity)
    except EvidenceError as problem:
        err.print(f"There is no bundle: {problem}.")
        return FAILED
    if content is None:
        err.print(f"No record of {of} {identity}. `glovebox audit query` finds calls, and shows their runs.")
        return FAILED
    write_new_file(output, content)
    emit(
        {"file": str(output), of: identity, "bytes": len(content)},
        f"{output}: {of} {identity}, {counted(len(content), 'byte')}.",
    )
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
        found = making.prove(directory, "call", call_id, partial(_texts, settings))
    except EvidenceError as problem:
        hint = "`glovebox audit seal` seals it now; else the next day or 64 MiB will."
        unsealed = f"Records of call {call_id} are in a segment that is not sealed yet: {hint}"
        err.print(unsealed if problem.kind == "unsealed" else f"There is no proof: {problem}.")
        return FAILED
    if found is None:
        err.print(f"No record of call {call_id}. `glovebox audit tail` shows the latest calls.")
        return FAILED
    out.out(found.decode(), end="")
    return OK


def _made(settings: Settings, directory: Path, of: str, identity: str) -> bytes | None:
    texts = partial(_texts, settings)
    try:
        return making.make(directory, of, identity, texts)
    except EvidenceError as problem:
        if problem.kind != "unsealed":
            raise
        with closing(audit_log(settings)) as log:
            log.seal()
        return making.make(directory, of, identity, texts)


def _texts(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return profiles in effect, of each role too, and the policy, by digest; empty if they do not load."""
    try:
        profiles = app.load_profiles(settings)
        found = governed(settings, profiles, workspace.find(settings, "http"), TOOLS)
    except (ProfileError, MisnamedError):
        return {}, {}
    sets = [profiles, *(each.profiles for each in found.every)]
    texts = {each.digests[tool]: profiles_model.effective(each[tool]) for each in sets for tool in each}
    return texts, {} if found.policy is None else {found.digest or "": policy_keys(found.policy)}
