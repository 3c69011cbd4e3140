"""Build the docker driver's image (``glovebox setup --docker``). Packages come from the host's pip, checked by hash.

The base image may come from a registry or elsewhere (``docker import``): it is only asked for its Python version, and
nothing is downloaded inside it.

Images are named by content: another recipe, package or guest makes another image. A server only ever uses the image
with exactly its own content, so an upgraded server cannot meet an old guest.
"""

import functools
import hashlib
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
import docker
from docker.errors import APIError

from glovebox_sandboxes.contract.base import DEFAULT
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker.engine import Client, find_image, host_from_environment, translated
from glovebox_sandboxes.runtime import environments, guest_tree, packages
from glovebox_sandboxes.runtime.environments import Environment

DEFAULT_BASE = "python:3.12-slim"
RECIPE = Path(__file__).parent / "python"
LOCK = environments.SHIPPED / f"{DEFAULT}.lock"
_RUNTIME = ("Dockerfile", "finish.py", "hosts")

BUILD_SECONDS = 900
"""For one answer of the Engine during a build; compiling everything takes about 20 s on two cores."""
_MINIMUM_PYTHON = (3, 11)
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_WORDS = 1_500
_ATTEMPT = "Building the image of the docker driver"
_OTHER_BASE = "Name an image that is on this machine: glovebox setup --docker --base IMAGE"
_OTHER_STEP = "Run it again; if it fails again, the base image may lack something: try another with --base IMAGE."


@functools.cache
def tag(lock: str = "") -> str:
    """Return the name of the image this version needs: ``glovebox/python:0f3a…``; ``lock`` is empty for the default."""
    return f"glovebox/python:{_digest(guest_tree.digest(), lock, 'guest.Dockerfile', *_RUNTIME)}"


def runtime_tag(base: str, lock: str = "") -> str:
    """Return the name of the first step's image: all except the guest, for this base."""
    return f"glovebox/runtime:{_digest(base, lock, *_RUNTIME)}"


def _digest(start: str, lock: str, *recipe: str) -> str:
    whole = hashlib.sha256(start.encode())
    whole.update(bytes.fromhex(lock) if lock else hashlib.sha256(LOCK.read_bytes()).digest())
    for name in recipe:
        whole.update(hashlib.sha256((RECIPE / name).read_bytes()).digest())
    return whole.hexdigest()[:16]


async def build(
    base: str = DEFAULT_BASE, tell: Callable[[str], object] = str, environment: Environment | None = None
) -> str:
    """Build the image this version needs, unless it exists; return its id (``sha256:…``).

    Args:
        base: an image with CPython 3.11 or newer and glibc; pulled if it is not on this machine.
        tell: receives one sentence per step.
        environment: its packages are installed; None for the default's.

    Raises:
        SandboxError: the Engine, the base or the packages are unavailable; says what to do.
        MisnamedError: the environment's lock cannot be followed.
    """
    lock, file = (environment.locked(), environment.lock) if environment else ("", LOCK)
    name = tag(lock)
    with translated(_ATTEMPT), await anyio.to_thread.run_sync(_connected) as api:
        found = await anyio.to_thread.run_sync(find_image, api, name)
        if found is None:
            runtime = await _runtime(api, base, lock, file, tell)
            tell(f"Building {name}")
            with tempfile.TemporaryDirectory(prefix="glovebox-image-") as scratch:
                guest = Path(scratch) / "guest"
                guest.mkdir()
                guest_tree.write(guest)
                found = await anyio.to_thread.run_sync(
                    _build, api, "guest.Dockerfile", name, {"RUNTIME": runtime}, guest
                )
        return str(found["Id"])


async def remove(lock: str) -> list[str]:
    """Remove the images with this lock's digest, for every guest version, and return their names.

    Raises SandboxError: the Engine is unavailable, or a sandbox uses one of them.
    """
    with translated("Removing images"), await anyio.to_thread.run_sync(_connected) as api:
        return await anyio.to_thread.run_sync(_remove, api, tag(lock))


def _connected() -> Client:
    return docker.APIClient(base_url=host_from_environment(), version="auto", timeout=BUILD_SECONDS)


def _remove(api: Client, own: str) -> list[str]:
    ours = _layer(api, own)
    tags = (name for each in api.images() for name in each["RepoTags"] or () if "glovebox/" in name)
    names = sorted(name for name in tags if ours and _layer(api, name) == ours)
    for name in names:  # glovebox/python, then its base
        api.remove_image(name)
    return names


