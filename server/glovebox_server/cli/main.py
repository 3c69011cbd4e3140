"""The command line: one thin function per command, words and options. What a command does lives in ``actions``.

Heavy modules are imported by the command that needs them, so that ``glovebox --help`` is quick.
"""

import sys
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO, Literal

import click
from click.core import ParameterSource

from glovebox_server.cli import COMPLETE
from glovebox_server.cli.artifacts import artifact
from glovebox_server.cli.audit import audit
from glovebox_server.cli.bundle import bundle
from glovebox_server.cli.environments import environment
from glovebox_server.cli.governance.approvals import approvals
from glovebox_server.cli.governance.canaries import canary
from glovebox_server.cli.governance.policy import policy
from glovebox_server.cli.governance.promotions import promote, promotions, rollback
from glovebox_server.cli.governance.stops import resume, stop, stops
from glovebox_server.cli.governance.tokens import Lifetime
from glovebox_server.cli.governance.tokens import token as tokens
from glovebox_server.cli.governance.usage import usage
from glovebox_server.cli.options import (
    File,
    Form,
    Group,
    complete_environment,
    complete_tool,
    directories,
    err,
    importing,
    json_option,
    lock_options,
    out,
    state_directory,
    workflow_option,
)
from glovebox_server.cli.profiles import profiles
from glovebox_server.cli.receipts import receipt
from glovebox_server.settings import Settings

#: Bytes of a call's arguments on standard input, as many as of a line from an MCP client; code of a call is far below.
_MAX_ARGUMENTS = 1 << 20

_LEVELS = ("debug", "info", "warning", "error")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("glovebox-mcp"), prog_name="glovebox")
def main() -> None:
    """Narrow, typed, sandboxed tools for AI agents, over the Model Context Protocol."""


for _group in (profiles, policy, environment, audit, bundle, receipt, artifact, stops, canary, approvals, tokens):
    main.add_command(_group)
for _command in (stop, resume, usage):
    main.add_command(_command)
for _command in (promote, promotions, rollback):
    artifact.add_command(_command)


@main.command()
@click.option(
    "--transport",
    type=click.Choice(["stdio", "http"]),
    default="stdio",
    show_default=True,
    help="How clients reach it.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on (http).")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8321, show_default=True, help="Port (http); 0 for any free one."
)
@click.option("--allowed-host", multiple=True, help="Host header to accept, for addresses that are not this machine's.")
@click.option(
    "--log-level", type=click.Choice(_LEVELS), default="info", show_default=True, help="Lowest that is logged."
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of its log."
)
@click.option("--trusted-proxy", multiple=True, help="Address of a proxy whose X-Forwarded-For names clients.")
@click.option("--oauth-issuer", metavar="URL", help="Let in whoever has an access token of this issuer, too (http).")
@click.option("--oauth-audience", multiple=True, help="What such tokens are for, if not this server's addresses.")
@click.option("--oauth-any-type", is_flag=True, help="Accept tokens whose `typ` is not at+jwt.")
@workflow_option
@state_directory
@lock_options
def serve(
    settings: Settings,
    *,
    transport: str,
    host: str,
    port: int,
    allowed_host: tuple[str, ...],
    log_level: str,
    log_format: Literal["text", "json"],
    trusted_proxy: tuple[str, ...],
    oauth_issuer: str | None,
    oauth_audience: tuple[str, ...],
    oauth_any_type: bool,
    workflow: str | None,
) -> None:
    """Serve MCP clients until they leave or a signal ends it."""
    named = ("host", "port", "allowed_host", "trusted_proxy", "oauth_issuer", "oauth_audience", "oauth_any_type")
    _require_http(transport, *named)
    if oauth_issuer is None and (oauth_audience or oauth_any_type):
        raise click.UsageError("--oauth-audience and --oauth-any-type go with --oauth-issuer.")
    with importing():
        from glovebox_server.cli.actions import commands  # noqa: PLC0415 - see the module's header

    oauth = None
    if oauth_issuer is not None:
        oauth = {"issuer": oauth_issuer, "audiences": oauth_audience, "any_type": oauth_any_type}
    sys.exit(
        commands.serve(
            settings,
            transport=transport,
            host=host,
            port=port,
            allowed_hosts=allowed_host,
            trusted_proxies=trusted_proxy,
            log=(log_level, log_format),
            oauth=oauth,
            workflow=workflow,
        )
    )


