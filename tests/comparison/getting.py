"""Getting the systems that are compared: each into a folder of its own, its version pinned here; or why it cannot.

Everything is below one folder that git ignores. Nothing is installed into the system.
"""

import json
import os
import shutil
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.comparison import running
from tests.comparison.systems import Docker, LlmSandbox, McpRunPython, SandboxRuntime, Srt, System, first_line, owned

SANDBOX_RUNTIME = "sandbox-runtime==0.2.0"
SRT = ("@anthropic-ai/sandbox-runtime@0.0.83", "node@22.23.3")
LLM_SANDBOX = "llm-sandbox[docker]==0.3.46"
MCP_RUN_PYTHON = ("mcp-run-python==0.0.22", "deno==2.9.8")
#: What its Pyodide loads, of the versions in the lock of pyodide 0.28.2. The last of them is no wheel of PyPI's.
PYODIDE_WHEELS = ("micropip==0.10.1", "pydantic==2.10.6", "typing-extensions==4.14.1", "annotated-types==0.7.0")
PYDANTIC_CORE = "pydantic_core-2.27.2-cp313-cp313-pyodide_2025_0_wasm32.whl"
PEERS = ("docker-run", "docker-hardened", "sandbox-runtime", "llm-sandbox", "mcp-run-python")
NO_FILTER = (
    "the wheel that pip installs does not hold the filter of Unix sockets that its README describes, though its source "
    "archive does; it then goes on without, and says so in its debug log"
)

INSTALL_SECONDS = 300  # for one command that fetches packages


class NotHereError(Exception):
    """A system cannot be had on this host; the message says why and what to do."""


@asynccontextmanager
async def got(key: str, folder: Path, image: str) -> AsyncIterator[System]:
    """A system, ready to run."""
    home = folder / key
    home.mkdir(parents=True, exist_ok=True)
    if key in ("docker-run", "docker-hardened"):
        yield Docker(image, await _engine(image), hardened=key == "docker-hardened")
    elif key in ("sandbox-runtime", "srt"):
        for program in ("bwrap", "socat", "rg"):
            if shutil.which(program) is None:
                raise NotHereError(f"it needs {program}: apt-get install bubblewrap socat ripgrep")
        owned(home / "home")
        if key == "srt":
            await _must(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), *SRT], "npm install")
            yield Srt(home, ", ".join(each.rpartition("@")[2] for each in SRT).replace(", ", " (Node ") + ")")
            return
        await _venv(home, SANDBOX_RUNTIME)
        bubblewrap = await first_line(["bwrap", "--version"])
        filtered = any((home / "venv").glob("lib/python3*/site-packages/**/unix-block.bpf"))
        yield SandboxRuntime(
            home, f"{SANDBOX_RUNTIME.partition('==')[2]} ({bubblewrap})", notes="" if filtered else NO_FILTER
        )
    elif key == "llm-sandbox":
        engine = await _engine(image)
        await _venv(home, LLM_SANDBOX)
        named = await _with_python(image, home)
        yield LlmSandbox(home, named, f"{LLM_SANDBOX.partition('==')[2]} (Docker {engine})")
    else:
        await _venv(home, *MCP_RUN_PYTHON)
        notes = await _deno(home)
        versions = f"{MCP_RUN_PYTHON[0].partition('==')[2]} (Deno {MCP_RUN_PYTHON[1].partition('==')[2]})"
        yield McpRunPython(home, versions, notes=notes)


async def _must(argv: list[str], what: str, *, cwd: Path | None = None, stdin: bytes = b"", **env: str) -> str:
    ran = await running.run(argv, seconds=INSTALL_SECONDS, cwd=cwd, env={**os.environ, **env}, stdin=stdin)
    if ran.ended != "ended" or ran.code != 0:
        said = (ran.stderr or ran.stdout).decode("utf-8", "replace").strip()[-300:]
        raise NotHereError(f"{what} failed: {said or ran.ended}")
    return ran.stdout.decode("utf-8", "replace")


async def _venv(home: Path, *packages: str) -> None:
    python = home / "venv/bin/python"
    stamp = home / "installed"
    if stamp.exists() and stamp.read_text() == "\n".join(packages):
        return
    await _must([sys.executable, "-m", "venv", "--clear", str(home / "venv")], "making a virtual environment")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    await _must(pip, f"installing {' '.join(packages)}")
    stamp.write_text("\n".join(packages))


