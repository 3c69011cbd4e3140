"""The lock of what is in effect: what it says, what it refuses, and who signed it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.fixtures.audit_logs import log_lines
from tests.unit.test_active_policy import TEXT as POLICY

from glovebox_audit.receipts.dsse import public_pem
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED
from glovebox_server.app import opened
from glovebox_server.cli.main import main
from glovebox_server.exits import OK, REFUSED, USAGE
from glovebox_server.proof.lock import Lock
from glovebox_server.settings import Settings

LIMIT = "wall_seconds = 30"


class Scene:
    def __init__(self, place: Path) -> None:
        self.place = place
        self.profiles = place / "config" / "profiles"
        self.profiles.mkdir(parents=True)
        text = (SHIPPED / "list_workspace_files.toml").read_text()
        self.profile = self.profiles / "list_workspace_files.toml"
        self.put(self.profile, text)
        self.policy = place / "config" / "policy.toml"
        self.put(self.policy, POLICY)
        self.lock = place / "glovebox.lock"
        self.places = ["--profiles-dir", str(self.profiles), "--state-dir", str(place / "state")]

    def put(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o600)

    def replace(self, path: Path, old: str, new: str) -> None:
        text = path.read_text()
        assert old in text
        self.put(path, text.replace(old, new))

    def run(self, *words: object, places: bool = True) -> Result:
        return CliRunner().invoke(main, [*map(str, words), *(self.places if places else ())])

    def locked(self) -> Mapping[str, Any]:
        found = self.run("profiles", "lock", self.lock)
        assert found.exit_code == OK, found.stderr
        content: Mapping[str, Any] = json.loads(self.lock.read_bytes())
        return content

    def key(self, name: str) -> tuple[Path, Path]:
        private = Ed25519PrivateKey.generate()
        form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        own, public = self.place / f"{name}.pem", self.place / f"{name}.pub"
        self.put(own, private.private_bytes(serialization.Encoding.PEM, form, secret).decode())
        self.put(public, public_pem(private.public_key()))
        return own, public

    def start(self, **given: Any) -> None:
        state, data = self.place / "state", self.place / "data"
        settings = Settings(profiles_dir=self.profiles, state_dir=state, data_dir=data, **given)

        async def once() -> None:
            async with opened(settings, "cli") as app:
                before = app.in_force.now.digest
                self.replace(self.policy, "tools = [", 'tools = ["run_python", ')
                for _ in range(2):
                    await app.in_force.look(app.audit, lambda _: None)
                self.changed = app.in_force.now.digest != before
                self.problem = app.in_force.problem

        anyio.run(once)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    monkeypatch.chdir(workspace)
    return Scene(tmp_path)


def test_a_lock_has_the_digest_and_every_key_of_what_is_in_force(scene: Scene) -> None:
    """Profiles, the policy, and each tool as models are shown it; comments change no byte of it."""
    content = scene.locked()
    shown = json.loads(scene.run("profiles", "show", "list_workspace_files", "--json").stdout)
    assert content["profiles"]["list_workspace_files"] == {"digest": shown["digest"], "keys": shown["profile"]}
    assert content["policy"]["keys"]["roles"]["one"]["tools"] == ["list_workspace_files"]
    assert set(content["tools"]) == set(content["profiles"])
    before = scene.lock.read_bytes()
    scene.put(scene.profile, "# a comment\n" + scene.profile.read_text())
    scene.lock.unlink()
    scene.locked()
    assert scene.lock.read_bytes() == before
    said = json.loads(scene.run("profiles", "lock", scene.lock, "--force", "--json").stdout)
    assert said == {"file": str(scene.lock), "lock": Lock.read(scene.lock).digest}
    signed = scene.run("profiles", "sign", scene.lock, "--key", scene.key("operator")[0], "--json", places=False)
    assert (signed.exit_code, json.loads(signed.stdout)["file"]) == (OK, f"{scene.lock}.sig")
    taken = scene.run("profiles", "lock", scene.lock)
    assert (taken.exit_code, "there is one already" in taken.stderr) == (USAGE, True)


def test_a_lock_takes_the_place_of_no_pipe_and_no_device(scene: Scene) -> None:
    """Root could put it in the place of any device of the machine; nor does a signature."""
    os.mkfifo(scene.lock)
    told = scene.run("profiles", "lock", scene.lock, "--force")
    assert (told.exit_code, "no regular file" in told.stderr, scene.lock.is_fifo()) == (USAGE, True, True)
    scene.lock.unlink()
    scene.locked()
    sign = ["profiles", "sign", scene.lock, "--key", scene.key("operator")[0]]
    os.mkfifo(f"{scene.lock}.sig")
    assert scene.run(*sign, places=False).exit_code == USAGE
    Path(f"{scene.lock}.sig").unlink()
    assert scene.run(*sign, places=False).exit_code == OK


def test_what_differs_is_named_with_its_file_and_line(scene: Scene) -> None:
    """A key of a profile, one of the policy, and a profile that is gone; without a change nothing is (the control)."""
    scene.replace(scene.profile, "wall_seconds = 10", LIMIT)
    scene.locked()
    assert scene.run("profiles", "check", "--locked", scene.lock).exit_code == OK
    scene.replace(scene.profile, LIMIT, "wall_seconds = 20")
    scene.replace(scene.policy, "tools = [", 'tools = ["run_python", ')
    found = scene.run("profiles", "check", "--locked", scene.lock, "--json")
    errors = json.loads(found.stdout)["errors"]
    named = {(each["path"], each["line"], each["key"]): each["problem"] for each in errors if each["line"]}
    lines = scene.profile.read_text().splitlines()
    at = lines.index("wall_seconds = 20") + 1
    problem = named[str(scene.profile), at, "limits.wall_seconds"]
    was = scene.lock.read_text().splitlines()
    line = int(problem.rpartition(":")[2])
    assert (found.exit_code, problem) == (USAGE, f"is 20.0, and 30.0 in {scene.lock}:{line}")
    assert '"wall_seconds": 30.0' in was[line - 1]
    assert (str(scene.policy), POLICY.splitlines().index('tools = ["list_workspace_files"]') + 1) in {
        (path, line) for path, line, _ in named
    }
    scene.profile.unlink()
    told = scene.run("profiles", "check", "--locked", scene.lock).stdout
    assert "is 10.0, and 30.0 in" in told


def test_a_server_starts_with_what_was_locked_and_with_nothing_else(scene: Scene) -> None:
    """And says in its first record with which lock."""
    scene.locked()
    digest = Lock.read(scene.lock).digest
    scene.start(locked=scene.lock)
    assert f'"lock_digest":"{digest}"'.encode() in log_lines(scene.place / "state" / "audit")[0]
    scene.put(scene.policy, POLICY)
    scene.replace(scene.profile, "wall_seconds = 10", "wall_seconds = 20")
    with pytest.raises(ProfileError, match=r"limits\.wall_seconds: is 20.0, and 10.0 in .*glovebox\.lock:\d+"):
        scene.start(locked=scene.lock)
    refused = scene.run("call", "list_workspace_files", "--locked", scene.lock)
    assert (refused.exit_code, "limits.wall_seconds: is 20.0, and 10.0 in" in refused.stderr) == (USAGE, True)


def test_a_policy_that_changes_while_a_server_runs_is_refused_where_it_was_locked(scene: Scene) -> None:
    """What was in effect stays; the control has no lock, and takes it."""
    scene.locked()
    scene.start()
    assert (scene.changed, scene.problem) == (True, None)
    scene.put(scene.policy, POLICY)
    scene.start(locked=scene.lock)
    assert (scene.changed, "glovebox.lock" in (scene.problem or "")) == (False, True)


@pytest.mark.parametrize("gone", [True, False])
def test_a_policy_that_was_not_locked_or_is_gone_is_a_difference(scene: Scene, gone: bool) -> None:
    """A server without it would let everybody do more, and one with another what nobody reviewed."""
    if not gone:
        scene.policy.unlink()
    scene.locked()
    if gone:
        scene.policy.unlink()
    else:
        scene.put(scene.policy, POLICY)
    with pytest.raises(ProfileError, match=r"policy: is not there" if gone else r"policy: .*and not in"):
        scene.start(locked=scene.lock)


def test_a_lock_that_was_edited_or_that_others_could_write_is_none(scene: Scene) -> None:
    """Another value or digest differs from what is in effect; another form, or others' access, is refused as such."""
    scene.locked()
    text = scene.lock.read_text()
    scene.replace(scene.lock, '"wall_seconds": 10.0', '"wall_seconds":  10.0')
    with pytest.raises(ProfileError, match="it was edited"):
        Lock.read(scene.lock)
    scene.put(scene.lock, text.replace('"digest": "sha256:', '"digest": "sha256:0', 1))
    with pytest.raises(ProfileError, match="digest: is"):
        scene.start(locked=scene.lock)
    scene.put(scene.lock, text.replace("lock/v1", "lock/v2"))
    with pytest.raises(ProfileError, match="newer Glovebox"):
        Lock.read(scene.lock)
    for hostile in ("[]", "{}", "1", '{"type": 1}', "[" * 100_000):
        scene.put(scene.lock, hostile)
        with pytest.raises(ProfileError, match="is no lock"):
            Lock.read(scene.lock)
    scene.put(scene.lock, text)
    scene.lock.chmod(0o666)
    with pytest.raises(ProfileError, match="writable by every user"):
        Lock.read(scene.lock)


