"""``glovebox environment``, ``setup`` and ``clean``: what is built on this machine, and what goes."""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import anyio
import click

from glovebox_audit.printable import printable
from glovebox_sandboxes.contract.base import DEFAULT
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.plural import counted
from glovebox_sandboxes.runtime import environments, guest_gc, packages, runtime, trial
from glovebox_sandboxes.runtime.environments import Environment
from glovebox_server import app as apps
from glovebox_server.cli.groups import LazyGroup
from glovebox_server.cli.options import command, complete_environment, emit, err
from glovebox_server.cli.terminal import table_of
from glovebox_server.secret_files import prepare_state
from glovebox_server.settings import Settings
from glovebox_server.upkeep import keeping
from glovebox_server.upkeep.log import audit_log, retention

_MIB = 2**20
_IMAGE = "glovebox_sandboxes.drivers.docker.image.build"
Tell = Callable[[str], None]


@click.group(cls=LazyGroup)
def environment() -> None:
    """Python packages for programs: named sets, locked by hash. `glovebox setup --environment` builds."""


@command("list", environment, opens="settings")
def environment_list(settings: Settings) -> None:
    """Each with its state, size, digest and the tools that have it."""
    listed = keeping.listed(settings, apps.load_profiles(settings))
    rows = []
    for each in listed:
        size = f"{each.bytes / _MIB:.0f}" if each.bytes else ""
        rows.append((each.name, size, each.digest[:19], each.tools, each.source, each.state))
    table = table_of(["name", "MiB", "digest", "tools", "from", "state"], rows, right=["MiB"])
    emit({"environments": [asdict(each) for each in listed]}, table)


@command("update", environment, opens="settings")
@click.argument("name", shell_complete=complete_environment)
def environment_update(settings: Settings, name: str) -> None:
    """Lock the newest versions that its file allows; build nothing."""
    own = settings.environments_dir
    found = environments.load(name, own)
    if found.shipped:
        fix = f"Copy {found.path} to {own}, under another name if both are to be used, and lock that."
        raise MisnamedError(f"Locking {name}", "it is shipped with its lock", fix)

    async def make() -> int:
        with _show_steps() as tell:
            return await packages.write_lock(found, runtime.base_python(), tell)

    count = anyio.run(make)
    words = f"{found.lock}: {counted(count, 'package')}. Build it: `glovebox setup --environment {name}`."
    fields = {"name": name, "lock": str(found.lock), "digest": f"sha256:{found.locked()}", "packages": count}
    emit(fields, printable(words))


@command("remove", environment, opens="settings")
@click.argument("name", shell_complete=complete_environment)
@click.option("--force", is_flag=True, help="Also where a profile names it; then no server starts with that profile.")
@click.option("--docker", is_flag=True, help="Also the Docker Engine's images of it, which others may use too.")
def environment_remove(settings: Settings, name: str, force: bool, docker: bool) -> None:
    """Remove what is built of an environment; its file and lock stay."""
    record = keeping.removable(settings, apps.load_profiles(settings), name, force=force)
    images: list[str] = []
    if docker:
        build = importlib.import_module(_IMAGE)  # needs the Engine
        images = anyio.run(build.remove, record.lock)
    freed = keeping.remove(settings, name, record)
    more = f", with {counted(len(images), 'image')} of Docker's" if docker else ""
    told = printable(f"{name} is removed{more}, {freed / _MIB:.0f} MiB freed; its file and lock stay.")
    emit({"removed": name, "bytes": freed, "images": images}, told)


async def _chosen(settings: Settings, names: tuple[str, ...], tell: Tell) -> list[Environment]:
    """Return the default and the named ones; without names, those set up before, as an upgrade may change them.

    Raises MisnamedError if a named one cannot be followed.
    """
    own = settings.environments_dir
    chosen = [environments.load(DEFAULT, own)]
    for name in dict.fromkeys(names or environments.recorded(settings.data_dir)):
        try:
            found = environments.load(name, own)
            if name == DEFAULT:
                continue
            if names and not found.lock.exists():
                await packages.write_lock(found, runtime.base_python(), tell)
            found.locked()
            chosen.append(found)
        except MisnamedError as problem:
            if names:
                raise
            tell(printable(f"Left as it is: {problem}"))
    return chosen


@contextmanager
def _show_steps() -> Iterator[Tell]:
    """Print the current step: on one line of a terminal, else line by line."""
    with err.status("Preparing") as status:

        def tell(step: str) -> None:
            status.update(step)
            if not err.is_terminal:
                err.print(step)

        yield tell


@command("setup", opens="settings")
@click.option("--docker", is_flag=True, help="Build the docker driver's image too.")
@click.option("--base", help="Image to build it from: CPython 3.11 or newer, glibc (python:3.12-slim).")
@click.option("--environment", "names", multiple=True, shell_complete=complete_environment, help="Build this one too.")
def setup(settings: Settings, docker: bool, base: str | None, names: tuple[str, ...]) -> None:
    """Build the sandboxes' Python: once, and after an upgrade."""

    async def make() -> None:
        with _show_steps() as tell:
            chosen = await _chosen(settings, names, tell)
            built = [await runtime.build(settings.data_dir, tell, each) for each in chosen]
            tell("Trying it in a sandbox")
            async with registry.opened(settings.data_dir, f"setup{os.getpid()}") as drivers:
                driver = await drivers.get("bubblewrap")
                for environment, found in zip(chosen, built, strict=True):
                    await trial.check(driver, found, runtime.base_python(), environment)
            current = [path for each in runtime.every(settings.data_dir).values() for path in each.directories]
            if removed := guest_gc.remove(settings.data_dir, current):
                tell(f"Removed guests and runtimes of other versions: {removed}")
            if docker:
                build = importlib.import_module(_IMAGE)  # needs the Engine
                for environment in chosen:
                    other = None if environment.name == DEFAULT else environment
                    await build.build(base or build.DEFAULT_BASE, tell, other)
        ready = {"python": built[0].version, "data_dir": str(settings.data_dir)}
        words = f"Ready: Python {built[0].version} in {settings.data_dir}"
        if more := [each.name for each in chosen[1:]]:
            words += f", with {', '.join(more)}: name one in a profile (python.environment) to use it"
        if not emit({**ready, "environments": [environment.name for environment in chosen]}):
            err.print(words, style="green")

    anyio.run(make)


@command("clean")
@click.option("--dry-run", is_flag=True, help="Show it, and remove nothing.")
def clean(settings: Settings, dry_run: bool) -> None:
    """Remove expired artifacts and leftovers of dead servers.

    And segments of the audit log that retention no longer keeps.
    """
    if settings.state_dir.exists():
        prepare_state(settings.state_dir)  # a directory that another user may fill is not searched
    kept = retention(settings)
    items = keeping.look(settings, kept) if dry_run else keeping.clean(settings, kept, partial(audit_log, settings))
    total = sum(item.bytes for item in items)
    rows = [(each.kind, each.name, each.bytes, each.why) for each in items]
    table = table_of(["kind", "name", "bytes", "why"], rows, right=["bytes"])
    words = f"{counted(len(items), 'item')}, {counted(total, 'byte')}, {'would be ' * dry_run}removed."
    emit({"removed": not dry_run, "bytes": total, "items": [asdict(item) for item in items]}, table, words)
