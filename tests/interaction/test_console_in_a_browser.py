"""The console in Debian's Chromium: what a page looks like, what it runs, and what a person can do without a mouse."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
import uvicorn
from playwright.async_api import Browser, BrowserContext, Page, async_playwright
from tests.fixtures.approving import HostClock, a_desk, again, proposal
from tests.fixtures.leftovers import until
from tests.interaction import node
from tests.interaction.test_console import Scene, decided
from tests.must_run import unusable

from glovebox_audit.chain import draft, new_call_id
from glovebox_audit.events import ReceiptSigned
from glovebox_server.console import people
from glovebox_server.console.application import Console
from glovebox_server.console.people import People, Role
from glovebox_server.guards.budgets.spending import read_clocks
from glovebox_server.receipts.keys import Signer
from glovebox_server.settings import Settings
from glovebox_server.transport.serve import open_listener, url_of

#: Texts that would run, reorder, forge or break out, wherever a page put them as they are: {} is what would run.
FORMS = (
    "<script>{}</script>", "<img src=x onerror={}>", "<svg onload={}>", '"><script>{}</script>',
    "'><img src=x onerror={}>",
    '" onfocus={} autofocus "', "javascript:{}", "</textarea><script>{}</script>", "</pre><script>{}</script>",
    "<iframe srcdoc='<script>{}</script>'>", "{{{{ {} }}}}", "{{% {} %}}", "<details open ontoggle={}>",
    "]]><script>{}</script>", "<base href=http://evil.example/>{}", "<style>@import 'http://evil.example/{}'</style>",
    "<meta http-equiv=refresh content='0;url=javascript:{}'>", "<form action=javascript:{}><button autofocus>",
    "\u202e<script>{}</script>", "\u2028<script>{}</script>", "\x1b]8;;javascript:{}\x07", "=HYPERLINK({})",
    "[x](javascript:{})", "<math><mtext><script>{}</script>", "<!--><script>{}</script>-->",
)  # fmt: skip
PAYLOADS = [form.format(f"window.ran={number}") for number, form in enumerate(FORMS)]


@asynccontextmanager
async def _served(tmp_path: Path) -> AsyncIterator[tuple[Scene, str, uvicorn.Server]]:
    """A console over HTTP, and a server whose directory it shows."""
    async with a_desk(tmp_path / "s", HostClock()) as desk:
        with people.opened(desk.state) as database:
            listener = open_listener("127.0.0.1", 0)
            host = f"127.0.0.1:{listener.getsockname()[1]}"
            console = Console(settings=Settings(state_dir=desk.state), database=database, hosts=frozenset({host}))
            server = uvicorn.Server(uvicorn.Config(console.gate, log_config=None))
            console.ends = lambda: server.should_exit
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: server.serve(sockets=[listener]))
                await until(lambda: server.started)
                yield Scene(desk, console, database), url_of(listener), server
                server.should_exit = True


@asynccontextmanager
async def _chromium() -> AsyncIterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        unusable("browser", "there is no chromium: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            await browser.close()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with _chromium() as found:
        yield found


async def _enter(scene: Scene, url: str, where: Browser | BrowserContext, role: Role = "operator") -> Page:
    """Come in as a person does: open the link, press the button."""
    page = await where.new_page()
    await page.goto(f"{url}/enter?link={scene.link('anna', role)}")
    await page.get_by_role("button", name="Begin the session").click()
    await page.wait_for_url("**/now")
    return page


async def _go(page: Page, to: str) -> None:
    await page.goto(page.url.rpartition("/")[0].partition("/call")[0] + f"/{to}")


async def _fill(scene: Scene) -> str:
    """Something on every page; the id of a call with a receipt is returned."""
    call = new_call_id()
    await scene.desk.audit.append_all([draft(decided(call))])
    await scene.desk.asked(proposal("import os\nprint('a')  # a comment\n" + "x = 1\n" * 40))
    return call


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1280])
async def test_pages_are_accessible_and_fit(
    scheme: Literal["light", "dark"], width: int, browser: Browser, tmp_path: Path
) -> None:
    """axe-core finds nothing, nothing is wider than the window, and no page asks another host for anything."""
    axe = (node.directory() / "node_modules" / "axe-core" / "axe.min.js").read_text()
    async with _served(tmp_path) as (scene, url, _):
        call = await _fill(scene)
        context = await browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
        page = await _enter(scene, url, context)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        for to in ("now", "waiting", "history", "profiles", "stop?scope=all&name=", f"call/{call}"):
            await _go(page, to)
            await page.evaluate(axe)
            found: dict[str, Any] = await page.evaluate("axe.run({resultTypes: ['violations']})")
            wrong = [(each["id"], [one["html"][:120] for one in each["nodes"]]) for each in found["violations"]]
            assert wrong == [], to
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, to
        assert {each.startswith(url) for each in asked} == {True}


async def test_no_text_is_ever_run(browser: Browser, tmp_path: Path) -> None:
    """In programs, reasons, names and records; the control is that the same text as markup does run."""
    async with _served(tmp_path) as (scene, url, _):
        for number, payload in enumerate(PAYLOADS[:4]):
            await scene.desk.asked(proposal(payload, run=f"r_{number}"))
        calls = [
            decided(new_call_id(), principal=payload, client=payload, run=payload, reason=payload)
            for payload in PAYLOADS
        ]
        await scene.desk.audit.append_all([*map(draft, calls)])
        page = await _enter(scene, url, browser)
        said: list[str] = []
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("console", lambda message: said.append(message.text))
        for to in ("now", "waiting", "history", *(f"call/{each.call_id}" for each in calls)):
            await _go(page, to)
            assert await page.evaluate("window.ran") is None, to
            assert (
                await page.locator("main script, main iframe, main img, main svg, main base, main style").count() == 0
            )
            assert "\u202e" not in await page.content()
        assert said == []
        await _go(page, "history")
        shown = await page.locator("main").inner_text()
        assert PAYLOADS[0] in shown
        free = await browser.new_page()
        await free.set_content(PAYLOADS[0])
        assert await free.evaluate("window.ran") == 0


async def test_a_question_comes_by_itself_and_is_answered_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    """Without a reload; one key decides nothing, and what is typed stays while others come."""
    async with _served(tmp_path) as (scene, url, _):
        page = await _enter(scene, url, browser, "approver")
        await _go(page, "waiting")
        await page.get_by_text("Nothing is waiting.").wait_for()
        made = proposal("print(1)")
        question = await scene.desk.asked(made)
        await page.get_by_text(f"May {question.id} run?").wait_for()
        await page.get_by_label("Yes, once").focus()
        await page.keyboard.press("Enter")  # of a form without a choice: the browser asks for one
        assert await scene.desk.state_of(question) == "pending"
        await page.get_by_label("Reason for a no").focus()
        await page.keyboard.type("half a ")
        other = await scene.desk.asked(proposal("print(2)"))
        await page.get_by_text(f"May {other.id} run?").wait_for()
        await page.keyboard.type("reason")
        assert await page.locator(f"[data-key={question.id}] input[name=reason]").input_value() == "half a reason"
        card = page.locator(f"[data-key={question.id}]")
        await card.get_by_label("Yes, once").focus()
        await page.keyboard.press("Space")
        await card.get_by_role("button", name="Answer").focus()
        await page.keyboard.press("Enter")
        await page.get_by_text(f"{question.id} is allowed.").wait_for()
        assert (await scene.desk.decided(again(made))).approval == question.id


async def test_a_question_that_is_settled_elsewhere_says_so(browser: Browser, tmp_path: Path) -> None:
    """Also to somebody who wrote a reason, and to a reader, in a browser without Trusted Types that keeps nothing."""
    plain = await browser.new_context(bypass_csp=True)
    refuses = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no') }})"
    await plain.add_init_script(f"delete window.trustedTypes; {refuses}")
    async with _served(tmp_path) as (scene, url, _):
        question = await scene.desk.asked(proposal("print(1)"))
        page, reader = await _enter(scene, url, browser, "approver"), await _enter(scene, url, plain, "viewer")
        for each in (page, reader):
            await _go(each, "waiting")
        await page.get_by_label("Reason for a no").fill("half a reason")
        await page.locator("h1").click()
        await reader.locator("section pre").first.focus()
        await scene.desk.answer(question, allow=False)
        for each in (page, reader):
            await each.get_by_text("This was settled elsewhere").wait_for()
        other = await scene.desk.asked(proposal("print(2)"))
        await page.get_by_text(f"May {other.id} run?").wait_for()
        assert await page.get_by_text("This was settled elsewhere").count() == 1
        assert await page.get_by_text("denied: run_python").count() == 1


@pytest.mark.parametrize(
    ("signed", "changed", "said"),
    [
        ('{"predicate": {"call": {"id": "ID"}}}', {}, "Its receipt is signed, for this call."),
        ('{"predicate": {"call": {"id": "c_0"}}}', {}, "Its receipt is of another call, c_0."),
        ('{"predicate": {"call": {"id": "ID"}}}', {"payloadType": "x"}, "does NOT fit"),
        ('{"predicate": {"call": {"id": "ID"}}}', {"signatures": [{"keyid": "x"}]}, "another key now than then"),
        ('{"predicate": {"call": {"id": "ID"}}}', {"payload": "%"}, "Its receipt was not checked: "),
        ("{}", {}, "Its receipt was not checked: "),
    ],
)
async def test_a_receipt_is_checked_by_the_browser(
    signed: str, changed: dict[str, Any], said: str, browser: Browser, tmp_path: Path
) -> None:
    """Only one that fits, and is of the call, is green."""
    async with _served(tmp_path) as (scene, url, _):
        call, signer = new_call_id(), Signer.load(scene.desk.state)
        envelope = signer.sign(signed.replace("ID", call).encode()) | changed
        receipt = ReceiptSigned(call_id=call, digest="sha256:0", key=signer.key_id, envelope=envelope)
        await scene.desk.audit.append_all([draft(decided(call)), draft(receipt)])
        page = await _enter(scene, url, browser)
        await _go(page, f"call/{call}")
        await page.locator("#receipt", has_text=said).wait_for()
        assert await page.locator("#receipt.green").count() == said.endswith("for this call.")


@pytest.mark.parametrize("lost", ["console", "session", "questions"])
async def test_a_page_that_hears_nothing_turns_red(lost: str, browser: Browser, tmp_path: Path) -> None:
    """Within six seconds of the end of what it shows; before, it has the head of the log."""
    async with _served(tmp_path) as (scene, url, server):
        await _fill(scene)
        page = await _enter(scene, url, browser)
        assert ":" in await page.locator("#head").inner_text()
        assert await page.locator("#alive.stale").count() == 0
        if lost == "console":
            server.should_exit = True
        elif lost == "session":
            await scene.database.transact(lambda db: People(db, read_clocks()).revoke("anna"))
        else:
            await _go(page, "waiting")
            (scene.desk.state / "governance" / "approvals.sqlite").write_bytes(b"")
        await page.locator("#alive.stale").wait_for(timeout=8000)
