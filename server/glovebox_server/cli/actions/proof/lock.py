"""What ``glovebox profiles lock | sign | check --locked`` do. Each returns an exit code."""

from pathlib import Path

from rich.console import Console

from glovebox_audit.receipts import dsse
from glovebox_sandboxes.plural import counted
from glovebox_server import app, workspace
from glovebox_server.cli.actions.profiles import described, say
from glovebox_server.cli.actions.saving import replace_file
from glovebox_server.cli.terminal import print_json
from glovebox_server.exits import OK, USAGE
from glovebox_server.proof import signature
from glovebox_server.proof.lock import Effective, Lock, written
from glovebox_server.receipts import keys
from glovebox_server.settings import Settings
from glovebox_server.startup.policy import governed, policy_file
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.environments import required


def write(settings: Settings, file: Path, console: Console, *, force: bool, as_json: bool) -> int:
    """Write the lock of what is in force here."""
    found = _effective(settings)
    replace_file(file, written(found.content()), force=force)
    if as_json:
        print_json(console.file, {"file": str(file), "lock": Lock.read(file).digest})
        return OK
    policy = "the policy" if found.policy is not None else "no policy"
    counts = f"{counted(len(found.profiles), 'profile')}, {policy}, {counted(len(found.tools), 'tool')}"
    say(console, f"{file}: {counts}. {Lock.read(file).digest}")
    return OK


def sign(file: Path, key: Path, console: Console, *, as_json: bool) -> int:
    """Sign a lock with an operator's key."""
    lock, private = Lock.read(file), keys.operators(key)
    place = signature.place(file)
    replace_file(place, signature.sign(lock.data, private), force=True)
    key_id = dsse.key_id(private.public_key())
    if as_json:
        print_json(console.file, {"file": str(place), "lock": lock.digest, "key_id": key_id})
    else:
        say(console, f"{place}: signed with key {key_id}")
    return OK


def check(settings: Settings, file: Path, console: Console, *, as_json: bool) -> int:
    """Name all that differs from a lock."""
    lock = Lock.read(file)
    differences = lock.differences(_effective(settings))
    if as_json:
        print_json(console.file, {"lock": lock.digest, "errors": [described(each) for each in differences]})
    else:
        for each in differences:
            say(console, str(each), "red")
        say(console, f"{counted(len(differences), 'difference')} from {file}.")
    return USAGE if differences else OK


def _effective(settings: Settings) -> Effective:
    profiles = app.load_profiles(settings)
    environments = required(settings, profiles)
    path = policy_file(settings)
    policy = governed(settings, profiles, workspace.find(settings, "http"), TOOLS).policy
    return app.effective(profiles, environments, policy, path)
