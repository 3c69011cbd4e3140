"""The command line: one thin function per command. What a command does lives elsewhere; here are words and exit codes.

Heavy modules are imported by the command that needs them, so that ``glovebox --help`` is quick.
"""

import functools
import gc
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from pydantic import ValidationError

from glovebox_server.cli.terminal import Terminal
from glovebox_server.errors import OutputFailed, Unforeseen
from glovebox_server.printable import printable
from glovebox_server.settings import NoSuchPlace, Settings, unknown_variables

_Command = TypeVar("_Command", bound=Callable[..., Any])

#: Bytes of a call's arguments on standard input, as many as of a line from an MCP client; code of a call is far below.
_MAX_ARGUMENTS = 1 << 20

#: Where a command notes its state directory, for what becomes of it.
_STATE_DIR = "glovebox.state_dir"

#: Results and data go to standard output, words for the person to standard error.
_out = Terminal(soft_wrap=True)
_err = Terminal(stderr=True, soft_wrap=True)


@contextmanager
def _importing() -> Iterator[None]:
    """Import many modules without looking for garbage meanwhile: there is none, and it takes a third of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _directories(command: _Command) -> _Command:
    """Options every command with a place to look has; each overrides its environment variable."""
    for name, text in (
        ("workspace", "Directory the tools may read (GLOVEBOX_WORKSPACE; but for http the current one)."),
        ("profiles-dir", "Your own profiles (GLOVEBOX_PROFILES_DIR)."),
        ("data-dir", "The sandboxes' runtime (GLOVEBOX_DATA_DIR)."),
        ("state-dir", "Audit log, artifacts, token (GLOVEBOX_STATE_DIR)."),
    ):
        kind = click.Path(file_okay=False)
        command = click.option(f"--{name}", type=kind, default=None, help=text)(command)

    @functools.wraps(command)
    def with_settings(
        *args: Any,
        workspace: str | None,
        profiles_dir: str | None,
        data_dir: str | None,
        state_dir: str | None,
        **kwargs: Any,
    ) -> Any:
        given: dict[str, Any] = {
            "workspace": workspace,
            "profiles_dir": profiles_dir,
            "data_dir": data_dir,
            "state_dir": state_dir,
        }
        if unknown := unknown_variables(os.environ):
            raise click.UsageError(printable(" ".join(unknown)))
        try:
            settings = Settings(**{key: value for key, value in given.items() if value is not None})
        except ValidationError as problem:
            first = problem.errors()[0]
            name = f"GLOVEBOX_{'_'.join(str(part) for part in first['loc'])}".upper()
            raise click.UsageError(f"{name}: {first['msg']}.") from None
        except NoSuchPlace as problem:
            raise click.UsageError(str(problem)) from None
        for name in given:
            wrong = _wrong(settings, name)
            if wrong is not None:
                hint = f"--{name.replace('_', '-')}, GLOVEBOX_{name.upper()}"
                raise click.BadParameter(f"{getattr(settings, name)} {wrong}.", param_hint=hint)
        click.get_current_context().meta[_STATE_DIR] = settings.state_dir
        return command(*args, settings=settings, **kwargs)

    return with_settings  # type: ignore[return-value]  # a decorator that adds a keyword


def _wrong(settings: Settings, name: str) -> str | None:
    """Why a directory cannot be used; None where it can, or where whoever needs it makes it or says so."""
    path: Path | None = getattr(settings, name)
    if path is None:
        return None
    try:
        str(path).encode()  # records and digests are UTF-8
        return None if stat.S_ISDIR(path.stat().st_mode) else "is not a directory"
    except UnicodeEncodeError:
        return "is not UTF-8: rename it, or name another"
    except OSError as problem:
        later = isinstance(problem, (FileNotFoundError, PermissionError)) and name != "workspace"
        return None if later else f"cannot be used: {problem.strerror}"


class Told(click.Command):
    """A command whose failures end in a sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; see ``failures`` and ``entry`` for what becomes of an exception."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, OutputFailed):
            raise
        except Exception as raised:
            from glovebox_server.cli import failures  # noqa: PLC0415 - brings every part

            doing = f"running `{ctx.command_path}`"
            found = failures.foreseen(raised, doing.capitalize())
            if found is None:
                raise Unforeseen(doing, ctx.meta.get(_STATE_DIR)) from raised
            failures.tell(found[0], _err, as_json=ctx.params.get("as_json", False))
            ctx.exit(found[1])


