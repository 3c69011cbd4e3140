"""What only a secret looks like leaves no call: by no stream, value or page, live or at the end, or record."""

import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.audit_logs import log_lines
from tests.fixtures.brokered import DRIVERS, Heard, profile, submitted
from tests.unit.test_secret_corpus import POSITIVES
from tests.unit.test_suggest import keys

from glovebox_server import app as apps
from glovebox_server.audit import chain
from glovebox_server.audit.chain import digest
from glovebox_server.calls import CallResult
from glovebox_server.proof import sealed
from glovebox_server.settings import Settings

TOKEN = POSITIVES[0].partition("=")[2]
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
    directory: Path, driver: str, keys: str, code: str = CODE, *, workspace_key: str = "read", **more: Any
) -> tuple[CallResult, str, str]:
    """What a program under a profile with these keys gives back, shows live, and leaves on record."""
    for name in ("profiles", "workspace"):
        (directory / name).mkdir()
    (directory / "workspace").chmod(0o755)
    (directory / "workspace" / "notes.txt").write_text(f"token {TOKEN}\n{KEY}\n")
    text = profile("run_python", driver).replace(
        "[network]", f"[files]\nworkspace = '{workspace_key}'\noutput = true\n[network]"
    )
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


NAMED = "open('/output/' + {} + '.txt', 'w').write('a file')"


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", [TOKEN, TOKEN + "\n", "a" * 180 + "/" + TOKEN])
async def test_a_file_with_a_secret_in_its_name_is_refused(driver: str, name: str, tmp_path: Path) -> None:
    """Told without it, in result and record, also where the name can be none; the control is a plain name."""
    made = f"import os\nos.makedirs('/output/' + os.path.dirname({name!r}), exist_ok=True)\n"
    result, _, log = await called(tmp_path, driver, "", made + NAMED.format(repr(name)))
    assert TOKEN not in whole(result) + log
    assert result.structured["artifacts"] == []
    assert result.structured["redacted"] == {"GitHub token": 1}
    assert "not collected, What looks like a secret is in its name." in whole(result)
    (tmp_path / "control").mkdir()
    control, _, _ = await called(tmp_path / "control", driver, "", NAMED.format("'plain'"))
    assert [each["name"] for each in control.structured["artifacts"]] == ["plain.txt"]


@pytest.mark.driver("bubblewrap")
async def test_names_of_changed_files_hold_none_either(tmp_path: Path) -> None:
    """Of a workspace that a program has a copy of; the control is the name beside it."""
    code = f"for name in ({TOKEN!r}, 'plain'):\n    open(name, 'w').write('x')\n"
    result, _, _ = await called(tmp_path, "bubblewrap", "", code, workspace_key="overlay")
    assert TOKEN not in whole(result)
    assert result.structured["changes"]["created"] == ("[secret: GitHub token]", "plain")


@pytest.mark.driver("bubblewrap")
@pytest.mark.parametrize(("redact", "refused"), [("refuse", True), ("none", False)])
async def test_a_secret_in_a_name_is_one_of_the_output(redact: str, refused: bool, tmp_path: Path) -> None:
    """So nothing comes back where the profile says so; where it says that all may come, it does (the control)."""
    result, _, log = await called(tmp_path, "bubblewrap", f"[result]\nredact = '{redact}'\n", NAMED.format(repr(TOKEN)))
    assert (result.failed, TOKEN in whole(result)) == (refused, not refused)
    assert (TOKEN in log) is not refused


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
async def test_arguments_that_are_sealed_show_none_and_are_whole_for_who_has_the_key(tmp_path: Path) -> None:
    """Neither text nor base64 of the secret is in the log; another key opens nothing (the control)."""
    (_, public), (other, _), private = keys(tmp_path, "mine"), keys(tmp_path, "other"), tmp_path / "mine.pem"
    code = f"print('{TOKEN}')"
    _, _, log = await called(tmp_path, "bubblewrap", "", code, audit_arguments_key=public)
    [decided] = [each for line in log.splitlines() if (each := json.loads(line))["kind"] == "call.decided"]
    assert decided["data"]["redacted"] == {"GitHub token": 1}
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


@pytest.mark.driver("bubblewrap")
async def test_a_value_that_was_lent_leaves_no_program_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no pattern is for, which lies in the workspace as well; the control is the call before it was lent."""
    value = "q7Zk2mX9vB4tR8wLp3Ns"
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace").chmod(0o755)
    (tmp_path / "workspace" / "notes.txt").write_text(value)
    monkeypatch.setenv("LENT", value)
    code = "import base64; text = open('notes.txt').read(); print(text, base64.b64encode(text.encode()).decode())"
    async with apps.opened(Settings(workspace=tmp_path / "workspace", state_dir=tmp_path / "state"), "cli") as app:
        assert value in whole(await submitted(app, "run_python", {"code": code}))
        await app.broker.credentials.value("env:LENT")
        heard = Heard()
        result = await submitted(app, "run_python", {"code": code}, heard)
    assert value not in whole(result) + heard.text
    assert "cTdaazJtWDl2QjR0" not in whole(result) + heard.text
    assert result.structured["redacted"] == {"credential of the server": 2}
