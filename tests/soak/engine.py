"""A Docker Engine of the soak's own, to be killed: nobody else's containers are on it, nobody else's Engine is hurt.

Its data, sockets and containerd are below one directory. Sandboxes have no network of Docker's, so it needs no bridge.
"""

import os
import re
import signal
import subprocess  # noqa: TID251 - a whole Engine is what is killed
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
from tests.fixtures import leftovers

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker.engine import Engine
from glovebox_sandboxes.drivers.docker.image import build as images

START_SECONDS = 60.0  # a start takes 2 seconds on an idle machine


class OwnEngine:
    """One Engine below a directory, and its containerd, which is a service beside it as on a real host."""

    def __init__(self, directory: Path) -> None:
        """Nothing is started."""
        self.directory = directory
        self.host = f"unix://{directory}/sock"
        self._containerd: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start both, and wait until the Engine answers."""
        (self.directory / "containerd.toml").write_text(
            'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
        )
        places = {"config": "containerd.toml", "root": "contained", "state": "containing", "address": "containerd"}
        self._containerd = self._run("containerd", places)
        await leftovers.until((self.directory / "containerd").exists, START_SECONDS)
        await self._start()

    async def _start(self) -> None:
        places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid", "containerd": "containerd"}
        (self.directory / "pid").unlink(missing_ok=True)
        self._process = self._run("dockerd", places, "--host", self.host, "--bridge=none", "--iptables=false")
        await leftovers.until(self._answers, START_SECONDS)

    def _run(self, program: str, places: Mapping[str, str], *more: str) -> subprocess.Popen[bytes]:
        words = [word for option, name in places.items() for word in (f"--{option}", str(self.directory / name))]
        with (self.directory / "log").open("ab") as sink:
            return subprocess.Popen(
                [program, *words, *more], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )

    async def killed_and_started(self) -> None:
        """Kill the Engine as the kernel would, and start it again, as a service manager does."""
        _end(self._process, signal.SIGKILL)
        await self._start()

    def close(self) -> None:
        """Stop both; the data root, which each start mounts on itself, is left mounted by each that was killed."""
        _end(self._process, signal.SIGTERM)
        _end(self._containerd, signal.SIGTERM)
        data = str(self.directory / "data")
        while any(line.split()[4] == data for line in _mounts()):
            subprocess.run(["umount", data], check=True)

    def left(self) -> tuple[int, list[str]]:
        """What is left of it after ``close``, which is ended here."""
        containers: list[bytes] = []
        shims: list[tuple[int, str]] = []
        more: list[tuple[int, str]] = []
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if process.name.isdigit() and str(self.directory).encode() in (process / "cmdline").read_bytes():
                    pid, name = int(process.name), (process / "comm").read_text().strip()
                    (shims if name.startswith("containerd-shim") else more).append((pid, name))
                    containers += re.findall(rb"-id\0([0-9a-f]{64})", (process / "cmdline").read_bytes())
        inside = [(each.pid, each.name) for pid, _ in shims for each in leftovers.family(pid)]
        for pid, _ in [*inside, *shims]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for empty in (each for name in containers for each in Path("/sys/fs/cgroup").glob(f"*/docker/{name.decode()}")):
            with suppress(OSError):
                empty.rmdir()
        wrong = [f"{pid}: {name}" for pid, name in [*inside, *more] if pid != os.getpid()]
        return len(shims), [*wrong, *(line for line in _mounts() if str(self.directory) in line)]

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"dockerd ended: {(self.directory / 'log').read_text()[-2000:]}"
        with suppress(SandboxError):
            Engine(self.host).close()
            return True
        return False


def _end(process: subprocess.Popen[bytes] | None, how: signal.Signals) -> None:
    if process is not None:
        process.send_signal(how)
        process.wait(START_SECONDS)


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


@contextmanager
def own_engine(directory: Path) -> Iterator[OwnEngine]:
    """An Engine with our image, which is taken from the one that is set up here; the environment leads to it."""
    engine, before = OwnEngine(directory), os.environ.get("DOCKER_HOST")
    directory.mkdir()
    image = directory / "image"
    subprocess.run(["docker", "save", "--output", str(image), images.tag()], check=True)
    try:
        anyio.run(engine.start)
        load = ["docker", "--host", engine.host, "load", "--quiet", "--input", str(image)]
        subprocess.run(load, check=True, stdout=subprocess.DEVNULL)
        image.unlink()
        os.environ["DOCKER_HOST"] = engine.host
        yield engine
    finally:
        engine.close()
        os.environ.pop("DOCKER_HOST", None)
        if before is not None:
            os.environ["DOCKER_HOST"] = before
