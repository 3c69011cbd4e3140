"""A workspace with planted secrets, of kinds that names tell and of kinds that contents tell: none is shown or kept."""

import base64
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from click.testing import CliRunner
from mcp.shared.exceptions import MCPError
from tests.escape.test_hidden_files import MARK, SECRETS
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.brokered import Called, Glovebox, glovebox, profile
from tests.fixtures.internet import SITE, Cable, internet, ok, wires
from tests.unit.test_secret_corpus import POSITIVES

from glovebox_server.app import App
from glovebox_server.calls import Principal
from glovebox_server.cli.main import main
from glovebox_server.guards.redaction.patterns import find_secrets
from glovebox_server.mcp.delivery import tool_result
from glovebox_server.mcp.prompts import complete
from glovebox_server.mcp.resources import Resources

__all__ = ["wires"]


def _kinds() -> Mapping[str, tuple[str, frozenset[str]]]:
    """Of each kind that is told by its content a text with it, and the pieces of it that open something."""
    kinds: dict[str, tuple[str, frozenset[str]]] = {}
    for text in POSITIVES:
        for start, end, kind in find_secrets(text.encode()):
            runs = re.findall(r"[A-Za-z0-9+/_\-]{16,}", text[start:end])
            # A name of a key, or the public id of one, opens nothing.
            pieces = frozenset(run for run in runs if not re.search(r"(?i)access_key|^A[KS]IA", run))
            kinds.setdefault(kind, (text, pieces))
    return kinds


KINDS = _kinds()
PAGE = "docs.example.org"
PROGRAM = r"""
import glob, json, sys
texts = {path: open(path).read() for path in sorted(glob.glob("notes/*.txt"))}
for path, text in texts.items():
    print(path, text, flush=True)
    print(json.dumps({path: text}), file=sys.stderr)
    name = path.split("/")[1]
    open("/output/" + name, "w").write(text)
    if FAILS:
        continue
    open("/output/" + name + ".json", "w").write(json.dumps({"text": text}))
    open("/output/" + name + ".bin", "wb").write(b"\xff\x00\n" + text.encode())
    open("copies/" + name, "w").write(text)
closed = 0
for path in SECRETS:
    try:
        texts[path] = open(path).read()
    except OSError:
        closed += 1
    else:
        print(texts[path], flush=True)
        open("/output/" + path.replace("/", "-"), "w").write(texts[path])
print("closed:", closed)
if FAILS:
    raise ValueError("\n".join(texts.values()))
texts
"""


def left(text: str) -> list[str]:
    """Kinds of planted secrets of which something stands in a text, as it is or with JSON's escapes."""
    shown = [kind for kind, (_, pieces) in KINDS.items() if any(piece in text for piece in pieces)]
    return [*shown, *(["a file that is hidden"] if MARK in text else [])]


def planted(workspace: Path) -> None:
    """Write each: some forty files with names of secrets, and ordinary files of which each holds one."""
    contents = {
        f"notes/{number:02}.txt": f"a note\n{text}\nits end\n" for number, (text, _) in enumerate(KINDS.values())
    }
    for name, content in {**SECRETS, **contents, "copies/.keep": ""}.items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o666)
    for path in workspace.rglob("*"):
        if path.is_dir():
            path.chmod(0o777)


def everything(called: Called) -> Iterator[tuple[str, str]]:
    """What a caller gets of a call, in each form."""
    yield "result", str((called.result.structured, called.result.content, called.result.meta))
    yield "message", tool_result(called.result).model_dump_json()
    yield "live", called.heard


async def resources_of(app: App, called: Called) -> Iterator[tuple[str, str]]:
    """What a caller reads of a call over MCP afterwards: records, receipt, and each file whole and in part."""
    served, principal = Resources(app, anyio.Event()), Principal(id="local:test", transport="cli")
    call = called.fields["call_id"]
    uris = [f"audit://calls/{call}", f"receipt://{call}", "glovebox://capabilities"]
    files = [*called.fields.get("artifacts", ()), *called.fields.get("images", ())]
    uris += [uri for each in files for uri in (each["uri"], f"{each['uri']}?offset=0")]
    read = []
    for uri in uris:
        try:
            (only,) = (await served.read(principal, uri)).contents
        except MCPError as refused:
            read.append((uri, f"{refused} {refused.error.data}"))
            continue
        blob = only.blob if isinstance(only, types.BlobResourceContents) else ""
        text = base64.b64decode(blob).decode("latin-1") if blob else getattr(only, "text", "")
        read.append((uri, f"{text}\n{only.meta}"))
    return iter(read)


async def completions(app: App) -> str:
    """Paths that are offered for each letter a name may begin with, and in each folder."""
    principal, offered = Principal(id="local:test", transport="cli"), ""
    for typed in ("", ".", "keys/", "home/", "home/.aws/", ".git/", "notes/", "s", "t", "p"):
        argument = types.CompletionArgument(name="path", value=typed)
        params = types.CompleteRequestParams(ref=types.PromptReference(name="analyse_file"), argument=argument)
        offered += str(await complete(params, principal, app.broker.submit, _nothing_owned, app.broker.tools))
    return offered


async def _nothing_owned(_principal: Principal) -> list[Any]:
    return []


