"""What is told of a file that was to be scanned, whatever becomes of that. No real sandbox."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from tests.fixtures.artifact_stores import BOB, a_call, keep
from tests.fixtures.brokered import Heard
from tests.fixtures.channels import OUTCOME, Guest
from tests.unit.test_broker import Recorder, Scene, scene
from tests.unit.test_stops import a_stop, obeying, put

from glovebox_audit.place import AuditError
from glovebox_audit.receipts.parts import Input
from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_sandboxes.contract.errors import Refusal, RefusedError, SandboxError
from glovebox_server.app import check_example
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.calls import NOTHING, Principal
from glovebox_server.core.call import CallDeniedError, Inputs
from glovebox_server.core.rights import Rights
from glovebox_server.guards.budgets.spending import LOOKING
from glovebox_server.guards.proposals.guard import propose, refuse_unasked
from glovebox_server.promotion import proposing

__all__ = ["scene"]  # a fixture

SCANNED = "artifact.scanned"
PROPOSES = """
tool = "propose_changes"
description = "Changes."
risk = "high"
isolation = ["bubblewrap"]
approval = "none"

[files]
inputs = true
"""


def scanned(scene: Scene, tmp_path: Path, scan: Callable[[Guest], Awaitable[None]]) -> Scene:
    """A broker whose profile has files scanned: the second sandbox of a call, and each after it, does ``scan``."""
    text = (SHIPPED / "run_python.toml").read_text().replace("output = true", "output = true\nscan = true", 1)
    (tmp_path / "run_python.toml").write_text(text)
    rights = Rights(profiles=load([SHIPPED, tmp_path], check_example=check_example), workspace=None)
    sandboxes = 0

    async def script(guest: Guest) -> None:
        nonlocal sandboxes
        sandboxes += 1
        if sandboxes > 1:
            await scan(guest)
            return
        await guest.file("a.txt", b"content")
        await guest.done()

    scene.driver.script = script
    return scene.guarded(rights_of=lambda _: rights)


async def say(guest: Guest, text: str, status: int = 0) -> None:
    """Print, as the scanner does, and end."""
    stream, frames = guest.wire.open("stdout", {})
    await guest.say(frames + guest.wire.data(stream, text.encode()) + guest.wire.end(stream))
    await guest.done({**OUTCOME, "status": status})


async def told(scene: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the one file's entry says in the result, which is good all the same, and in the record."""
    result = await scene.call()
    assert not result.failed
    (entry,) = result.structured["findings"]
    (recorded,) = (each for each in scene.audit.events if each.kind == SCANNED)
    assert scene.audit.kinds()[-2:] == [SCANNED, "call.finished"]
    assert recorded.uri == entry["uri"] == result.structured["artifacts"][0]["uri"]
    assert tuple(entry["findings"]) == (recorded.findings or ())
    assert entry["not_scanned"] == recorded.not_scanned
    return entry, {"sandbox_id": recorded.sandbox_id}


@pytest.mark.parametrize(
    ("printed", "reads"),
    [
        (["markup: a script"], ["markup: a script"]),
        ([], []),
        (["a\nb\x1b[2J\u202ec", 7], ["a⟪U+000A⟫b⟪U+001B⟫[2J⟪U+202E⟫c", "7"]),
        (["x" * 1000] * 100, ["x" * 300] * 54),
    ],
    ids=["one", "none", "hostile", "many"],
)
async def test_of_findings_only_the_form_is_believed(
    printed: list[Any], reads: list[str], scene: Scene, tmp_path: Path
) -> None:
    """Each is a line in which nothing hides; so many and so long, and what has no room is counted."""
    scene = scanned(scene, tmp_path, lambda guest: say(guest, json.dumps({"a.txt": {"findings": printed, "more": 7}})))
    result = await scene.call()
    (entry,) = result.structured["findings"]
    assert entry["findings"] == reads
    assert entry["more"] == 7 + len(printed) - len(reads)
    (recorded,) = (each for each in scene.audit.events if each.kind == SCANNED)
    assert len(recorded.findings or ()) == min(len(printed), proposing.MAX_FINDINGS)
    assert recorded.more == 7 + max(0, len(printed) - proposing.MAX_FINDINGS)
    (finished,) = scene.audit.last_words()
    assert finished.usage["scan_ms"] > 0


