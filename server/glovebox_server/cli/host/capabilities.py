"""``glovebox capabilities``: the manifest as JSON, or as a page a person can read."""

import os

import anyio
from rich.console import Console

from glovebox_sandboxes.contract.base import mechanisms
from glovebox_sandboxes.drivers import registry
from glovebox_server import workspace
from glovebox_server.app import VERSION, load_profiles
from glovebox_server.calls import Principal
from glovebox_server.cli.options import command, emit, out
from glovebox_server.cli.terminal import print_table, table_of
from glovebox_server.mcp.catalogue import Manifest, build_manifest
from glovebox_server.settings import Settings
from glovebox_server.startup import governed
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep import environments


@command("capabilities", opens="settings")
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
    out.print(f"Glovebox {found['glovebox']}, tools {found['tools_digest']}, profiles {found['profiles_digest']}")
    if found["policy_digest"]:
        out.print(f"role {found['role'] or 'none'}, policy {found['policy_digest']}")
    drivers = [
        {
            "driver": each["name"],
            "level": each["level"],
            "usable": "no" if not each["usable"] else "yes, experimental" if each["experimental"] else "yes",
            "version": each["version"],
            "limits by": mechanisms(each["limits"]),
        }
        for each in found["drivers"]
    ]
    is_refused = any(each["refused"] for each in found["tools"])
    tools = [
        {
            "tool": each["name"],
            "driver": each["driver"] or "none",
            "network": each["network"],
            "workspace": each["workspace"],
            "files out, in": f"{'yes' if each['output'] else 'no'}, {'yes' if each['inputs'] else 'no'}",
            **({"why it does not run here": each["refused"]} if is_refused else {}),
        }
        for each in found["tools"]
    ]
    for rows in (drivers, tools):
        if table := table_of(rows):
            out.print()
            print_table(out, table)
    if found["workspace"]["refused"]:
        out.print(f"\n{found['workspace']['refused']}")
    out.print("\nunsupported or experimental in a profile", style="bold")
    for feature in found["features"]:
        value = f'{feature["key"]} = "{feature["value"]}"'
        out.print(f"{value}: {feature['status']}: {feature['reason']}. {feature['instead']}")
