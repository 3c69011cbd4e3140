"""`glovebox audit`: exit codes, JSON for programs, and text that cannot take over a terminal."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from tests.fixtures import segments
from tests.fixtures.audit_logs import decided, fill, finished, log_lines, replace_lines

from glovebox_audit import chain, read
from glovebox_audit.events import ArtifactRefused, ProfileLoaded, ServerStopped, draft
from glovebox_audit.file import LOG_NAME, LogFile
from glovebox_audit.query.index import Filters
from glovebox_audit.segments.rotation import Rotation
from glovebox_server.cli.actions import audit, page, query
from glovebox_server.cli.main import main
from glovebox_server.exits import UNAVAILABLE
from glovebox_server.receipts.keys import Signer

HOSTILE = "\x1b]0;owned\x07\x9b2J\u202e[red]bold[/red]\udcff"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a log of five records and one that quotes hostile text."""
    fill(tmp_path / "audit", 4)
    file = LogFile(tmp_path / "audit", "s_1")
    file.commit([draft(decided("c_evil"))])
    file.commit([draft(ArtifactRefused(call_id="c_evil", name=HOSTILE, reason="no UTF-8"))])
    file.close()
    return tmp_path / "audit"


@pytest.fixture
def console() -> Console:
    """Return a console that behaves like a colour terminal and can be read."""
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=200)


def text(console: Console) -> str:
    """Return what was shown."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows(console: Console) -> list[dict[str, object]]:
    """Return what was shown as JSON, one object per line."""
    return [json.loads(line) for line in text(console).splitlines()]


def harmless(shown: str) -> bool:
    """Say whether a terminal would obey nothing in it."""
    return all(character.isprintable() or character == "\n" for character in shown)


def test_tail_shows_records_as_lines(directory: Path, console: Console) -> None:
    """One line each, with number, time, kind and call."""
    assert audit.tail(directory, console, count=3, follow=False, as_json=False) == 0
    lines = text(console).splitlines()
    assert len(lines) == 3
    assert "call.finished c_1" in lines[0]
    assert "ended=exited" in lines[0]


@pytest.fixture
def busy(tmp_path: Path) -> Path:
    """Return a log in which each call is followed by the records of nine more servers."""
    place = tmp_path / "busy"
    for number in range(3):
        fill(place, 2)
        file = LogFile(place, f"s_{number}")
        for _ in range(9):
            file.commit([draft(ProfileLoaded(tool="run_python", digest="sha256:0", source="shipped"))])
            file.commit([draft(ServerStopped(reason="done"))])
        file.close()
    return place


@pytest.mark.parametrize("count", [0, 1, 4, 6, 50])
def test_tail_shows_calls_and_counts_what_it_shows(busy: Path, console: Console, count: int) -> None:
    """However many records of servers lie between; `--all` and `--json` have those too (controls)."""
    assert audit.tail(busy, console, count=count, follow=False, as_json=False) == 0
    lines = text(console).splitlines()
    assert len(lines) == min(count, 6)
    assert all(" call." in line for line in lines)
    audit.tail(busy, console, count=count, follow=False, as_json=False, everything=True)
    assert len(text(console).splitlines()) - len(lines) == min(count, 60)


def test_tail_as_json_hides_nothing(busy: Path, console: Console) -> None:
    """A program filters by itself."""
    audit.tail(busy, console, count=2, follow=False, as_json=True)
    assert [row["kind"] for row in rows(console)] == ["profile.loaded", "server.stopped"]


def test_tail_of_a_log_without_calls_says_so(tmp_path: Path, console: Console) -> None:
    """Nothing at all would look like an empty log."""
    file = LogFile(tmp_path, "s_1")
    file.commit([draft(ServerStopped(reason="done"))])
    file.close()
    assert audit.tail(tmp_path, console, count=5, follow=False, as_json=False) == 0
    assert "--all" in text(console)


def test_hostile_text_reaches_no_terminal(directory: Path, console: Console) -> None:
    """M16: escapes, C1 controls and direction marks come out escaped, markup as it is; raw they would act (control)."""
    audit.tail(directory, console, count=5, follow=False, as_json=False)
    page.show(directory, console, console, "c_evil", as_json=False)
    page.show(directory, console, console, "c_evil", as_json=True)
    query.query(directory, console, console, Filters(), limit=9, as_json=False)
    assert harmless(text(console))
    assert "\\x1b]0;owned" in text(console)
    assert "[red]bold[/red]" in text(console)
    assert not harmless(log_lines(directory)[-1].decode())


def test_tail_as_json_is_one_record_per_line(directory: Path, console: Console) -> None:
    """The objects are the records, whole; what is no record says so."""
    with (directory / LOG_NAME).open("ab") as handle:
        handle.write(b"rubbish\n")
    assert audit.tail(directory, console, count=2, follow=False, as_json=True) == 0
    record, rubbish = rows(console)
    assert record == json.loads(log_lines(directory)[-2])
    assert rubbish == {"unreadable": "the line is not JSON"}


def test_follow_ends_when_interrupted(directory: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is how one leaves; it is no failure."""

    async def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("anyio.sleep", interrupted)
    assert audit.tail(directory, console, count=1, follow=True, as_json=True) == 0
    assert len(rows(console)) == 1


def test_show_gives_every_record_of_a_call(directory: Path, console: Console) -> None:
    """In order, with all fields."""
    assert page.show(directory, console, console, "c_1", as_json=True) == 0
    assert [row["kind"] for row in rows(console)] == ["call.decided", "call.finished"]


