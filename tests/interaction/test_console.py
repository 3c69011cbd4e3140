"""The console, page by page: who comes in, what they see, what they may do, and what is refused on record."""

import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import anyio
import anyio.to_thread
import httpx2
import pytest
from tests.fixtures.approving import Desk, HostClock, a_desk, again, proposal
from tests.fixtures.audit_logs import started
from tests.fixtures.leftovers import until

from glovebox_audit.chain import Record, draft, new_call_id
from glovebox_audit.events import CallDecided
from glovebox_audit.verify import verify
from glovebox_server.console import people, views
from glovebox_server.console.application import Console
from glovebox_server.console.gate import HEADERS, MAX_FORM_BYTES, cookie_of
from glovebox_server.console.highlight import MAX_CHARACTERS
from glovebox_server.console.people import LINK_MS, SESSION_MS, People, Role
from glovebox_server.guards.budgets.spending import Clocks, read_clocks
from glovebox_server.guards.stops import stops
from glovebox_server.settings import Settings
from glovebox_server.stores.database import Database

HOST = "127.0.0.1:8322"
HERE = {"Origin": f"http://{HOST}"}
PAGES = ("now", "waiting", "history", "artifacts", "profiles", "health", "stop?scope=all&name=")


@dataclass
class Scene:
    """A console, and the server whose directory it shows."""

    desk: Desk
    console: Console
    database: Database

    def client(self) -> httpx2.AsyncClient:
        """A browser of its own."""
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.console.gate), base_url=f"http://{HOST}")

    def link(self, name: str, role: Role) -> str:
        """The secret of a new link."""
        return self.database.transact_now(lambda db: People(db, read_clocks()).invite(name, role))

    async def entered(self, name: str = "anna", role: Role = "operator") -> "Session":
        """Somebody who came in."""
        client = self.client()
        answer = await client.post("/enter", data={"link": self.link(name, role)}, headers=HERE)
        assert answer.status_code == 303, answer.text
        return Session(client, answer.headers["location"].rpartition("/")[0])

    def last(self, kind: str) -> Record:
        """The newest record of a kind."""
        return next(each for each in reversed(self.desk.records()) if each.kind == kind)


@dataclass
class Session:
    """A session in a browser."""

    client: httpx2.AsyncClient
    place: str

    async def get(self, page: str) -> httpx2.Response:
        """A page."""
        return await self.client.get(f"{self.place}/{page}")

    async def shown(self, page: str) -> str:
        """A page's text."""
        answer = await self.get(page)
        assert answer.status_code == 200, answer.text
        return answer.text

    async def token(self) -> str:
        """What its forms hold."""
        found = re.search(r'name="token" value="([0-9a-f]{32})"', await self.shown("now"))
        assert found is not None
        return found[1]

    async def post(self, page: str, **fields: str) -> httpx2.Response:
        """A form of it, sent."""
        data = {"token": await self.token()} | fields
        return await self.client.post(f"{self.place}/{page}", data=data, headers=HERE)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with _scene(tmp_path) as found:
        yield found


@asynccontextmanager
async def _scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with a_desk(tmp_path / "s", HostClock()) as desk:
        with people.opened(desk.state) as database:
            console = Console(settings=Settings(state_dir=desk.state), database=database, hosts=frozenset({HOST}))
            yield Scene(desk, console, database)


async def test_a_link_begins_one_session_and_looking_at_it_uses_nothing_up(scene: Scene) -> None:
    """The sign-in page does not use it; the second try is refused and counted; who came in is on record."""
    secret, client = scene.link("anna", "viewer"), scene.client()
    for _ in range(2):
        assert secret in (await client.get("/enter", params={"link": secret})).text
    first = await client.post("/enter", data={"link": secret}, headers=HERE)
    assert first.status_code == 303
    cookie = first.headers["set-cookie"]
    # Its name is as unguessable as its path: a server on another port can set none that would be read for it.
    assert cookie.startswith(f"glovebox_{first.headers['location'][1:33]}=")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert f"Path={first.headers['location'].removesuffix('now')}" in cookie
    assert scene.last("console.entered").data == {"name": "anna", "role": "viewer"}
    again_ = await scene.client().post("/enter", data={"link": secret}, headers=HERE)
    assert again_.status_code == 403
    assert scene.console.gate.refusals.totals == {"console.link": 1}