async def _engine(image: str) -> str:
    version = await first_line(["docker", "version", "--format", "{{.Server.Version}}"])
    if not version:
        raise NotHereError(
            "no Docker Engine answers: systemctl start docker, or run this through tests/tools/with_dockerd"
        )
    if not await first_line(["docker", "image", "inspect", "--format", "{{.Id}}", image]):
        raise NotHereError(f"there is no image {image}: docker pull it, or name another with --image")
    return version


async def _with_python(image: str, home: Path) -> str:
    """The image under a name of our own, with ``python`` beside ``python3`` and a command, as python:3-slim has."""
    (home / "image").mkdir(exist_ok=True)
    link = "command -v python || ln -s $(command -v python3) /usr/local/bin/python"
    venv = "python3 -m venv --without-pip /sandbox/.sandbox-venv"  # where its pool looks for one
    (home / "image/Dockerfile").write_text(f'FROM {image}\nRUN {link}\nRUN {venv}\nCMD ["python3"]\n')
    await _must(["docker", "build", "-t", "glovebox-compare-python", str(home / "image")], "docker build")
    return "glovebox-compare-python"


async def _deno(home: Path) -> str:
    """Deno's files for the server, with its dependencies; what had to be put in for them, as words for the page."""
    ready = home / "ready"
    if ready.exists():
        return ready.read_text()
    shipped = next((home / "venv/lib").glob("python3*/site-packages/mcp_run_python/deno"))
    target = home / "deno"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(shipped, target)
    notes = ""
    try:
        await _install(home)
    except NotHereError:
        # Its two other sources are a registry and a CDN that are often shut off where PyPI and npm are let through.
        notes = await _stand_ins(home)
    ready.write_text(notes)
    return notes


async def _install(home: Path) -> None:
    arguments = ["run", "--allow-net", "--allow-read=./node_modules", "--allow-write=./node_modules"]
    argv = [str(home / "venv/bin/deno"), *arguments, "--node-modules-dir=auto", "src/main.ts", "noop"]
    await _must(argv, "deno", cwd=home / "deno", NO_COLOR="1", DENO_DIR=str(home / "cache"))


async def _stand_ins(home: Path) -> str:
    target = home / "deno"
    config = json.loads((target / "deno.jsonc").read_text())
    config["imports"] = {name: at for name, at in config["imports"].items() if not at.startswith("jsr:")}
    config["imports"]["@std/cli/parse-args"] = "./src/parse-args.ts"
    config["imports"]["@modelcontextprotocol/sdk"] = "npm:@modelcontextprotocol/sdk@1.17.5"
    (target / "deno.jsonc").write_text(json.dumps(config, indent=2))
    (target / "deno.lock").unlink()
    (target / "src/parse-args.ts").write_text(_PARSE_ARGS)
    deno = [str(home / "venv/bin/deno"), "install", "--node-modules-dir=auto", "--entrypoint", "src/main.ts"]
    await _must(deno, "deno install", cwd=target, NO_COLOR="1", DENO_DIR=str(home / "cache"))
    pyodide = (target / "node_modules/pyodide").resolve()
    pip = [str(home / "venv/bin/python"), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(pyodide)]
    await _must([*pip, "--python-version", "3.13", "--only-binary", ":all:", *PYODIDE_WHEELS], "pip download")
    with zipfile.ZipFile(pyodide / PYDANTIC_CORE, "w") as wheel:
        wheel.writestr("pydantic_core/__init__.py", _PYDANTIC_CORE)
        about = "pydantic_core-2.27.2.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: pydantic_core\nVersion: 2.27.2\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp313-cp313-pyodide_2025_0_wasm32\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
    await _install(home)
    return (
        "jsr.io and Pyodide's CDN could not be reached where this was run: Pyodide and Deno are npm's and PyPI's, "
        "unchanged, with the server's own permissions; a reader of its command line and the conversion of a result to "
        "JSON are stand-ins of ours"
    )


_PARSE_ARGS = """
// Stands in for jsr:@std/cli/parse-args: reads --name=value, which is all that is written here.
export function parseArgs(args: string[], options: { default?: Record<string, string> }): any {
  const found: any = { ...options.default }
  for (const each of args) {
    const match = /^--([^=]+)=(.*)$/.exec(each)
    if (match) found[match[1]!] = match[2]
  }
  return found
}
"""
_PYDANTIC_CORE = '''"""Stands in for pydantic_core: the one function that the server uses."""
import json


def to_json(value, indent=None, fallback=None):
    return json.dumps(value, indent=indent, default=fallback).encode()
'''
