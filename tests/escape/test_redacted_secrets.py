"""What only a secret looks like leaves no call: by no stream, value or page, live or at the end, or record."""

import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.brokered import DRIVERS, Heard, profile, submitted
from tests.unit.test_secret_corpus import POSITIVES
from tests.unit.test_suggest import keys

from glovebox_audit import chain
from glovebox_audit.chain import digest
from glovebox_server import app as apps
from glovebox_server.calls import CallResult, Principal
from glovebox_server.guards.redaction.detector import derive_forms
from glovebox_server.proof import sealed
from glovebox_server.settings import Settings

TOKEN = POSITIVES[0].partition("=")[2].replace("p_", "r_", 1) + POSITIVES[0][-36:] + POSITIVES[0][-4:]
"""Of 76 letters, as GitHub's refresh tokens may have: more than others."""
KEY = next(text for text in POSITIVES if "OPENSSH" in text)
CODE = """
import sys, json
secret = open("notes.txt").read()
print("begin\\n" + secret, flush=True)
print("as an error:", secret, file=sys.stderr)
print(json.dumps({"secret": secret}))
open("/output/out.txt", "w").write("a file")
secret
"""


async def called(
    directory: Path,
    driver: str,
    keys: str,
    code: str = CODE,
    *,
    workspace_key: str = "read",
    files: int = 1,
    **more: Any,
) -> tuple[CallResult, str, str]:
    """What a program under a profile with these keys gives back, shows live, and leaves on record."""
    for name in ("profiles", "workspace"):
        (directory / name).mkdir()
    (directory / "workspace").chmod(0o755)
    (directory / "workspace" / "notes.txt").write_text(f"token {TOKEN}\n{KEY}\n")
    text = profile("run_python", driver).replace(
        "[network]", f"[files]\nworkspace = '{workspace_key}'\noutput = true\n[network]"
    )
    text = text.replace("[limits]", f"[limits]\noutput = {{ bytes = '1 MiB', files = {files} }}")
    kept = "\n[audit]\nkeep = ['arguments', 'stdout', 'stderr', 'value']\n"
    (directory / "profiles" / "run_python.toml").write_text(f"{text}{kept}{keys}")
    settings = Settings(
        workspace=directory / "workspace", profiles_dir=directory / "profiles", state_dir=directory / "state", **more
    )
    heard = Heard()
    async with apps.opened(settings, "cli") as app:
        result = await submitted(app, "run_python", {"code": code}, heard)
    return result, heard.text, b"".join(log_lines(settings.state_dir / "audit")).decode()


def whole(result: CallResult) -> str:
    """All of a result, both forms."""
    return str((result.structured, result.content, result.meta))


def pieces() -> list[str]:
    """The token, and each line of the key."""
    return [TOKEN, *re.findall(r"[A-Za-z0-9+/]{40,}", KEY)]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_secret_in_output_is_replaced_and_counted(driver: str, tmp_path: Path) -> None:
    """By default, in every output and in what is kept of it; the rest of the output is as it was."""
    result, live, log = await called(tmp_path, driver, "")
    assert [piece for piece in pieces() if piece in whole(result) + live + log] == []
    assert result.structured["redacted"] == {"GitHub token": 4, "private key": 4}
    assert "secrets replaced in this output: GitHub token × 4, private key × 4" in whole(result)
    assert result.structured["stdout"]["text"].startswith(
        "begin\ntoken [secret: GitHub token]\n[secret: private key]\n"
    )
    assert '"redacted":{"GitHub token":4,"private key":4}' in log
    assert not result.failed
    assert [each["name"] for each in result.structured["artifacts"]] == ["out.txt"]


@pytest.mark.driver("bubblewrap")
async def test_without_redaction_it_is_all_there(tmp_path: Path) -> None:
    """The control."""
    result, live, log = await called(tmp_path, "bubblewrap", "[result]\nredact = 'none'\n")
    for where in (whole(result), live, log):
        assert TOKEN in where
    assert "redacted" not in result.structured


@pytest.mark.driver("bubblewrap")
async def test_a_profile_can_have_such_a_result_refused(tmp_path: Path) -> None:
    """Nothing comes back, live neither, and no file; that it ran is on record."""
    result, live, log = await called(tmp_path, "bubblewrap", "[result]\nredact = 'refuse'\n")
    assert result.failed
    assert result.structured["refused"]["rule"] == "result.redact"
    assert "GitHub token × 4" in result.structured["refused"]["reason"]
    assert live == ""
    assert "out.txt" not in whole(result)
    assert [piece for piece in pieces() if piece in whole(result) + log] == []
    assert '"kind":"call.finished"' in log


FORGED = """
import json, os, stat, struct
about = json.dumps({"name": "", "reason": open("notes.txt").read().split()[1]}).encode() + b"\\0"
frame = struct.pack("!BI", ord("S"), len(about)) + about
for pipe in (int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2):
    try:
        if stat.S_ISFIFO(os.fstat(pipe).st_mode):
            os.write(pipe, frame)
    except OSError:
        pass
"""


