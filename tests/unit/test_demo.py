"""The demo's first look: what this host lacks is said once and before anything is built."""

import importlib.util
import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.repo.files import ROOT

LACKS = {"what": "bwrap is not installed", "fix": "Run `apt-get install bubblewrap`.", "fatal": True}
UNBUILT = {"what": "the runtime is not built", "fix": "Run `glovebox setup`.", "fatal": True}
HARMLESS = {"what": "no control groups", "fix": "Run the server as root.", "fatal": False}


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def says(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def answer(*missing: dict[str, Any], docker: bool = False, profiles: str | None = None) -> None:
        drivers = [
            {"driver": "bubblewrap", "missing": missing, "usable": not missing},
            {"driver": "docker", "missing": [], "usable": docker},
        ]
        body = json.dumps({"drivers": drivers, "profiles": {"error": profiles}}).encode()

        async def run(*_: object, **__: object) -> Any:
            return SimpleNamespace(stdout=body, stderr=b"", returncode=4)

        monkeypatch.setattr(demo.anyio, "run_process", run)

    return answer


async def test_what_is_missing_is_said_once_with_its_fix(demo: ModuleType, says: Callable[..., None]) -> None:
    """Before setup downloads anything; a broken profile too."""
    says(LACKS, UNBUILT)
    with pytest.raises(demo.Surprise) as raised:
        await demo.check()
    assert str(raised.value).count("apt-get install bubblewrap") == 1
    assert "glovebox setup" not in str(raised.value)
    says(profiles="a.toml:1: x: unknown key")
    with pytest.raises(demo.Surprise, match=r"a\.toml:1"):
        await demo.check()


async def test_what_the_demo_adds_itself_is_not_missing(demo: ModuleType, says: Callable[..., None]) -> None:
    """The control: setup builds the runtime, limits per process are enough, and docker would do as well."""
    says(UNBUILT, HARMLESS)
    await demo.check()
    says(LACKS, docker=True)
    await demo.check()


def test_the_demo_says_who_it_is(demo: ModuleType) -> None:
    assert demo.NAME.name == "glovebox demo"