HOSTILE = [
    '{"a": "b"}', '{"a": []}', '{"a": {"findings": []}}', '{"a": {"findings": [], "more": -1}}', "[" * 100_000,
    '{"a": {"findings": [], "more": true}}', '{"a": {"findings": [], "more": 1e9}}',
    '{"a": {"findings": {}, "more": 0}}',
    '{"a": {"findings": [], "more": 0}, "b": {"findings": [], "more": 0}}',
    '{"a": {"findings": [], "more": 1000001}}',
]  # fmt: skip


@pytest.mark.parametrize("printed", ["", "{", "[]", "{}", *HOSTILE])
async def test_what_says_nothing_is_not_clean(printed: str, scene: Scene, tmp_path: Path) -> None:
    """The scanner was ended, or taken over: the file was not scanned, and the call goes on."""
    entry, sandbox = await told(scanned(scene, tmp_path, lambda guest: say(guest, printed)))
    assert entry["not_scanned"] == "the scanner gave no findings, which the file may have brought about"
    assert sandbox["sandbox_id"] == "s2"


async def test_a_scan_that_fails_or_dies_or_takes_too_long_is_none(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its exit status, or since its sandbox is gone, also by the time for all; nothing runs on."""
    entry, _ = await told(scanned(scene, tmp_path, lambda guest: say(guest, '{"a.txt": []}', 1)))
    assert entry["not_scanned"] == "the scanner failed on it"
    scene.audit.events.clear()
    entry, _ = await told(scanned(scene, tmp_path, lambda guest: guest.channel.aclose()))
    assert entry["not_scanned"] == "the sandbox ended without an outcome"
    scene.audit.events.clear()
    monkeypatch.setattr(proposing, "MAX_SCAN_SECONDS", 0.05)
    entry, _ = await told(scanned(scene, tmp_path, lambda _: anyio.sleep_forever()))
    assert entry["not_scanned"].endswith("seconds that there are for the files of a call were over")
    assert scene.driver.live == 0


async def test_without_a_sandbox_it_is_said(scene: Scene, tmp_path: Path) -> None:
    """The call's own was there; for the next there is no room."""
    scene = scanned(scene, tmp_path, lambda guest: say(guest, "{}"))
    script = scene.driver.script

    async def last(guest: Guest) -> None:
        scene.driver.problem = SandboxError("Starting", "no process could be made in /secret/x", "")
        assert script is not None
        await script(guest)

    scene.driver.script = last
    entry, sandbox = await told(scene)
    assert entry["not_scanned"] == "no process could be made in [host path]"
    assert sandbox["sandbox_id"] is None


async def test_who_leaves_meanwhile_ends_the_scan(scene: Scene, tmp_path: Path) -> None:
    """What was published is on record with the call's end, and nothing runs on."""
    begun = anyio.Event()

    async def scan(_guest: Guest) -> None:
        begun.set()
        await anyio.sleep_forever()

    scene = scanned(scene, tmp_path, scan)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.call)
        await begun.wait()
        tasks.cancel_scope.cancel()
    (last,) = scene.audit.last_words()
    assert (last.kind, len(last.published or ())) == ("call.cancelled", 1)
    assert scene.driver.live == 0


async def test_findings_that_cannot_be_recorded_are_not_told(scene: Scene, tmp_path: Path) -> None:
    """As with every record of a call."""
    scene = scanned(scene, tmp_path, lambda guest: say(guest, '{"a.txt": []}'))
    scene.audit.fails = SCANNED
    with pytest.raises(AuditError):
        await scene.call()


SCANS = (
    proposing.Scan(name="a.html", uri="artifact://1", sha256="1", findings=("markup: a script",) * 14, sandbox_id="s1"),
    proposing.Scan(name="b\u202e.csv", uri="artifact://2", sha256="2", not_scanned="the scanner failed on it"),
    proposing.Scan(name="c.csv", uri="artifact://3", sha256="3", known=True),
)


async def proposed(audit: Any) -> proposing.Proposed:
    """What a person is shown of three artifacts."""
    planned = SimpleNamespace(scanned=lambda found: found)
    proposals = proposing.Proposals(settings=cast("Any", None), audit=audit, into=dict)
    plain = proposing.Proposed(planned=cast("Any", planned), shown="what would change")
    return await proposals.scanned(plain, SCANS, a_call())