@pytest.mark.driver("bubblewrap")
async def test_what_a_program_says_of_a_picture_holds_none_either(tmp_path: Path) -> None:
    """It reaches the pipe of its results, in which a sentence says why a picture has no smaller copy."""
    result, _, _ = await called(tmp_path, "bubblewrap", "", FORGED)
    assert "A picture: not shown, [secret: GitHub token]" in whole(result)
    assert TOKEN not in whole(result)


NAMED = "open('/output/' + {} + '.txt', 'w').write('a file')"


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_file_with_a_secret_in_its_name_is_refused(driver: str, tmp_path: Path) -> None:
    """Told without it, in result and record, also where the name can be none; the control is a plain name."""
    names = (TOKEN, TOKEN + "\n", "a" * 180 + "/" + TOKEN)
    made = [f"import os\nos.makedirs('/output/{'a' * 180}')", *(NAMED.format(repr(name)) for name in (*names, "plain"))]
    result, _, log = await called(tmp_path, driver, "", "\n".join(made), files=len(made))
    assert TOKEN not in whole(result) + log
    assert [each["name"] for each in result.structured["artifacts"]] == ["plain.txt"]
    assert result.structured["redacted"] == {"GitHub token": len(names)}
    assert "not collected, What looks like a secret is in its name." in whole(result)
    refused = [line for line in log.splitlines() if '"kind":"artifact.refused"' in line]
    assert [json.loads(line)["data"]["reason"] for line in refused] == [
        "What looks like a secret is in its name."
    ] * len(names)


@pytest.mark.driver("bubblewrap")
async def test_names_of_changed_files_hold_none_either(tmp_path: Path) -> None:
    """Of a workspace that a program has a copy of; the control is the name beside it."""
    code = f"for name in ({TOKEN!r}, 'plain'):\n    open(name, 'w').write('x')\n"
    result, _, _ = await called(tmp_path, "bubblewrap", "", code, workspace_key="overlay")
    assert TOKEN not in whole(result)
    assert result.structured["changes"]["created"] == ("[secret: GitHub token]", "plain")


@pytest.mark.driver("bubblewrap")
async def test_arguments_that_are_kept_hold_none_either(tmp_path: Path) -> None:
    """The program that was sent with it is recorded without, with the digest of what ran, and that it was replaced."""
    _, _, log = await called(tmp_path, "bubblewrap", "", f"token = {TOKEN!r}\n")
    assert TOKEN not in log
    assert "token = '[secret: GitHub token]'" in log
    (decided,) = [json.loads(line)["data"] for line in log.splitlines() if '"kind":"call.decided"' in line]
    assert decided["redacted"] == {"GitHub token": 1}
    assert decided["arguments_digest"] != digest(decided["arguments"])


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize(("redact", "refused"), [("refuse", True), ("none", False)])
async def test_a_secret_in_a_name_is_one_of_the_output(redact: str, refused: bool, tmp_path: Path) -> None:
    """So nothing comes back where the profile says so; where it says that all may come, it does (the control)."""
    result, _, log = await called(tmp_path, "bubblewrap", f"[result]\nredact = '{redact}'\n", NAMED.format(repr(TOKEN)))
    assert (result.failed, TOKEN in whole(result)) == (refused, not refused)
    assert (TOKEN in log) is not refused


@pytest.mark.driver("bubblewrap")
async def test_arguments_that_are_sealed_show_none_and_are_whole_for_who_has_the_key(tmp_path: Path) -> None:
    """Neither text nor base64 of the secret is in the log; another key opens nothing (the control)."""
    (_, public), (other, _), private = keys(tmp_path, "mine"), keys(tmp_path, "other"), tmp_path / "mine.pem"
    code = f"print('{TOKEN}')"
    _, _, log = await called(tmp_path, "bubblewrap", "", code, audit_arguments_key=public)
    [decided] = [each for line in log.splitlines() if (each := json.loads(line))["kind"] == "call.decided"]
    assert decided["data"]["redacted"] == {"GitHub token": 1}
    assert decided["data"]["arguments"]["code"] == "print('[secret: GitHub token]')"
    assert [each for each in (TOKEN, *(b64encode(f"{pad}{TOKEN}".encode()).decode()[8:-8] for pad in ("", "a", "ab")))
            if each in log] == []  # fmt: skip
    record = chain.parse(next(line for line in log.encode().splitlines(keepends=True) if b'"call.decided"' in line))
    assert sealed.arguments_of(record, None) is None
    assert sealed.arguments_of(record, sealed.opener(other)) is None
    found = sealed.arguments_of(record, sealed.opener(private))
    assert found is not None
    assert (found["code"], digest(found)) == (code, decided["data"]["arguments_digest"])