@main.command()
@click.argument("tool", shell_complete=complete_tool)
@click.option(
    "--args",
    "arguments",
    default="{}",
    help="Arguments as a JSON object, beside a program too; - reads standard input.",
)
@click.option("--code", help="The program, for run_python; - reads standard input.")
@click.option(
    "--file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True),
    help="The program, in a file; - reads standard input.",
)
@click.option(
    "--run",
    metavar="ID",
    type=Form("r_[0-9a-hjkmnp-tv-z]{26}", "r_ and 26 characters, as `audit show` has it"),
    help="Go on in this run, as a refusal names it; else the call is one of its own.",
)
@workflow_option
@json_option
@state_directory
@lock_options
def call(
    settings: Settings,
    *,
    tool: str,
    arguments: str,
    code: str | None,
    file: Path | None,
    run: str | None,
    workflow: str | None,
    as_json: bool,
) -> None:
    """Make one call of a tool, in a sandbox.

    Exit 0 fine, 1 program failed, 2 bad arguments, 3 refused, 4 unavailable.
    """
    with importing():
        from glovebox_server.cli.actions import commands  # noqa: PLC0415 - see the module's header

    if code is not None and file is not None:
        raise click.UsageError("--code and --file both name the program: leave one out.")
    program = "--code"
    if file is not None and str(file) == "-":
        program, code, file = "--file", "-", None
    if arguments == code == "-":
        raise click.UsageError("--args and the program cannot both read standard input.")
    text = _read("--args", sys.stdin.buffer) if arguments == "-" else arguments
    if code == "-":
        code = _read(program, sys.stdin.buffer)
    elif file is not None:
        try:
            with file.open("rb") as opened:
                code = _read("--file", opened)
        except OSError as problem:
            raise click.UsageError(f"--file: the file cannot be read: {problem.strerror}.") from None
    elif code is not None:
        _require_text("--code", code)
    sys.exit(
        commands.call(
            settings, out, err, tool=tool, arguments=text, code=code, run=run, workflow=workflow, as_json=as_json
        )
    )


@main.command()
@click.option("--docker", is_flag=True, help="Build the docker driver's image too.")
@click.option("--base", help="Image to build it from: CPython 3.11 or newer, glibc (python:3.12-slim).")
@click.option(
    "--environment",
    "names",
    multiple=True,
    shell_complete=complete_environment,
    help="Build this one too (may be repeated); see `environment`.",
)
@json_option
@directories
def setup(settings: Settings, docker: bool, base: str | None, names: tuple[str, ...], as_json: bool) -> None:
    """Build the sandboxes' Python: once, and after an upgrade."""
    from glovebox_server.cli.actions import environments  # noqa: PLC0415 - see the module's header

    sys.exit(environments.setup(settings, out, err, names=names, docker=docker, base=base, as_json=as_json))


@main.command()
@click.option("--prove", is_flag=True, help="Attack the sandboxes of this host and say what held: 0 all, 1 not all.")
@click.option("--driver", "names", multiple=True, help="Prove this driver (may be repeated); else every usable one.")
@json_option
@directories
def doctor(settings: Settings, prove: bool, names: tuple[str, ...], as_json: bool) -> None:
    """Say what this host can enforce, and what fixes the rest."""
    if prove:
        from glovebox_server.prove import scorecard  # noqa: PLC0415 - see the module's header

        for name in scorecard.unknown(names):
            raise click.UsageError(f"There is no driver {name!r}; there are {scorecard.KNOWN}.")
    elif names:
        raise click.UsageError("--driver says what to prove; add --prove.")
    from glovebox_server.cli.actions import commands  # noqa: PLC0415 - see the module's header

    if prove:
        sys.exit(commands.prove(settings, out, err, names=names, as_json=as_json))

    sys.exit(commands.doctor(settings, out, as_json=as_json))


