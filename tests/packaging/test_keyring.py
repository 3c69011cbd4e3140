"""A lent key from a real keyring: the Python package ``keyring``, with a backend that keeps its entries in a file."""

import os
import subprocess  # noqa: TID251 - installs packages, and runs Python beside them
import sys
from pathlib import Path

import pytest
from tests.must_run import unusable

PACKAGES = (
    *("keyring==25.6.0", "keyrings.alt==5.0.2", "jaraco.classes==3.4.0", "jaraco.functools==4.6.0"),
    *("jaraco.context==6.1.2", "more-itertools==11.2.1", "importlib_metadata==8.7.0", "zipp==3.23.0"),
    "backports.tarfile==1.2.0",
)
KEY = "Zq8-fk2_Lw7Rt5Xv9Bn3Mp6Hs1Dy4Gc0"
ASK = """
import asyncio, keyring, sys
from glovebox_server.guards.credentials.sources import CredentialError, read
async def main():
    try:
        print((await read("keyring:tracker/" + sys.argv[1])).text)
    except CredentialError as failed:
        print(failed.reason, "|", failed.fix)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packages are, and beside them what they keep."""
    place = tmp_path_factory.mktemp("keyring")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        unusable("index", f"keyring cannot be installed here: {(done.stderr or done.stdout)[-300:]}")
    return place


def ran(place: Path, backend: str, *command: str) -> str:
    """What Python printed, beside these packages and with this backend."""
    own = {"PYTHONPATH": str(place), "PYTHON_KEYRING_BACKEND": backend, "XDG_DATA_HOME": str(place / "kept")}
    done = subprocess.run([sys.executable, *command], env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_key_comes_from_the_keyring(place: Path) -> None:
    """As it was put there by hand; an entry that is not there is said to be empty."""
    backend = "keyrings.alt.file.PlaintextKeyring"
    ran(place, backend, "-c", f"import keyring; keyring.set_password('tracker', 'me', '{KEY}')")
    assert ran(place, backend, "-c", ASK, "me") == KEY
    assert "its entry in the keyring is not there or empty" in ran(place, backend, "-c", ASK, "other")


def test_a_keyring_that_cannot_be_used_says_what_to_do(place: Path) -> None:
    """No backend, as on a server without a desktop: the failure and the fix, and no value."""
    said = ran(place, "keyring.backends.fail.Keyring", "-c", ASK, "me")
    assert said.startswith("there is no keyring here | ")
    assert "name another source" in said
    assert KEY not in said