class _Group(click.Group):
    """A group of such commands, and of such groups."""

    command_class = Told
    group_class = type  # click: of the same class


_file = click.Path(path_type=Path, dir_okay=False)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("glovebox-mcp"), prog_name="glovebox")
def main() -> None:
    """Narrow, typed, sandboxed tools for AI agents, over the Model Context Protocol."""


@main.command()
@click.option("--transport", type=click.Choice(["stdio", "http"]), default="stdio", show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on (http).")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8321, show_default=True, help="Port (http); 0 for any free one."
)
@click.option("--allowed-host", multiple=True, help="Host header to accept, for addresses that are not this machine's.")
@_directories
def serve(settings: Settings, transport: str, host: str, port: int, allowed_host: tuple[str, ...]) -> None:
    """Serve MCP clients until they leave or a signal ends it."""
    _require_http(transport, "host", "port", "allowed_host")
    with _importing():
        from glovebox_server.cli import commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.serve(settings, _err, transport=transport, host=host, port=port, allowed_hosts=allowed_host))


@main.command()
@click.argument("tool")
@click.option("--args", "arguments", default="{}", help="Arguments as a JSON object; - reads standard input.")
@_json_option
@_directories
def call(settings: Settings, tool: str, arguments: str, as_json: bool) -> None:
    """Make one brokered call: exit 0 fine, 1 program failed, 2 bad arguments, 3 refused, 4 unavailable."""
    with _importing():
        from glovebox_server.cli import commands  # noqa: PLC0415 - see the module's header

    text = _standard_input() if arguments == "-" else arguments
    sys.exit(commands.call(settings, _out, _err, tool=tool, arguments=text, as_json=as_json))


@main.command()
@click.option("--docker", is_flag=True, help="Build the docker driver's image too.")
@click.option("--base", help="Image to build it from: CPython 3.11 or newer, glibc (python:3.12-slim).")
@_directories
def setup(settings: Settings, docker: bool, base: str | None) -> None:
    """Build the sandboxes' Python runtime (once, and after an upgrade)."""
    from glovebox_server.cli import commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.setup(settings, _err, docker=docker, base=base))


@main.command()
@click.option("--prove", is_flag=True, help="Attack the sandboxes of this host and say what held: 0 all, 1 not all.")
@click.option("--driver", "names", multiple=True, help="Prove this driver (may be repeated); else every usable one.")
@_json_option
@_directories
def doctor(settings: Settings, prove: bool, names: tuple[str, ...], as_json: bool) -> None:
    """Say what this host can enforce, what is missing, and the command that fixes it."""
    if prove:
        from glovebox_server.prove import scorecard  # noqa: PLC0415 - see the module's header

        for name in scorecard.unknown(names):
            raise click.UsageError(f"There is no driver {name!r}; there are {scorecard.KNOWN}.")
    elif names:
        raise click.UsageError("--driver says what to prove; add --prove.")
    from glovebox_server.cli import commands  # noqa: PLC0415 - see the module's header

    if prove:
        sys.exit(commands.prove(settings, _out, _err, names=names, as_json=as_json))

    sys.exit(commands.doctor(settings, _out, as_json=as_json))


@main.command()
@_json_option
@_directories
def capabilities(settings: Settings, as_json: bool) -> None:
    """What can be had here before any call: drivers, limits, network modes, tools, digests, and what is refused."""
    from glovebox_server.cli import commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.capabilities(settings, _out, as_json=as_json))


@main.command()
@click.argument("uri")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write; else stdout.")
@_directories
def artifact(settings: Settings, uri: str, output: Path | None) -> None:
    """Read an artifact of a call made here (by this user over stdio or `glovebox call`)."""
    from glovebox_server.cli import commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.artifact(settings, _err, uri=uri, output=output))


@main.command()
@click.option("--dry-run", is_flag=True, help="Show it, and remove nothing.")
@_json_option
@_directories
def clean(settings: Settings, dry_run: bool, as_json: bool) -> None:
    """Remove what is of no use any more: expired artifacts, leftovers of killed servers, what retention gives up."""
    from glovebox_server.cli import commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.clean(settings, _out, dry_run=dry_run, as_json=as_json))