def profiles(result: str = "") -> tuple[str, ...]:
    """Every tool with all kept on record that can be; programs in a copy of the workspace."""
    kept = f"\n[audit]\nkeep = ['arguments', 'stdout', 'stderr', 'value']\n{result}"
    files = {
        "run_python": "[files]\nworkspace = 'overlay'\noutput = true\n[network]",
        **dict.fromkeys(READERS, "[files]\nworkspace = 'read'\n[network]"),
    }
    copied = "[limits]\nworkspace = { bytes = '8 MiB', files = 500 }\noutput = { bytes = '8 MiB', files = 200 }"
    own = [profile(tool, "bubblewrap").replace("[network]", table) + kept for tool, table in files.items()]
    own[0] = own[0].replace("[limits]", copied)
    return (*own, profile("fetch_url", "bubblewrap", f'{{ host = "{PAGE}" }}') + kept)


READERS = ("read_workspace_file", "search_workspace", "list_workspace_files")


async def calls(box: Glovebox) -> Iterator[tuple[str, Called]]:
    """Every tool: some files by their names, all of them, a page, and programs that end well and badly."""
    files = (".env", "keys/server.pem", ".ssh/config", "notes/00.txt", "notes/01.txt")
    head = f"SECRETS = {sorted(SECRETS)!r}\n"
    made = [(f"read {path}", await box.call("read_workspace_file", path=path)) for path in files]
    made += [
        ("list", await box.call("list_workspace_files", pattern="**", include_ignored=True, limit=1000)),
        ("search", await box.call("search_workspace", pattern=".", include_ignored=True, context=2, limit=1000)),
        ("page", await box.call("fetch_url", url=f"https://{PAGE}/notes")),
        ("program", await box.call("run_python", code=f"{head}FAILS = False\n{PROGRAM}")),
        ("failing program", await box.call("run_python", code=f"{head}FAILS = True\n{PROGRAM}")),
    ]
    code = "\n".join(f"x = {text!r}" for text, _ in KINDS.values())
    made.append(("arguments", await box.call("run_python", code=f"{code}\nx")))
    return iter(made)


@pytest.mark.driver("bubblewrap")
async def test_no_planted_secret_reaches_a_result_a_record_or_a_preview(wires: Cable, tmp_path: Path) -> None:
    """Whatever reads it, and wherever it would be shown: results, live output, files read again, records, pages."""
    assert len(KINDS) + len(SECRETS) >= 60
    shown = await all_shown(wires, tmp_path)
    assert {where: kinds for where, text in shown.items() if (kinds := left(text))} == {}
    assert shown["program: result"].count("[secret: ") > len(KINDS)
    assert all(f"closed: {len(SECRETS)}" in shown[f"{each}: result"] for each in ("program", "failing program"))


@pytest.mark.driver("bubblewrap")
async def test_without_redaction_they_are_all_seen(wires: Cable, tmp_path: Path) -> None:
    """The control: the same calls do come upon each, and each place would show it; what names tell stays hidden."""
    shown = await all_shown(wires, tmp_path, "[result]\nredact = 'none'\n")
    for where in ("program: result", "program: message", "program: live", "page: result", "search: result", "log"):
        assert set(left(shown[where])) == set(KINDS), where
    assert {kind for where, text in shown.items() if "artifact://" in where for kind in left(text)} == set(KINDS)
    assert MARK not in "".join(shown.values())


async def all_shown(wires: Cable, directory: Path, result: str = "") -> Mapping[str, str]:
    """Everything that is shown or kept of the calls, by where."""
    shown: dict[str, str] = {}
    body = "\n".join(text for text, _ in KINDS.values()).encode()
    async with internet(wires) as net, glovebox(net, directory, *profiles(result)) as box:
        planted(directory / "workspace")
        net.zone[PAGE] = [[SITE]]

        async def serve(stream: anyio.abc.ByteStream) -> None:
            await stream.receive()
            await stream.send(ok(body, "Content-Type: text/plain"))

        await net.serve(SITE, 443, serve, name=PAGE)
        for name, called in await calls(box):
            shown |= {f"{name}: {where}": text for where, text in everything(called)}
            shown |= {f"{name}: {where}": text for where, text in await resources_of(box.app, called)}
        shown["completions"] = await completions(box.app)
        ids = [json.loads(line)["call_id"] for line in log(directory).splitlines() if '"kind":"call.decided"' in line]
    shown["log"] = log(directory)
    for each in ids[-2:]:
        shown[f"page of {each}"] = cli(directory, "audit", "show", each)
        bundle = directory / f"{each}.zip"
        cli(directory, "audit", "bundle", "--call", each, "--output", str(bundle))
        with zipfile.ZipFile(bundle) as parts:
            shown |= {f"bundle: {name}": parts.read(name).decode() for name in parts.namelist()}
    shown["queries"] = cli(directory, "audit", "query", "--json") + cli(directory, "audit", "tail", "--json")
    return shown


def log(directory: Path) -> str:
    """The audit log."""
    return b"\n".join(log_lines(directory / "state" / "audit")).decode()


def cli(directory: Path, *words: str) -> str:
    """What a command prints."""
    done = CliRunner().invoke(main, [*words, "--state-dir", str(directory / "state")])
    assert done.exit_code == 0, (words, done.output)
    return done.output
