"""``/ready``: what calls lack, to callers; that they lack something, to strangers, at a bounded cost."""

import json
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner
from tests.interaction.served import TIMEOUT_SECONDS, served, until
from tests.interaction.test_gate import _request, _status

from glovebox_sandboxes.runtime import runtime
from glovebox_server.cli.main import main
from glovebox_server.upkeep import readiness


async def test_ready_says_what_calls_lack_and_looks_once_however_often_strangers_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 or 503 to a stranger, the parts to a caller; /health is 200 all the time, and no 503 is a refused request."""
    built, looks, now = True, 0, 0.0

    def find(_data: Path) -> object:
        nonlocal looks
        looks += 1
        return built or None

    async with served(tmp_path, "http") as server:
        monkeypatch.setattr(runtime, "find", find)
        probe = server.gate.look.__self__  # type: ignore[union-attr]  # a method
        monkeypatch.setattr(probe, "_clock", lambda: now)
        monkeypatch.setattr(probe, "_until", now)
        bare = _request(server, "GET", "/ready", {"Authorization": ""})

        async def asked() -> tuple[int, dict[str, bool]]:
            nonlocal now
            now += readiness.KEPT_SECONDS
            status = (await _status(server, bare))[0]
            assert (await _status(server, _request(server, "GET", "/health", {"Authorization": ""})))[0] == 200
            told = await _status(server, _request(server, "GET", "/ready"))
            assert told[0] == status
            return status, {name: value for name, value in json.loads(told[1]).items() if name != "status"}

        whole = {"runtime": True, "log": True, "policy": True, "profiles": True}
        assert await asked() == (200, whole)
        assert {(await _status(server, bare))[0] for _ in range(20)} == {200}
        assert looks == 1
        built = False
        assert await asked() == (503, whole | {"runtime": False})
        built = True
        (tmp_path / "audit").rename(tmp_path / "away")
        assert await asked() == (503, whole | {"log": False})
        (tmp_path / "away").rename(tmp_path / "audit")
        server.app.audit._unusable = "the disk did not answer"
        assert await asked() == (503, whole | {"log": False})
        server.app.audit._unusable = None
        assert await asked() == (200, whole)
        assert looks == 5
        assert list((tmp_path / "audit").glob("tmp*")) == []
        # A disk that does not answer: not ready, and no second thread waits for it.
        monkeypatch.setattr(readiness, "WAIT_SECONDS", 0.05)
        stuck, threads = threading.Event(), []
        monkeypatch.setattr(runtime, "find", lambda _data: threads.append(stuck.wait(TIMEOUT_SECONDS)))
        for _ in range(3):
            assert (await asked())[0] == 503
        stuck.set()
        await until(lambda: len(threads) == 1)
        assert not server.app.refusals.totals


async def test_doctor_shows_what_a_server_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a token what is wrong, without one that something is; no answer at all is an error that quotes no token."""
    async with served(tmp_path / "state", "http") as server:
        token = tmp_path / "token"
        token.write_text(f"{server.tokens['alice']}\n")
        other = tmp_path / "other"
        other.write_text("secret" * 8)

        async def asked(*words: object) -> tuple[int, str]:
            command = ["doctor", "--url", *map(str, words)]
            done = await anyio.to_thread.run_sync(CliRunner().invoke, main, command)
            assert "secret" not in done.output
            return done.exit_code, done.output

        monkeypatch.setattr(readiness, "is_built", lambda _: True)
        assert await asked(server.url) == (0, "ready: yes\nhealth: yes\n")
        code, told = await asked(server.url, "--token-file", token, "--json")
        body = json.loads(told)
        assert (code, body["ready"]) == (
            0, {"status": "ok", "runtime": True, "log": True, "policy": True, "profiles": True},
        )  # fmt: skip
        assert (body["health"]["unusable_profiles"], body["health"]["refused_requests"]) == (False, {})
        server.app.audit._unusable = "the disk did not answer"
        assert (await asked(server.url))[0] == 4
        code, told = await asked(server.url, "--token-file", token)
        assert (code, told.splitlines()[:3]) == (4, ["ready: no", "  runtime   true", "  log       false"])
        server.app.audit._unusable = None
        code, told = await asked(server.url, "--token-file", other)
        assert (code, "or it does not know the token. Name its address, and a token of its own." in told) == (4, True)
    code, told = await asked(server.url)
    assert (code, f"Asking {server.url}/ready: Connection refused. Name the address" in told) == (4, True)
    assert (await asked("http://127.0.0.1:x"))[0] == 4