@main.group()
def profiles() -> None:
    """What each tool may do."""


@profiles.command("list")
@_json_option
@_directories
def profiles_list(settings: Settings, as_json: bool) -> None:
    """One line per tool."""
    sys.exit(_with_profiles(settings, lambda found, commands: commands.list_profiles(found, _out, as_json=as_json)))


@profiles.command("show")
@click.argument("tool")
@_json_option
@_directories
def profiles_show(settings: Settings, tool: str, as_json: bool) -> None:
    """The whole profile in force, every default filled in."""
    sys.exit(_with_profiles(settings, lambda found, commands: commands.show(found, tool, _out, as_json=as_json)))


@profiles.command("explain")
@click.argument("tool")
@_json_option
@_directories
def profiles_explain(settings: Settings, tool: str, as_json: bool) -> None:
    """What a tool may read, write, reach and spend, in plain words."""
    sys.exit(
        _with_profiles(settings, lambda found, commands: commands.explain_tool(found, tool, _out, as_json=as_json))
    )


@profiles.command("check")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@_json_option
@_directories
def profiles_check(settings: Settings, paths: tuple[Path, ...], as_json: bool) -> None:
    """Load profiles and run their examples: yours and the shipped ones, or the given files and directories."""
    from glovebox_server.app import check_example, profile_directories  # noqa: PLC0415 - see the module's header
    from glovebox_server.cli import profiles as commands  # noqa: PLC0415 - see the module's header
    from glovebox_server.tools import TOOLS  # noqa: PLC0415 - see the module's header

    checked = list(paths) or profile_directories(settings)
    sys.exit(commands.check(checked, _out, check_example=check_example, tools=TOOLS, as_json=as_json))


@profiles.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@_json_option
def profiles_diff(a: Path, b: Path, as_json: bool) -> None:
    """Compare two profiles or two directories of them; exits 1 if anything was widened."""
    from glovebox_server.cli import profiles as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.diff_paths(a, b, _out, as_json=as_json))


def _with_profiles(settings: Settings, act: Callable[[Any, Any], int]) -> int:
    from glovebox_server.app import load_profiles  # noqa: PLC0415 - see the module's header
    from glovebox_server.cli import profiles as commands  # noqa: PLC0415 - see the module's header

    return act(load_profiles(settings), commands)


@main.group()
def audit() -> None:
    """What happened, and whether the log of it is whole."""


@audit.command("tail")
@click.option("-n", "count", default=20, show_default=True, help="How many records.")
@click.option("-f", "--follow", is_flag=True, help="Go on as records are written.")
@click.option("--all", "everything", is_flag=True, help="Show the servers' own records too, as --json does.")
@_json_option
@_directories
def audit_tail(settings: Settings, count: int, follow: bool, everything: bool, as_json: bool) -> None:
    """The last records of calls."""
    from glovebox_server.cli import audit as commands  # noqa: PLC0415 - see the module's header

    log = _log(settings)
    sys.exit(commands.tail(log, _out, count=count, follow=follow, as_json=as_json, everything=everything))


@audit.command("show")
@click.argument("call_id", metavar="CALL")
@_json_option
@_directories
def audit_show(settings: Settings, call_id: str, as_json: bool) -> None:
    """Everything recorded of one call."""
    from glovebox_server.cli import audit as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.show(_log(settings), _out, call_id, as_json=as_json))


@audit.command("verify")
@click.option("--anchor", help="SEQ:HASH noted down earlier (`glovebox audit head`): finds a log cut and rewritten.")
@click.option("--key", "keys", multiple=True, type=_file, help="A public key: check the signature of each seal too.")
@click.option("--all", "everything", is_flag=True, help="Read again what was found whole before.")
@click.option("--proof", type=_file, help="Check this inclusion proof instead, with --key and nothing else.")
@_json_option
@_directories
def audit_verify(
    settings: Settings,
    *,
    anchor: str | None,
    keys: tuple[Path, ...],
    everything: bool,
    proof: Path | None,
    as_json: bool,
) -> None:
    """Check the log; names the line where something was changed, removed, added or reordered."""
    from glovebox_server.cli import audit as commands  # noqa: PLC0415 - see the module's header

    if proof is not None:
        if anchor is not None or everything or len(keys) != 1:
            raise click.UsageError("--proof takes one --key, the server's public key, and neither --anchor nor --all.")
        sys.exit(commands.verify_proof(proof, _out, public_key=keys[0], as_json=as_json))
    log = _log(settings)
    sys.exit(commands.verify(log, _out, anchor=anchor, key_files=keys, everything=everything, as_json=as_json))