@pytest.mark.parametrize(
    ("kind", "late", "boot"),
    [("link", LINK_MS, "1"), ("session", SESSION_MS, "1"), ("link", 0, "2"), ("session", 0, "2")],
)
def test_a_link_and_a_session_end_with_their_time_and_with_a_reboot(
    kind: str, late: int, boot: str, tmp_path: Path
) -> None:
    """A millisecond earlier they hold; whatever the wall clock says."""
    begin = 1_000_000

    def at(since: int = 0, boot: str = "1") -> Clocks:
        return Clocks(wall=5, boot=boot, since_boot=begin + since)

    lasts = LINK_MS if kind == "link" else SESSION_MS
    with people.opened(tmp_path) as database:
        secret = database.transact_now(lambda db: People(db, at()).invite("anna", "approver"))
        if kind == "session":
            secret = database.transact_now(lambda db: People(db, at()).enter(secret))[0]
        found = [
            database.query_now(lambda db, now=now: People(db, now)._person(kind, secret))  # type: ignore[misc]
            for now in (at(lasts - 1), at(late, boot))
        ]
    assert [each is not None for each in found] == [True, False]


def test_the_file_has_no_secret(tmp_path: Path) -> None:
    """Who reads it can use neither link nor session; of more than may be, the oldest are forgotten."""
    with people.opened(tmp_path) as database:

        def invite(number: int) -> str:
            at = Clocks(wall=number, boot="1", since_boot=number)
            return database.transact_now(lambda db: People(db, at).invite("anna", "viewer"))

        secrets = [invite(number) for number in range(people.MOST + 2)]
        rows = database.query_now(lambda db: db.execute("SELECT * FROM entries").fetchall())
    assert len(rows) == people.MOST
    assert not [each for each in secrets if each in str(rows)]


@pytest.mark.parametrize("page", [*PAGES, "call/c_0", "events"])
async def test_nothing_is_shown_without_the_session_of_its_path(page: str, scene: Scene) -> None:
    """Neither without a cookie nor with another session's; the control is the session itself."""
    anna, ben = await scene.entered("anna"), await scene.entered("ben")
    stranger = await scene.client().get(f"{anna.place}/{page}")
    (cookie,) = ben.client.cookies.jar
    theirs = {"Cookie": f"{cookie_of(anna.place[1:])}={cookie.value}; {cookie.name}={cookie.value}"}
    other = await scene.client().get(f"{anna.place}/{page}", headers=theirs)
    assert (stranger.status_code, other.status_code) == (401, 401)
    assert scene.console.gate.refusals.totals == {"console.session": 2}
    if page != "events":
        assert (await anna.get(page)).status_code in {200, 404}