def test_show_of_an_unknown_call_says_how_to_find_one(directory: Path, console: Console) -> None:
    """Exit code 1, and 2 for what cannot be an id."""
    assert page.show(directory, console, console, "c_none", as_json=False) == 1
    assert "glovebox audit tail" in text(console)
    with pytest.raises(query.NoSuchCall, match="is not the id of a call"):
        page.show(directory, console, console, "../x", as_json=False)


def test_verify_says_whole_or_names_the_line(directory: Path, console: Console) -> None:
    """Exit code 0 or 1; without an anchor it says what it cannot see."""
    assert audit.verify(directory, console, anchor=None, as_json=False) == 0
    assert "the log is whole (without an anchor" in text(console)
    lines = log_lines(directory)
    replace_lines(directory, [lines[0], *lines[2:]])
    assert audit.verify(directory, console, anchor=None, as_json=False) == 1
    assert "line 2: deleted: records 2 to 2 are missing before this line" in text(console)


def test_verify_as_json_has_every_problem(directory: Path, console: Console) -> None:
    """A program sees kind, line and number."""
    replace_lines(directory, log_lines(directory)[:-1])
    assert audit.verify(directory, console, anchor=None, as_json=True) == 1
    (report,) = rows(console)
    assert (report["ok"], report["records"], report["omitted"]) == (False, 5, 0)
    problems = report["problems"]
    assert isinstance(problems, list)
    assert (problems[0]["kind"], problems[0]["line"], problems[0]["seq"]) == ("truncated", 6, 6)


def test_head_is_the_anchor_verify_takes(directory: Path, console: Console) -> None:
    """Print it today, verify against it tomorrow; a wrong one fails, rubbish is a bad argument."""
    assert audit.head(directory, console, as_json=False) == 0
    anchor = text(console).strip()
    assert audit.verify(directory, console, anchor=anchor, as_json=False) == 0
    assert "(with the anchor)" in text(console)
    wrong = f"{read.head(directory).seq}:{chain.GENESIS}"
    assert audit.verify(directory, console, anchor=wrong, as_json=False) == 1
    assert audit.verify(directory, console, anchor="rubbish", as_json=False) == 2


def test_head_as_json(directory: Path, console: Console) -> None:
    """The same anchor for a program."""
    assert audit.head(directory, console, as_json=True) == 0
    (row,) = rows(console)
    assert row["anchor"] == f"{row['seq']}:{row['hash']}"


@pytest.mark.parametrize("command", ["tail", "tail -f", "show c_1", "show last", "query", "verify", "head"])
def test_without_a_log_every_command_says_so(tmp_path: Path, command: str) -> None:
    """Exit code 4 and the fix, as a sentence and, for programs, as the object every command tells a failure with."""
    asked = ["audit", *command.split(), "--state-dir", str(tmp_path)]
    done = CliRunner().invoke(main, asked)
    assert (done.exit_code, done.stdout) == (UNAVAILABLE, "")
    assert "Name the directory that holds audit.jsonl" in " ".join(done.stderr.split())
    done = CliRunner().invoke(main, [*asked, "--json"])
    assert done.exit_code == UNAVAILABLE
    assert json.loads(done.stdout)["error"]["kind"] == "AuditUnavailable"


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
    key.write_text(signer.public_pem())
    return tmp_path, key


def said(*asked: str | Path) -> tuple[int, str, str]:
    """Run a command: exit code, standard output, and standard error on one line."""
    done = CliRunner().invoke(main, [str(each) for each in asked])
    return done.exit_code, done.stdout, " ".join(done.stderr.split())


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
    other.write_text(Signer.load(tmp_path / "other").public_pem())
    file.write_text(proof)
    code, text, _ = said("audit", "verify", "--proof", file, "--key", other)
    assert (code, "signed with another key" in text) == (1, True)


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        (("audit", "prove", "c_none"), 1, "No record of call c_none"),
        (("audit", "prove", "not an id"), 2, "is not the id of a call"),
        (("audit", "verify", "--proof", "proof.json"), 2, "--proof takes one --key"),
        (("audit", "verify", "--proof", "proof.json", "--key", "k", "--all"), 2, "--proof takes one --key"),
        (("audit", "verify", "--key", "/nowhere.pem"), 2, "The key /nowhere.pem cannot be used"),
    ],
)
def test_what_cannot_be_proved_is_said(
    sealed: tuple[Path, Path], asked: tuple[str, ...], code: int, words: str
) -> None:
    """With the exit code of each."""
    found, out, err = said(*asked, "--state-dir", sealed[0])
    assert (found, words in out + err) == (code, True)


def test_verify_checks_seals_with_a_key_and_reads_what_is_new(sealed: tuple[Path, Path]) -> None:
    """The report says which of it was done; --all reads everything again."""
    state, key = sealed
    verify = ("audit", "verify", "--state-dir", state)
    assert "signatures not checked without --key" in said(*verify)[1]
    assert "of them found whole before" in said(*verify)[1]
    text = said(*verify, "--all")[1]
    assert "of them found whole before" not in text
    text = said(*verify, "--key", key)[1]
    assert "signatures checked" in text
    assert "of them found whole before" not in text  # not with this key
    assert "of them found whole before" in said(*verify, "--key", key)[1]
    other = state / "other.pem"
    other.write_text(Signer.load(state / "other").public_pem())
    code, text, _ = said(*verify, "--key", other)
    assert code == 1
    assert "segments/000001.jsonl line" in text
    assert "signed with another key" in text
    assert said(*verify, "--key", other, "--key", key)[0] == 0


def test_a_missing_segment_is_named(sealed: tuple[Path, Path]) -> None:
    """As a file, which has no line."""
    state, _ = sealed
    (state / "audit" / "segments" / "000001.jsonl").unlink()
    code, text, _ = said("audit", "verify", "--state-dir", state)
    assert (code, "segments/000001.jsonl: missing:" in text) == (1, True)
