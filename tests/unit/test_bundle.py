"""Bundles: what a run did is shown in one file, and that it did no more; a record that is left out is missed."""

import json
import os
import re
import subprocess  # noqa: TID251 - verifies as a stranger does, with nothing at hand
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.fixtures import segments
from tests.fixtures.audit_logs import SHARED, TABLE, decided, finished, started

import glovebox_profiles
import glovebox_sandboxes
import glovebox_server
from glovebox_audit import chain
from glovebox_audit.bundle import archive, evidence, report
from glovebox_audit.bundle.archive import make, verify
from glovebox_audit.chain import EvidenceError, draft
from glovebox_audit.events import ArtifactScanned, CallDecided, EgressDecided, ServerStopped
from glovebox_audit.file import LogFile
from glovebox_audit.receipts import dsse
from glovebox_audit.receipts.dsse import public_pem
from glovebox_audit.segments.merkle import Contents, counted, name_of, root_of_counts, shown
from glovebox_audit.verify import verify as verify_log
from glovebox_server.cli.main import main
from glovebox_server.exits import USAGE

OURS, THEIRS = "r_" + "0" * 26, "r_" + "1" * 26


def record(log: LogFile, event: Any, run: str, principal: str = "token:ours") -> None:
    governed = {"policy_digest": "sha256:" + "d" * 64} if isinstance(event, CallDecided) else {}
    log.commit([draft(replace(event, run=run, principal=principal, **governed))])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Four sealed segments: the run has records in the first and third, another in all."""
    place = tmp_path / "audit"
    log = LogFile(place, "s_1", segments.rotation(1 << 30))
    for number in range(4):
        record(log, decided(f"c_theirs{number}"), THEIRS, "token:theirs")
        if number not in {1, 3}:
            record(log, decided(f"c_{number}", reason="<script>alert(1)</script>\u202e"), OURS)
            record(log, finished(f"c_{number}"), OURS)
        record(log, finished(f"c_theirs{number}"), THEIRS, "token:theirs")
        log.seal()
    log.close()
    return place


def made(directory: Path, of: str = "run", identity: str = OURS) -> bytes:
    return make(directory, of, identity, lambda: ({}, {}))


def forged(content: bytes, change: Callable[[Any], object]) -> bytes:
    """A bundle whose evidence was changed by somebody who writes all the rest of it to fit."""
    told, others = archive.evidence_in(content)
    fields = json.loads(told)
    change(fields)
    return archive.written(chain.canonical(fields) + b"\n", others)


def test_a_run_is_shown_whole_and_nobody_elses(directory: Path) -> None:
    content = made(directory)
    found = verify(content, segments.KEYS).evidence
    assert [each.call_id for each in found.records] == ["c_0", "c_0", "c_2", "c_2"]
    assert [seal.segment for seal in found.seals] == [1, 2, 3, 4]
    assert b"theirs" not in content
    assert THEIRS.encode() not in content
    assert content == made(directory)
    one = verify(made(directory, "call", "c_2"), segments.KEYS).evidence
    assert ([each.call_id for each in one.records], [seal.segment for seal in one.seals]) == (["c_2", "c_2"], [3])
    with pytest.raises(EvidenceError, match="no record of run r_none"):
        made(directory, "run", "r_none")


def _third(told: Any) -> Any:
    return told["segments"][2]


def _with_fewer_counted(told: Any) -> None:
    _third(told)["records"].pop()
    _third(told)["counts"][0]["records"] = 1


def _with_a_changed_record(told: Any) -> None:
    each = told["segments"][0]["records"][0]
    each["record"] = each["record"].replace("allowed", "refused").replace("run_python", "fetch_urls")


def _with_another_profile(told: Any) -> None:
    text = {"network": {"mode": "none"}}
    told["profiles"][chain.digest(text)] = text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda told: _third(told)["records"].pop(), "has 2 of its records, and the bundle 1: some were left out"),
        (lambda told: _third(told).update(records=[]), "segment 3 has 2 of its records, and the bundle 0"),
        (
            lambda told: _third(told).update(records=[], counts=told["segments"][1]["counts"]),
            "3: a count's path does not",
        ),
        (lambda told: _third(told).update(records=[], counts=[]), "segment 3: its counts show neither how many"),
        (_with_fewer_counted, "segment 3: a count's path does not lead to the root"),
        (lambda told: told["segments"].pop(2), "segment 4 does not follow the one before it"),
        (lambda told: _third(told).update(told["segments"][0]), "segment 1 does not follow the one before it"),
        (
            lambda told: _third(told).update(records=_third(told)["records"][:1] * 2),
            "not in the order of the log, each once",
        ),
        (lambda told: told.update(id=THEIRS), "it is another call's"),
        (_with_a_changed_record, "its path does not lead to the root"),
        (lambda told: told.update(profiles={}), "the profile sha256:a{64} is named by its records, and left out"),
        (_with_another_profile, "the profile sha256:[0-9a-f]{64} is named by none of its records"),
        (lambda told: told.update(policies={}), "the policy sha256:d{64} is named by its records, and left out"),
        (lambda told: told["policies"].update({"sha256:" + "e" * 64: None}), "sha256:e{64} is named by none of its"),
    ],
)
def test_a_bundle_that_says_less_is_refused(directory: Path, change: Callable[[Any], object], reason: str) -> None:
    """Also without a key, since it is about what was sealed; nothing changed is the control."""
    content = made(directory)
    verify(forged(content, lambda _: None), {})
    for keys in ({}, segments.KEYS):
        with pytest.raises(EvidenceError, match=reason):
            verify(forged(content, change), keys)


def test_what_sandboxes_share_goes_along_for_each_record_that_names_it(tmp_path: Path) -> None:
    """From whichever segment of the call has it; a changed or absent one is refused, unless its maker says so."""
    log = LogFile(tmp_path / "audit", "s_1", segments.rotation(1 << 30))
    record(log, decided("c_1"), OURS)
    log.seal()
    log.commit([started("c_1", OURS)])
    record(log, finished("c_1"), OURS)
    log.seal()
    log.close()
    content = made(tmp_path / "audit")
    found = verify(content, segments.KEYS).evidence
    assert found.tables == {TABLE: SHARED}
    assert f"Measured of sandboxes <code>{TABLE}" in report.page(found)
    for text, reason in (({TABLE: {**SHARED, "host": {}}}, "has another digest"), ({}, "by its records, and left")):
        with pytest.raises(EvidenceError, match=f"the table {TABLE} .*{reason}"):
            verify(forged(content, lambda told, text=text: told.update(tables=text)), segments.KEYS)  # type: ignore[misc]


def test_the_key_decides_who_sealed_it(directory: Path) -> None:
    """Another key is refused, and never named as one that signed; without one nothing is said of who it was."""
    other = Ed25519PrivateKey.generate().public_key()
    content = made(directory)
    with pytest.raises(EvidenceError, match="signed with another key"):
        verify(content, {dsse.key_id(other): other})
    assert verify(content, {}).evidence.keys == ()
    assert verify(content, segments.KEYS).evidence.keys == tuple(segments.KEYS)
    assert verify(content, {dsse.key_id(other): other, **segments.KEYS}).evidence.keys == tuple(segments.KEYS)


def test_a_page_that_says_something_else_is_refused_and_what_was_said_is_text(directory: Path) -> None:
    """The page is made again of what was proved. What strangers said is no markup and reorders nothing."""
    content = made(directory)
    told, others = archive.evidence_in(content)
    page = others[archive.REPORT].decode()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\u202e" not in page
    assert "default-src 'none'" in page
    assert page.count("Changed since, as whoever made this bundle says") == 2  # of profile and policy
    others[archive.REPORT] = page.replace("c_2", "c_3").encode()
    with pytest.raises(EvidenceError, match=r"its report\.html is not what its evidence says"):
        verify(archive.written(told, others), segments.KEYS)
    with pytest.raises(EvidenceError, match=r"its extra\.txt is not what its evidence says"):
        verify(archive.written(told, {**archive.evidence_in(content)[1], "extra.txt": b"x"}), segments.KEYS)
    earlier = forged(content, lambda fields: fields.update(version="0.0.1"))
    assert verify(earlier, segments.KEYS).report_checked  # as this version makes it, whatever it says


def test_the_page_says_what_was_found_in_files(tmp_path: Path) -> None:
    """And of which it is not known; that a file has nothing in it is said too."""
    log = LogFile(tmp_path / "audit", "s_1", segments.rotation(1 << 30))
    record(log, decided("c_1"), OURS)
    for more in (
        {"name": "a.svg", "findings": ("markup: a script", "<b>"), "more": 3},
        {"name": "b.pdf", "not_scanned": "no time was left"},
        {"name": "c.txt"},
    ):
        record(log, ArtifactScanned(call_id="c_1", tool="run_python", principal="x", uri="artifact://1", **more), OURS)
    log.seal()
    log.close()
    page = archive.evidence_in(made(tmp_path / "audit"))[1][archive.REPORT].decode()
    for told in (
        "a.svg: markup: a script; &lt;b&gt;; and 3 more<",
        "b.pdf: not looked into: no time was left<",
        "c.txt: nothing found<",
    ):
        assert told in page


def test_another_page_has_another_number(tmp_path: Path) -> None:
    """Else a bundle with the page that was made before is called damaged: raise the number in ``evidence.VERSION``."""
    log = LogFile(tmp_path / "audit", "s_1", segments.rotation(1 << 30))
    asked = EgressDecided(
        call_id="c_1", tool="fetch_url", principal="x", scheme="https", host="example.org", port=443,
        asked_digest="sha256:" + "e" * 64, effect="allow", rule="egress.docs",
    )  # fmt: skip
    for event in (decided("c_1"), asked, finished("c_1")):
        record(log, event, OURS)
    log.seal()
    log.close()
    found = verify(made(tmp_path / "audit"), segments.KEYS).evidence
    records = tuple(replace(each, time="then") for each in found.records)
    page = report.page(replace(found, records=records, seals=(found.seals[0].model_copy(update={"time": "then"}),)))
    number = evidence.VERSION.rpartition("+")[2]
    assert (number, chain.digest({"page": page})) == (
        "page.3",
        "sha256:c7961da58f4fc3ccd5481c6c54359b5b45d53d0f258990a0939dda678334e923",
    )


@pytest.mark.parametrize("other", ["0.0.1", version("glovebox-mcp")])
def test_a_page_of_another_version_is_never_called_proved(other: str, directory: Path, tmp_path: Path) -> None:
    """Nor one made before pages had a number; a page that is the same is proved (the control)."""
    told, others = archive.evidence_in(forged(made(directory), lambda fields: fields.update(version=other)))
    (tmp_path / "key.pem").write_text(public_pem(segments.PUBLIC))
    edited = {**others, archive.REPORT: others[archive.REPORT].replace(b"c_2", b"c_3")}
    for parts, said, proved in ((others, "PROVED with", True), (edited, "PROVED except report.html with", False)):
        file = tmp_path / "run.bundle"
        file.write_bytes(archive.written(told, parts))
        words = ["bundle", "verify", str(file), "--key", str(tmp_path / "key.pem")]
        assert said in CliRunner().invoke(main, words).stdout
        assert json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["proved"] is proved
    without = {name: each for name, each in others.items() if name != archive.REPORT}
    with pytest.raises(EvidenceError, match=r"report\.html"):
        verify(archive.written(told, without), segments.KEYS)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["bundle", "verify", "pipe"],
        ["bundle", "verify", "there", "--key", "pipe"],
        ["audit", "verify", "--key", "pipe"],
        ["audit", "verify", "--anchors", "pipe"],
        ["audit", "verify", "--proof", "pipe", "--key", "there"],
        ["receipt", "verify", "there", "--key", "pipe"],
        ["receipt", "verify", "./pipe"],
    ],
    ids=" ".join,
)
def test_a_pipe_is_no_key_no_proof_and_no_bundle(words: list[str], tmp_path: Path) -> None:
    """Nobody writes to it, so a command that read it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "there").touch()
    program = [sys.executable, "-m", "glovebox_server", *words]
    environment = {**os.environ, "GLOVEBOX_STATE_DIR": str(tmp_path / "state")}
    told = subprocess.run(
        program, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30
    )
    assert told.returncode == USAGE
    assert re.search(r"pipe' is (no regular file|neither a file nor the id)", " ".join(told.stderr.split()))


