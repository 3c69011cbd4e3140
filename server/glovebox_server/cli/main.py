"""The table of commands. A module is imported when its command is used, so that others stay quick."""

import sys

import click
from click.shell_completion import get_completion_class

from glovebox_server.cli import COMPLETE
from glovebox_server.cli.groups import LazyGroup

_LAZY = {
    "approvals": ("rules.approvals:approvals", "Answer calls that wait for approval, and see what was granted."),
    "artifact": ("artifact:artifact", "Files that programs made: list, save, promote them."),
    "audit": ("evidence.audit:audit", "Read the audit log, and verify it."),
    "backup": ("host.backup:backup", "Back up the state directory, while servers use it."),
    "bundle": ("evidence.receipt:bundle", "Bundle one call or run in a file, to check anywhere."),
    "call": ("call:call", "Make one call of a tool, in a sandbox."),
    "canary": ("rules.stop:canary", "Files whose content stops any call that sends it."),
    "capabilities": ("host.doctor:capabilities", "Show what can be used here, before any call."),
    "clean": ("host.environment:clean", "Remove expired artifacts and leftovers of dead servers."),
    "client-config": ("rules.token:client_config", "Print configuration to paste into clients."),
    "console": ("host.console:console", "A web page of this machine: what runs, what waits, what was."),
    "doctor": ("host.doctor:doctor", "Show what this host can enforce, and what fixes the rest."),
    "environment": ("host.environment:environment", "Python packages for programs: named sets, locked by hash."),
    "notify": ("host.notify:notify", "Notifications of what waits, alarms or is stopped."),
    "policy": ("rules.policy:policy", "Check, explain and compare policies."),
    "profiles": ("rules.profiles:profiles", "List, explain, check and lock tools' profiles."),
    "receipt": ("evidence.receipt:receipt", "Signed proof of what one call was, got and did."),
    "restore": ("host.backup:restore", "Put a backup in the place of the state directory."),
    "resume": ("rules.stop:resume", "Lift a stop, or all of them."),
    "serve": ("serve:serve", "Serve MCP clients until they leave or a signal ends it."),
    "setup": ("host.environment:setup", "Build the sandboxes' Python: once, and after an upgrade."),
    "stop": ("rules.stop:stop", "End running calls within a second, and refuse new ones."),
    "stops": ("rules.stop:stops", "Stops in effect: see `glovebox stop` and `glovebox resume`."),
    "token": ("rules.token:token", "Bearer tokens of callers over HTTP."),
    "usage": ("rules.policy:usage", "Show what calls have spent, where policy.toml has budgets."),
    "worker": ("worker:worker", "Prepare sandboxes for the servers of a state directory."),
}


@click.group(
    cls=LazyGroup, lazy=_LAZY, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="glovebox-mcp", prog_name="glovebox")
def main() -> None:
    """Narrow, typed, sandboxed tools for AI agents, over the Model Context Protocol."""


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script for a shell's tab key.

    It completes commands, options and names: `eval "$(glovebox completion bash)"`.
    """
    found = get_completion_class(shell)
    if found is not None:
        sys.stdout.write(found(main, {}, "glovebox", COMPLETE).source() + "\n")