@pytest.mark.driver("bubblewrap")
async def test_what_a_tool_reads_or_finds_is_replaced(tmp_path: Path) -> None:
    """Files of ordinary names with a secret in them, read and searched."""
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace").chmod(0o755)
    (tmp_path / "workspace" / "notes.txt").write_text(f"token {TOKEN}\n{KEY}\n")
    async with apps.opened(Settings(workspace=tmp_path / "workspace", state_dir=tmp_path / "state"), "cli") as app:
        results: list[Any] = [
            await submitted(app, "read_workspace_file", {"path": "notes.txt"}),
            await submitted(app, "search_workspace", {"pattern": "token"}),
        ]
    for result in results:
        assert TOKEN not in whole(result)
        assert "[secret: GitHub token]" in whole(result)
        assert result.structured["redacted"]["GitHub token"] == 1
        assert not result.failed


VALUE = "q7Zk2mX9vB4tR8wLp3Ns"
LENT = """
[[network.credential]]
name = "tracker"
host = "api.example.org"
paths = ["/v1/*"]
header = "Authorization"
source = "env:LENT"
"""
POLICY = """\
version = 1
default = "keeper"
[roles.keeper]
tools = ["fetch_url", "run_python"]
[roles.other]
tools = ["run_python"]
[[example]]
principal = "token:anybody"
call = { tool = "read_workspace_file", arguments = { nothing = 1 } }
expect = "deny"
"""
PRINT = "import base64; text = {}; print(text, base64.b64encode(text.encode()).decode())"


@asynccontextmanager
async def serving(directory: Path, value: str, *, load: bool = True) -> AsyncIterator[apps.App]:
    """A server in which a tool of the role keeper has this key, which was read already."""
    (directory / "profiles").mkdir(parents=True)
    fetch = profile("fetch_url", "bubblewrap", '{ host = "api.example.org" }') + LENT
    (directory / "profiles" / "fetch_url.toml").write_text(fetch)
    (directory / "policy.toml").write_text(POLICY)
    settings = Settings(
        profiles_dir=directory / "profiles", policy=directory / "policy.toml", state_dir=directory / "state"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENT", value)
        async with apps.opened(settings, "cli") as app:
            if load:
                await app.guards.credentials.value("env:LENT")
            yield app


def caller(role: str) -> Principal:
    """Who has this role."""
    return Principal(id="token:any", transport="http", roles=(role,))


async def printed(directory: Path, value: str, said: str, *, load: bool = True, role: str = "keeper") -> dict[str, Any]:
    """What shows of a program that prints this, twice written."""
    heard = Heard()
    async with serving(directory, value, load=load) as app:
        code = PRINT.format(repr(said))
        result = await app.broker.submit(caller(role), "run_python", {"code": code}, heard)
    lines = log_lines(directory / "state" / "audit")
    records = [each["data"] for each in map(json.loads, lines) if each["kind"] in {"call.decided", "call.finished"}]
    counted = ("redacted", "outputs", "exit_code", "ended", "arguments_digest")
    return {
        "stdout": result.structured["stdout"], "redacted": result.structured.get("redacted"), "live": heard.text,
        "records": [{key: record.get(key) for key in counted} for record in records],
        "content": [str(each) for each in result.content],
    }  # fmt: skip


@pytest.mark.driver("bubblewrap")
async def test_a_value_that_was_lent_leaves_no_program_either(tmp_path: Path) -> None:
    """One that no pattern is for; the controls are the call before it was lent, and a caller without its tool."""
    before = await printed(tmp_path / "before", VALUE, VALUE, load=False)
    assert VALUE in str(before)
    assert before["live"].endswith("=\n")
    after = await printed(tmp_path / "after", VALUE, VALUE)
    assert after["live"] == after["stdout"]["text"] == "[credential of the server] [credential of the server]M=\n"
    assert VALUE not in str(after)
    assert "cTdaazJtWDl2QjR0" not in str(after)
    assert after["redacted"] == {"credential of the server": 2}
    other = await printed(tmp_path / "other", VALUE, VALUE, role="other")
    assert (other["stdout"]["text"], other["redacted"]) == (before["stdout"]["text"], None)


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize("role", ["keeper", "other"])
async def test_a_part_of_a_key_shows_in_no_call(role: str, tmp_path: Path) -> None:
    """Of two keys of one length a program that prints nearly all of one is treated alike: by owner and by others."""
    guess = VALUE[:-3] + "x" + VALUE[-2:]  # what base64 has of the last character alone is not all of it
    first = await printed(tmp_path / "first", VALUE, guess, role=role)
    assert first == await printed(tmp_path / "second", VALUE[::-1].swapcase(), guess, role=role)
    assert guess in first["stdout"]["text"]


async def test_files_are_searched_for_the_keys_of_their_tool_too(tmp_path: Path) -> None:
    """Of a caller that had the tool and has it no more; the control is a file of a tool that never had the key."""
    async with serving(tmp_path, VALUE) as app:
        assert app.redaction(caller("keeper"), "run_python")[1] == derive_forms("of the server", VALUE)
        assert app.redaction(caller("other"), "fetch_url")[1] == derive_forms("of the server", VALUE)
        assert app.redaction(caller("other"), "run_python")[1] == {}
