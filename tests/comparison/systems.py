"""The systems that are compared, each behind one small adapter: how a program is run in it, and with which settings.

Settings are those that the system's own documentation recommends; what is granted is the same everywhere: the workspace
to read, a place to write, no network, and the limits of the case where there is a setting for them.
"""

import json
import os
import secrets
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import anyio
from tests.comparison import running
from tests.comparison.portable import HERE, Ended, Seen
from tests.comparison.running import Ran

from glovebox_sandboxes.conformance import case as texts
from glovebox_sandboxes.conformance.case import LIMITS
from glovebox_sandboxes.conformance.host import CANARY, Planted
from glovebox_sandboxes.contract.base import Limits

PYTHON = ("python3", "-I", "-B", "-X", "utf8", "-c")
CALLER = ("PATH", "HOME", "LANG", "DOCKER_HOST", "XDG_RUNTIME_DIR", CANARY)
NOBODY = 65534  # who runs what is meant for a normal user's machine, where the comparison is run as root
INSIDE = {"WORKSPACE": "/workspace", "SCRATCH": "/tmp", "OUTPUT": "/tmp/output", "INPUT": "/tmp/input"}  # noqa: S108
BEGUN = "gbx-begun"
"""What a program says before anything else, on standard error: without it nothing was run, and nothing stopped."""
_HELLO = f"""
os.write(2, b"{BEGUN}\\n")
"""
_PREFACE = """
ctypes.CDLL(None).prctl(15, {name!r}.encode(), 0, 0, 0)
for _place in (OUTPUT, INPUT):
    os.makedirs(_place, exist_ok=True)
"""


class System(ABC):
    """One way to run a program that nobody trusts."""

    key: str
    title: str
    version: str = ""
    notes: str = ""  # how it was got and set, where that is not plain from the command
    linux: ClassVar[bool] = True
    """Whether a program finds a Linux kernel: processes, /proc, /dev, sockets that are sockets."""
    workspace: ClassVar[bool] = True  # whether files of the host can be given to it at all
    slack: ClassVar[float] = 6.0  # seconds it may take to start and to clean up, beside the program's own

    @abstractmethod
    def command(self) -> str:
        """The command or the lines that run a program, with the limits of a plain case, for the page."""

    @abstractmethod
    async def run(self, text: str, limits: Limits, host: Planted, *, scratch: Path) -> Seen:
        """Run one program; ``scratch`` is a directory of the host, empty before the case, for those that need one."""


class Standing(NamedTuple):
    """How programs are run in one process: a job a line on its standard input, a result a line on its output."""

    argv: Sequence[str]
    env: Mapping[str, str]
    settings: Mapping[str, object]  # the first job, which has no result


class _Foreign(System):
    """What is run as a command."""

    plain = False  # whether programs are run as they stand, since only their time counts

    def _program(self, text: str, host: Planted, places: Mapping[str, str], name: str) -> str:
        if self.plain:
            return text
        return texts.program(_HELLO + _PREFACE.format(name=name) * self.linux + text, places, host.names)

    async def run(self, text: str, limits: Limits, host: Planted, *, scratch: Path) -> Seen:
        """Run the command that this system makes of it."""
        name = f"gbx{secrets.token_hex(5)}"
        ran = await self.ran(text, limits, host, scratch=scratch, name=name)
        if ran.ended != "ended":
            # What we broke off is ours to remove; what a call leaves that came to its end is what is looked for.
            await self.clean(name)
        seen = self.read(ran)
        seconds, found = ran.seconds, await running.left(name)
        if found:
            await self.clean(name)
        stdout, stderr = (stream.replace(f"{BEGUN}\n", "") for stream in (seen.stdout, seen.stderr))
        begun = (stdout, stderr) != (seen.stdout, seen.stderr)
        told: Ended = seen.ended if begun or seen.ended not in ("ended", "stopped") else "failed"
        note = seen.note if begun else f"{seen.note} {stderr.strip()[-300:]}".strip()
        return Seen(ended=told, stdout=stdout, stderr=stderr, note=note, seconds=seconds, left=found)

    @abstractmethod
    async def ran(self, text: str, limits: Limits, host: Planted, *, scratch: Path, name: str) -> Ran:
        """Run it, and stop it where its time is up."""

    async def clean(self, name: str) -> None:
        """Remove what stopping the command leaves."""

    def read(self, ran: Ran) -> Seen:
        """What the command's output means."""
        return Seen(ended=ran.ended, stdout=_text(ran.stdout), stderr=_text(ran.stderr), note=f"exit status {ran.code}")