def test_no_byte_of_a_bundle_can_be_changed(directory: Path) -> None:
    """Each in turn, with two others in its place; whatever the bytes, the answer is a sentence."""
    content = made(directory, "call", "c_2")
    verify(content, segments.KEYS)
    for place in range(0, len(content), 7):
        for mask in (0x01, 0x80):
            changed = content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]
            with pytest.raises(EvidenceError):
                verify(changed, segments.KEYS)
    for hostile in (b"", b"PK", content[:-1], content + b"x", content * 2, b"\0" * 100):
        with pytest.raises(EvidenceError):
            verify(hostile, segments.KEYS)


def test_what_is_not_sealed_makes_no_bundle(directory: Path) -> None:
    """Nothing would show that there is no more; once sealed it is there (the control)."""
    log = LogFile(directory, "s_2", segments.rotation(1 << 30))
    record(log, decided("c_late"), OURS)
    with pytest.raises(EvidenceError, match="still being written"):
        made(directory)
    log.seal()
    log.close()
    assert len(verify(made(directory), segments.KEYS).evidence.records) == 5


def test_a_seal_that_counts_wrongly_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever verifies the log, and by the maker of a bundle; a right one is whole (the control)."""
    for wrong in (False, True):
        place = tmp_path / str(wrong)
        if wrong:
            monkeypatch.setattr(Contents, "count", lambda *_: None)
        log = LogFile(place, "s_1", segments.rotation(1 << 30))
        record(log, decided("c_1"), OURS)
        log.seal()
        log.close()
        monkeypatch.undo()
        kinds = [each.kind for each in verify_log(place, keys=segments.KEYS).problems]
        assert kinds == (["seal"] if wrong else [])
    with pytest.raises(EvidenceError, match="segment 1 is not what was sealed"):
        made(place)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 8, 13])
def test_every_name_is_counted_or_shown_to_be_absent(size: int) -> None:
    contents = Contents()
    for number in range(size):
        for _ in range(number + 1):
            contents.count(f"c_{number}", {})
    leaves = contents.leaves()
    root = root_of_counts(leaves)
    for number in range(size):
        name = name_of("call", f"c_{number}")
        assert counted(shown(leaves, name), name, size, root) == number + 1
        with pytest.raises(ValueError, match="neither how many"):
            counted([], name, size, root)
        apart = [*shown(leaves, leaves[0][0]), *shown(leaves, leaves[-1][0])]
        if size > 2 and leaves[0][0] < name < leaves[-1][0]:
            with pytest.raises(ValueError, match="neither how many"):
                counted(apart, name, size, root)
    for number in range(20):
        name = name_of("run", f"r_{number}")
        assert counted(shown(leaves, name), name, size, root) == 0


def test_it_is_verified_by_a_stranger_with_nothing_but_file_and_key(directory: Path, tmp_path: Path) -> None:
    """A home that is not there, no settings, another directory; and nothing was written."""
    (tmp_path / "run.bundle").write_bytes(made(directory))
    (tmp_path / "key.pem").write_text(public_pem(segments.PUBLIC))
    empty = tmp_path / "empty"
    empty.mkdir()
    glovebox = Path(sys.executable).with_name("glovebox")
    words = [str(glovebox), "bundle", "verify", str(tmp_path / "run.bundle")]
    for key, said in (
        (["--key", str(tmp_path / "key.pem")], "PROVED with sha256:"),
        ([], "consistent, signer unknown"),
    ):
        done = subprocess.run(
            [*words, *key], env={"HOME": str(empty / "none")}, cwd=empty, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert said in done.stdout
        assert "2 calls with 4 records, and nothing else of it is in segments 1 to 4" in done.stdout
    assert list(empty.iterdir()) == []


@pytest.mark.driver("bubblewrap")
def test_it_is_verified_in_a_bare_container(directory: Path, tmp_path: Path) -> None:
    """No log (the control), state, home, network, /etc or /proc; one with a byte changed is refused."""
    content = made(directory)
    changed = content.replace(b"c_2", b"c_3", 1)
    given = tmp_path / "given"
    given.mkdir()
    for name, data in (
        ("run.bundle", content),
        ("bad.bundle", changed),
        ("key.pem", public_pem(segments.PUBLIC).encode()),
    ):
        (given / name).write_bytes(data)
    ours = (glovebox_server, glovebox_profiles, glovebox_sandboxes)
    packages = {Path(each.__file__ or "").parents[1] for each in ours}
    shown = ["/usr", *sorted({sys.prefix, sys.base_prefix, *map(str, packages)} - {"/usr"})]
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--setenv", "HOME", "/none"]
    for each in shown:
        command += ["--ro-bind", each, each]
    for link in ("/lib", "/lib64", "/bin"):
        there = Path(link)
        command += ["--symlink", str(there.resolve()), link] if there.is_symlink() else ["--ro-bind", link, link]
    command += ["--ro-bind", str(given), "/given", "--chdir", "/given", sys.executable, "-m", "glovebox_server"]

    def said(*words: str) -> tuple[int, str]:
        env = {"PATH": os.environ["PATH"]}
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, env=env)
        return done.returncode, done.stdout + done.stderr

    code, text = said("bundle", "verify", "run.bundle", "--key", "key.pem")
    assert (code, "PROVED with sha256:" in text) == (0, True), text
    assert "2 calls with 4 records, and nothing else of it is in segments 1 to 4" in text
    assert said("bundle", "verify", "run.bundle")[1].count("consistent, signer unknown") == 1
    code, text = said("bundle", "verify", "bad.bundle", "--key", "key.pem")
    assert (code, "does not hold" in text) == (1, True), text
    code, text = said("audit", "head", "--state-dir", str(directory.parent))
    assert code != 0, text


def test_the_run_of_the_newest_call_can_be_named_by_a_word(directory: Path, tmp_path: Path) -> None:
    """The control: where there is no call yet, or it is of no run, that is said, with what to name instead."""

    def run(state: Path) -> Result:
        words = f"audit bundle --json --run last -o {tmp_path}/run.bundle --state-dir {state}"
        return CliRunner().invoke(main, words.split())

    told = run(directory.parent)
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["bytes"] == (tmp_path / "run.bundle").stat().st_size
    of_them = verify((tmp_path / "run.bundle").read_bytes(), segments.KEYS).evidence.records
    assert {each.call_id for each in of_them} == {f"c_theirs{number}" for number in range(4)}
    for calls in (0, 1):
        state = tmp_path / str(calls)
        log = LogFile(state / "audit", "s_1", segments.rotation(1 << 30))
        log.commit([draft(decided("c_0") if calls else ServerStopped(reason="test"))])
        log.close()
        told = run(state)
        assert (told.exit_code, f"--call {'c_0' if calls else 'CALL'}" in told.output) == (USAGE, True), told.output


@pytest.mark.parametrize("told", [5, None, "abc", {"a": 1}])
def test_a_receipt_that_withholds_what_is_no_list_says_nothing_of_it(told: object) -> None:
    """Without a key anybody wrote it; the control is a list."""
    key = Ed25519PrivateKey.generate()

    def receipt(withheld: object) -> bytes:
        payload = chain.canonical({"predicate": {"withheld": withheld}})
        return chain.canonical(dsse.EnvelopeSigner(key).sign(payload))

    assert report.withheld(receipt(told)) == []
    assert report.withheld(receipt(["Network: all of it."])) == ["Network: all of it."]
