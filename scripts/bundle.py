"""``make bundle``: writes dist/glovebox-mcp-VERSION.mcpb, what Claude Desktop and others install by opening it.

In it are the wheel, the locked versions of what it needs, and the manifest that says how uv runs it. Packed, and so
validated, by Anthropic's own ``mcpb``: the one on PATH, else by npx.
Format: https://github.com/anthropics/mcpb/blob/main/MANIFEST.md.
"""

import json
import shutil
import subprocess  # noqa: TID251 - two programs of ours and npm's
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from glovebox_server.tools import TOOLS

HERE = Path(__file__).resolve().parent.parent
LOCK = "requirements.lock"
PACKER = "@anthropic-ai/mcpb@2.1.2"


def manifest(project: dict[str, Any], wheel: str) -> dict[str, Any]:
    """The bundle's manifest, in the version that every client reads: 0.4 has a type for uv, which some refuse.

    Args:
        project: the table ``project`` of pyproject.toml.
        wheel: name of the wheel's file.
    """
    # The program's name is given: as a script, our module `mcp` would stand in for the package of that name.
    run = f"tool run --from ${{__dirname}}/{wheel} --constraints ${{__dirname}}/{LOCK} {project['name']}".split()
    return {
        "manifest_version": "0.3",
        "name": project["name"],
        "display_name": "Glovebox",
        "version": project["version"],
        "description": project["description"],
        "long_description": (
            "Needs [uv](https://docs.astral.sh/uv/) and bubblewrap. Once, in a terminal, in this extension's folder: "
            f"`uvx --from ./{wheel} --constraints {LOCK} {project['name']} setup` builds the Python that sandboxes "
            "run. Until then a call says which command does so."
        ),
        "author": {"name": project["authors"][0]["name"]},
        "license": project["license"],
        "keywords": project["keywords"],
        "server": {
            "type": "python",
            "entry_point": wheel,
            "mcp_config": {"command": "uv", "args": [*run, "serve", "--workspace", "${user_config.workspace}"]},
        },
        # Not their descriptions for models: those depend on the profiles.
        "tools": [{"name": tool.name, "description": tool.title} for tool in TOOLS.values() if not tool.proposes],
        "compatibility": {"platforms": ["linux"], "runtimes": {"python": project["requires-python"]}},
        "user_config": {
            "workspace": {
                "type": "directory",
                "title": "Workspace",
                "description": "Directory the tools may read. Whatever lies in it can reach the model.",
                "required": True,
            }
        },
    }


def main() -> None:
    """Build the wheel, write the manifest, pack both; into the directory that is named, else ./dist."""
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "dist"
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as name:
        stage = Path(name)
        subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", stage], cwd=HERE, check=True)
        (wheel,) = stage.glob("*.whl")
        for file in (LOCK, "LICENSE"):
            shutil.copy(HERE / file, stage)
        (stage / "manifest.json").write_text(json.dumps(manifest(project, wheel.name), indent=2) + "\n")
        into.mkdir(exist_ok=True)
        bundle = into / f"{project['name']}-{project['version']}.mcpb"
        packer = ["mcpb"] if shutil.which("mcpb") else ["npx", "--yes", PACKER]
        subprocess.run([*packer, "pack", stage, bundle], check=True)


if __name__ == "__main__":
    main()