class Docker(_Foreign):
    """``docker run``, as it comes or with the options that guides to hardening agree on."""

    def __init__(self, image: str, version: str, *, hardened: bool) -> None:
        """Take an image that has ``python3``."""
        self.key = "docker-hardened" if hardened else "docker-run"
        self.title = "`docker run`, hardened" if hardened else "`docker run`, defaults"
        self.version = version
        self._image = image
        self._hardened = hardened

    def options(self, limits: Limits) -> list[str]:
        """Options of ``docker run``."""
        if not self._hardened:
            return []
        memory = f"{limits.memory_bytes}b"
        return [
            *("--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--user", "65532:65532", "--pids-limit", str(limits.pids), "--memory", memory, "--memory-swap", memory),
            *("--cpus", "1", "--ulimit", f"cpu={limits.cpu_seconds}"),
            *("--tmpfs", f"{INSIDE['SCRATCH']}:rw,noexec,nosuid,nodev,size={limits.scratch_bytes}"),
        ]

    def command(self) -> str:
        """The command, with the limits of a plain case."""
        return shlex.join(["docker", "run", "--rm", *self.options(LIMITS), "-v", "WORKSPACE:/workspace:ro",
                           "IMAGE", *PYTHON, "PROGRAM"])  # fmt: skip

    async def ran(self, text: str, limits: Limits, host: Planted, *, scratch: Path, name: str) -> Ran:
        """Run it in a container of its own."""
        argv = ["docker", "run", "--rm", "--name", name, *self.options(limits), "-v", f"{host.workspace}:/workspace:ro"]
        program = self._program(text, host, INSIDE, name)
        return await running.run(
            [*argv, self._image, *PYTHON, program], seconds=limits.wall_seconds + self.slack, env=caller(), cwd=scratch
        )

    async def clean(self, name: str) -> None:
        """Remove the container: a client that was killed leaves it."""
        await running.run(["docker", "rm", "-f", name], seconds=30)


class SandboxRuntime(_Foreign):
    """PyPI's ``sandbox-runtime``: bubblewrap around a command; run by its runner, which has limits."""

    key = "sandbox-runtime"
    title = "`sandbox-runtime`"
    slack = 15.0

    def __init__(self, home: Path, version: str, *, notes: str) -> None:
        """Take the folder with its virtual environment."""
        self.version = version
        self.notes = notes
        self._home = home

    @staticmethod
    def job(command: str, limits: Limits, *, scratch: str, workspace: str) -> dict[str, object]:
        """What its runner reads: nothing is written and no domain reached but what is named, as its README has it."""
        return {
            "command": command,
            "timeout_seconds": int(limits.wall_seconds),
            "working_directory": workspace,
            "sandbox_config": {
                "network": {"allowed_domains": [], "denied_domains": []},
                "filesystem": {"deny_read": ["~/.ssh"], "allow_write": [scratch], "deny_write": [".env"]},
                "resource_limits": {
                    "max_memory_mb": limits.memory_bytes // 2**20,
                    "max_cpu_seconds": limits.cpu_seconds,
                    "max_file_size_mb": limits.scratch_bytes // 2**20,
                    "max_processes": limits.pids,
                },
            },
        }

    def command(self) -> str:
        """The command and what it reads, with the limits of a plain case."""
        job = self.job(f"{shlex.join(PYTHON)} PROGRAM", LIMITS, scratch="SCRATCH", workspace="WORKSPACE")
        return f"python -m sandbox_runtime.runner <<'JOB'\n{json.dumps(job)}\nJOB"

    async def ran(self, text: str, limits: Limits, host: Planted, *, scratch: Path, name: str) -> Ran:
        """Run it below the workspace, as a normal user."""
        places = {"WORKSPACE": str(host.workspace), "SCRATCH": str(scratch)}
        places |= {"OUTPUT": str(scratch / "output"), "INPUT": str(scratch / "input")}
        inner = shlex.join([*PYTHON, self._program(text, host, places, name)])
        job = self.job(inner, limits, scratch=str(scratch), workspace=str(host.workspace))
        return await running.run(
            [*_as_user(), str(self._home / "venv/bin/python"), "-B", "-m", "sandbox_runtime.runner"],
            stdin=json.dumps(job).encode() + b"\n",
            seconds=limits.wall_seconds + self.slack,
            env=caller() | {"HOME": str(self._home / "home")},
            cwd=host.workspace,
        )

    def read(self, ran: Ran) -> Seen:
        """Its runner's events."""
        events = [_parsed(line) for line in _text(ran.stdout).splitlines()]
        said = [each for each in events if each.get("type") in ("timeout", "resource_limit", "error")]
        failed = any(each["type"] == "error" for each in said) or not any(events)
        late = any(each["type"] == "timeout" for each in said)
        told: Ended = "failed" if failed else "timed_out" if late else "stopped" if said else "ended"
        return Seen(
            ended=told if ran.ended == "ended" else ran.ended,
            stdout="".join(each["data"] for each in events if each.get("type") == "stdout"),
            stderr="".join(each["data"] for each in events if each.get("type") == "stderr") or _text(ran.stderr),
            note="; ".join(str(each.get("reason") or each.get("message") or each["type"]) for each in said),
        )


