"""``glovebox artifact promote``, ``promotions`` and ``rollback``: what is shown, asked, refused, recorded, put back."""

import asyncio
import errno
import json
import os
import select
import subprocess  # noqa: TID251 - a command at a terminal is a process of its own
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.conformance.whole_calls.promoting import CaseFolder
from tests.fixtures.artifact_stores import Clock, a_store, keep
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.promoting import held
from tests.fixtures.whole_commands import GLOVEBOX

from glovebox_audit.verify import verify
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.calls import Principal, ToolCall
from glovebox_server.cli.main import main
from glovebox_server.exits import OK, REFUSED, UNAVAILABLE
from glovebox_server.promotion.folder import TargetFolder
from glovebox_server.promotion.proposing import Proposals
from glovebox_server.settings import Settings

POLICY = """\
version = 1

[promote]
into = {{ reports = "{folder}" }}

[[example]]
principal = "local:0"
call = {{ tool = "run_python", arguments = {{ code = "1" }} }}
expect = "deny"
"""
FILES = {"a.csv": b"a,1\n", "plots/run.sh": b"#!/bin/sh\necho \x1b[2Jhi\n", "b.bin": b"\0\1\2"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A state directory with artifacts of somebody, a policy, and a folder."""
    for name in ("config/profiles", "reports"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "config/policy.toml").write_text(POLICY.format(folder=tmp_path / "reports"))
    (tmp_path / "state").mkdir(mode=0o700)

    async def fill() -> None:
        async with a_store(tmp_path / "state/artifacts", Clock(datetime.now(UTC))) as store:
            for name, content in FILES.items():
                await keep(store, name, content)

    asyncio.run(fill())
    return tmp_path


def run(place: Path, *words: str) -> tuple[int, str]:
    """One command: its exit code, and all that it printed."""
    options = ("--state-dir", str(place / "state"), "--profiles-dir", str(place / "config/profiles"))
    found = CliRunner().invoke(main, ["artifact", *words, *options])
    return found.exit_code, found.output


def addresses(place: Path) -> list[str]:
    """Of all artifacts."""
    return [each["uri"] for each in json.loads(run(place, "list", "--json")[1])["artifacts"]]


def promoted(place: Path) -> str:
    """Promote all of them; the promotion's id."""
    words = ("promote", *addresses(place), "--into", "reports", "--json")
    status, text = run(place, *words)
    assert status == REFUSED
    status, text = run(place, *words, "--expect", json.loads(text)["plan"]["digest"])
    assert status == OK, text
    return str(json.loads(text)["promotion"]["id"])


def test_without_a_terminal_it_shows_and_changes_nothing(place: Path) -> None:
    """The differences, sizes, types and risks, nothing of which a terminal obeys, and a digest."""
    (place / "reports/a.csv").write_bytes(b"a,0\n")
    status, text = run(place, "promote", *addresses(place), "--into", "reports")
    assert status == REFUSED
    assert "a.csv: changes, 4 → 4 bytes, text/csv" in text
    assert "│ -a,0" in text
    assert "│ +a,1" in text
    assert "it is a script that names its own interpreter" in text
    assert "terminal control characters" in text
    assert "\x1b" not in text
    assert "b.bin: new, 3 bytes" in text
    assert "It is no text" in text
    assert "--expect sha256:" in text
    assert held(place / "reports") == {"a.csv": b"a,0\n"}


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        (b"a,1", ["-a,1", "\\ No newline at end of file", "+a,1"]),
        (b"a,1\r\n", ["-a,1⟪U+000D⟫", "+a,1"]),
        (b"a,1\x0c", ["-a,1⟪U+000C⟫", "\\ No newline at end of file", "+a,1"]),
        (b"a,1\\x0c\n", [r"-a,1\x0c", "+a,1"]),
        (b"a,1\x0b\n", ["-a,1⟪U+000B⟫", "+a,1"]),
        (b"a\r1\n", ["-a⟪U+000D⟫1", "+a,1"]),
        ("a,1\u2028\n".encode(), ["-a,1⟪U+2028⟫", "+a,1"]),
    ],
)
def test_a_difference_that_few_programs_show_is_shown(place: Path, before: bytes, shown: list[str]) -> None:
    """Only a line feed ends a line; whatever else some readers end one at is in it, as an escape."""
    (place / "reports/a.csv").write_bytes(before)
    _, text = run(place, "promote", *addresses(place), "--into", "reports")
    lines = [line.removeprefix("  │ ") for line in text.split("\n") if line.startswith("  │ ")]
    assert lines[lines.index("+++ a.csv") + 2 :][: len(shown)] == shown