async def test_a_proposal_shows_what_was_found_and_what_was_not_looked_into() -> None:
    """Bounded, above the rest, in lines in which nothing hides; recorded before, or nobody is asked."""
    audit = Recorder()
    found = await proposed(audit)
    assert found.shown.splitlines()[1:] == [
        "  a.html: 14 findings",
        *["  ! found: markup: a script"] * 12,
        "  ! and 2 more, which are on record",
        "  ! b⟪U+202E⟫.csv was NOT scanned: the scanner failed on it",
        "  c.csv: nothing was found",
        "what would change",
    ]
    assert [(each.kind, each.uri, each.not_scanned) for each in audit.events] == [
        ("proposal.scanned", "artifact://1", None),
        ("proposal.scanned", "artifact://2", "the scanner failed on it"),
    ]
    assert len(audit.events[0].findings) == 14
    assert set(cast("Any", found.planned)) == {"artifact://1", "artifact://3"}  # of the other its record says nothing
    with pytest.raises(AuditError):
        await proposed(Recorder(fails="proposal.scanned"))


def a_file(scan: proposing.Scan) -> Input:
    """The artifact that was scanned."""
    return Input(name=scan.name, uri=scan.uri, sha256=scan.sha256, bytes=1)


def test_what_is_known_is_the_callers_own_and_a_failure_is_one_calls() -> None:
    """By content and name; the oldest goes."""
    known, file, failed = proposing.Known(), a_file(SCANS[0]), a_file(SCANS[1])
    assert known.of(a_call(), file) is None
    known.note(a_call(), SCANS[0])
    assert known.of(a_call(number=2), replace(file, uri="artifact://9")) == replace(
        SCANS[0], uri="artifact://9", known=True
    )
    assert known.of(a_call(BOB), file) is None
    assert known.of(a_call(), replace(file, name="a.ipynb")) is None
    known.note(a_call(), SCANS[1])
    assert known.of(a_call(), failed) == replace(SCANS[1], known=True)
    assert known.of(a_call(number=2), failed) is None
    for number in range(256):
        known.note(a_call(), replace(SCANS[0], sha256=f"n{number}"))
    assert known.of(a_call(), file) is None


@pytest.mark.parametrize("by", ["stop", "client", ""], ids=["stop", "client", "control"])
async def test_looking_into_a_proposal_ends_with_its_call(by: str, scene: Scene, tmp_path: Path) -> None:
    """Before anybody is asked, by a stop or whoever leaves; the control comes to the question, which nobody can be."""
    begun = anyio.Event()
    (tmp_path / "propose_changes.toml").write_text(PROPOSES)

    async def script(guest: Guest) -> None:
        begun.set()
        await (anyio.sleep_forever() if by else say(guest, '{"a.txt": []}'))

    class Proposals(proposing.Proposals):
        async def proposed(self, *_: object) -> proposing.Proposed:
            return proposing.Proposed(planned=cast("Any", SimpleNamespace(scanned=lambda found: found)), shown="")

    scene.driver.script = script
    me = Principal(id="local:1", transport="cli")
    rights = Rights(profiles=load([SHIPPED, tmp_path], check_example=check_example), workspace=None)
    uri = (await keep(scene.broker.artifacts, "a.txt", b"a", principal=me)).uri
    (tmp_path / "state").mkdir()
    async with obeying(tmp_path / "state") as stops, anyio.create_task_group() as tasks:
        proposals = Proposals(settings=cast("Any", None), audit=cast("Any", scene.audit), into=dict)
        broker = scene.guarded(rights_of=lambda _: rights, stops=stops, proposals=lambda: proposals).broker
        results = []

        async def call() -> None:
            arguments = {"inputs": [uri], "into": "x", "apply": False}
            results.append(await broker.submit(me, "propose_changes", arguments, Heard()))

        tasks.start_soon(call)
        with anyio.fail_after(10):
            await begun.wait()
            if by == "client":
                tasks.cancel_scope.cancel()
            elif by == "stop":
                put(tmp_path / "state", a_stop())
    assert scene.driver.live == 0
    rules = [each.structured["refused"]["rule"] for each in results]
    assert rules == {"stop": ["stop"], "client": [], "": ["approval.nobody"]}[by]
    assert scene.audit.kinds() == {"stop": ["call.decided"], "client": [], "": ["proposal.scanned", "call.decided"]}[by]