def test_only_the_lock_that_its_operator_signed_is_taken(scene: Scene) -> None:
    """Unsigned, signed by another, and signed before it was changed: each is refused by its reason."""
    own, public = scene.key("operator")
    other, _ = scene.key("other")
    scene.locked()
    with pytest.raises(ProfileError, match="is not signed"):
        scene.start(locked=scene.lock, require_signed=public)
    scene.run("profiles", "sign", scene.lock, "--key", other, places=False)
    with pytest.raises(ProfileError, match="signed with another key"):
        scene.start(locked=scene.lock, require_signed=public)
    assert scene.run("profiles", "sign", scene.lock, "--key", own, places=False).exit_code == OK
    scene.start(locked=scene.lock, require_signed=public)
    assert not scene.changed
    scene.put(scene.policy, POLICY)
    scene.replace(scene.profile, "wall_seconds = 10", "wall_seconds = 20")
    scene.lock.unlink()
    scene.locked()
    with pytest.raises(ProfileError, match="of another lock, or this one was changed"):
        scene.start(locked=scene.lock, require_signed=public)
    with pytest.raises(ProfileError, match="there is none"):
        scene.start(require_signed=public)


def test_nothing_is_promoted_by_a_policy_that_was_not_locked(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was added since is none; nor is one of an unsigned lock. The control is the policy as it was."""
    _, public = scene.key("operator")
    scene.locked()
    words = ("artifact", "promote", "artifact://" + "0" * 32, "--into", "reports")
    monkeypatch.setenv("GLOVEBOX_LOCKED", str(scene.lock))
    asked = scene.run(*words)
    assert (asked.exit_code, "names no folder" in asked.stderr) == (REFUSED, True)
    (scene.place / "reports").mkdir()
    named = f'[promote]\ninto = {{ reports = "{scene.place / "reports"}" }}\n'
    scene.put(scene.policy, POLICY.replace("[[example]]", f"{named}[[example]]", 1))
    asked = scene.run(*words)
    assert (asked.exit_code, "promote" in asked.stderr, "glovebox.lock" in asked.stderr) == (USAGE, True, True)
    monkeypatch.delenv("GLOVEBOX_LOCKED")
    asked = scene.run(*words)
    assert (asked.exit_code, "There is no artifact" in asked.stderr) == (REFUSED, True)
    monkeypatch.setenv("GLOVEBOX_REQUIRE_SIGNED", str(public))
    asked = scene.run(*words)
    assert (asked.exit_code, "there is none" in asked.stderr) == (USAGE, True)


def test_a_key_that_others_could_read_signs_nothing(scene: Scene) -> None:
    """Nor one that is missing, a link or a folder; the control is the key for its owner alone."""
    own, _ = scene.key("operator")
    scene.locked()
    own.chmod(0o644)
    told = scene.run("profiles", "sign", scene.lock, "--key", own, places=False).stderr
    assert "signing key" in told
    assert "others have access to it" in told
    assert not os.path.lexists(f"{scene.lock}.sig")
    told = scene.run("profiles", "sign", scene.lock, "--key", scene.place / "none.pem", places=False).stderr
    assert "openssl genpkey" in told
    own.chmod(0o600)
    linked, folder = scene.place / "link.pem", scene.place / "folder"
    linked.symlink_to(own)
    folder.mkdir()
    for other in (linked, folder):
        told = scene.run("profiles", "sign", scene.lock, "--key", other, places=False).stderr
        assert "Name the file itself." in told
        assert "genpkey" not in told
        assert "Remove" not in told
    assert scene.run("profiles", "sign", scene.lock, "--key", own, places=False).exit_code == OK
