"""Packages of one environment are seen in no sandbox of another, forked or not. Real sandboxes, wheels of our own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tests.fixtures import wheels
from tests.fixtures.environments import with_default
from tests.fixtures.specs import SPEC
from tests.fixtures.zygotes import answer, outcome_of

from glovebox_sandboxes.contract.base import Driver, Plan
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.runtime import environments, packages, runtime
from glovebox_sandboxes.session import connection

pytestmark = pytest.mark.driver("bubblewrap")
LOADED = "import json, sys; print(json.dumps(sorted({'one', 'two'} & {*sys.modules})))"
SHARED = "import json, shared; print(json.dumps(shared.WHOSE))"


@pytest.fixture(scope="module")
def data(runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with two environments, each with a module of its own and one of the same name."""
    place = tmp_path_factory.mktemp("environments")
    data, own = place / "data", place / "own"
    own.mkdir()
    with_default(data, runtime_dir)
    with pytest.MonkeyPatch.context() as patch:
        wheels.alone(patch, place / "wheels")
        patch.setattr(runtime, "_compile", lambda *_: anyio.lowlevel.checkpoint())
        for name in ("one", "two"):
            files = {f"{name}.py": "", "shared.py": f"WHOSE = {name!r}\n"}
            wheels.make(place / "wheels", f"package_{name}", "1.0", files)
            (own / f"{name}.toml").write_text(f'packages = ["package-{name}"]\nmodules = ["{name}"]\n')
            environment = environments.load(name, own)
            anyio.run(packages.write_lock, environment, runtime.base_python(), lambda _: None)
            anyio.run(runtime.build, data, lambda _: None, environment)
    return data


@asynccontextmanager
async def a_driver(data: Path) -> AsyncIterator[Driver]:
    """The driver on it."""
    async with registry.opened(data, "environments") as available:
        yield await available.get("bubblewrap")


def plan_of(driver: Driver, environment: str, preload: tuple[str, ...] = ()) -> Plan:
    """The plan of a sandbox with these packages."""
    return driver.plan(replace(SPEC, mounts=(), environment=environment, preload=preload))


async def forked(driver: Driver, plan: Plan, code: str) -> Any:
    """What a program printed in a fork of this plan's zygote."""
    async with driver.source(plan) as source, source.open() as sandbox:
        return await answer(await connection.attest(sandbox, plan), code)


async def test_what_one_environment_imported_is_in_no_fork_of_another(data: Path) -> None:
    """I8: plan, and so ready queue and zygote, are another's; the control is that a fork has what its own imported."""
    async with a_driver(data) as driver:
        one, two = plan_of(driver, "one", ("one",)), plan_of(driver, "two", ("two",))
        assert one.digest != two.digest
        assert one.digest == plan_of(driver, "one", ("one",)).digest
        async with driver.source(one) as first, driver.source(two) as second:
            for source, plan, whose in ((first, one, "one"), (second, two, "two"), (first, one, "one")):
                async with source.open() as sandbox:
                    proved = await connection.attest(sandbox, plan)
                    assert proved.attestation.differences == ()
                    assert await answer(proved, LOADED) == [whose]
        assert await forked(driver, one, SHARED) == "one"
        assert await forked(driver, two, SHARED) == "two"


async def test_what_is_in_another_environment_is_named_and_not_there(data: Path) -> None:
    """The caller is told which one has it; the control is a name that none has."""
    async with a_driver(data) as driver:
        plan = plan_of(driver, "one")
        for name, told in (("two", "environment two"), ("sklearn", "environment science"), ("nobody", "")):
            async with driver.open(plan) as sandbox:
                found = await outcome_of(await connection.attest(sandbox, plan), f"import {name}")
            assert isinstance(found.value, dict)
            message = found.value["error"]["message"]
            assert message.startswith(f"No module named '{name}'")
            assert told in message
            assert ("environment " in message) == bool(told)


async def test_an_environment_is_read_only(data: Path) -> None:
    """As all of the runtime: no program leaves something there for the next; the control is its own /tmp."""
    look = "import json, os; print(json.dumps([bool(os.statvfs(p).f_flag & os.ST_RDONLY) for p in PLACES]))"
    async with a_driver(data) as driver:
        plan = plan_of(driver, "one")
        async with driver.open(plan) as sandbox:
            proved = await connection.attest(sandbox, plan)
            assert await answer(proved, f"PLACES = ['/opt/packages', '/tmp']\n{look}") == [True, False]


async def test_one_that_is_not_built_is_refused(data: Path) -> None:
    """By its name, with the command; nothing else takes its place."""
    async with a_driver(data) as driver:
        with pytest.raises(UnsupportedSpecError, match=r"three is not built here\. Run `glovebox setup --env"):
            plan_of(driver, "three")
