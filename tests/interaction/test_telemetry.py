"""One message has one span and a call its parts, over pipes and HTTP; and who reads which metrics."""

import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.abc
import httpx2
import pytest
from mcp import Client, StdioServerParameters
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.collectors import Collector, attributes, collecting
from tests.interaction.node import ROOT, fake_server
from tests.interaction.served import Served, served, until
from tests.interaction.test_real_server import GLOVEBOX
from tests.interaction.test_refused_requests import post
from tests.interaction.test_several_processes import Wire, message, opened, several
from tests.must_run import unusable

from glovebox_audit.events import EgressDecided
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server import telemetry
from glovebox_server.transport.serve import open_listener, serve_http

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PARTS = ["admission", "decision", "sandbox", "run", "collect", "receipt"]


def records(state: Path) -> dict[str, Any]:
    """The data of each kind of record, of the last call."""
    return {each["kind"]: each["data"] for each in map(json.loads, log_lines(state / "audit"))}


@pytest.mark.driver("bubblewrap")
@pytest.mark.usefixtures("runtime_dir")
async def test_a_call_is_one_span_with_its_parts(tmp_path: Path) -> None:
    """Of a real call over pipes: the caller's trace goes on, and what it says is on record; nothing that it printed is.

    An error has no words of its own, and a tool that there is not no name.
    """
    state = tmp_path / "state"
    words = ["serve", "--state-dir", str(state), "--workspace", str(ROOT / "examples")]
    with collecting() as collector:
        server = StdioServerParameters(command=GLOVEBOX, args=words, env={**os.environ, **collector.variables})
        async with Client(server) as client:
            meta: Any = {"traceparent": PARENT}
            answer = await client.call_tool("run_python", {"code": "print('canary')"}, meta=meta)
            with pytest.raises(Exception, match="canary"):
                await client.call_tool("canary", {})
            version = client.protocol_version
            await until(lambda: "mcp.server.operation.duration" in collector.metrics, 60)
    assert collector.resource["service.name"] == "glovebox"
    assert not [span for span in collector.spans if "canary" in str(span)]
    found = {span.name: span for span in collector.spans if span.trace_id.hex() == PARENT.split("-")[1]}
    call = found.pop("tools/call run_python")
    assert (call.kind, call.parent_span_id.hex()) == (Span.SPAN_KIND_SERVER, PARENT.split("-")[2])
    said = records(state)
    assert answer.meta is not None
    call_id = answer.meta["dev.glovebox/call"]["call_id"]
    named = attributes(call)
    named.pop("jsonrpc.request.id")
    assert named == {
        "mcp.method.name": "tools/call", "mcp.protocol.version": version, "network.transport": "pipe",
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "run_python", "gen_ai.tool.call.id": call_id,
        "glovebox.decision": "allow", "glovebox.rule": said["call.decided"]["rule"],
        "glovebox.run": said["call.decided"]["run"], "glovebox.isolation.level": said["sandbox.started"]["level"],
        "glovebox.isolation.driver": "bubblewrap", "glovebox.isolation.verified": True, "glovebox.ended": "exited",
        "glovebox.receipt.digest": said["receipt.signed"]["digest"],
    }  # fmt: skip
    assert [*found] == PARTS
    assert {span.parent_span_id for span in found.values()} == {call.span_id}
    times = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in found.values()]
    assert times[0][0] <= call.start_time_unix_nano + 10_000_000
    assert [begin for begin, _ in times[1:]] == [end for _, end in times[:-1]]
    assert times[-1][1] <= call.end_time_unix_nano
    unknown = next(span for span in collector.spans if span.name == "tools/call")
    assert attributes(unknown)["gen_ai.tool.name"] == "_OTHER"
    assert (unknown.status.code, unknown.status.message) == (Status.STATUS_CODE_ERROR, "")
    (point,) = collector.metrics["gen_ai.execute_tool.duration"].exponential_histogram.data_points
    assert attributes(point) == {"gen_ai.tool.name": "run_python"}
    assert (point.count, sum(point.positive.bucket_counts)) == (1, 1)
    assert point.min <= point.sum <= point.max
    (calls,) = collector.metrics["mcp.tool.calls"].sum.data_points
    whose = {"tool_name": "run_python", "client_id": f"local:{os.getuid()}", "status": "success"}
    assert (calls.as_double, attributes(calls)) == (1, whose)


