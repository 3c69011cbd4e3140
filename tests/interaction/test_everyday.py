"""Everyday programs (``everyday.toml``): plots, Excel, joins, models, text, dates, images, processes."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from tests.fixtures.brokered import DRIVERS, submitted, write_shipped

from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.calls import Image, Text
from glovebox_server.settings import Settings

SCRIPTS = tomllib.loads((Path(__file__).parent / "everyday.toml").read_text())["script"]
DAYS = [
    (f"2026-01-0{day}", store, units) for day, store, units in zip(range(1, 10), "ABC" * 3, range(12, 21), strict=True)
]


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    """One event loop for the whole module."""
    with start_blocking_portal() as running:
        yield running


@pytest.fixture(scope="module", params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    """Each driver."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def app(driver: str, portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """A server with the shipped profiles, for one driver, and a workspace of two tables."""
    home = tmp_path_factory.mktemp("everyday")
    home.chmod(0o755)
    (home / "workspace").mkdir()
    (home / "workspace/sales.csv").write_text("day,store,units\n" + "".join(f"{d},{s},{u}\n" for d, s, u in DAYS))
    (home / "workspace/stores.csv").write_text("store,city\nA,Rome\nB,Oslo\nC,Rome\n")
    (home / "profiles").mkdir()
    write_shipped(home / "profiles", driver)
    settings = Settings(workspace=home / "workspace", state_dir=home / "state", profiles_dir=home / "profiles")
    with portal.wrap_async_context_manager(apps.opened(settings, "cli")) as opened:
        yield opened


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script["does"])
def test_an_everyday_program_works(script: dict[str, Any], driver: str, app: App, portal: BlockingPortal) -> None:
    """It ends well, complains of nothing, shows its result and hands out its files."""
    result = portal.call(submitted, app, "run_python", {"code": script["code"]})
    text = "\n".join(block.text for block in result.content if isinstance(block, Text))
    if hint := script.get(f"reads_with_{driver}"):
        assert result.failed
        assert hint in text
        return
    assert not result.failed, text
    assert result.structured["stderr"]["text"] == ""
    assert script.get("shows", "") in text
    assert sum(isinstance(block, Image) for block in result.content) == script.get("pictures", 0)
    assert sorted(artifact["name"] for artifact in result.structured["artifacts"]) == script.get("files", [])


def test_there_are_thirty() -> None:
    """Each does another thing."""
    assert len({script["does"] for script in SCRIPTS}) >= 30
