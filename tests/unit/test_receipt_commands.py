"""``glovebox receipt …``: exit codes, exact reasons, and a key that nobody else may read."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from tests.fixtures.receipts import CALL_ID, KEY, OTHER, receipt_log, said

from glovebox_audit.receipts.dsse import parse_public, public_pem
from glovebox_server.cli.main import main
from glovebox_server.receipts.keys import Signer
from glovebox_server.secret_files import SecretFileError


def run(*words: str | Path) -> Result:
    """One command; what it prints to both streams is in ``output``."""
    return CliRunner(env={"COLUMNS": "400"}).invoke(main, [str(word) for word in words])


@pytest.fixture
async def state(tmp_path: Path) -> Path:
    """A state directory with one receipt; its public key and the receipt lie beside it."""
    async with receipt_log(tmp_path / "state" / "audit") as harness:
        await harness.receipt()
        (tmp_path / "r.json").write_bytes(harness.content())
    (tmp_path / "key.pem").write_text(public_pem(KEY.public_key()))
    (tmp_path / "other.pem").write_text(public_pem(OTHER.public_key()))
    return tmp_path / "state"


def test_the_control_a_receipt_is_shown_and_verified(state: Path, tmp_path: Path) -> None:
    """By the call and from a file; with the key alone, and with the log."""
    by_call = run("receipt", "show", CALL_ID, "--state-dir", state)
    by_file = run("receipt", "show", tmp_path / "r.json", "--state-dir", tmp_path / "none")
    assert (by_call.exit_code, by_call.output) == (0, by_file.output)
    for words in (
        CALL_ID,
        "local:1",
        "Network: all of it.",
        "host docs.python.org, port 443",
        "artifact:0.txt",
        "in.csv",
    ):
        assert words in by_call.output
    assert max(map(len, by_call.output.splitlines()[:-1])) <= 100
    verify: list[str | Path] = ["receipt", "verify", tmp_path / "r.json", "--key", tmp_path / "key.pem"]
    alone = run(*verify)
    assert alone.exit_code == 0
    assert "holds: its place in the audit log was not looked at" in alone.output
    placed = run(*verify, "--audit", state / "audit")
    assert placed.exit_code == 0
    assert "holds: its place 6 in the audit log is right" in placed.output
    told = json.loads(run(*verify, "--audit", state / "audit", "--json").output)
    assert (told["ok"], told["audit_checked"]) == (True, True)
    assert told["statement"] == said((tmp_path / "r.json").read_bytes())


def test_what_show_prints_is_the_receipt_and_the_name_of_a_key_moves_no_cursor(state: Path, tmp_path: Path) -> None:
    """Redirected into a file it verifies; the name of a key is somebody's, and a terminal obeys what it prints."""
    shown = run("receipt", "show", CALL_ID, "--json", "--state-dir", state)
    (tmp_path / "copy.json").write_text(shown.output)
    assert run("receipt", "verify", tmp_path / "copy.json", "--key", tmp_path / "key.pem").exit_code == 0
    told = run("receipt", "verify", tmp_path / "r.json", "--key", tmp_path / "k\x1b[2J.pem")
    assert told.exit_code == 2
    assert "k\\x1b[2J.pem cannot be used: No such file" in told.output
    assert "\x1b" not in told.output


def test_a_call_made_here_is_verified_by_its_name_alone(state: Path, tmp_path: Path) -> None:
    """Its receipt, its place and the key are found; with another key, without one and of no call it is said."""
    verify: tuple[str | Path, ...] = ("receipt", "verify", CALL_ID, "--state-dir", state)
    without = run(*verify)
    assert (without.exit_code, "Name the server's public key with --key" in without.output) == (2, True)
    assert not (state / "keys").exists()
    named = run(*verify, "--key", tmp_path / "key.pem")
    assert (named.exit_code, "holds: its place 6 in the audit log is right" in named.output) == (0, True)
    state.chmod(0o700)
    Signer.load(state)
    foreign = run(*verify)
    assert (foreign.exit_code, "it was signed with another key" in foreign.output) == (1, True)
    pem = KEY.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (state / "keys" / "receipts.pem").write_bytes(pem)
    for name in (CALL_ID, CALL_ID[:8], "last"):
        own = run("receipt", "verify", name, "--state-dir", state)
        assert (own.exit_code, "this server's" in own.output) == (0, True), name
    assert run("receipt", "verify", tmp_path / "r.json", "--state-dir", state).exit_code == 0
    nobody = run("receipt", "verify", "c_none", "--state-dir", state)
    assert nobody.exit_code == 1
    assert "there is none of call c_none: " in nobody.stdout
    told = run("receipt", "verify", "c_none", "--state-dir", state, "--json")
    assert (told.exit_code, json.loads(told.stdout)["ok"], told.stderr) == (1, False, "")