@asynccontextmanager
async def faked(directory: Path, collector: Collector) -> AsyncIterator[Served]:
    """A server of its own process over HTTP, which sends to this collector, and ends in good order."""
    env = {**os.environ, **collector.variables}
    process = await anyio.open_process(fake_server("http", directory, "alice"), cwd=ROOT, env=env, stderr=None)
    try:
        assert process.stdout is not None
        told = json.loads(await process.stdout.receive())
        yield Served(app=None, tasks=None, url=told["url"], tokens=told["tokens"])  # type: ignore[arg-type]
        process.terminate()
        with anyio.fail_after(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()


async def test_a_trace_in_headers_is_a_link_and_no_parent(tmp_path: Path) -> None:
    """What stands in ``_meta`` is the parent, and the span of whatever carried the message beside it."""
    carrier = PARENT.replace("4b", "5c")
    with collecting() as collector:
        async with faked(tmp_path, collector) as server, httpx2.AsyncClient() as http:
            await post(server, http, "alice", {"traceparent": PARENT}, ("traceparent", carrier))
            await post(server, http, "alice", {}, ("traceparent", f"{carrier}x"))
    first, second = (span for span in collector.spans if span.name == "tools/call run_python")
    assert first.trace_id.hex() == PARENT.split("-")[1]
    assert [(each.trace_id.hex(), each.span_id.hex()) for each in first.links] == [tuple(carrier.split("-")[1:3])]
    assert attributes(first)["network.transport"] == "tcp"
    assert (second.parent_span_id, list(second.links)) == (b"", [])


async def test_a_collector_that_never_answers_delays_nothing(tmp_path: Path) -> None:
    """Calls are answered, and the server ends."""
    with collecting() as collector:
        collector.answers.clear()
        async with faked(tmp_path, collector) as server, httpx2.AsyncClient() as http:
            for _ in range(5):
                assert (await post(server, http, "alice", {}))["content"]
        assert not collector.spans


async def scraped(server: Any, *headers: tuple[str, str], method: str = "GET") -> tuple[int, str]:
    """The answer to a scrape."""
    async with httpx2.AsyncClient() as http:
        answer = await http.request(method, f"{server.url}/metrics", headers=[*headers])
        return answer.status_code, answer.text


async def test_metrics_are_for_this_machine_or_for_their_own_token(tmp_path: Path) -> None:
    """A caller's token opens nothing there, that token nothing else; another name of ours is refused as anywhere."""
    async with served(tmp_path / "off", "http") as server:
        assert (await scraped(server))[0] == 401
        assert (await scraped(server, ("Authorization", f"Bearer {server.tokens['alice']}")))[0] == 404
    async with served(tmp_path / "here", "http", metrics="loopback") as server:
        async with server.client("http", "legacy") as client:
            await client.call_tool("run_python", {"code": "1"})
        status, text = await scraped(server)
        assert status == 200
        assert 'mcp_tool_calls_total{client_id="token:alice",status="success"} 1\n' in text
        assert 'glovebox_records_total{kind="log.gap"} 0\n' in text
        assert 'mcp_method_name="tools/call",gen_ai_tool_name="run_python",network_transport="tcp"' in text
        assert (await scraped(server, ("Host", "evil.example")))[0] == 421
        assert (await scraped(server, method="POST"))[0] == 401
    token = tmp_path / "token"
    token.write_text("a" * 32 + "\n")
    token.chmod(0o600)
    async with served(tmp_path / "token-s", "http", metrics=str(token)) as server:
        assert (await scraped(server))[0] == 401
        for said, expected in (("b", 401), (server.tokens["alice"], 401), ("a" * 32, 200)):
            assert (await scraped(server, ("Authorization", f"Bearer {said}")))[0] == expected
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {'a' * 32}"}) as http:
            assert (await http.get(f"{server.url}/health")).status_code == 401


@pytest.mark.parametrize(
    ("who", "mode", "content", "hosts", "reason"),
    [
        ("loopback", 0o600, "", ("glovebox.example",), "through a proxy"),
        ("file", 0o644, "a" * 32, (), "others have access"),
        ("file", 0o600, "short", (), "no token of 16"),
        ("missing", 0o600, "", (), "cannot be opened"),
    ],
)
async def test_metrics_that_others_could_read_are_refused(
    *, who: str, mode: int, content: str, hosts: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    """Before the server listens."""
    (tmp_path / "file").write_text(content)
    (tmp_path / "file").chmod(mode)
    metrics = who if who == "loopback" else str(tmp_path / who)
    async with served(tmp_path / "s", "stdio") as server:
        with pytest.raises(DiagnosedError, match=reason):
            await serve_http(server.app, allowed_hosts=hosts, metrics=metrics)  # type: ignore[arg-type]


async def test_a_scrape_covers_all_processes_and_those_that_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of two answers, before one of them is killed and after: the numbers are those of the log."""
    monkeypatch.setenv("FAKE_METRICS", "loopback")
    async with several(tmp_path) as server:
        for session in opened(server):
            wire = Wire(server)
            assert wire.ask(message(server, "tools/call", session))[0] == 200
            wire.close()
        server.living()[1].send_signal(signal.SIGKILL)
        await until(lambda: (tmp_path / "up").read_text() == "up\n" * 3, 60)
        seen = set()
        for _ in range(4):
            status, text = await scraped(server)
            assert status == 200
            lines = [line.split() for line in text.splitlines() if line.startswith("glovebox_records_total")]
            seen.add(tuple((name, float(value)) for name, value in lines if float(value)))
            assert 'mcp_tool_calls_total{client_id="token:alice",status="success"} 2\n' in text
    kinds = Counter(json.loads(line)["kind"] for line in log_lines(tmp_path / "audit"))
    assert seen == {tuple((f'glovebox_records_total{{kind="{kind}"}}', float(n)) for kind, n in sorted(kinds.items()))}


@asynccontextmanager
async def ended(process: anyio.abc.Process) -> AsyncIterator[None]:
    """End a process with the block."""
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            process.kill()
            await process.aclose()


PROMETHEUS = """
global: {{scrape_interval: 200ms}}
rule_files: ["{rules}"]
scrape_configs: [{{job_name: glovebox, static_configs: [{{targets: ["{target}"]}}]}}]
"""


async def test_every_query_of_the_dashboard_returns_data(tmp_path: Path) -> None:
    """From Debian's Prometheus, which scrapes a server that made a call; its checker finds no fault either."""
    program = shutil.which("prometheus")
    if program is None:
        unusable("prometheus", "there is no prometheus: install Debian's")
    files = Path(telemetry.__file__).parent
    panels = json.loads((files / "grafana.json").read_text())["panels"]
    wanted = {re.sub(r"\$\w+", ".*", each["expr"]) for panel in panels for each in panel["targets"]}
    async with served(tmp_path / "s", "http", metrics="loopback") as server, httpx2.AsyncClient() as http:
        async with server.client("http", "legacy") as client:
            await client.call_tool("run_python", {"code": "1"})
        text = (await http.get(f"{server.url}/metrics")).text
        for words, given in ((["metrics"], text), (["rules", str(files / "alerts.yml")], "")):
            checked = await anyio.run_process(["promtool", "check", *words], input=given.encode(), check=False)
            assert (checked.returncode, checked.stderr) == (0, b""), checked.stdout + checked.stderr
        asked = EgressDecided(
            call_id="c", scheme="https", host="a.b", port=443, asked_digest="d", effect="allow", rule="r"
        )  # fmt: skip
        await server.app.audit.append(asked)
        with closing(open_listener("127.0.0.1", 0)) as listener:
            place = f"127.0.0.1:{listener.getsockname()[1]}"
        target, given = urlsplit(server.url).netloc, f"--config.file={tmp_path / 'prometheus.yml'}"
        (tmp_path / "prometheus.yml").write_text(PROMETHEUS.format(rules=files / "alerts.yml", target=target))
        command = [program, given, f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={place}"]
        with (tmp_path / "log").open("wb") as log:
            process = await anyio.open_process(command, stderr=log)
        async with ended(process):
            with anyio.move_on_after(60):
                while wanted:
                    await anyio.sleep(0.2)
                    for query in sorted(wanted):
                        with suppress(httpx2.TransportError):  # until it listens
                            answer = await http.get(f"http://{place}/api/v1/query", params={"query": query})
                            wanted -= {query} if answer.json()["data"]["result"] else set()
            assert not wanted
            rules = (await http.get(f"http://{place}/api/v1/rules")).json()["data"]["groups"][0]["rules"]
    assert len(rules) == (files / "alerts.yml").read_text().count("- alert:")
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