def test_what_cannot_be_cleared_away_is_said_and_in_force(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are where they belong, so it is a warning; the next command says why, and clears once it can."""

    def clear(_: TargetFolder, __: str) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    words = ("promote", *addresses(place), "--into", "reports")
    digest = json.loads(run(place, *words, "--json")[1])["plan"]["digest"]
    with monkeypatch.context() as patched:
        patched.setattr(TargetFolder, "clear", clear)
        status, text = run(place, *words, "--expect", digest)
        assert (status, "is in effect, but" in text, "could not be cleared away" in text) == (OK, True, True), text
        assert {**held(place / "reports"), **FILES} == held(place / "reports")
        status, text = run(place, "promotions")
        assert (status, "is in effect, but what was laid ready" in text, "not empty" in text) == (OK, True, True)
    status, text = run(place, "promotions")
    assert (status, "in effect" in text) == (OK, True)
    assert held(place / "reports") == FILES


def test_a_folder_that_is_gone_is_named(place: Path) -> None:
    """As a refusal with a rule. The control: it is put back, and so are the files."""
    identity = promoted(place)
    (place / "reports").rename(place / "elsewhere")
    status, text = run(place, "rollback", identity, "--json")
    assert status == REFUSED
    refused = json.loads(text[text.index("{") : text.rindex("}") + 1])["refused"]
    assert refused["rule"] == "promotion.path"
    assert f"Refused (promotion.path): {place / 'reports'} cannot be opened" in text
    assert str(place / "reports") in refused["reason"]
    (place / "elsewhere").rename(place / "reports")
    assert run(place, "rollback", identity)[0] == OK


def test_promoted_listed_and_put_back_on_record(place: Path) -> None:
    """From quarantine into the folder and back; the log has both, whole, and names no path of this host."""
    (place / "reports/a.csv").write_bytes(b"a,0\n")
    identity = promoted(place)
    assert held(place / "reports") == FILES
    assert not (place / "reports/plots/run.sh").stat().st_mode & 0o111
    status, text = run(place, "promotions")
    assert (status, "in effect" in text, identity in text) == (OK, True, True)
    assert run(place, "rollback", identity) == (OK, f"3 files of {identity} put back.\n")
    assert held(place / "reports") == {"a.csv": b"a,0\n"}
    assert not (place / "reports/plots").exists()
    records = [json.loads(line) for line in log_lines(place / "state/audit")]
    assert [each["kind"] for each in records] == ["promotion.applied", "promotion.rolled_back"]
    applied, back = (each["data"] for each in records)
    assert applied["promotion"] == back["promotion"] == identity
    assert [each["name"] for each in applied["files"]] == sorted(FILES)
    before = {each["name"]: each.get("before") for each in applied["files"]}
    assert {each["name"]: each.get("after") for each in back["files"]} == before
    assert str(place) not in json.dumps(records)
    assert verify(place / "state/audit").ok
    status, text = run(place, "rollback", identity)
    assert (status, f"Refused (promotion.unknown): {identity} was put back by" in text) == (REFUSED, True), text


def test_a_file_that_changed_since_is_not_put_back(place: Path) -> None:
    """None is, and it is named."""
    identity = promoted(place)
    (place / "reports/a.csv").write_bytes(b"mine")
    now = held(place / "reports")
    status, text = run(place, "rollback", identity)
    assert status == REFUSED
    assert "a.csv' changed since" in text or "a.csv changed since" in text, text
    assert held(place / "reports") == now


def test_what_is_expected_must_be_what_would_change_and_is_not_changed_twice(place: Path) -> None:
    """A digest printed before the folder changed is none; it needs no hash name. The second time nothing is to do."""
    words = ("promote", *addresses(place), "--into", "reports", "--json")
    digest = json.loads(run(place, *words)[1])["plan"]["digest"]
    (place / "reports/a.csv").write_bytes(b"mine")
    status, text = run(place, *words, "--expect", digest)
    assert status == REFUSED
    assert json.loads(text[text.index("{") :])["refused"]["rule"] == "promotion.expect"
    assert held(place / "reports") == {"a.csv": b"mine"}
    digest = json.loads(run(place, *words)[1])["plan"]["digest"]
    status, text = run(place, *words, "--expect", digest.removeprefix("sha256:"))
    assert status == OK, text
    status, text = run(place, "promote", *addresses(place), "--into", "reports")
    assert (status, "The same already" in text) == (OK, True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("reports =", "others ="), "names no folder 'reports' to promote into"),
        (lambda text: text.replace("[promote]", "").replace("into =", "#"), "names no folder"),
        (lambda text: text.replace("/reports", "/state/x"), "lies in the server's state directory"),
        (lambda text: text.replace("/reports", "/config"), "contains the server's profiles directory"),
        (lambda text: text.replace("/reports", "/nowhere"), "is not a directory"),
        (lambda text: text.replace("/reports", "/../x"), "absolute path without"),
    ],
)  # fmt: skip
def test_only_folders_that_the_operator_named(place: Path, change: object, told: str) -> None:
    """Of the policy, and none of the server's own. The control is ``test_promoted_listed_and_put_back_on_record``."""
    file = place / "config/policy.toml"
    file.write_text(change(file.read_text()))  # type: ignore[operator]
    status, text = run(place, "promote", *addresses(place), "--into", "reports")
    assert status != OK
    assert told in text
    assert held(place / "reports") == {}


def test_without_the_artifact_or_a_policy_nothing_is_promoted(place: Path) -> None:
    """None of the others either; closed unless somebody opened it."""
    status, text = run(place, "promote", addresses(place)[0], "artifact://" + "0" * 32, "--into", "reports")
    assert (status, "There is no artifact at" in text) == (REFUSED, True)
    assert held(place / "reports") == {}
    (place / "config/policy.toml").unlink()
    status, text = run(place, "promote", *addresses(place), "--into", "reports")
    assert status == REFUSED
    assert "Refused (promotion.folder): The policy names no folder" in text
    assert "in `[promote]` of policy.toml" in text, text


@pytest.mark.long
@pytest.mark.parametrize(("keys", "status"), [("y\n", OK), ("n\n", REFUSED), ("\n", REFUSED), ("\x04", REFUSED)])
def test_a_person_at_a_terminal_is_asked(place: Path, keys: str, status: int) -> None:
    """After what would change was shown there; anything but yes changes nothing."""
    terminal, theirs = os.openpty()
    options = ("--state-dir", str(place / "state"), "--profiles-dir", str(place / "config/profiles"))
    command = [*GLOVEBOX, "artifact", "promote", *addresses(place), "--into", "reports", *options]
    environment = {"PATH": os.environ["PATH"], "HOME": str(place)}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        shown, end = "", time.monotonic() + 60
        try:
            while "[y/N]" not in shown and time.monotonic() < end:
                if select.select([terminal], [], [], 0.2)[0]:
                    shown += os.read(terminal, 65536).decode()
            assert "│ +a,1" in shown
            assert held(place / "reports") == {}
            os.write(terminal, keys.encode())
            assert process.wait(60) == status
        finally:
            process.kill()
            os.close(terminal)
    assert held(place / "reports") == (FILES if status == OK else {})


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
@pytest.mark.parametrize(
    ("disk", "options", "told"),
    [
        ("reports", "size=8k", "No space left on device"),
        ("reports", "ro", "Read-only file system"),
        ("state/promotions", "size=16k,nr_inodes=1,mode=700", "No space left on device"),
        ("reports", "size=1m", ""),
    ],
    ids=["full", "read-only", "full journal", "control"],
)
def test_a_disk_that_takes_nothing_is_named(place: Path, disk: str, options: str, told: str) -> None:
    """A real one, mounted over the folder or the journal: nothing is changed there; the control has room."""
    # The full folder has room for two of the three files.
    words = ["artifact", "promote", *addresses(place), "--into", "reports"]
    digest = json.loads(run(place, *words[1:], "--json")[1])["plan"]["digest"]
    (place / disk).mkdir(mode=0o700, exist_ok=True)
    where = ["--state-dir", str(place / "state"), "--profiles-dir", str(place / "config/profiles")]
    script = f'mount -t tmpfs -o {options} none {disk} && {{ "$@"; ended=$?; ls -A reports; exit $ended; }}'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *GLOVEBOX, *words, "--expect", digest, *where],
        cwd=place, env={"PATH": os.environ["PATH"], "HOME": str(place)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if not told:
        assert (done.returncode, done.stdout.split()[-3:]) == (OK, ["a.csv", "b.bin", "plots"]), done.stderr
        return
    assert done.returncode == (REFUSED if disk == "reports" else UNAVAILABLE)
    assert told in done.stderr, done.stderr
    assert ("Refused (promotion.disk): The system refused " in done.stderr) == (disk == "reports")
    assert done.stdout.rstrip().split("\n")[-1].startswith("Into reports,")  # behind it `ls` has nothing to tell
    assert held(place / "reports") == {}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_what_the_system_refuses_of_a_proposal_is_told_without_paths(
    place: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """While it is worked out. The control is the same proposal where the file can be read."""
    kept = json.loads(run(place, "list", "--json")[1])["artifacts"]
    (uri,) = [each["uri"] for each in kept if each["name"] == "a.csv"]
    settings = Settings(state_dir=place / "state", profiles_dir=place / "config/profiles")
    proposals = Proposals(settings=settings, audit=None, into=lambda: {"reports": str(place / "reports")})  # type: ignore[arg-type]  # nothing is recorded
    call = ToolCall(
        id="c_" + "0" * 26,
        principal=Principal(id="local:0", transport="cli"),
        session=None,
        tool="propose_changes",
        arguments={"inputs": (uri,), "into": "reports", "apply": False},
        received=datetime.now(UTC),
    )

    def look(_: TargetFolder, name: str) -> None:
        raise OSError(number, os.strerror(number), str(place / "reports" / name))

    with monkeypatch.context() as patched:
        patched.setattr(TargetFolder, "look", look)
        with pytest.raises(RefusedError, match=os.strerror(number)) as caught:
            asyncio.run(proposals.proposed(call, 3))
    assert caught.value.rule == "promotion.path"
    assert str(place) not in str(caught.value)
    assert "of the folder reports would change" in asyncio.run(proposals.proposed(call, 3)).shown


def test_the_folder_of_a_proof_is_what_it_is(place: Path) -> None:
    """What is gone from it is not put there anew when it is looked at, which would be a proof of putting back."""
    (place / "workspace").mkdir()
    (place / "workspace/data.csv").write_bytes(b"a,1\n")
    folder = CaseFolder(app=None, path=place / "reports", workspace=place / "workspace")  # type: ignore[arg-type]  # nothing is promoted
    assert folder.held() == {"data.csv": "a,1\n"}
    (place / "reports/data.csv").unlink()
    assert folder.held() == {}
