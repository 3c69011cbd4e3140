"""Changes that a model proposes, at real servers: somebody who saw them says yes, and exactly they are made."""

import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from click.testing import CliRunner
from mcp import Client, MCPError, StdioServerParameters
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.promoting import held
from tests.interaction.served import Era, Transport, connected, plain_profile
from tests.interaction.test_asking import operate

from glovebox_server.cli.main import main
from glovebox_server.exits import REFUSED
from glovebox_server.guards.approvals.shown import CHANGES, COLUMNS, fold

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

WAYS = [("stdio", "legacy"), ("stdio", "modern")]
SECRET = "ghp_" + "0aB1cD2eF3" * 3 + "abcdef"
PROFILE = """\
tool = "propose_changes"
description = "Changes to the operator's folders, each of which somebody has to say yes to."
risk = "high"
isolation = ["bubblewrap"]
approval = "none"

[files]
inputs = true
"""
POLICY = """\
version = 1
default = "everybody"

[roles.everybody]
tools = ["run_python", "propose_changes"]

[promote]
into = {{ reports = "{folder}" }}

[[example]]
principal = "local:1000"
call = {{ tool = "run_python", arguments = {{ code = "1", timeout_seconds = 600 }} }}
expect = "deny"
"""


@dataclass
class Person:
    """Somebody at a client, who reads what they are asked, may do something first, and answers."""

    says: str = "allow"
    asked: list[str] = field(default_factory=list)
    first: Callable[[], object] = lambda: None

    async def answer(self, _context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        """What the client's form would send."""
        self.asked.append(params.message)
        self.first()
        return types.ElicitResult(action="accept", content={"answer": self.says})


@dataclass
class Place:
    """A server's directories, and the folder that its policy names."""

    path: Path
    person: Person = field(default_factory=Person)

    @property
    def folder(self) -> Path:
        """Which may be changed."""
        return self.path / "reports"

    @property
    def options(self) -> list[str]:
        """Of the server."""
        return ["--profiles-dir", str(self.path / "config/profiles"), "--state-dir", str(self.path / "state")]

    @asynccontextmanager
    async def client(
        self, transport: Transport = "stdio", era: Era = "legacy", *, asks: bool = True, more: Sequence[str] = ()
    ) -> AsyncIterator[Client]:
        """A client of a server of its own."""
        abilities = {"elicitation_callback": self.person.answer} if asks else {}
        async with connected(transport, era, [*self.options, *more], **abilities) as client:
            yield client

    def records(self) -> list[dict[str, Any]]:
        """Of the log, in order."""
        return [json.loads(line) for line in log_lines(self.path / "state/audit")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """With a profile for the tool, and a policy that names a folder."""
    (tmp_path / "config/profiles").mkdir(parents=True)
    (tmp_path / "reports").mkdir()
    (tmp_path / "config/profiles/propose_changes.toml").write_text(PROFILE)
    (tmp_path / "config/profiles/run_python.toml").write_text(plain_profile())
    (tmp_path / "config/policy.toml").write_text(POLICY.format(folder=tmp_path / "reports"))
    for each in (tmp_path, tmp_path / "config", tmp_path / "config/profiles"):
        each.chmod(0o755)
    return Place(tmp_path)


async def made(client: Client, **files: str) -> list[str]:
    """Have a program write files; their addresses."""
    code = f"import pathlib\nfor n, t in {files!r}.items():\n    pathlib.Path('/output', n + '.txt').write_text(t)"
    ran = await client.call_tool("run_python", {"code": code})
    found = {each["name"]: each["uri"] for each in (ran.structured_content or {})["artifacts"]}
    return [found[f"{name}.txt"] for name in files]


async def propose(client: Client, inputs: list[str], into: str = "reports", **more: Any) -> dict[str, Any]:
    """Propose; the structured result."""
    came = await client.call_tool("propose_changes", {"inputs": inputs, "into": into, **more})
    return came.structured_content or {"text": [each.text for each in came.content if hasattr(each, "text")]}


def refused(came: dict[str, Any]) -> str:
    """The rule that refused a call."""
    assert came.get("refused"), came
    return str(came["refused"]["rule"])


def done(came: dict[str, Any]) -> bool:
    """Whether a call changed something."""
    assert came["promotion"].startswith("p_"), came
    return came["error"] is None


@pytest.mark.parametrize(("transport", "era"), WAYS)
async def test_what_was_shown_is_there_after_a_yes(transport: Transport, era: Era, place: Place) -> None:
    """All of it: what is new and what changes, line by line. On record with its call, which has a receipt."""
    (place.folder / "notes.txt").write_text("before\n")
    async with place.client(transport, era) as client:
        uris = await made(client, notes="after\n", more="x\x1by\n", letters="p\u0430y " + "x" * 80)
        came = await propose(client, uris)
        (listed,) = [each for each in (await client.list_tools()).tools if each.name == "propose_changes"]
        assert listed.annotations is not None
        assert not listed.annotations.read_only_hint
    after = {"notes.txt": b"after\n", "more.txt": b"x\x1by\n", "letters.txt": f"p\u0430y {'x' * 80}".encode()}
    assert held(place.folder) == after
    (asked,) = place.person.asked
    for line in ("  │ -before", "  │ +after", "more.txt: new, 4 bytes", "  │ +x⟪U+001B⟫y", came["digest"]):
        assert line in asked
    assert "Look closely: what would change holds 1 character outside ASCII" in asked
    assert all(len(line) <= COLUMNS for line in asked.split("\n"))
    assert str(place.path) not in asked
    kinds = [each["kind"] for each in place.records() if each["kind"] != "pool.changed"]
    since = kinds.index("approval.requested")
    assert kinds[since : since + 6] == [
        "approval.requested", "approval.answered", "call.decided", "promotion.applied", "call.finished",
        "receipt.signed",
    ]  # fmt: skip
    (applied,) = [each["data"] for each in place.records() if each["kind"] == "promotion.applied"]
    assert (applied["promotion"], applied["digest"]) == (came["promotion"], came["digest"])
    assert applied["by"].startswith("local:")
    assert applied["asked_by"] == came["call_id"]
    operate(["receipt", "verify", came["call_id"]], place.options)
    operate(["artifact", "rollback", came["promotion"]], place.options)
    assert held(place.folder) == {"notes.txt": b"before\n"}


@pytest.mark.parametrize(("transport", "era"), WAYS)
async def test_a_no_changes_nothing_and_a_yes_is_for_one_call(transport: Transport, era: Era, place: Place) -> None:
    """The same call is asked about again, each time; where nothing is left to change nobody is asked."""
    async with place.client(transport, era) as client:
        uris = await made(client, notes="after\n", other="x\n")
        place.person.says = "deny"
        assert refused(await propose(client, uris[1:])) == "approval.denied"
        assert held(place.folder) == {}
        place.person.says = "allow"
        assert done(await propose(client, uris[:1]))
        assert refused(await propose(client, uris[:1])) == "promotion.same"
        (place.folder / "notes.txt").unlink()
        assert done(await propose(client, uris[:1]))
        assert len(place.person.asked) == 3
    assert held(place.folder) == {"notes.txt": b"after\n"}


async def test_what_changes_between_question_and_yes_is_left_alone(place: Place) -> None:
    """The yes was to what was shown; the control is the next, which nobody disturbs."""
    (place.folder / "notes.txt").write_text("before\n")
    async with place.client() as client:
        uris = await made(client, notes="after\n")
        place.person.first = lambda: (place.folder / "notes.txt").write_text("mine\n")
        assert refused(await propose(client, uris)) == "promotion.conflict"
        assert held(place.folder) == {"notes.txt": b"mine\n"}
        place.person.first = lambda: None
        assert done(await propose(client, uris))
    assert held(place.folder) == {"notes.txt": b"after\n"}
    assert "-mine" in place.person.asked[1]


@pytest.mark.parametrize(("transport", "era"), [("stdio", "legacy"), ("http", "modern")])
async def test_an_operator_says_yes_where_the_client_cannot_be_asked(
    transport: Transport, era: Era, place: Place
) -> None:
    """Who makes the same call again finds it. Over HTTP nobody at a client is asked, whatever it could show."""
    async with place.client(transport, era, asks=transport == "http") as client:
        uris = await made(client, notes="after\n")
        came = await propose(client, uris)
        assert refused(came) == "approval.pending"
        assert held(place.folder) == {}
        (identifier,) = [word for word in came["refused"]["reason"].split() if word.startswith("a_")]
        assert "  │ +after" in operate(["approvals", "show", identifier], place.options)
        operate(["approvals", "allow", identifier], place.options)
        assert done(await propose(client, uris))
        assert refused(await propose(client, uris)) == "promotion.same"
    assert held(place.folder) == {"notes.txt": b"after\n"}
    assert place.person.asked == []


async def test_what_cannot_be_asked_about_is_refused(place: Place) -> None:
    """No folder of the policy, a link on the way, no artifact of the caller's, too much, no text: nobody is asked."""
    (place.folder / "linked.txt").symlink_to(place.path / "config/policy.toml")
    with (place.folder / "held.txt").open("wb") as file:
        file.truncate(1 << 30)  # larger than what could be shown, and never read
    async with place.client() as client:
        notes, linked, large, binary, held_ = await made(
            client, notes="after\n", linked="x\n", large="x" * 60_000, binary="\0\1", held="x\n"
        )
        for into in ("elsewhere", "/etc", "..", str(place.folder), "reports/..", "x" * 4096):
            assert refused(await propose(client, [notes], into)) == "promotion.folder"
        assert refused(await propose(client, [linked])) == "promotion.path"
        assert refused(await propose(client, [held_])) == "promotion.path"
        assert refused(await propose(client, ["artifact://" + "0" * 32])) == "artifacts.unknown"
        assert refused(await propose(client, [large])) == "promotion.shown"
        assert refused(await propose(client, [binary])) == "promotion.shown"
        assert refused(await propose(client, [notes, linked], apply=True)) == "promotion.patch"
        assert place.person.asked == []
        assert done(await propose(client, [notes]))  # the control
    assert sorted(each.name for each in place.folder.iterdir()) == ["held.txt", "linked.txt", "notes.txt"]


async def test_a_patch_is_applied_to_what_its_program_was_given_or_not_at_all(place: Place) -> None:
    """A folder that holds something else by now is a conflict, before anybody is asked."""
    (place.path / "workspace").mkdir()
    for folder in ("workspace", "reports"):
        (place.path / folder / "notes.txt").write_text("before\n")
    own = place.path / "config/profiles/run_python.toml"
    own.write_text(plain_profile(workspace='"overlay"'))
    code = "open('/workspace/notes.txt', 'w').write('after\\n')"
    async with place.client("stdio", "legacy", more=["--workspace", str(place.path / "workspace")]) as client:
        ran = await client.call_tool("run_python", {"code": code})
        uri = (ran.structured_content or {})["changes"]["patch_uri"]
        (place.folder / "notes.txt").write_text("mine\n")
        assert refused(await propose(client, [uri], apply=True)) == "promotion.conflict"
        assert place.person.asked == []
        (place.folder / "notes.txt").write_text("before\n")
        assert done(await propose(client, [uri], apply=True))
    assert held(place.folder) == {"notes.txt": b"after\n"}
    assert "  │ -before\n  │ +after" in place.person.asked[0]


async def test_another_callers_artifact_is_none(place: Place) -> None:
    """Whoever made it may propose it; over HTTP that is somebody else."""
    async with place.client() as client:
        (uri,) = await made(client, notes="after\n")
    async with place.client("http", "modern") as other:
        assert refused(await propose(other, [uri])) == "artifacts.unknown"
    async with place.client() as client:
        assert done(await propose(client, [uri]))
    assert held(place.folder) == {"notes.txt": b"after\n"}


async def test_without_a_profile_nobody_has_the_tool(place: Place) -> None:
    """It is in no list, and a call of it is refused."""
    (place.path / "config/profiles/propose_changes.toml").unlink()
    text = POLICY.format(folder=place.folder).replace(', "propose_changes"', "")
    (place.path / "config/policy.toml").write_text(text)
    async with place.client() as client:
        (uri,) = await made(client, notes="after\n")
        assert "propose_changes" not in {each.name for each in (await client.list_tools()).tools}
        assert refused(await propose(client, [uri])) == "role.tools"
    assert held(place.folder) == {}


@pytest.mark.parametrize(("transport", "era"), [*WAYS, ("http", "modern")])
async def test_what_acts_in_a_proposed_file_is_asked_about_with_it(
    transport: Transport, era: Era, place: Place
) -> None:
    """Above every line that would change, on record before anybody is asked; of a plain file, that it is clean."""
    files = {"page": "<script>1</script>\n", "key": f"k = '{SECRET}'\n", "plain": "a,b\n"}
    async with place.client(transport, era, asks=transport == "stdio") as client:
        uris = await made(client, **files)
        came = await propose(client, uris)
        if transport == "http":
            (identifier,) = [word for word in came["refused"]["reason"].split() if word.startswith("a_")]
            asked = operate(["approvals", "show", identifier], place.options)
            operate(["approvals", "allow", identifier], place.options)
            came = await propose(client, uris)
        else:
            (asked,) = place.person.asked
        assert done(came)
    lines = asked.splitlines()
    said = lines.index("  page.txt: 1 finding")
    assert lines[said + 1] == "  ! found: markup: a script"
    assert "  plain.txt: nothing was found" in lines
    assert any(line.startswith("  ! found: a secret: ") for line in lines)
    # What a sandbox may write is not taken for what a yes writes.
    assert lines.index(next(fold(CHANGES))) < lines.index("What it may write:") < said
    assert said < lines.index("3 files of the folder reports would change:") < lines.index("  │ +<script>1</script>")
    kinds = [each["kind"] for each in place.records()]
    assert kinds.count("proposal.scanned") == 3  # once, although it was decided twice
    assert max(at for at, kind in enumerate(kinds) if kind == "proposal.scanned") < kinds.index("approval.requested")
    told = [each["data"] for each in place.records() if each["kind"] == "proposal.scanned"]
    assert {each["name"]: len(each.get("findings", ())) for each in told} == {
        "page.txt": 1, "key.txt": 1, "plain.txt": 0,
    }  # fmt: skip
    assert all(each["sandbox_id"] and each["driver"] == "bubblewrap" for each in told)
    (applied,) = [each["data"] for each in place.records() if each["kind"] == "promotion.applied"]
    assert {each["name"]: each["findings"] for each in applied["files"]} == {
        "page.txt": 1, "key.txt": 1, "plain.txt": 0,
    }  # fmt: skip
    operate(["audit", "verify"], place.options)


BUDGET = """
[[roles.everybody.budget]]
name = "processor"
per = "principal"
every = "day"
cpu_seconds = {left}
tool = "propose_changes"
"""


@pytest.mark.parametrize(("left", "asked"), [(19, 0), (600, 2)])
async def test_looking_into_a_proposed_file_is_charged_to_whoever_proposes(left: int, asked: int, place: Place) -> None:
    """Whatever is answered; with too little left nothing is scanned, and the control has enough."""
    policy = place.path / "config/policy.toml"
    policy.write_text(policy.read_text().replace("[promote]", BUDGET.format(left=left) + "\n[promote]"))
    place.person.says = "deny"
    async with place.client() as client:
        for uri in await made(client, notes="after\n", other="x\n"):
            assert refused(await propose(client, [uri])) == ("approval.denied" if asked else "budget.processor")
        (said,) = (await client.read_resource("glovebox://budget")).contents
        assert isinstance(said, types.TextResourceContents)
        (line,) = [each for each in json.loads(said.text)["left"] if each["budget"] == "processor"]
    assert len(place.person.asked) == asked
    assert [each["kind"] for each in place.records()].count("proposal.scanned") == asked
    assert (line["left"] < line["of"]) is bool(asked)
    assert line["left"] > line["of"] - 40


DYING = """\
import importlib, os, signal
module, _, path = os.environ["DIES_AT"].partition(":")
*way, name = path.split(".")
owner = importlib.import_module(module)
for each in way:
    owner = getattr(owner, each)
real, left = getattr(owner, name), int(os.environ["DIES_AFTER"])
def dying(*args, **options):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **options)
setattr(owner, name, dying)
from glovebox_server.cli.entry import run
run()
"""
"""A server that is killed when something is about to be done, after that was done so many times."""

PROMOTION = "glovebox_server.promotion"
BEFORE, AFTER = {"notes.txt": b"before\n"}, {"notes.txt": b"after\n", "more.txt": b"x\n"}


@pytest.mark.parametrize(
    ("at", "after", "changed"),
    [
        ("glovebox_server.guards.journal.journal:decided", 1, False),  # the yes is used, and not on record
        (f"{PROMOTION}.proposing:Proposals.put", 0, False),
        (f"{PROMOTION}.transaction:Journal.save", 1, False),
        (f"{PROMOTION}.folder:TargetFolder.exchange", 0, False),
        (f"{PROMOTION}.folder:TargetFolder.clear", 0, True),
        ("glovebox_server.guards.journal.journal:call_finished", 1, True),
    ],
)
async def test_a_server_that_is_killed_after_the_yes_made_the_change_or_none(
    at: str, after: int, *, changed: bool, place: Place
) -> None:
    """Both files are changed or neither, and the yes is used up either way: the next server asks about it anew."""
    (place.folder / "notes.txt").write_text("before\n")
    server = StdioServerParameters(
        command=sys.executable,
        args=["-c", DYING, "serve", *place.options],
        env={**os.environ, "DIES_AT": at, "DIES_AFTER": str(after)},
    )
    abilities: dict[str, Any] = {"elicitation_callback": place.person.answer}
    async with Client(server, mode="legacy", **abilities) as client:
        uris = await made(client, notes="after\n", more="x\n")
        with pytest.raises(MCPError, match="Connection closed"):
            await propose(client, uris)
    assert len(place.person.asked) == 1
    (said,) = json.loads(operate(["approvals", "list", "--all", "--json"], place.options))["approvals"]
    assert said["state"] == "used"
    async with place.client(asks=False) as client:
        assert held(place.folder) == (AFTER if changed else BEFORE)
        assert refused(await propose(client, uris)) == ("promotion.same" if changed else "approval.pending")
    operate(["audit", "verify"], place.options)


async def test_a_programs_patch_reaches_its_own_workspace_and_goes_again(place: Place) -> None:
    """By the operator's commands, onto the files that the program was given a copy of; a conflict changes none."""
    work = place.path / "workspace"
    work.mkdir()
    old = {"notes.txt": b"before\n", "gone.txt": b"x\n", "deep/kept.txt": b"kept\n"}
    new = {"notes.txt": b"after\n", "deep/kept.txt": b"kept\n", "deep/new/made.txt": b"made\n"}
    for name, content in old.items():
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_bytes(content)
    (place.path / "config/policy.toml").write_text(POLICY.format(folder=work))
    own = place.path / "config/profiles/run_python.toml"
    own.write_text(plain_profile(workspace='"overlay"'))
    code = (
        "import os, pathlib\nos.remove('gone.txt')\nos.mkdir('deep/new')\n"
        "pathlib.Path('notes.txt').write_text('after\\n')\npathlib.Path('deep/new/made.txt').write_text('made\\n')"
    )
    async with place.client(more=["--workspace", str(work)]) as client:
        ran = await client.call_tool("run_python", {"code": code})
        uri = (ran.structured_content or {})["changes"]["patch_uri"]
    assert held(work) == old
    words = ["artifact", "promote", uri, "--apply", "--into", "reports", "--json"]
    digest = json.loads(CliRunner().invoke(main, [*words, *place.options]).stdout)["plan"]["digest"]
    words += ["--expect", digest]
    (work / "notes.txt").write_text("mine\n")
    conflict = CliRunner().invoke(main, [*words, *place.options])
    assert (conflict.exit_code, json.loads(conflict.stdout)["refused"]["rule"]) == (REFUSED, "promotion.conflict")
    assert held(work) == {**old, "notes.txt": b"mine\n"}
    (work / "notes.txt").write_text("before\n")
    done = CliRunner().invoke(main, [*words, *place.options])
    assert (done.exit_code, held(work)) == (0, new), done.output
    identity = json.loads(done.stdout)["promotion"]["id"]
    (work / "deep/new/made.txt").write_text("mine\n")
    late = CliRunner().invoke(main, ["artifact", "rollback", identity, "--json", *place.options])
    assert (late.exit_code, json.loads(late.stdout)["refused"]["rule"]) == (REFUSED, "promotion.conflict")
    assert held(work) == {**new, "deep/new/made.txt": b"mine\n"}
    (work / "deep/new/made.txt").write_text("made\n")
    assert CliRunner().invoke(main, ["artifact", "rollback", identity, *place.options]).exit_code == 0
    assert held(work) == old
    assert not (work / "deep/new").exists()