class Steps:
    """Proposals, scanner, budgets and listener of one call, which note what each is given."""

    def __init__(self, refused: RefusedError | None = None) -> None:
        self.seen: list[tuple[object, ...]] = []
        self.refused = refused
        request = SimpleNamespace(id="c_1", tool="propose_changes")
        self.files = (a_file(SCANS[0]), a_file(SCANS[1]))
        readers: Any = tuple(SimpleNamespace(artifact=file) for file in self.files)
        now = SimpleNamespace(inputs=Inputs(readers=readers), decision=SimpleNamespace(approval=None), is_started=False)
        tool = SimpleNamespace(answer=lambda outcome: SimpleNamespace(fields={"promotion": outcome}))
        self.call: Any = SimpleNamespace(request=request, now=now, listener=self, tool=tool)

    def progress(self, message: str) -> None:
        """Hear of it."""
        self.seen.append((message,))

    async def proposed(self, *given: object) -> str:
        """Plan it."""
        if self.refused:
            raise self.refused
        self.seen.append(("proposed", *given))
        return "planned"

    @asynccontextmanager
    async def reserved(self, *given: object) -> AsyncIterator[None]:
        """Charge it."""
        self.seen.append(("reserved", *given))
        yield
        self.seen.append(("charged",))

    async def scans(self, *given: object) -> object:
        """Look into it."""
        self.seen.append(("scans", *given))
        return SCANS

    async def scanned(self, *given: object) -> object:
        """Show it."""
        self.seen.append(("scanned", *given))
        return SimpleNamespace(shown="+1", folder="/f")

    async def put(self, *given: object) -> str:
        """Make it."""
        self.seen.append(("put", given[1]))
        return "p_1" if self.call.now.is_started else "too early"


@pytest.mark.parametrize("charged", [True, False])
async def test_changes_are_looked_into_before_anybody_is_asked_and_made_once_approved(charged: bool) -> None:
    """The look is charged, where there are budgets; unapproved, nothing is made, whoever asks for it."""
    steps: Any = Steps()
    call, request, now = steps.call, steps.call.request, steps.call.now
    await propose(lambda: steps, steps, cast("Any", "known"), steps if charged else None, call)
    looked: list[tuple[object, ...]] = [("scans", call, steps.files, "known")]
    looked = [("reserved", now, LOOKING), *looked, ("charged",)] if charged else looked
    before = [("proposed", request, 2), ("Looking into files",), *looked, ("scanned", "planned", SCANS, request)]
    assert (steps.seen, now.changes, now.folder) == (before, "+1", "/f")
    with pytest.raises(AssertionError, match="c_1"):
        await now.perform(call)
    now.decision.approval = "a_1"
    ran = await now.perform(call)
    assert (ran.outcome, ran.delivered, ran.recorded) == ("p_1", NOTHING, {"promotion": "p_1"})
    assert ran.answer.fields == {"promotion": "p_1"}
    assert steps.seen[len(before) :] == [("Changing files",), ("put", request)]


async def test_what_cannot_be_proposed_is_refused_before_anything_is_looked_into() -> None:
    """By the folder that is missing, by the plan, by a disk that fails, or since there is nobody to say yes."""
    refusal, known = Refusal(rule="promotion.same", reason="Nothing.", hint="None."), cast("Any", None)
    steps: Any = Steps(RefusedError(refusal.rule, refusal.reason, refusal.hint))
    with pytest.raises(CallDeniedError) as refused:
        await propose(lambda: steps, steps, known, None, steps.call)
    assert refused.value.refusal == refusal
    with pytest.raises(CallDeniedError) as refused:
        await propose(None, steps, known, None, steps.call)
    reason = "propose_changes can change nothing here."
    assert refused.value.refusal == Refusal(rule="promotion.folder", reason=reason, hint="Ask the operator.")
    failing = ArtifactStoreError("read it", "it failed", "Mend it.")
    steps.call.now.inputs = Inputs(unreadable=failing)
    with pytest.raises(ArtifactStoreError) as failed:
        await propose(lambda: steps, steps, known, None, steps.call)
    assert (failed.value, steps.seen) == (failing, [])
    with pytest.raises(CallDeniedError, match="nobody can be asked here; nothing was changed"):
        await refuse_unasked(steps.call)