class Srt(_Foreign):
    """npm's ``@anthropic-ai/sandbox-runtime``: bubblewrap around a command, by its own command or as a library."""

    key = "srt"
    title = "`srt`"
    slack = 15.0

    def __init__(self, home: Path, version: str) -> None:
        """Take the folder with its packages, Node.js among them."""
        self.version = version
        self._home = home
        self._node = [*_as_user(), str(home / "node_modules/node/bin/node")]
        self._package = home / "node_modules/@anthropic-ai/sandbox-runtime/dist"

    @staticmethod
    def settings(scratch: str) -> dict[str, object]:
        """Its settings: nothing is written and no domain reached but what is named, as its README has it."""
        files = {"denyRead": ["~/.ssh"], "allowWrite": [scratch], "denyWrite": [".env"]}
        return {"network": {"allowedDomains": [], "deniedDomains": []}, "filesystem": files}

    def command(self) -> str:
        """The command, and its settings."""
        return f"srt --settings <(echo {shlex.quote(json.dumps(self.settings('SCRATCH')))}) -c COMMAND"

    async def ran(self, text: str, limits: Limits, host: Planted, *, scratch: Path, name: str) -> Ran:
        """Run it below the workspace, as a normal user."""
        places = {"WORKSPACE": str(host.workspace), "SCRATCH": str(scratch)}
        places |= {"OUTPUT": str(scratch / "output"), "INPUT": str(scratch / "input")}
        settings = self._home / "settings.json"
        settings.write_text(json.dumps(self.settings(str(scratch))))
        inner = shlex.join([*PYTHON, self._program(text, host, places, name)])
        return await running.run(
            [*self._node, str(self._package / "cli.js"), "--settings", str(settings), "-c", inner],
            seconds=limits.wall_seconds + self.slack, env=self._env(), cwd=host.workspace,
        )  # fmt: skip

    def standing(self, scratch: Path) -> Standing:
        """Its library in a process that stays."""
        argv = [*self._node, str(HERE / "peer_srt.mjs"), str(self._package / "index.js")]
        return Standing(argv=argv, env=self._env(), settings=self.settings(str(scratch)))

    def _env(self) -> dict[str, str]:
        return caller() | {"HOME": str(self._home / "home")}


class LlmSandbox(_Foreign):
    """``llm-sandbox`` on Docker, with the settings of its security guide's section on hardening."""

    key = "llm-sandbox"
    title = "`llm-sandbox`"
    notes = (
        "`stop_signal` is ours and spares the ten seconds of closing a session whose process 1 ignores SIGTERM; the "
        "rest is the set that its security guide calls the strongest verified to work, with the case's limits"
    )
    slack = 25.0

    def __init__(self, home: Path, image: str, version: str) -> None:
        """Take the folder with its virtual environment, and an image that has ``python``."""
        self.version = version
        self._home = home
        self._image = image

    @staticmethod
    def settings(limits: Limits) -> dict[str, object]:
        """Its ``runtime_configs``."""
        return {
            "network_mode": "none",
            "mem_limit": limits.memory_bytes,
            "pids_limit": limits.pids,
            "cap_drop": ["ALL"],
            "cap_add": ["DAC_OVERRIDE"],
            "security_opt": ["no-new-privileges:true"],
            "stop_signal": "SIGKILL",
        }

    def command(self) -> str:
        """The lines, with the limits of a plain case."""
        volumes = {"volumes": {"WORKSPACE": {"bind": "/workspace", "mode": "ro"}}}
        return (
            'SandboxSession(lang="python", image=IMAGE, keep_template=True, skip_environment_setup=True,\n'
            f"    execution_timeout={LIMITS.wall_seconds:.0f},\n"
            f"    runtime_configs={self.settings(LIMITS) | volumes}).run(PROGRAM)"
        )

    async def ran(self, text: str, limits: Limits, host: Planted, *, scratch: Path, name: str) -> Ran:
        """Run it in a session of its own."""
        volumes = {str(host.workspace): {"bind": "/workspace", "mode": "ro"}}
        job = {
            "code": self._program(text, host, INSIDE, name),
            "image": self._image,
            "seconds": limits.wall_seconds,
            "settings": self.settings(limits) | {"volumes": volumes, "name": name},
        }
        argv = [str(self._home / "venv/bin/python"), "-I", "-B", str(HERE / "peer_llm_sandbox.py")]
        return await running.run(
            argv,
            stdin=json.dumps(job).encode() + b"\n",
            seconds=limits.wall_seconds + self.slack,
            env=caller(),
            cwd=scratch,
        )

    def standing(self, _scratch: Path) -> Standing:
        """Two containers, in which it runs one program after another."""
        job = {"image": self._image, "seconds": LIMITS.wall_seconds, "settings": self.settings(LIMITS), "pool": 2}
        argv = [str(self._home / "venv/bin/python"), "-I", "-B", str(HERE / "peer_llm_sandbox.py")]
        return Standing(argv=argv, env=caller(), settings=job)

    async def clean(self, name: str) -> None:
        """Remove the container where the session could not."""
        await running.run(["docker", "rm", "-f", name], seconds=30)

    def read(self, ran: Ran) -> Seen:
        """The session's result."""
        try:
            found = json.loads(_text(ran.stdout).rstrip().rpartition("\n")[2])
        except ValueError:
            return _nothing(ran)
        ended = ran.ended
        if found["problem"] and ended == "ended":
            return Seen(ended="timed_out" if "Timeout" in found["problem"] else "failed", note=found["problem"])
        return Seen(ended=ended, stdout=found["stdout"], stderr=found["stderr"], note=f"exit status {found['code']}")