async def test_what_cannot_be_read_is_said_without_a_path_to_strangers(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """A path of other letters is nobody's; the console goes on, and records what it refused once it can."""
    anna, place = await scene.entered(), str(scene.desk.state)
    (cookie,) = anna.client.cookies.jar
    sent = {b"Cookie": f"{cookie_of('é')}={cookie.value}".encode("latin-1")}
    assert (await scene.client().get("/é/now", headers=sent)).status_code == 401
    keys, log, kept = (scene.desk.state / name for name in ("keys", "audit", "governance/console.sqlite"))
    keys.chmod(0o777)
    await scene.console.gate.refusals.record(scene.console)
    assert scene.console.gate.refusals._new == {("", "console.session"): 1}
    keys.chmod(0o700)
    log.rename(log.with_name("away"))
    answer = await anna.get("call/c_0")
    assert (answer.status_code, f"read the audit log in {log}" in answer.text) == (503, True)
    kept.rename(kept.with_name("away"))
    answer = await anna.get("now")
    assert (answer.status_code, place in answer.text) == (503, False)
    assert place in caplog.text


async def test_a_revoked_session_and_one_that_was_left_are_over(scene: Scene) -> None:
    """All of a name's, and one alone; a later link of the same name works."""
    first, second = await scene.entered("anna"), await scene.entered("anna")
    assert (await first.post("leave")).status_code == 303
    assert [(await each.get("now")).status_code for each in (first, second)] == [401, 200]
    assert scene.database.transact_now(lambda db: People(db, read_clocks()).revoke("anna")) == 1
    assert (await second.get("now")).status_code == 401
    assert "Now" in await (await scene.entered("anna")).shown("now")


@pytest.mark.parametrize(
    ("headers", "rule", "status"),
    [
        ({"Host": "evil.example:8322"}, "console.host", 421),
        ({"Host": "127.0.0.1:9"}, "console.host", 421),
        ({"Origin": "http://evil.example"}, "console.origin", 403),
        ({"Origin": "null"}, "console.origin", 403),
        ({"Origin": "http://127.0.0.1:9"}, "console.origin", 403),
        ({"Origin": f"https://{HOST}"}, "console.origin", 403),
        ({}, "console.origin", 403),
        ({**HERE, "Sec-Fetch-Site": "same-site"}, "console.origin", 403),
        ({**HERE, "Sec-Fetch-Site": "cross-site"}, "console.origin", 403),
    ],
)
async def test_a_form_of_another_page_does_nothing(
    headers: dict[str, str], rule: str, status: int, scene: Scene
) -> None:
    """Its cookie and its token are right: what is wrong is where it comes from, or where it goes."""
    anna = await scene.entered()
    data = {"token": await anna.token(), "scope": "all", "name": "", "because": "a test"}
    answer = await anna.client.post(f"{anna.place}/stop", data=data, headers=headers)
    assert answer.status_code == status
    assert scene.console.gate.refusals.totals == {rule: 1}
    assert not stops.stops_of(scene.desk.state).read().items
    right = await anna.client.post(f"{anna.place}/stop", data=data, headers=HERE)
    assert right.status_code == 303
    assert stops.stops_of(scene.desk.state).read().items


async def test_an_open_page_hears_nothing_more_once_its_session_is_over(scene: Scene) -> None:
    """Five of a session do, so that a browser has a connection left for what they load; a sixth is told so."""
    anna, heard = await scene.entered(), list[str]()

    async def hear() -> None:
        heard.append((await anna.get("events")).text)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(hear)
        await until(lambda: scene.console._streams.total() == 5)
        assert (await anna.get("events")).status_code == 429
        scene.database.transact_now(lambda db: People(db, read_clocks()).revoke("anna"))
        await scene.desk.asked(proposal("print(1)"))
    assert len(heard) == 5
    assert {each.count("data: ") for each in heard} <= {0, 1}
    assert not scene.console._streams


async def test_a_forged_form_is_refused_by_its_token(scene: Scene) -> None:
    """Another session's, none, one twice, one too long, one of another kind."""
    anna, ben = await scene.entered("anna"), await scene.entered("ben")
    place, rest = f"{anna.place}/stop", "scope=all&name=&because=x"
    kind = {"Content-Type": "application/x-www-form-urlencoded", **HERE}
    own = await anna.token()
    bodies = (
        f"token={await ben.token()}&{rest}",
        rest,
        f"token={own}&token={own}&{rest}",
        f"token={own}&x={'a' * MAX_FORM_BYTES}",
    )
    answers = [await anna.client.post(place, content=body, headers=kind) for body in bodies]
    answers.append(await anna.client.post(place, json={"token": own}, headers=HERE))
    assert [each.status_code for each in answers] == [403, 403, 400, 413, 400]
    assert scene.console.gate.refusals.totals == {"console.form": 5}
    assert not stops.stops_of(scene.desk.state).read().items


@pytest.mark.parametrize(
    ("role", "action", "allowed"),
    [
        ("viewer", "answer", False), ("viewer", "stop", False), ("viewer", "resume", False),
        ("approver", "answer", True), ("approver", "stop", False), ("approver", "resume", False),
        ("operator", "answer", True), ("operator", "stop", True), ("operator", "resume", True),
    ],
)  # fmt: skip
async def test_each_action_wants_its_role(role: Role, action: str, allowed: bool, scene: Scene) -> None:
    """Who lacks it sees no form for it, and what they post is refused and counted by their name."""
    question = await scene.desk.asked(proposal("print(1)"))
    session = await scene.entered("anna", role)
    page = await session.shown("waiting") + await session.shown("now")
    assert ('action="answer"' in page) == (role != "viewer")
    assert ("stop?scope=all" in page) == (role == "operator")
    answer = await session.post(
        action, question=question.id, digest=question.digest, answer="once", scope="all", name="", because="x",
        stop="s_0",
    )  # fmt: skip
    assert (answer.status_code == 403) is not allowed
    assert scene.console.gate.refusals.totals == ({} if allowed else {"console.role": 1})


async def test_a_question_is_answered_as_it_was_shown(scene: Scene) -> None:
    """All that would run is on the page, nothing hides in it; the call passes, by the name of the person."""
    made = proposal("print('\u202e<script>alert(1)</script>')")
    question = await scene.desk.asked(made)
    anna = await scene.entered("anna", "approver")
    page = await anna.shown("waiting")
    assert "⟪U+202E⟫&lt;script&gt;alert(1)&lt;/script&gt;" in page
    changed = await anna.post("answer", question=question.id, digest="sha256:0", answer="once")
    assert changed.status_code == 409
    assert "Look at the question again" in changed.text
    unsaid = await anna.post("answer", question=question.id, digest=question.digest)
    assert unsaid.status_code == 400
    given = await anna.post("answer", question=question.id, digest=question.digest, answer="once")
    assert given.status_code == 303
    assert f"{question.id} is allowed." in await anna.shown("waiting")
    assert (await scene.desk.decided(again(made))).approval == question.id
    answered = scene.last("approval.answered").data
    assert (answered["answered_by"], answered["channel"]) == ("console:anna", "operator")
    late = await anna.post("answer", question=question.id, digest=question.digest, answer="once")
    assert late.status_code == 409
    assert "used: run_python" in await anna.shown("waiting")
    assert verify(scene.desk.state / "audit").ok


async def test_those_who_act_at_the_same_moment_are_all_on_record(scene: Scene) -> None:
    """Of answers to one question the first counts, and the others are told so."""
    question = await scene.desk.asked(proposal("print(1)"))
    people = [await scene.entered(name, "operator") for name in ("anna", "ben", "cleo", "dan")]
    came = list[int]()

    async def act(number: int, page: str, **fields: str) -> None:
        came.append((await people[number].post(page, **fields)).status_code)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            said = {"question": question.id, "digest": question.digest, "answer": "once"}
            tasks.start_soon(partial(act, number, "answer", **said))
            tasks.start_soon(partial(act, number, "stop", scope="run", name=f"r_{number}", because="x"))
    assert sorted(came) == [303] * 5 + [409] * 3
    assert Counter(scene.desk.kinds())["stop.made"] == 4


async def test_those_alike_stand_together_and_each_is_answered_by_itself(scene: Scene) -> None:
    """The same program in two runs, around another one; and how somebody has answered so far is told them."""
    made = [proposal(code, run=run) for code, run in (("print(1)", "r_1"), ("print(2)", "r_1"), ("print(1)", "r_2"))]
    asked = [await scene.desk.asked(each) for each in made]
    anna = await scene.entered("anna", "approver")
    page = await anna.shown("waiting")
    places = [page.index(f"May {each.id} run?") for each in asked]
    assert not min(places[0], places[2]) < places[1] < max(places[0], places[2])
    assert page.count("One of 2 that want exactly the same.") == 2
    await anna.post("answer", question=asked[0].id, digest=asked[0].digest, answer="once")
    page = await anna.shown("waiting")
    assert f"May {asked[2].id} run?" in page
    assert "Of 1 question in seven days you said yes to 1, half of them within 0 s." in page


async def test_a_program_has_colours_unless_a_line_of_it_would_keep_others_waiting(scene: Scene) -> None:
    """For this one the lexer takes nine seconds, at each look at the page; a shorter one is the control."""
    for zeros, coloured in ((30_000, False), (19_000, False), (200, True)):
        question = await scene.desk.asked(proposal(f'"%{"0" * zeros}'))
        page = await (await scene.entered()).shown("waiting")
        assert ('<span class="string">' in page) is coloured
        assert "0" * zeros in page
        await scene.desk.answer(question, allow=False)
        looks = views._texts.cache_info().misses
        page = await (await scene.entered()).shown("waiting")
        assert views._texts.cache_info().misses == looks
        assert (f"It is long: glovebox approvals show {question.id}" in page) is (zeros > MAX_CHARACTERS)


async def test_pages_come_before_any_server(tmp_path: Path) -> None:
    """Where there is no log yet, each says so."""
    state = tmp_path / "s"
    state.mkdir(mode=0o700)
    with people.opened(state) as database:
        console = Console(settings=Settings(state_dir=state), database=database, hosts=frozenset({HOST}))
        anna = await Scene(Mock(state=state), console, database).entered()
        for page in PAGES:
            assert (await anna.get(page)).status_code == 200, page


async def test_a_no_has_its_reason(scene: Scene) -> None:
    """Which the model reads."""
    question = await scene.desk.asked(proposal("print(1)"))
    anna = await scene.entered("anna", "approver")
    await anna.post("answer", question=question.id, digest=question.digest, answer="deny", reason="Not today.\n")
    assert scene.last("approval.answered").data["reason"] == "Not today."


async def test_a_stop_is_made_with_a_reason_and_lifted(scene: Scene) -> None:
    """By name, as it is: the page asks before, tells afterwards, and shows what is stopped."""
    anna, name = await scene.entered(), 'token:ci"\u05d0'
    page = await anna.shown(f"stop?scope=principal&name={quote(name)}")
    assert "Stop principal token:ci&#34;⟪U+05D0⟫?" in page
    (given,) = re.findall('name="name" value="(.*?)"', page)
    refused = await anna.post("stop", scope="principal", name=name, because=" ")
    assert refused.status_code == 400
    made = await anna.post("stop", scope="principal", name=unescape(given), because="It sends mail.")
    assert made.status_code == 303
    renewed = await anna.client.get(f"{anna.place}/now", headers={"Sec-Fetch-Mode": "cors"})
    assert "is stopped" not in renewed.text  # it is for the page that comes next
    page = await anna.shown("now")
    assert "principal token:ci&#34;⟪U+05D0⟫ is stopped" in page
    assert "It sends mail." in page
    ((stop),) = stops.stops_of(scene.desk.state).read().items
    assert stop.name == name
    assert scene.last("stop.made").data["by"] == "console:anna" == stop.by
    assert (await anna.post("resume", stop=stop.id)).status_code == 303
    assert not stops.stops_of(scene.desk.state).read().items
    assert scene.last("stop.lifted").data == {"by": "console:anna", "stop": stop.id}
    assert (await anna.post("resume", stop=stop.id)).status_code == 409


async def test_what_runs_is_shown_until_it_ends(scene: Scene) -> None:
    """Also what began before the console; of a server that is gone nothing runs."""
    log = scene.desk.audit
    early, late = new_call_id(), new_call_id()
    anna = await scene.entered()
    await log.append_all([draft(decided(early)), started(early)])
    async with scene.console.gate.inner.router.lifespan_context(scene.console.gate.inner):  # type: ignore[attr-defined]
        await until(lambda: scene.console.live.listed()[0])
        await log.append_all([draft(decided(late))])
        await until(lambda: len(scene.console.live.listed()[0]) == 2)
        page = await anna.shown("now")
        assert page.index(early) < page.index(late)
        assert "fake, container: measured as planned" in page
        assert "no sandbox yet" in page


async def test_what_runs_can_be_stopped_where_questions_cannot_be_read(scene: Scene) -> None:
    """The page says what is damaged; the control is the page before."""
    anna = await scene.entered()
    assert "damaged" not in await anna.shown("now")
    (scene.desk.state / "governance/approvals.sqlite").write_bytes(b"no store")
    page = await anna.shown("now")
    assert "damaged" in page
    assert "Stop everything" in page


async def test_a_log_that_is_indexed_shows_how_far(scene: Scene) -> None:
    """Instead of a page that waits for it; the page itself comes afterwards."""
    anna = await scene.entered()
    scene.console.live.indexing = (2**20, 4 * 2**20)
    assert "25% of 4 MiB" in await anna.shown("history")
    scene.console.live.indexing = None
    assert "25%" not in await anna.shown("history")


async def test_calls_are_found_and_told(scene: Scene) -> None:
    """By what a form says, newest first; one call by the beginning of its id."""
    ids = [new_call_id() for _ in range(3)]
    await scene.desk.audit.append_all(
        [draft(decided(each, principal=f"token:{place}")) for place, each in enumerate(ids)]
    )
    anna = await scene.entered()
    page = await anna.shown("history")
    assert [page.index(each) for each in ids] == sorted((page.index(each) for each in ids), reverse=True)
    assert 'value="\u05d0"' in await anna.shown("history?principal=\u05d0")  # as it is typed
    only = await anna.shown("history?principal=token%3A1")
    assert [each in only for each in ids] == [False, True, False]
    assert "token:1" in await anna.shown(f"call/{ids[1]}")
    assert (await anna.get("call/c_zzzz")).status_code == 404
    assert (await anna.get("history?since=yesterdayish")).status_code == 400


@pytest.mark.parametrize("page", PAGES)
async def test_each_answer_has_the_headers_that_keep_pages_apart(page: str, scene: Scene) -> None:
    """Refusals too."""
    anna = await scene.entered()
    answers = [await anna.get(page), await scene.client().get("/x/now"), await scene.client().get("/static/console.js")]
    for answer in answers:
        assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)
        assert "unsafe" not in answer.headers["Content-Security-Policy"]


def decided(call_id: str, **said: Any) -> CallDecided:
    """The event that begins a call, with what is ``said`` otherwise."""
    fields = {
        "tool": "run_python",
        "principal": "token:ci",
        "run": "r_1",
        "transport": "http",
        "rule": "allow",
        "reason": "x",
    }
    digests = dict.fromkeys(("profile_digest", "arguments_digest"), "sha256:0")
    return CallDecided(**{**fields, **digests, **said}, call_id=call_id, effect="allow", arguments_bytes=1)