def _layer(api: Client, name: str) -> str:
    """Return an image's first layer: of ours all except the guest; empty if there is none."""
    found = find_image(api, name)
    return str(next(iter(found["RootFS"].get("Layers") or ()), "")) if found else ""


async def _runtime(api: Client, base: str, lock: str, file: Path, tell: Callable[[str], object]) -> str:
    name = runtime_tag(base, lock)
    if await anyio.to_thread.run_sync(find_image, api, name) is None:
        tell(f"Looking at the base image {base}")
        series, machine = await anyio.to_thread.run_sync(_ask_base, api, base)
        with tempfile.TemporaryDirectory(prefix="glovebox-image-") as scratch:
            tell(f"Installing the locked packages of {file.stem} for Python {series} on {machine}")
            installed = Path(scratch) / "packages"
            await packages.install(installed, file, series, machine=machine)
            tell(f"Building {name}")
            await anyio.to_thread.run_sync(_build, api, "Dockerfile", name, {"BASE": base}, installed)
    return name


def _ask_base(api: Client, base: str) -> tuple[str, str]:
    """Return the base's Python series ("3.12") and machine ("x86_64"); pull it if missing."""
    found = find_image(api, base)
    if found is None:
        try:
            with translated(f"Pulling {base}"):
                api.pull(base)
        except SandboxError as problem:
            raise SandboxError(problem.what, problem.reason, _OTHER_BASE) from problem
        found = api.inspect_image(base)
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    container = api.create_container_from_config(
        {
            "Image": found["Id"],
            "Entrypoint": ["python3", "-I", "-c", program],
            "Cmd": [],
            "NetworkDisabled": True,
            "HostConfig": {"NetworkMode": "none", "CapDrop": ["ALL"], "LogConfig": {"Type": "json-file"}},
        }
    )["Id"]
    try:
        api.start(container)
        api.wait(container)
        series = api.logs(container, stdout=True, stderr=False).decode(errors="replace").strip()
    except APIError as problem:
        words = str(problem.explanation)[:_WORDS]
        raise SandboxError(_ATTEMPT, f"{base} cannot run python3: {words}", _OTHER_BASE) from problem
    finally:
        api.remove_container(container, force=True, v=True)
    major, _, minor = series.partition(".")
    machine = _MACHINES.get(found["Architecture"])
    if machine is None or not minor.isdigit() or (int(major), int(minor)) < _MINIMUM_PYTHON:
        reason = f"{base} is {found['Architecture']} with Python {series!r}; 3.11 or newer is needed"
        raise SandboxError(_ATTEMPT, reason, _OTHER_BASE)
    return series, machine


def _build(api: Client, dockerfile: str, tag: str, arguments: Mapping[str, str], directory: Path) -> Mapping[str, Any]:
    with tempfile.TemporaryFile(prefix="glovebox-context-") as context:
        with tarfile.open(fileobj=context, mode="w") as archive:
            files = (RECIPE / name for name in (dockerfile, "finish.py", "hosts"))
            for path in (*files, directory):
                archive.add(path, arcname=path.name, filter=_as_root)
        context.seek(0)
        answers = api.build(
            fileobj=context,
            custom_context=True,
            dockerfile=dockerfile,
            tag=tag,
            buildargs=dict(arguments),
            network_mode="none",
            rm=True,
            forcerm=True,
            decode=True,
        )
        _follow(answers)
    # The stages before the last only help to build the very same thing again.
    api.prune_images(filters={"dangling": True, "label": ["dev.glovebox.stage=build"]})
    return dict(api.inspect_image(tag))


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make an entry root's, writable by root alone, readable by the sandbox's user, and without a time."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode = 0o755 if entry.isdir() else 0o644
    entry.mtime = 0
    return entry


def _follow(answers: Iterable[Mapping[str, Any]]) -> None:
    """Read the Engine's progress to the end; raise SandboxError with the end of a failed step's output."""
    words = ""
    for answer in answers:
        words = (words + str(answer.get("stream", "")))[-_WORDS:]
        if "error" in answer:
            raise SandboxError(_ATTEMPT, f"{answer['error']}; before it: {words}", _OTHER_STEP)
