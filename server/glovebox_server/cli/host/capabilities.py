"""``glovebox capabilities``: the manifest as JSON, or as a page a person can read."""

import os

import anyio
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from glovebox_sandboxes.contract.base import mechanisms
from glovebox_sandboxes.drivers import registry
from glovebox_server import workspace
from glovebox_server.app import VERSION, load_profiles
from glovebox_server.calls import Principal
from glovebox_server.cli.options import (
    CliCommand,
    directories,
    emit,
    json_option,
    out,
)
from glovebox_server.cli.terminal import new_table, print_table
from glovebox_server.mcp.manifest import Manifest, build_manifest
from glovebox_server.settings import Settings
from glovebox_server.startup.policy import governed
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep import environments


@click.command(cls=CliCommand)
@json_option
@directories
def capabilities(settings: Settings) -> None:
    """Show what can be used here, before any call.

    Drivers, limits, network modes, tools, digests, and what is refused.
    """
    found = anyio.run(_find, settings)
    if not emit(found):
        _print(out, found)


async def _find(settings: Settings) -> Manifest:
    profiles = load_profiles(settings)
    roles = governed(settings, profiles, workspace.find(settings, "cli"), TOOLS)
    async with registry.opened(settings.data_dir, f"capabilities{os.getpid()}") as available:
        return await build_manifest(
            tools=TOOLS,
            rights=roles.rights_of(Principal(id=f"local:{os.getuid()}", transport="cli")),
            environments=environments.required(settings, profiles),
            drivers=available,
            version=VERSION,
        )


def _print(out: Console, found: Manifest) -> None:
    out.print(Text(f"Glovebox {found['glovebox']}, tools {found['tools_digest']}, profiles {found['profiles_digest']}"))
    if found["policy_digest"]:
        out.print(Text(f"role {found['role'] or 'none'}, policy {found['policy_digest']}"))
    table = new_table("driver", "level", "usable", "version", "limits by")
    for driver in found["drivers"]:
        usable = "yes, experimental" if driver["experimental"] else "yes"
        usable = usable if driver["usable"] else "no"
        table.add_row(driver["name"], driver["level"], usable, driver["version"], mechanisms(driver["limits"]))
    _section(out, table)
    refused = ["why it does not run here"] if any(tool["refused"] for tool in found["tools"]) else []
    table = new_table("tool", "driver", "network", "workspace", "files out, in", *refused)
    for tool in found["tools"]:
        files = f"{'yes' if tool['output'] else 'no'}, {'yes' if tool['inputs'] else 'no'}"
        driver = tool["driver"] or "none"
        cells = (tool["name"], driver, tool["network"], tool["workspace"], files, tool["refused"])
        table.add_row(*cells[: len(table.columns)])
    _section(out, table)
    if found["workspace"]["refused"]:
        out.print(Text(f"\n{found['workspace']['refused']}"))
    out.print(Text("\nunsupported or experimental in a profile", style="bold"))
    for feature in found["features"]:
        value = f'{feature["key"]} = "{feature["value"]}"'
        out.print(Text(f"{value}: {feature['status']}: {feature['reason']}. {feature['instead']}"))


def _section(out: Console, table: Table) -> None:
    out.print()
    print_table(out, table)
