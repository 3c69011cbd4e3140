"""Every driver of the registry keeps the contract, has a golden plan and a page, and is known wherever drivers are."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
from tests.fixtures.specs import SPEC
from tests.must_run import NAMES as MUST_RUN
from tests.repo.files import ROOT

from glovebox_profiles.features import FEATURES
from glovebox_profiles.model import Profile
from glovebox_sandboxes.contract.base import Level
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.drivers.registry import DRIVERS, NAMES, DriverEntry

each_driver = pytest.mark.parametrize("entry", DRIVERS, ids=lambda entry: entry.name)


def imagined(entry: DriverEntry) -> ModuleType:
    return import_module(f"tests.unit.test_{entry.name}_plan")


def test_each_folder_is_an_entry_and_the_order_is_that_of_strength() -> None:
    folders = {path.parent.name for path in Path(registry.__file__).parent.glob("*/__init__.py")}
    assert sorted(folders) == sorted(NAMES)
    levels = get_args(Level)
    assert [levels.index(entry.level) for entry in DRIVERS] == sorted(levels.index(entry.level) for entry in DRIVERS)


def test_profiles_take_exactly_these_names() -> None:
    """The model, the features of the manifest and the names no run may skip are made of the registry."""
    schema = Profile.model_json_schema()["properties"]["isolation"]["items"]
    assert schema["enum"] == list(NAMES)
    unsupported = {each.value for each in FEATURES if each.key == "isolation" and each.status == "unsupported"}
    assert not unsupported & set(NAMES)
    assert {each.value for each in FEATURES if each.key == "isolation"} - unsupported == {
        entry.name for entry in DRIVERS if entry.experimental
    }
    assert set(NAMES) <= MUST_RUN


@each_driver
async def test_each_can_be_probed_and_has_the_whole_contract(entry: DriverEntry, tmp_path: Path) -> None:
    """On any host, one without a runtime too: the probe says what is missing, and that is no error."""
    async with entry.connect(tmp_path, "contract") as driver:
        assert (driver.name, driver.capabilities.driver) == (entry.name, entry.name)
        assert driver.capabilities.level == entry.level
        assert driver.capabilities.usable or all(each.what and each.fix for each in driver.capabilities.missing)
        assert all(callable(getattr(driver, name)) for name in ("plan", "open", "source"))


async def test_where_no_driver_can_the_fix_stands_beside_what_it_puts_right(tmp_path: Path) -> None:
    """What cannot be put right comes after it, wherever the profile names it."""
    words = r"here: bubblewrap: [^;]+\. (Run|Install|Upgrade|See) .*Nor can microvm: this version has no such driver\.$"
    async with registry.opened(tmp_path, "contract") as drivers:
        for names in (("bubblewrap", "microvm"), ("microvm", "bubblewrap")):
            with pytest.raises(UnsupportedSpecError, match=words):
                await drivers.choose(names, SPEC)


@each_driver
def test_each_has_a_golden_plan_and_is_on_the_page(entry: DriverEntry) -> None:
    module = imagined(entry)
    assert json.loads(module.GOLDEN.read_text())
    assert module.GOLDEN.name == f"{entry.name}_plan.json"
    plan, again = module.plan(SPEC), module.plan(SPEC)
    assert (plan.driver, plan.level) == (entry.name, entry.level)
    assert plan.digest == again.digest
    assert plan.spec == SPEC
    page = (ROOT / "docs/operate/drivers.md").read_text()
    assert f"| `{entry.name}` | `{entry.level}` | {entry.purpose} |" in page
    assert f"\n## {entry.name}\n" in page