@audit.command("prove")
@click.argument("call_id", metavar="CALL")
@_directories
def audit_prove(settings: Settings, call_id: str) -> None:
    """Print the inclusion proof of one call: its records, and that they lie in a sealed segment, as JSON."""
    from glovebox_server.cli import audit as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.prove(_log(settings), _out, _err, call_id))


@audit.command("seal")
@_directories
def audit_seal(settings: Settings) -> None:
    """End the segment that is being written, so that its calls can be proved."""
    from glovebox_server.cli import audit as commands  # noqa: PLC0415 - see the module's header
    from glovebox_server.cli.commands import audit_log  # noqa: PLC0415 - see the module's header

    sys.exit(commands.seal(_log(settings), _out, lambda: audit_log(settings)))


@audit.command("head")
@_json_option
@_directories
def audit_head(settings: Settings, as_json: bool) -> None:
    """The end of the chain, to be kept elsewhere as an anchor."""
    from glovebox_server.cli import audit as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.head(_log(settings), _out, as_json=as_json))


@main.group()
def receipt() -> None:
    """Signed proof of what one call was, got and did."""


@receipt.command("key")
@_directories
def receipt_key(settings: Settings) -> None:
    """The public key, for whoever verifies; made where there is none."""
    from glovebox_server.cli import receipts as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.key(settings.state_dir, _out, _err))


@receipt.command("show")
@click.argument("wanted", metavar="CALL|FILE")
@click.option("--json", "as_json", is_flag=True, help="Print the receipt itself, as `receipt verify` takes it.")
@_directories
def receipt_show(settings: Settings, wanted: str, as_json: bool) -> None:
    """What a receipt says; of a call made here, or in a file."""
    from glovebox_server.cli import receipts as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.show(settings.state_dir, _out, _err, wanted, as_json=as_json))


@receipt.command("verify")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--key", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The server's public key.")
@click.option("--audit", type=click.Path(path_type=Path, file_okay=False), help="Audit log to find its place in.")
@_json_option
def receipt_verify(file: Path, key: Path, audit: Path | None, as_json: bool) -> None:
    """Prove a receipt with the public key alone; exit 1 and the reason if it does not hold."""
    from glovebox_server.cli import receipts as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.verify(file, _out, public_key=key, audit=audit, as_json=as_json))


@main.command("client-config")
@click.option("--transport", type=click.Choice(["stdio", "http"]), default="stdio", show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Name clients reach the server by (http).")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8321, show_default=True, help="Its port (http); 443 means https."
)
@_directories
def client_config(settings: Settings, transport: str, host: str, port: int) -> None:
    """Configuration to paste into Claude Code, Claude Desktop, VS Code and Cursor."""
    _require_http(transport, "host", "port")
    if host.strip("[]") in ("0.0.0.0", "::", ""):  # noqa: S104 - what must not be shown to clients
        told = f"{host} is where a server listens, not a name that leads to it. Name the host that clients will use:"
        raise click.BadParameter(f"{told} the one given to `glovebox serve --allowed-host`.", param_hint="--host")
    from glovebox_server.cli import commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.client_config(settings, _out, transport=transport, host=host, port=port))


def _require_http(transport: str, *names: str) -> None:
    """Refuse options that would be ignored: whoever gives them believes that the server listens."""
    given = click.get_current_context()
    for name in names:
        if transport != "http" and given.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is for --transport http; over {transport} the server listens nowhere.")


def _standard_input() -> str:
    content = sys.stdin.buffer.read(_MAX_ARGUMENTS + 1)
    if len(content) > _MAX_ARGUMENTS:
        raise click.UsageError(f"--args: standard input has more than {_MAX_ARGUMENTS} bytes.")
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        raise click.UsageError(f"--args: standard input is not UTF-8 at byte {problem.start}.") from None


def _log(settings: Settings) -> Path:
    return settings.state_dir / "audit"
