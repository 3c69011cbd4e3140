"""Files that a call gives back, scanned before its result: at real servers, each file in a sandbox of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from mcp import Client
from mcp_types import TextResourceContents
from tests.fixtures.audit_logs import log_lines
from tests.interaction.served import Era, Transport, connected, plain_profile
from tests.interaction.test_asking import operate

from glovebox_server.cli.main import main
from glovebox_server.promotion import proposing

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

WAYS = [("stdio", "modern"), ("http", "legacy")]
SECRET = "ghp_" + "0aB1cD2eF3" * 3 + "abcdef"
FILES = {
    "page.html": "<p onclick=alert(1)><script>1</script>",
    "drawing.svg": '<svg xmlns="http://www.w3.org/2000/svg"><image href="http://h/x"/></svg>',
    "settings.txt": f"key = '{SECRET}'\n",
    "table.csv": "a,b\n1,2\n",
}


def options(directory: Path, *, scan: bool = True) -> list[str]:
    """Of a server whose profile has files scanned."""
    profiles = directory / "config/profiles"
    profiles.mkdir(parents=True)
    text = plain_profile()
    changed = text.replace("output = true", "output = true\nscan = true", 1) if scan else text
    assert ("scan = true" in changed) == scan
    (profiles / "run_python.toml").write_text(changed)
    for each in (directory, directory / "config", profiles):
        each.chmod(0o755)
    return ["--profiles-dir", str(profiles), "--state-dir", str(directory / "state")]


async def made(client: Client, code: str) -> tuple[dict[str, Any], str]:
    """What a program gives back: as data, and as text."""
    ran = await client.call_tool("run_python", {"code": code})
    return ran.structured_content or {}, "\n".join(each.text for each in ran.content if each.type == "text")


def written(files: dict[str, str]) -> str:
    """A program that writes files."""
    return f"import pathlib\nfor n, t in {files!r}.items():\n    pathlib.Path('/output', n).write_text(t)"


def records(directory: Path) -> list[dict[str, Any]]:
    """Of the log, in order."""
    return [json.loads(line) for line in log_lines(directory / "state/audit")]


@pytest.mark.parametrize(("transport", "era"), WAYS)
async def test_what_acts_in_a_file_is_told_with_the_result(transport: Transport, era: Era, tmp_path: Path) -> None:
    """A page, a drawing and a secret are told and recorded, each from its own sandbox; of a table, that it is clean."""
    given = options(tmp_path)
    async with connected(transport, era, given) as client:
        result, text = await made(client, written(FILES))
    found = {each["name"]: each for each in result["findings"]}
    assert set(found) == set(FILES)
    assert set(found["page.html"]["findings"]) == {"markup: a script", "markup: a handler of events"}
    assert found["drawing.svg"]["findings"] == ["markup: what is loaded from elsewhere"]
    assert [each.split(":")[0] for each in found["settings.txt"]["findings"]] == ["a secret"]
    assert found["table.csv"]["findings"] == []
    assert {each["not_scanned"] for each in found.values()} == {None}
    assert "page.html: markup: a script" in text
    assert "table.csv: nothing was found" in text
    assert SECRET not in text
    assert result["exit_code"] == 0
    kinds = [each["kind"] for each in records(tmp_path)]
    of_call = kinds[kinds.index("call.decided") :]
    assert of_call.count("sandbox.started") == 1 + len(FILES)
    assert of_call.index("artifact.scanned") > of_call.index("artifact.collected")
    assert of_call.index("artifact.scanned") < of_call.index("call.finished")
    data = {each["data"]["name"]: each["data"] for each in records(tmp_path) if each["kind"] == "artifact.scanned"}
    assert {name: each.get("findings", []) for name, each in data.items()} == {
        name: each["findings"] for name, each in found.items()
    }
    started = [each["data"]["sandbox_id"] for each in records(tmp_path) if each["kind"] == "sandbox.started"]
    assert [each["sandbox_id"] for each in data.values()] == started[1:]
    (finished,) = (each["data"] for each in records(tmp_path) if each["kind"] == "call.finished")
    assert 0 < finished["usage"]["scan_ms"] < finished["elapsed_ms"]
    call = result["call_id"]
    operate(["receipt", "verify", call], given)
    operate(["audit", "verify"], given)
    shown = CliRunner().invoke(main, ["audit", "show", call, "--state-dir", str(tmp_path / "state")]).output
    assert "page.html" in shown
    assert "  markup: a script" in shown


@pytest.mark.parametrize(("transport", "era"), WAYS)
async def test_long_output_is_an_artifact_without_secrets_and_looked_into(
    transport: Transport, era: Era, tmp_path: Path
) -> None:
    """Each form alone has what fits, says that it is cut, and where the whole is; that has no secret of the middle."""
    code = f"print('begin' + 'x' * 50_000)\nprint('token {SECRET[:4]}' + {SECRET[4:]!r})\nprint('y' * 50_000 + 'end')"
    given = options(tmp_path)
    async with connected(transport, era, given) as client:
        result, text = await made(client, code)
        (kept,) = result["artifacts"]
        (read,) = (await client.read_resource(kept["uri"])).contents
        whole = read.text if isinstance(read, TextResourceContents) else ""
    stored = tmp_path / "state/artifacts/items" / kept["uri"].removeprefix("artifact://") / "content"
    assert stored.read_text() == whole
    assert whole == f"begin{'x' * 50_000}\ntoken [secret: GitHub token]\n{'y' * 50_000}end\n"
    assert result["redacted"] == {"GitHub token": 1}
    for form in (result["stdout"]["text"], text):
        assert form.startswith(whole[: 12 * 1024])
        assert whole[-4 * 1024 :] in form
        assert len(form.encode()) < 17 * 1024
    for form in (result["truncated"], text):
        assert f"16384 of {len(whole)} bytes are here; all of it is {kept['uri']}" in form
    assert [(each["name"], each["not_scanned"]) for each in result["findings"]] == [(kept["name"], None)]
    operate(["receipt", "verify", result["call_id"]], given)


async def test_without_the_key_nothing_is_looked_into(tmp_path: Path) -> None:
    """The control, and what is so by default: one sandbox, and no word of it."""
    async with connected("stdio", "modern", options(tmp_path, scan=False)) as client:
        result, text = await made(client, written(FILES))
    assert result.get("findings") is None
    assert "scanned" not in text
    kinds = [each["kind"] for each in records(tmp_path)]
    assert (kinds.count("sandbox.started"), kinds.count("artifact.scanned")) == (1, 0)


async def test_what_is_not_looked_into_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more files than there may be sandboxes, which are 16 (here 2), the rest; the call ends as it would."""
    assert proposing.MAX_FILES == 16
    monkeypatch.setattr(proposing, "MAX_FILES", 2)
    files = {f"{number}.csv": "1\n" for number in range(4)}
    async with connected("stdio", "modern", options(tmp_path)) as client:
        result, text = await made(client, written(files))
        nothing, _ = await made(client, "1")
    why = {each["name"]: each["not_scanned"] for each in result["findings"]}
    assert [name for name, reason in why.items() if reason] == ["2.csv", "3.csv"]
    assert why["3.csv"] == "of the files of a call 2 are scanned"
    assert "3.csv: NOT scanned: of the files" in text
    assert result["exit_code"] == 0
    assert nothing.get("findings") is None
