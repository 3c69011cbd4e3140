"""What ``glovebox setup`` and ``glovebox environment`` do. Each returns an exit code."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import anyio
from rich.console import Console
from rich.text import Text

from glovebox_audit.printable import printable
from glovebox_sandboxes.contract.base import Driver
from glovebox_sandboxes.contract.spec import DEFAULT
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.plural import counted
from glovebox_sandboxes.runtime import environments, guest_gc, locks, runtime, trial
from glovebox_sandboxes.runtime.environments import Environment, EnvironmentFileError
from glovebox_sandboxes.runtime.packages import RuntimeBuildError
from glovebox_sandboxes.runtime.runtime import Runtime
from glovebox_server import app as apps
from glovebox_server.cli.terminal import new_table, print_json, print_table
from glovebox_server.exits import OK
from glovebox_server.settings import Settings
from glovebox_server.upkeep import environments as keeping

_MIB = 2**20

Tell = Callable[[str], None]


def setup(
    settings: Settings,
    out: Console,
    err: Console,
    *,
    names: tuple[str, ...],
    docker: bool,
    base: str | None,
    as_json: bool,
) -> int:
    """Build what sandboxes need; see ``glovebox setup``."""

    async def make() -> int:
        with _telling(err) as tell:
            chosen = await _chosen(settings, names, tell)
            built = [await runtime.build(settings.data_dir, tell, each) for each in chosen]
            tell("Trying it in a sandbox")
            async with registry.opened(settings.data_dir, f"setup{os.getpid()}") as drivers:
                driver = await drivers.get("bubblewrap")
                await _check_all(driver, chosen, built, err)
            current = [path for each in runtime.every(settings.data_dir).values() for path in each.directories]
            if removed := guest_gc.remove(settings.data_dir, current):
                tell(f"Removed guests and runtimes of other versions: {removed}")
            if docker:
                from glovebox_sandboxes.drivers.docker.image import build  # noqa: PLC0415 - needs the Engine

                for environment in chosen:
                    other = None if environment.name == DEFAULT else environment
                    await build.build(base or build.DEFAULT_BASE, tell, other)
        if as_json:
            ready = {"python": built[0].version, "data_dir": str(settings.data_dir)}
            print_json(out.file, {**ready, "environments": [environment.name for environment in chosen]})
            return OK
        words = f"Ready: Python {built[0].version} in {settings.data_dir}"
        if more := [each.name for each in chosen[1:]]:
            words += f", with {', '.join(more)}: name one in a profile (python.environment) to use it"
        err.print(words, style="green", markup=False, highlight=False)
        return OK

    return anyio.run(make)


async def _check_all(driver: Driver, chosen: Sequence[Environment], built: Sequence[Runtime], err: Console) -> None:
    """Try each environment; every failure but the last is printed, which is raised."""
    failed: list[RuntimeBuildError] = []
    for environment, found in zip(chosen, built, strict=True):
        try:
            await trial.check(driver, found, runtime.base_python(), environment)
        except RuntimeBuildError as problem:
            failed.append(problem)
    for earlier in failed[:-1]:
        err.print(printable(str(earlier)), style="red", markup=False, highlight=False)
    if failed:
        raise failed[-1]


async def _chosen(settings: Settings, names: tuple[str, ...], tell: Tell) -> list[Environment]:
    """The default, and those that are named; where none is, those that were set up before: an upgrade may change them.

    Raises:
        EnvironmentFileError: one that is named cannot be followed.
    """
    own = settings.environments_dir
    chosen = [environments.load(DEFAULT, own)]
    for name in () if names else environments.recorded(settings.data_dir):
        try:
            found = environments.load(name, own)
            found.locked()
            chosen.append(found)
        except EnvironmentFileError as problem:
            tell(printable(f"Left as it is: {problem}"))
    for name in dict.fromkeys(names):
        found = environments.load(name, own)
        if name != DEFAULT:
            if not found.lock.exists():
                await locks.write(found, runtime.base_python(), tell)
            found.locked()
            chosen.append(found)
    return chosen


def show(settings: Settings, out: Console, *, as_json: bool) -> int:
    """Print one line for each environment; see ``glovebox environment list``."""
    listed = keeping.listed(settings, apps.load_profiles(settings))
    if as_json:
        print_json(out.file, {"environments": [asdict(each) for each in listed]})
        return OK
    table = new_table("name", "MiB", "digest", "tools", "from", "state", right=["MiB"])
    for each in listed:
        mib = f"{each.bytes / _MIB:.0f}" if each.bytes else ""
        cells = (each.name, mib, each.digest[:19], ", ".join(each.tools), each.source, each.state)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    print_table(out, table)
    return OK


def update(settings: Settings, out: Console, err: Console, *, name: str, as_json: bool) -> int:
    """Make a lock anew; see ``glovebox environment update``.

    Raises:
        EnvironmentFileError: there is no such environment, or it is not the operator's to lock.
    """
    own = settings.environments_dir
    found = environments.load(name, own)
    if found.shipped:
        fix = f"Copy {found.path} to {own}, under another name if both are to be used, and lock that."
        raise EnvironmentFileError(f"Locking {name}", "it is shipped with its lock", fix)

    async def make() -> int:
        with _telling(err) as tell:
            return await locks.write(found, runtime.base_python(), tell)

    count = anyio.run(make)
    if as_json:
        body = {"name": name, "lock": str(found.lock), "digest": f"sha256:{found.locked()}", "packages": count}
        print_json(out.file, body)
        return OK
    words = f"{found.lock}: {counted(count, 'package')}. Build it: `glovebox setup --environment {name}`."
    out.print(Text(printable(words)))
    return OK


def remove(settings: Settings, out: Console, *, name: str, force: bool, docker: bool, as_json: bool) -> int:
    """Remove what is built; see ``glovebox environment remove``."""
    record = keeping.removable(settings, apps.load_profiles(settings), name, force=force)
    images: list[str] = []
    if docker:
        from glovebox_sandboxes.drivers.docker.image import build  # noqa: PLC0415 - needs the Engine

        images = anyio.run(build.remove, record.lock)
    freed = keeping.remove(settings, name, record)
    if as_json:
        print_json(out.file, {"removed": name, "bytes": freed, "images": images})
        return OK
    more = f", with {counted(len(images), 'image')} of Docker's" if docker else ""
    out.print(Text(printable(f"{name} is removed{more}, {freed / _MIB:.0f} MiB freed; its file and lock stay.")))
    return OK


@contextmanager
def _telling(err: Console) -> Iterator[Tell]:
    """Say what happens now: on one line of a terminal, else line by line."""
    with err.status("Preparing") as status:

        def tell(step: str) -> None:
            status.update(step)
            if not err.is_terminal:
                err.print(step, markup=False, highlight=False)

        yield tell
