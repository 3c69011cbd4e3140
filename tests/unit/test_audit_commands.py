"""`glovebox audit`: exit codes, JSON for programs, and text that cannot take over a terminal."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.fixtures import segments
from tests.fixtures.audit_logs import decided, fill, finished, log_lines, replace_lines

from glovebox_audit import chain, read
from glovebox_audit.chain import draft
from glovebox_audit.events import ArtifactRefused, ProfileLoaded, ServerStopped
from glovebox_audit.file import LogFile
from glovebox_audit.receipts.dsse import public_pem
from glovebox_audit.segments.files import LOG_NAME
from glovebox_audit.segments.rotation import Rotation
from glovebox_server.cli.main import main
from glovebox_server.exits import UNAVAILABLE
from glovebox_server.receipts.keys import Signer

HOSTILE = "\x1b]0;owned\x07\x9b2J\u202e[red]bold[/red]\udcff"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    fill(tmp_path / "audit", 4)
    file = LogFile(tmp_path / "audit", "s_1")
    file.commit([draft(decided("c_evil"))])
    file.commit([draft(ArtifactRefused(call_id="c_evil", name=HOSTILE, reason="no UTF-8"))])
    file.close()
    return tmp_path


def said(*asked: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, [str(each) for each in asked])
    return done.exit_code, done.stdout, " ".join(done.stderr.split())


def rows(shown: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in shown.splitlines()]


def harmless(shown: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in shown)


def test_tail_shows_records_as_lines_and_objects(state: Path) -> None:
    code, text, _ = said("audit", "tail", "-n3", "--state-dir", state)
    lines = text.splitlines()
    assert (code, len(lines)) == (0, 3)
    assert "call.finished c_1" in lines[0]
    assert "ended=exited" in lines[0]
    with (state / "audit" / LOG_NAME).open("ab") as handle:
        handle.write(b"rubbish\n")
    record, rubbish = rows(said("audit", "tail", "-n2", "--json", "--state-dir", state)[1])
    assert record == json.loads(log_lines(state / "audit")[-2])
    assert rubbish == {"unreadable": "the line is not JSON"}


@pytest.fixture
def busy(tmp_path: Path) -> Path:
    """Return a state directory in whose log each call is followed by the records of nine more servers."""
    place = tmp_path / "busy"
    for number in range(3):
        fill(place / "audit", 2)
        file = LogFile(place / "audit", f"s_{number}")
        for _ in range(9):
            file.commit([draft(ProfileLoaded(tool="run_python", digest="sha256:0", source="shipped"))])
            file.commit([draft(ServerStopped(reason="done"))])
        file.close()
    return place


@pytest.mark.parametrize("count", [-3, 0, 1, 4, 6, 50])
def test_tail_shows_calls_and_counts_what_it_shows(busy: Path, count: int) -> None:
    """However many records of servers lie between; `--all` and `--json` have those too (controls)."""
    tail = ("audit", "tail", "-n", count, "--state-dir", busy)
    code, text, _ = said(*tail)
    lines = text.splitlines()
    assert (code, len(lines)) == (0, min(max(count, 0), 6))
    assert all(" call." in line for line in lines)
    assert len(said(*tail, "--all")[1].splitlines()) == min(max(count, 0), 60)
    found = rows(said("audit", "tail", "-n2", "--json", "--state-dir", busy)[1])
    assert [row["kind"] for row in found] == ["profile.loaded", "server.stopped"]


def test_tail_of_a_log_without_calls_says_so(tmp_path: Path) -> None:
    """Nothing at all would look like an empty log."""
    file = LogFile(tmp_path / "audit", "s_1")
    file.commit([draft(ServerStopped(reason="done"))])
    file.close()
    code, text, _ = said("audit", "tail", "--state-dir", tmp_path)
    assert (code, "--all" in text) == (0, True)


def test_hostile_text_reaches_no_terminal(state: Path) -> None:
    """M16: escapes, C1 controls and direction marks come out escaped, markup as it is; raw they would act (control)."""
    commands = (("tail",), ("show", "c_evil"), ("show", "c_evil", "--json"), ("query",))
    text = "".join(said("audit", *command, "--state-dir", state)[1] for command in commands)
    assert harmless(text)
    assert "\\x1b]0;owned" in text
    assert "[red]bold[/red]" in text
    assert not harmless(log_lines(state / "audit")[-1].decode())


def test_follow_ends_when_interrupted(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("anyio.sleep", interrupted)
    code, text, _ = said("audit", "tail", "-n1", "--follow", "--json", "--state-dir", state)
    assert (code, len(rows(text))) == (0, 1)


def test_show_gives_every_record_of_a_call_or_says_how_to_find_one(state: Path) -> None:
    code, text, _ = said("audit", "show", "c_1", "--json", "--state-dir", state)
    assert (code, [row["kind"] for row in rows(text)]) == (0, ["call.decided", "call.finished"])
    code, _, err = said("audit", "show", "c_none", "--state-dir", state)
    assert (code, "glovebox audit tail" in err) == (1, True)
    code, _, err = said("audit", "show", "../x", "--state-dir", state)
    assert (code, "is not the id of a call" in err) == (2, True)


def test_verify_says_whole_or_names_the_line(state: Path) -> None:
    verify = ("audit", "verify", "--state-dir", state)
    code, text, _ = said(*verify)
    assert (code, "the log is whole (without an anchor" in text) == (0, True)
    lines = log_lines(state / "audit")
    replace_lines(state / "audit", [lines[0], *lines[2:]])
    code, text, _ = said(*verify)
    assert (code, "line 2: deleted: records 2 to 2 are missing before this line" in text) == (1, True)


def test_verify_as_json_has_every_problem(state: Path) -> None:
    replace_lines(state / "audit", log_lines(state / "audit")[:-1])
    code, text, _ = said("audit", "verify", "--json", "--state-dir", state)
    (report,) = rows(text)
    assert (code, report["ok"], report["records"], report["omitted"]) == (1, False, 5, 0)
    problems = report["problems"]
    assert isinstance(problems, list)
    assert (problems[0]["kind"], problems[0]["line"], problems[0]["seq"]) == ("truncated", 6, 6)


def test_head_is_the_anchor_verify_takes(state: Path) -> None:
    """Print it today, verify against it tomorrow; a wrong one fails, rubbish is a bad argument."""
    code, head, _ = said("audit", "head", "--state-dir", state)
    verify = ("audit", "verify", "--state-dir", state, "--anchor")
    assert code == 0
    code, text, _ = said(*verify, head.strip())
    assert (code, "(with the anchor)" in text) == (0, True)
    wrong = f"{read.head(state / 'audit').seq}:{chain.GENESIS}"
    assert [said(*verify, anchor)[0] for anchor in (wrong, "rubbish")] == [1, 2]
    (row,) = rows(said("audit", "head", "--json", "--state-dir", state)[1])
    assert head.strip() == row["anchor"] == f"{row['seq']}:{row['hash']}"


@pytest.mark.parametrize("command", ["tail", "tail -f", "show c_1", "show last", "query", "verify", "head"])
def test_without_a_log_every_command_says_so(tmp_path: Path, command: str) -> None:
    asked = ["audit", *command.split(), "--state-dir", str(tmp_path)]
    done = CliRunner().invoke(main, asked)
    assert (done.exit_code, done.stdout) == (UNAVAILABLE, "")
    assert "Name the directory that holds audit.jsonl" in " ".join(done.stderr.split())
    done = CliRunner().invoke(main, [*asked, "--json"])
    assert done.exit_code == UNAVAILABLE
    assert json.loads(done.stdout)["error"]["kind"] == "AuditError"


@pytest.fixture
def sealed(tmp_path: Path) -> tuple[Path, Path]:
    """A state directory whose log has sealed segments, and its public key."""
    signer = Signer.load(tmp_path)
    rotates = Rotation(signer=signer, segment_bytes=segments.SMALL)
    file = LogFile(tmp_path / "audit", "s_1", rotates)
    for number in range(8):
        file.commit([draft(decided(f"c_{number}"))])
        file.commit([draft(finished(f"c_{number}"))])
    file.commit([draft(decided("c_new"))])
    file.commit([draft(finished("c_new"))])
    file.close()
    key = tmp_path / "key.pem"
    key.write_text(public_pem(signer.public))
    return tmp_path, key


def test_a_call_is_sealed_proved_and_the_proof_checked_elsewhere(sealed: tuple[Path, Path], tmp_path: Path) -> None:
    """The whole way; with another key, a changed byte or another call it does not hold."""
    state, key = sealed
    code, _, words = said("audit", "prove", "c_new", "--state-dir", state)
    assert (code, "`glovebox audit seal` seals it now" in words) == (1, True)
    assert "Sealed segment" in said("audit", "seal", "--state-dir", state)[1]
    assert "nothing to seal" in said("audit", "seal", "--state-dir", state)[1]
    assert json.loads(said("audit", "seal", "--json", "--state-dir", state)[1]) == {"segment": None}
    code, proof, _ = said("audit", "prove", "c_new", "--state-dir", state)
    assert code == 0
    file = tmp_path / "proof.json"
    file.write_text(proof)
    check = ("audit", "verify", "--proof", file, "--key", key, "--state-dir", tmp_path / "elsewhere")
    code, text, _ = said(*check)
    assert (code, "2 records of c_new lie in segment" in text) == (0, True)
    told = json.loads(said(*check, "--json")[1])
    assert (told["ok"], [each["kind"] for each in told["records"]]) == (True, ["call.decided", "call.finished"])
    file.write_text(proof.replace("12.5", "99.5"))
    code, text, _ = said(*check)
    assert (code, "The proof does not hold: record 2 of segment" in text) == (1, True)
    assert json.loads(said(*check, "--json")[1])["ok"] is False
    other = tmp_path / "other.pem"
    other.write_text(public_pem(Signer.load(tmp_path / "other").public))
    file.write_text(proof)
    code, text, _ = said("audit", "verify", "--proof", file, "--key", other)
    assert (code, "signed with another key" in text) == (1, True)


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        (("audit", "prove", "c_none"), 1, "no record of call c_none: `glovebox audit query`"),
        (("audit", "prove", "not an id"), 2, "is not the id of a call"),
        (("audit", "verify", "--proof", "KEY"), 2, "--proof takes one --key"),
        (("audit", "verify", "--proof", "KEY", "--key", "KEY", "--key", "KEY"), 2, "--proof takes one --key"),
        (("audit", "verify", "--key", "/nowhere.pem"), 2, "The key /nowhere.pem cannot be used"),
        (("audit", "verify", "--proof", "/nowhere", "--key", "KEY"), 2, "The proof /nowhere cannot be used"),
    ],
)
def test_what_cannot_be_proved_is_told(
    sealed: tuple[Path, Path], asked: tuple[str, ...], code: int, words: str
) -> None:
    state, key = sealed
    found, out, err = said(*(str(key) if word == "KEY" else word for word in asked), "--state-dir", state)
    assert (found, words in out + err) == (code, True)


def test_verify_checks_seals_with_a_key_and_names_a_missing_segment(sealed: tuple[Path, Path]) -> None:
    state, key = sealed
    verify = ("audit", "verify", "--state-dir", state)
    assert "signatures not checked without --key" in said(*verify)[1]
    assert "signatures checked" in said(*verify, "--key", key)[1]
    other = state / "other.pem"
    other.write_text(public_pem(Signer.load(state / "other").public))
    code, text, _ = said(*verify, "--key", other)
    assert code == 1
    assert "segments/000001.jsonl line" in text
    assert "signed with another key" in text
    assert said(*verify, "--key", other, "--key", key)[0] == 0
    (state / "audit" / "segments" / "000001.jsonl").unlink()
    code, text, _ = said("audit", "verify", "--state-dir", state)
    assert (code, "segments/000001.jsonl: missing:" in text) == (1, True)