def test_what_does_not_hold_is_told_with_its_reason(state: Path, tmp_path: Path) -> None:
    """Exit 1: tampered, another key, another log; in words and as JSON."""
    content = (tmp_path / "r.json").read_bytes()
    (tmp_path / "bad.json").write_bytes(content.replace(b"vnd", b"vmd"))
    (tmp_path / "log").mkdir()
    for name in ("audit.jsonl", "head.json"):
        (tmp_path / "log" / name).write_bytes(b"")
    cases: list[tuple[list[str | Path], str]] = [
        ([tmp_path / "bad.json", "--key", tmp_path / "key.pem"], "its payload is not application/vnd.in-toto+json"),
        ([tmp_path / "r.json", "--key", tmp_path / "other.pem"], "it was signed with another key"),
        ([tmp_path / "r.json", "--key", tmp_path / "key.pem", "--audit", tmp_path / "log"], "audit log"),
    ]
    for words, reason in cases:
        found = run("receipt", "verify", *words)
        assert found.exit_code == 1
        assert "The receipt does not hold: " in found.output
        assert reason in found.output
        told = json.loads(run("receipt", "verify", *words, "--json").output)
        assert told["ok"] is False
        assert reason in told["reason"]


def test_bad_arguments_are_no_verdict(state: Path, tmp_path: Path) -> None:
    """Exit 2 for what is no key or no call, 1 for a call without receipt, 4 for a log that there is not."""
    assert run("receipt", "verify", tmp_path / "r.json", "--key", tmp_path / "r.json").exit_code == 2
    assert run("receipt", "verify", tmp_path / "r.json", "--key", tmp_path / "none.pem").exit_code == 2
    missing = run("receipt", "verify", tmp_path / "none.json", "--key", tmp_path / "key.pem")
    assert missing.exit_code == 2
    assert "none.json' is neither a file nor the id of a call" in missing.stderr
    assert run("receipt", "show", "../x\x1b[2J", "--state-dir", state).exit_code == 2
    assert run("receipt", "show", "c_" + "9" * 26, "--state-dir", state).exit_code == 1
    assert run("receipt", "show", CALL_ID, "--state-dir", tmp_path / "empty").exit_code == 4
    shown = run("receipt", "show", tmp_path / "key.pem", "--state-dir", state)
    assert (shown.exit_code, "does not hold" in shown.output) == (1, True)


def test_the_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    """0600 in a directory 0700; the public half is printed, the same each time, and verifies nothing else."""
    first = run("receipt", "key", "--state-dir", tmp_path / "state")
    assert first.exit_code == 0
    place = tmp_path / "state" / "keys"
    assert (place.stat().st_mode & 0o777, (place / "receipts.pem").stat().st_mode & 0o777) == (0o700, 0o600)
    assert run("receipt", "key", "--state-dir", tmp_path / "state").output == first.output
    assert "PRIVATE" not in first.output
    signer = Signer.load(tmp_path / "state")
    assert signer.key_id in first.output
    assert parse_public(public_pem(signer.public).encode())


def test_a_key_that_others_could_have_read_is_not_used(tmp_path: Path) -> None:
    """Open to others, a link, another kind of key, or no key: refused with the path and what to do."""
    Signer.load(tmp_path)
    path = tmp_path / "keys" / "receipts.pem"
    path.chmod(0o640)
    with pytest.raises(SecretFileError, match=r"receipt key .*others have access to it \(mode 640\).*chmod 600"):
        Signer.load(tmp_path)
    refused = run("receipt", "key", "--state-dir", tmp_path)
    assert (refused.exit_code, "chmod 600" in refused.output) == (4, True)
    path.chmod(0o600)
    path.rename(tmp_path / "moved.pem")
    path.symlink_to(tmp_path / "moved.pem")
    with pytest.raises(SecretFileError, match="cannot be opened as a file of its own"):
        Signer.load(tmp_path)
    path.unlink()
    other = X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for content in (b"", b"rubbish", other):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(SecretFileError, match="does not hold an Ed25519 private key"):
            Signer.load(tmp_path)
    path.parent.chmod(0o755)
    with pytest.raises(SecretFileError, match=r"mode 755.*chmod 700"):
        Signer.load(tmp_path)