class McpRunPython(_Foreign):
    """``mcp-run-python``: Pyodide in Deno, spoken to as its own ``code_sandbox`` does, over stdio."""

    key = "mcp-run-python"
    title = "`mcp-run-python`"
    linux = False
    workspace = False
    slack = 20.0

    def __init__(self, home: Path, version: str, *, notes: str) -> None:
        """Take the folder with its virtual environment and Deno's files."""
        self.version = version
        self.notes = notes
        self._home = home

    arguments: ClassVar[Sequence[str]] = (
        *("run", "--allow-read=./node_modules", "--node-modules-dir=auto"),
        *("src/main.ts", "stdio", "--return-mode=json"),
    )

    def command(self) -> str:
        """The command that it runs itself for ``mcp-run-python --disable-networking stdio``."""
        return shlex.join(["deno", *self.arguments])

    async def ran(self, text: str, limits: Limits, host: Planted, *, scratch: Path, name: str) -> Ran:  # noqa: ARG002 - it writes nowhere
        """Run it in a server of its own."""
        code = self._program(text, host, INSIDE, name)
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "compare", "version": "1"}}
        call = {"name": "run_python_code", "arguments": {"python_code": code}}
        messages = (
            {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call},
        )
        return await running.run(
            [str(self._home / "venv/bin/deno"), *self.arguments],
            stdin=b"".join(json.dumps(each).encode() + b"\n" for each in messages),
            complete=lambda printed: b'"id":2' in printed and printed.endswith(b"\n"),
            keeps=False,
            seconds=limits.wall_seconds + self.slack,
            env=caller() | {"NO_COLOR": "1", "DENO_DIR": str(self._home / "cache")},
            cwd=self._home / "deno",
        )

    def read(self, ran: Ran) -> Seen:
        """The tool's result."""
        for line in _text(ran.stdout).splitlines():
            with_id = _parsed(line)
            if with_id.get("id") == 2 and "result" in with_id:
                content = with_id["result"]["content"][0]["text"]
                found = _parsed(content) or {"output": [], "error": content}
                printed = "\n".join(found["output"]) + "\n"
                return Seen(ended=ran.ended, stdout=printed, stderr=str(found.get("error", "")))
        return _nothing(ran)


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _nothing(ran: Ran) -> Seen:
    return Seen(
        ended="failed" if ran.ended == "ended" else ran.ended, stderr=_text(ran.stderr), note="there is no result"
    )


def _as_user() -> list[str]:
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]


def caller() -> dict[str, str]:
    """The environment of whoever calls a system: what its client needs, and the variable that no program may see."""
    return {name: os.environ[name] for name in CALLER if name in os.environ}


def owned(path: Path) -> Path:
    """The directory, made, and belonging to whom normal users' systems are run as."""
    path.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        shutil.chown(path, NOBODY, NOBODY)
    return path


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


async def first_line(argv: Sequence[str], **env: str) -> str:
    """The first line that a command prints, empty where it cannot be run or fails."""
    try:
        with anyio.fail_after(60):
            ran = await running.run(argv, seconds=50, env={**os.environ, **env})
    except (OSError, TimeoutError):
        return ""
    return _text(ran.stdout).partition("\n")[0].strip() if ran.code == 0 else ""