@main.command()
@json_option
@directories
def capabilities(settings: Settings, as_json: bool) -> None:
    """What can be had here before any call.

    Drivers, limits, network modes, tools, digests, and what is refused.
    """
    from glovebox_server.cli.actions import commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.capabilities(settings, out, as_json=as_json))


@main.command()
@click.option("--dry-run", is_flag=True, help="Show it, and remove nothing.")
@json_option
@state_directory
def clean(settings: Settings, dry_run: bool, as_json: bool) -> None:
    """Remove what is of no use any more.

    Expired artifacts, leftovers of killed servers, what retention gives up.
    """
    from glovebox_server.cli.actions import commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.clean(settings, out, dry_run=dry_run, as_json=as_json))


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script for a shell's tab key.

    It completes commands, options and names: `eval "$(glovebox completion bash)"`.
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415 - only here

    found = get_completion_class(shell)
    if found is not None:
        out.out(found(main, {}, "glovebox", COMPLETE).source(), highlight=False)


@main.command("client-config")
@click.option(
    "--transport",
    type=click.Choice(["stdio", "http"]),
    default="stdio",
    show_default=True,
    help="How clients reach it.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Name clients reach the server by (http).")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8321, show_default=True, help="Its port (http); 443 means https."
)
@click.option("--token", metavar="NAME", help="Make this token and show it, or show one whose file holds it (http).")
@click.option("--role", help="What the token that is made may do, as of `token create`.")
@click.option("--expires", type=Lifetime(), help="When it ends: 12h, 30d.")
@click.option("--token-file", metavar="FILE", type=File(), help="Show the token that was saved in this file (http).")
@json_option
@state_directory
def client_config(
    settings: Settings,
    *,
    transport: str,
    host: str,
    port: int,
    token: str | None,
    role: str | None,
    expires: timedelta | None,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Configuration to paste into clients.

    Claude Code, Claude Desktop, VS Code and Cursor.
    """
    _require_http(transport, "host", "port", "token", "role", "expires", "token_file")
    if token is None and (role or expires):
        raise click.UsageError("--role and --expires go with --token NAME, which makes a token.")
    if token is not None and token_file is not None:
        raise click.UsageError("--token and --token-file both name the token: leave one out.")
    if host.strip("[]") in ("0.0.0.0", "::", ""):  # noqa: S104 - what must not be shown to clients
        told = f"{host} is where a server listens, not a name that leads to it. Name the host that clients will use:"
        raise click.BadParameter(f"{told} the one given to `glovebox serve --allowed-host`.", param_hint="--host")
    from glovebox_server.cli.actions import client_config as commands  # noqa: PLC0415 - see the module's header

    asked = {"name": token, "role": role, "lifetime": expires, "file": token_file}
    code = commands.show(settings, out, err, transport=transport, host=host, port=port, asked=asked, as_json=as_json)
    sys.exit(code)


def _require_http(transport: str, *names: str) -> None:
    """Refuse options that would be ignored: whoever gives them believes that the server listens."""
    given = click.get_current_context()
    for name in names:
        if transport != "http" and given.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is for --transport http; over {transport} the server listens nowhere.")


def _require_text(option: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"{option}: it is not UTF-8.") from None


def _read(option: str, source: BinaryIO) -> str:
    """What an option is to be read from."""
    place = "standard input" if source is sys.stdin.buffer else "the file"
    content = source.read(_MAX_ARGUMENTS + 1)
    if len(content) > _MAX_ARGUMENTS:
        raise click.UsageError(f"{option}: {place} has more than {_MAX_ARGUMENTS} bytes.")
    try:
        return content.decode("utf-8-sig")  # editors write the mark, and Python itself takes no offence
    except UnicodeDecodeError as problem:
        raise click.UsageError(f"{option}: {place} is not UTF-8 at byte {problem.start}.") from None
