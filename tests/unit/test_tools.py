"""Every tool of the registry: a profile, a job the guest knows, and models that fit it."""

from pathlib import Path

import pytest
from tests.repo.files import ROOT

import _glovebox_guest.jobs
from glovebox_profiles.load.loader import SHIPPED
from glovebox_server.tools import TOOLS
from glovebox_server.tools.base import Arguments, Tool, ToolResult

JOBS = {path.stem for path in Path(_glovebox_guest.jobs.__path__[0]).glob("*.py")} - {"__init__"}
DELIVERED = {"artifacts", "images", "changes", "notes"}
each_tool = pytest.mark.parametrize("tool", TOOLS.values(), ids=lambda tool: tool.name)


def test_each_job_is_done_for_one_tool() -> None:
    """None is forgotten; they are in alphabetical order, as clients see them."""
    assert list(TOOLS) == sorted(TOOLS)
    assert {tool.kind for tool in TOOLS.values() if not tool.proposes} == JOBS
    assert [tool.name for tool in TOOLS.values() if tool.proposes] == ["propose_changes"]


@each_tool
def test_each_has_a_profile_a_job_and_its_page(tool: Tool) -> None:
    """What ships for it is where it is looked for, and the guest's module has what it is called by."""
    # What changes files on the host has neither: no profile is shipped, and nothing of it runs in a sandbox.
    assert f"`{tool.name}`" in (ROOT / "README.md").read_text()
    assert (SHIPPED / f"{tool.name}.toml").is_file() != tool.proposes
    if tool.proposes:
        return
    module = __import__(f"_glovebox_guest.jobs.{tool.kind}", fromlist=["run"])
    assert callable(module.run)
    assert hasattr(module, "ask") == (tool.request is not None)


@each_tool
def test_each_says_what_its_models_say(tool: Tool) -> None:
    """A tool that makes a request needs the network; one that delivers files has fields for them, and no other has."""
    assert issubclass(tool.arguments, Arguments)
    assert issubclass(tool.result, ToolResult)
    assert tool.open_world == ("network" in tool.needs) == (tool.request is not None)
    fields = set(tool.result.model_fields)
    assert fields >= DELIVERED if tool.delivers else not DELIVERED & fields


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/home/me/work/data/a.csv", "data/a.csv"),
        ("/home/me/work", "."),
        ("/home/me/workshop/a.csv", "/home/me/workshop/a.csv"),
        ("/home/me/work/../secret", "../secret"),  # which the guest refuses
        ("/workspace/a.csv", "/workspace/a.csv"),
        ("a.csv", "a.csv"),
    ],
)
def test_an_absolute_path_below_the_workspace_becomes_a_relative_one(path: str, asked: str) -> None:
    """For a caller that knows the host's paths; the control is another caller, whose path stays as it is."""
    tool = TOOLS["read_workspace_file"]
    assert tool.job({"path": path}, root=Path("/home/me/work")).payload["path"] == asked
    assert tool.job({"path": path}).payload["path"] == path
