"""Podman, Podman without root and Docker without root, as services of the test run.

Each has its socket, its store and everything else in one directory of its own, and is gone after it.
"""

import os
import pwd
import shutil
import signal
import subprocess  # noqa: TID251 - services and their tools, started for the test run; nothing here comes from a sandbox
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from glovebox_sandboxes.drivers.docker.image import content

#: Seconds for a service to answer, which takes one or two, and for one import of the image, which takes some 15.
_ANSWER_SECONDS = 30
_IMPORT_SECONDS = 240
_LOOK_SECONDS = 0.05
_END_SECONDS = 10
#: A user namespace must have a number for the sandbox's user, 65532.
_NUMBERS = 65_536
_ROOTLESS = Path("/usr/share/docker.io/contrib/dockerd-rootless.sh")

_CONFIGURATION = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{place}/tmp"
"""


class UnavailableError(Exception):
    """This machine cannot run it; says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One that answers, with our image in it."""

    name: str
    socket: Path
    place: Path
    rootless: bool

    @property
    def host(self) -> str:
        """For ``DOCKER_HOST``."""
        return f"unix://{self.socket}"


@contextmanager
def running(name: str, image: Path) -> Iterator[Engine]:
    """One of ``podman``, ``podman-rootless`` and ``docker-rootless``, with the image of this file.

    Raises:
        UnavailableError: it cannot be had here.
    """
    if os.geteuid() != 0:
        raise UnavailableError("the test run must be root's, to be root and another user")
    rootless = name != "podman"
    user = _user() if rootless else pwd.getpwuid(0)
    with ExitStack() as stack:
        place = stack.enter_context(_directory(user))
        if name == "docker-rootless":
            command, load, environment = _docker(place, image)
        else:
            command, load, environment = _podman(place, image)
        whole = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(place), "XDG_RUNTIME_DIR": str(place / "run")}
        whole |= environment
        socket = place / "run" / "engine.sock"
        stack.enter_context(_service(_as(user, command), whole, place, socket))
        done = subprocess.run(
            _as(user, load), env=whole, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False
        )
        if done.returncode != 0:
            raise UnavailableError(f"the image cannot be imported: {done.stderr[-500:]}")
        yield Engine(name=name, socket=socket, place=place, rootless=rootless)


@contextmanager
def saved_image() -> Iterator[Path]:
    """A file with the image of this version, from the Docker Engine that has it.

    Raises:
        UnavailableError: there is none.
    """
    with tempfile.TemporaryDirectory(prefix="glovebox-image-") as scratch:
        Path(scratch).chmod(0o755)
        file = Path(scratch) / "image.tar"
        command = ["docker", "save", "--output", str(file), content.tag()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
        except OSError as problem:
            raise UnavailableError(f"docker cannot be run: {problem}") from problem
        if done.returncode != 0:
            raise UnavailableError(f"no Docker Engine has the image to import: {done.stderr.strip()}")
        file.chmod(0o644)
        yield file


def _podman(place: Path, image: Path) -> tuple[list[str], list[str], Mapping[str, str]]:
    program = shutil.which("podman")
    if program is None:
        raise UnavailableError("podman is not installed: apt-get install podman uidmap")
    configuration = place / "containers.conf"
    configuration.write_text(_CONFIGURATION.format(place=place))
    configuration.chmod(0o644)
    general = [program, "--root", f"{place}/store", "--runroot", f"{place}/run/store", "--storage-driver", "overlay"]
    service = [*general, "system", "service", "--time", "0", f"unix://{place}/run/engine.sock"]
    return service, [*general, "load", "--quiet", "--input", str(image)], {"CONTAINERS_CONF": str(configuration)}


def _docker(place: Path, image: Path) -> tuple[list[str], list[str], Mapping[str, str]]:
    if not _ROOTLESS.exists() or shutil.which("rootlesskit") is None:
        raise UnavailableError("rootless Docker is not installed: apt-get install docker.io rootlesskit uidmap")
    run = place / "run"
    service = [
        str(_ROOTLESS), "--data-root", f"{place}/store", "--exec-root", f"{run}/docker", "--pidfile", f"{run}/pid",
        "--host", f"unix://{run}/engine.sock", "--iptables=false", "--bridge=none",
    ]  # fmt: skip
    # No network for the Engine itself, which nothing here uses: that would take a TUN device and slirp4netns.
    environment = {
        "DOCKER_HOST": f"unix://{run}/engine.sock",
        "DOCKERD_ROOTLESS_ROOTLESSKIT_NET": "host",
        "DOCKERD_ROOTLESS_ROOTLESSKIT_PORT_DRIVER": "none",
        "DOCKERD_ROOTLESS_ROOTLESSKIT_MTU": "0",
    }
    docker = shutil.which("docker") or "docker"
    return service, [docker, "load", "--quiet", "--input", str(image)], environment


def _user() -> pwd.struct_passwd:
    """A user who may map enough numbers, see subuid(5)."""
    for user in pwd.getpwall():
        if user.pw_uid and all(_may_map(user.pw_name, Path("/etc", file)) for file in ("subuid", "subgid")):
            if shutil.which("newuidmap") is None:
                raise UnavailableError("newuidmap is not installed: apt-get install uidmap")
            return user
    raise UnavailableError(
        "no user but root has 65536 numbers in /etc/subuid and /etc/subgid: useradd --create-home NAME"
    )


def _may_map(name: str, file: Path) -> bool:
    lines = (line.split(":") for line in file.read_text().splitlines()) if file.exists() else ()
    return any(line[0] == name and int(line[-1]) >= _NUMBERS for line in lines)


def _as(user: pwd.struct_passwd, command: list[str]) -> list[str]:
    if not user.pw_uid:
        return command
    return ["setpriv", "--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups", *command]


@contextmanager
def _directory(user: pwd.struct_passwd) -> Iterator[Path]:
    # Short, because a socket's path has 108 bytes at most; and where any user can get to, unlike pytest's own.
    place = Path(tempfile.mkdtemp(prefix="gb-engine-"))
    try:
        for directory in (place, place / "run", place / "tmp"):
            directory.mkdir(mode=0o700, exist_ok=True)
            os.chown(directory, user.pw_uid, user.pw_gid)
        yield place
    finally:
        _end_everything_in(place)
        for mount in reversed(mounts(place)):
            subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(place)


@contextmanager
def _service(command: list[str], environment: Mapping[str, str], place: Path, socket: Path) -> Iterator[None]:
    log = place / "log"
    with log.open("wb") as words, subprocess.Popen(
        command, env=environment, cwd=place, stdin=subprocess.DEVNULL, stdout=words, stderr=words,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + _ANSWER_SECONDS
            while not socket.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise UnavailableError(f"it does not answer; its last words: {log.read_text()[-500:]}")
                time.sleep(_LOOK_SECONDS)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def processes(place: Path) -> list[int]:
    """Everything that was started with this directory as its home, and all that came of it."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"HOME={place}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended
    return found


def mounts(place: Path) -> list[str]:
    """Mount points in it that this process sees, outermost first."""
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return sorted(point for point in points if Path(point).is_relative_to(place))


def _end_everything_in(place: Path) -> None:
    # Podman leaves a process that holds its user namespace; a service that was killed may leave more.
    for number in processes(place):
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + _END_SECONDS
    while processes(place) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
