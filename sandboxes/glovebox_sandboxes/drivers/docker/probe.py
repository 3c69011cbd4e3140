"""Probe what the Engine on this host can enforce. Blocking calls: run it in a thread.

Only asks; each sandbox measures whether it is as planned (see ``contract.measure``).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docker.errors import ImageNotFound

from glovebox_sandboxes.contract.base import Capabilities, Missing
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker import podman
from glovebox_sandboxes.drivers.docker.engine import Engine, translated
from glovebox_sandboxes.drivers.docker.image import content
from glovebox_sandboxes.drivers.docker.plan import DRIVER, GROUPS_FIX, LEVEL, Host, Runtime
from glovebox_sandboxes.runtime import environments

SETUP = "glovebox setup --docker"
MINIMUM_API = (1, 41)
"""Engine 20.10: the first that can give a container its own cgroup namespace."""
# Field of the Engine's "info", its limit, and the kernel's controller.
_CONTROLLERS = {
    "MemoryLimit": ("memory_bytes", "memory"),
    "PidsLimit": ("pids", "pids"),
    "CpuCfsQuota": ("cpu", "cpu"),
}
_RUNTIME_FIX: Mapping[Runtime, str] = {
    "runc": "Run `apt-get install runc`.",
    "crun": "Run `apt-get install crun`.",
    "runsc": "Add gVisor's runsc to the Engine's runtimes as docs/operate/drivers.md says, and restart it.",
}
_GROUP_FIX = "Enable it on the kernel's command line (cgroup_enable={0}) and restart the Engine."


def probe(engine: Engine, runtime: Runtime, data: Path | None = None) -> tuple[Capabilities, Host]:
    """Return what the Engine can do with a runtime. Raises SandboxError if it does not answer.

    ``data`` is the data directory, which names the built environments; without one there is the default alone.
    """
    with translated(f"Asking the Docker Engine at {engine.host} what it can do"):
        info: Mapping[str, Any] = engine.api.info()
        own = engine.podman_info() if engine.podman else None
        image = _image(engine, content.tag())
        built = environments.recorded(data) if data is not None else {}
        others = {name: _image(engine, content.tag(each.lock)) for name, each in built.items()}
    options = [option.removeprefix("name=").partition(",")[0] for option in info.get("SecurityOptions") or ()]
    configuration: Mapping[str, Any] = (image or {}).get("Config") or {}
    fit = {name: each for name, each in others.items() if each is not None and not each["Config"].get("Volumes")}
    every = [configuration, *(each["Config"] for each in fit.values())]
    groups = _may_make_groups(info, own)
    if own is not None and runtime == "runc" and own["ociRuntime"]["name"] == "crun":
        runtime = "crun"
    host = Host(
        image=(image or {}).get("Id", ""),
        image_environment=tuple(sorted({entry.partition("=")[0] for each in every for entry in each.get("Env") or ()})),
        environments={name: each["Id"] for name, each in fit.items()},
        elsewhere=environments.elsewhere(data) if data is not None else {},
        apparmor="apparmor" in options,
        user_namespace="userns" in options
        or "rootless" in options
        or (own is not None and own["security"]["rootless"]),
        socket=engine.socket,
        runtime=runtime,
        groups=groups,
        processors=int(info.get("NCPU") or 1),
        added=("/etc/hostname", *(() if own is None else podman.MOUNTS)),
    )
    gaps = _engine_gaps(info, engine.version, options, runtime) if own is None else _podman_gaps(info, own, runtime)
    missing = (*gaps, *_group_gaps(info, host, own), *_image_gaps(image, configuration))
    limits = _limits(info, groups)
    if runtime == "runsc":
        # The group counts the threads of gVisor's kernel too.
        limits = {**limits, "pids": "rlimit"}
    return Capabilities(
        driver=DRIVER[runtime],
        level=LEVEL[runtime],
        version=_version(engine.version, runtime),
        limits=limits,
        missing=missing,
    ), host


def unavailable(problem: SandboxError, runtime: Runtime) -> Capabilities:
    """Return the capabilities of an Engine that does not answer."""
    missing = Missing(what=f"a Docker Engine that answers ({problem.reason})", fix=problem.fix, fatal=True)
    return Capabilities(driver=DRIVER[runtime], level=LEVEL[runtime], version="", limits={}, missing=(missing,))


def _image(engine: Engine, tag: str) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = engine.api.inspect_image(tag)
    except ImageNotFound:
        return None
    return found


def _engine_gaps(
    info: Mapping[str, Any], version: Mapping[str, Any], options: list[str], runtime: Runtime
) -> Iterator[Missing]:
    api = tuple(int(part) for part in str(version.get("ApiVersion", "0")).split("."))
    if info.get("OSType") != "linux" or api < MINIMUM_API:
        yield Missing(
            what="a Docker Engine 20.10 or newer for Linux", fix="Run `apt-get install docker.io`.", fatal=True
        )
    if "seccomp" not in options:
        yield Missing(
            what="seccomp in the Docker Engine", fix="Use a kernel and an Engine built with seccomp.", fatal=True
        )
    if runtime not in (info.get("Runtimes") or {}):
        yield Missing(what=f"the runtime {runtime} in the Docker Engine", fix=_RUNTIME_FIX[runtime], fatal=True)


def _podman_gaps(info: Mapping[str, Any], own: Mapping[str, Any], runtime: Runtime) -> Iterator[Missing]:
    version = str(info.get("ServerVersion", "0")).split(".")
    if tuple(int(part) for part in version[:2]) < podman.MINIMUM:
        yield Missing(what="Podman 4.3 or newer", fix="Use a newer distribution, or the Docker Engine.", fatal=True)
    if not own["security"]["seccompEnabled"]:
        yield Missing(what="seccomp in Podman", fix="Use a kernel and a Podman built with seccomp.", fatal=True)
    if runtime == "runsc":
        yield Missing(
            what="a Docker Engine: Podman is not asked for gVisor",
            fix="Install what the driver needs to start runsc itself, see docs/operate/drivers.md.",
            fatal=True,
        )
    elif own["ociRuntime"]["name"] not in podman.RUNTIMES:
        yield Missing(
            what=f"crun or runc as Podman's runtime, which is {own['ociRuntime']['name']}",
            fix='Set runtime = "crun" in the [engine] section of containers.conf, and restart the service.',
            fatal=True,
        )


def _may_make_groups(info: Mapping[str, Any], own: Mapping[str, Any] | None) -> bool:
    if own is None:
        return info.get("CgroupDriver") != "none"
    # Podman's answer in the Engine's format describes the kernel, even if its user may use none of it.
    return {controller for _, controller in _CONTROLLERS.values()} <= set(own["cgroupControllers"])


def _group_gaps(info: Mapping[str, Any], host: Host, own: Mapping[str, Any] | None) -> Iterator[Missing]:
    if not host.groups:
        yield Missing(what="no control groups: limits hold per process", fix=GROUPS_FIX, fatal=False)
        return
    for field, (limit, controller) in _CONTROLLERS.items():
        if not info.get(field):
            yield Missing(
                what=f"the {controller} controller, which enforces {limit}",
                fix=_GROUP_FIX.format(controller),
                fatal=True,
            )
    # Podman would warn of it in each container, and a warning means that a part was left out.
    if not info.get("SwapLimit") and (own is not None or _host_has_swap()):
        yield Missing(
            what="swap accounting: memory_bytes could be exceeded into swap",
            fix="Boot with swapaccount=1, or turn swap off: `swapoff -a`",
            fatal=True,
        )


def _image_gaps(image: Mapping[str, Any] | None, configuration: Mapping[str, Any]) -> Iterator[Missing]:
    if image is None:
        yield Missing(what=f"the image {content.tag()}", fix=f"Run `{SETUP}`.", fatal=True)
    elif configuration.get("Volumes"):
        # A volume is a writable directory of the host's, outside every limit.
        declared = ", ".join(sorted(configuration["Volumes"]))
        yield Missing(
            what=f"an image without volumes ({content.tag()} declares {declared})",
            fix=f"Build it again: `docker rmi {content.tag()} && {SETUP}`",
            fatal=True,
        )


def _limits(info: Mapping[str, Any], groups: bool) -> Mapping[str, str]:
    group = f"cgroup v{info.get('CgroupVersion') or '1'}" if groups else "rlimit"
    return {
        "wall_seconds": "guest and broker",
        "cpu_seconds": "rlimit",
        "processors": group if groups else "none",
        "memory_bytes": group,
        "pids": group,
        "scratch_bytes": "tmpfs",
        "output_bytes": "tmpfs",
        "output_files": "guest and broker",
        "stream_bytes": "broker",
    }


def _version(version: Mapping[str, Any], runtime: Runtime) -> str:
    """Return Engine and runtime: "20.10.24 (runc 1.1.5)"; the Engine knows no version of others than runc."""
    parts = {part.get("Name"): part.get("Version") for part in version.get("Components") or ()}
    if "Podman Engine" in parts:
        return f"Podman {version.get('Version', '')}"
    if runtime != "runc":
        return f"{version.get('Version', '')} ({runtime})"
    words = f" (runc {parts['runc']})" if parts.get("runc") else ""
    return f"{version.get('Version', '')}{words}"


def _host_has_swap() -> bool:
    # The Engine is on this machine (see ``Engine``), so this is its memory too.
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("SwapTotal:"):
            return int(line.split()[1]) > 0
    return False
