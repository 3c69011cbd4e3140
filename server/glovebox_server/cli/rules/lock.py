"""``glovebox profiles lock | sign``: writes down what is in effect, and signs it."""

from pathlib import Path

import click

from glovebox_audit.receipts import dsse
from glovebox_sandboxes.plural import counted
from glovebox_server import app, workspace
from glovebox_server.cli.options import command, emit, out
from glovebox_server.cli.rules.showing import described
from glovebox_server.cli.saving import replace_file
from glovebox_server.exits import OK, USAGE
from glovebox_server.proof import signature
from glovebox_server.proof.lock import Effective, Lock, written
from glovebox_server.receipts import keys
from glovebox_server.settings import Settings
from glovebox_server.startup.policy import governed, policy_file
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.environments import required


@command("lock", opens="settings")
@click.argument("file", default="glovebox.lock", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def profiles_lock(settings: Settings, file: Path, force: bool) -> None:
    """Write down what is in force: profiles, policy, tools.

    One file (glovebox.lock), to review, and for `serve --locked`.
    """
    found = _effective(settings)
    replace_file(file, written(found.content()), force=force)
    if emit({"file": str(file), "lock": Lock.read(file).digest}):
        return
    policy = "the policy" if found.policy is not None else "no policy"
    counts = f"{counted(len(found.profiles), 'profile')}, {policy}, {counted(len(found.tools), 'tool')}"
    out.print(f"{file}: {counts}. {Lock.read(file).digest}")


@command("sign", opens="nothing")
@click.argument("file", default="glovebox.lock", type=click.Path(path_type=Path))
@click.option("--key", required=True, type=click.Path(path_type=Path), help="Your Ed25519 private key, in PEM.")
def profiles_sign(file: Path, key: Path) -> None:
    """Sign a lock, into FILE.sig: for `serve --require-signed`.

    FILE is glovebox.lock where none is given.
    """
    lock, private = Lock.read(file), keys.operators(key)
    place = signature.place(file)
    replace_file(place, signature.sign(lock.data, private), force=True)
    key_id = dsse.key_id(private.public_key())
    if not emit({"file": str(place), "lock": lock.digest, "key_id": key_id}):
        out.print(f"{place}: signed with key {key_id}")


def check_lock(settings: Settings, file: Path) -> int:
    """Name all that differs from a lock."""
    lock = Lock.read(file)
    differences = lock.differences(_effective(settings))
    if not emit({"lock": lock.digest, "errors": [described(each) for each in differences]}):
        for each in differences:
            out.print(str(each), style="red")
        out.print(f"{counted(len(differences), 'difference')} from {file}.")
    return USAGE if differences else OK


def _effective(settings: Settings) -> Effective:
    profiles = app.load_profiles(settings)
    environments = required(settings, profiles)
    path = policy_file(settings)
    policy = governed(settings, profiles, workspace.find(settings, "http"), TOOLS).policy
    return app.effective(profiles, environments, policy, path)
