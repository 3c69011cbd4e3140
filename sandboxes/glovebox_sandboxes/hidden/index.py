"""Index the secret files of a directory, by name, at every moment, by watching all of its folders.

``_glovebox_guest.workspace.hidden`` defines what is one, as for jobs of our own. Threads walk the tree and read
changes. The event loop only asks whether a change waits to be read. What cannot be watched is not served.
"""

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import anyio.to_thread

from _glovebox_guest.workspace.hidden import Kind, kind_of, may_be_among
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.hidden.paths import FIELD, above, folded, follow, named, shown
from glovebox_sandboxes.host import mounts
from glovebox_sandboxes.host.identity import changes_user

_MOST_KNOWN = 16
"""Sets of revealed paths whose masks are cached: profiles differ in them, and canaries come and go."""
_MOST_BYTES = 3500
"""Of a folder's path, so that names in it and the path of its cover fit into PATH_MAX."""
Found = tuple[tuple[str, tuple[str, ...]], ...]
"""Paths to cover, folders with a trailing slash; each with the paths that reveal it: its own, or those of links to
it."""


class SecretFileGuard:
    """A guard that reports whether one program has been kept from every secret file so far."""

    def __init__(self, index: "SecretFileIndex", revealed: frozenset[str], broke: Callable[[], None]) -> None:
        """Take the revealed paths, and what is called, in any thread, when the guard breaks."""
        self._index = index
        self._revealed = revealed
        self._broke = broke
        self.broken = False
        """A secret file has appeared, or has replaced a covered one."""

    @property
    def holds(self) -> bool:
        """Report whether it certainly holds, without waiting."""
        return self._index.settled and not self.broken

    def tell(self, *paths: str) -> None:
        """Report a secret file by the paths that reveal it; none for what was not seen."""
        if not self.broken and not any(shown(path, self._revealed) for path in paths):
            self.broken = True
            self._broke()


class SecretFileIndex:
    """Secret files of one directory. All except ``settled`` and ``masks`` runs in threads, one at a time."""

    def __init__(self, root: str, changed: Callable[[], None] = lambda: None) -> None:
        """Watch nothing until ``rebuild``. ``changed`` is called, in any thread, when the set changes."""
        self.root = root
        self._changed = changed
        self._mounts = mounts.MountWatch()
        try:
            self.queue = mounts.Inotify()
        except OSError:
            self._mounts.close()
            raise
        self._lock = threading.Lock()
        self._watched: dict[int, set[str]] = {}
        self._numbers: dict[str, int] = {}
        self._below: dict[str, set[str]] = {}
        self._present: dict[str, bool] = {}
        self._links: dict[str, frozenset[str]] = {}
        """Links that are named as secrets, and the names on their ways."""
        self._touched: dict[str, bool] = {}
        """Paths whose links may lead elsewhere by now; True if something may be new there."""
        self._led: dict[str, tuple[str, bool]] = {}
        self._inside: tuple[str, ...] = ()
        self._identity: tuple[int, ...] | None = None
        self._mounted = False
        self._closed = False
        self._guards: set[SecretFileGuard] = set()
        self._found: Found = ()
        self._masks: dict[frozenset[str], tuple[str, ...]] = {}
        self.problem: tuple[str, str] | None = None
        """Why it is unknown, and what to do; None if it is known."""

    @property
    def count(self) -> int:
        """Return the number of such files and folders."""
        return len(self._found)

    @property
    def settled(self) -> bool:
        """Report whether all changes so far are applied. In this order: a reader of changes takes the lock first."""
        # A server that ends closes it under a sandbox that is still being prepared.
        if self._closed:
            return True
        # Engines mount for every container: only mounts in this directory matter.
        if self._mounts.changed() and (self._lock.locked() or self._mounted_here()):
            self._mounted = True
        return not self._mounted and not self.queue.pending and not self._lock.locked()

    @property
    def current(self) -> bool:
        """Report whether it describes the directory that is there now."""
        return self.problem is None and self._identity == mounts.identity(os.stat, self.root)[:2]

    def masks(self, revealed: frozenset[str]) -> tuple[str, ...]:
        """Return what to cover if ``revealed`` is shown. Raises UnsupportedSpecError if unknown, or too much."""
        if self.problem is not None:
            reason, fix = self.problem
            raise UnsupportedSpecError(FIELD, f"secrets in it cannot be hidden from programs: {reason}", fix)
        masks = self._masks  # another one from the moment on that there is more
        if revealed not in masks:
            hidden = {mask: names for mask, names in self._found if not any(shown(name, revealed) for name in names)}
            if "/" in hidden:
                reason = f"the link {named(hidden['/'][-1])} is named as a secret, and leads to all of it, or too far"
                raise UnsupportedSpecError(FIELD, reason, "Remove or rename it, or show it (files.reveal).")
            if len(masks) >= _MOST_KNOWN:
                masks.clear()
            masks[revealed] = folded(hidden)
        return masks[revealed]

    @contextmanager
    def guarding(self, revealed: frozenset[str], broke: Callable[[], None]) -> Iterator[SecretFileGuard]:
        """Guard one program during the block."""
        guard = SecretFileGuard(self, revealed, broke)
        self._guards.add(guard)
        try:
            yield guard
        finally:
            self._guards.discard(guard)

    def rebuild(self) -> None:
        """Start over with the directory that is there now."""
        with self._lock:
            if not self._closed:
                self._rebuild()

    def drain(self) -> None:
        """Apply every change so far."""
        with self._lock:
            if self._closed:
                return
            mounted, self._mounted = self._mounted, False
            if mounted and self._mounted_here():
                self._rebuild()
            for number, mask, name in self.queue.read():
                self._take(number, mask, name)
            self._publish()

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            self._closed = True
            self.queue.close()
            self._mounts.close()

    def _mounted_here(self) -> bool:
        """Return whether the directory, or the mounts below it, differ from those indexed."""
        return (self._identity, self._inside) != (mounts.identity(os.stat, self.root)[:2], mounts.inside(self.root))

    def _rebuild(self) -> None:
        for number in self._watched:
            self.queue.remove(number)
        for known in (self._watched, self._numbers, self._below, self._present, self._links, self._touched, self._led):
            known.clear()
        self.problem = None
        self._identity = mounts.identity(os.stat, self.root)[:2]
        self._inside = mounts.inside(self.root)
        self._tell()
        for path in self._inside:  # a mount hides what lies below, which some sandboxes see
            with suppress(OSError):
                self._keep(path, folder=stat.S_ISDIR(os.lstat(_joined(self.root, path)).st_mode))
        self._scan("")
        self._publish()

    def _publish(self) -> None:
        touched, self._touched = self._touched, {}
        for link, passed in list(self._links.items()) if touched else ():
            if again := touched.keys() & passed:
                self._links[link], target = follow(self.root, link)
                self._lead(link, target, came=any(touched[path] for path in again))
        shown_by: dict[str, tuple[str, ...]] = {}
        for link, (path, is_folder) in self._led.items():
            if path not in self._present:
                mask = f"{path}/" if is_folder else path
                shown_by[mask] = (*shown_by.get(mask, (path,)), link)
        for path, is_folder in self._present.items():
            shown_by[f"{path}/" if is_folder else path] = (path,)
        found = tuple(sorted(shown_by.items()))
        if found != self._found:
            self._found = found
            self._masks = {}
            self._changed()

    def _tell(self, *paths: str) -> None:
        for guard in tuple(self._guards):
            guard.tell(*paths)

    def _take(self, number: int, mask: int, name: str) -> None:
        if mask & mounts.IN_Q_OVERFLOW:
            self._rebuild()
        elif mask & mounts.IN_IGNORED:
            for path in self._watched.pop(number, ()):
                if self._numbers.get(path) == number:
                    del self._numbers[path]
        else:
            for path in sorted(self._watched.get(number, ())):
                if name:
                    self._change(path, name, mask)
                else:
                    self._touch(path, came=False)
                    self._look(above(path), path.rpartition("/")[2])

    def _touch(self, path: str, *, came: bool) -> None:
        self._touched[path] = came or self._touched.get(path, False)

    def _change(self, folder: str, name: str, mask: int) -> None:
        path = _joined(folder, name)
        is_folder = bool(mask & mounts.IN_ISDIR)
        came = bool(mask & (mounts.IN_CREATE | mounts.IN_MOVED_TO))
        self._touch(path, came=came)
        if mask & mounts.IN_ATTRIB:
            # Its owner may have opened what was unreadable before.
            if is_folder and path not in self._numbers and not self._present.get(path):
                self._scan(path)
            elif not is_folder and path not in self._present:
                self._look(folder, name, came=False)
            return
        self._forget(path)
        # When two names are exchanged, the deletion of the second is reported after its new file: it still exists.
        if not came and not os.path.lexists(_joined(self.root, path)):
            return
        if not self._look(folder, name) and (is_folder or not came):
            self._scan(path)

    def _forget(self, path: str) -> None:
        self._below.get(above(path), set()).discard(path)
        waiting = [path]
        while waiting:
            path = waiting.pop()
            waiting += self._below.pop(path, ())
            self._present.pop(path, None)
            self._led.pop(path, None)
            self._links.pop(path, None)
            self._unwatch(path)

    def _watch(self, path: str, mask: int) -> None:
        """Watch a path. Raises OSError."""
        number = self.queue.add(_joined(self.root, path), mask)
        if self._numbers.get(path, number) != number:
            self._unwatch(path)
        self._numbers[path] = number
        self._watched.setdefault(number, set()).add(path)
        self._know(path)

    def _unwatch(self, path: str) -> None:
        number = self._numbers.pop(path, 0)
        paths = self._watched.get(number, set())
        paths.discard(path)
        if number and not paths:  # it may have a name elsewhere
            self._watched.pop(number, None)
            self.queue.remove(number)

    def _know(self, path: str) -> None:
        self._below.setdefault(above(path), set()).add(path)

    def _scan(self, top: str) -> None:
        waiting = [top]
        while waiting and self.problem is None:
            folder = waiting.pop()
            place = _joined(self.root, folder)
            try:
                if folder and (folder in self._inside or _closed(place)):
                    continue
                if len(os.fsencode(place)) > _MOST_BYTES:
                    self._keep(folder, folder=True)
                    continue
                # Watched before it is read: changes in between are reported.
                self._watch(folder, mounts.FOLDER)
                with os.scandir(place) as listed:
                    entries = list(listed)
                doubtful = may_be_among([each.name for each in entries])
                waiting += [
                    _joined(folder, entry.name)
                    for entry in entries
                    if not (doubtful and self._look(folder, entry.name)) and entry.is_dir(follow_symlinks=False)
                ]
            except (FileNotFoundError, NotADirectoryError):
                continue
            except PermissionError:
                if folder:  # a program may know a name in it
                    self._keep(folder, folder=True)
            except OSError as error:
                self._fail(error)

    def _look(self, folder: str, name: str, *, came: bool = True) -> bool:
        """Check one name, keep a secret's, and return whether it is one; a link ``came`` unless it was there."""
        kind = kind_of(name, folder)
        if kind is None:
            return False
        path = _joined(folder, name)
        place = _joined(self.root, path)
        try:
            mode = os.lstat(place).st_mode
            if stat.S_ISLNK(mode):
                self._links.setdefault(path, frozenset({path}))
                self._touch(path, came=came)
                self._know(path)
                return True
            if kind.content is not None and not self._holds(kind, path, mode):
                return False
        except FileNotFoundError:
            self._tell(path)  # gone by now, and of unknown kind
        except OSError as error:
            self._fail(error)
        else:
            self._keep(path, folder=stat.S_ISDIR(mode))
        return True

    def _lead(self, link: str, target: str | None, *, came: bool) -> None:
        """Keep a link's target that is named as a secret; ``came`` if it may have led elsewhere before."""
        kind, before = kind_of(link.rpartition("/")[2], above(link)), self._led.pop(link, None)
        if kind is None:
            return
        try:
            mode = None if target is None else os.lstat(_joined(self.root, target)).st_mode
            if kind.content is not None and (mode is None or not self._holds(kind, target or "", mode)):
                return
        except FileNotFoundError:
            mode = None
        except OSError as error:
            self._fail(error)
            return
        if target is not None and mode is not None:
            self._led[link] = target, stat.S_ISDIR(mode)
        if came or self._led.get(link, before) != before:
            self._tell(*filter(None, (link, target)))

    def _holds(self, kind: Kind, path: str, mode: int) -> bool:
        """Return whether a file's content makes it a secret; watch it before reading. Raises OSError."""
        if not stat.S_ISREG(mode):
            return False
        place = _joined(self.root, path)
        with suppress(PermissionError):  # a sandbox may not read it either
            self._watch(path, mounts.FILE)
        return kind.held_at(place)

    def _keep(self, path: str, *, folder: bool) -> None:
        self._present[path] = folder
        self._know(path)
        self._tell(path)

    def _fail(self, error: OSError) -> None:
        if error.errno == errno.ENOSPC:
            fix = "Raise it: `sysctl fs.inotify.max_user_watches=1048576`; or serve a smaller directory (--workspace)."
            self.problem = "it has more folders than this user may watch", fix
        else:
            where = named(os.path.relpath(error.filename or self.root, self.root))
            fix = "Move it elsewhere, or serve another directory (--workspace)."
            self.problem = f"{where} cannot be watched ({error.strerror})", fix
        self._tell()


class SecretFileIndexes:
    """Indexes of one server: one per served directory, from its first use."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        """Start with none. ``changed`` is called, in any thread, when an index changes."""
        self._changed = changed
        self._indexes: dict[str, SecretFileIndex] = {}
        self._making = anyio.Lock()

    async def of(self, root: str) -> SecretFileIndex:
        """Return the index of a directory as it is now. Raises UnsupportedSpecError if it cannot be indexed."""
        index = self._indexes.get(root)
        if index is None or not index.current:
            async with self._making:
                index = self._indexes.get(root) or self._made(root)
                if not index.current:
                    await anyio.to_thread.run_sync(index.rebuild)
        if not index.settled:
            await anyio.to_thread.run_sync(index.drain)
        return index

    def _made(self, root: str) -> SecretFileIndex:
        try:
            index = self._indexes[root] = SecretFileIndex(root, self._changed)
        except OSError as error:
            fix = "Raise it: `sysctl fs.inotify.max_user_instances=1024`."
            raise UnsupportedSpecError(FIELD, f"it cannot be watched for secrets ({error.strerror})", fix) from error
        self._listen(index)
        return index

    def _listen(self, index: SecretFileIndex) -> None:
        """Have a thread apply changes as they come: the kernel's queue is bounded."""
        loop = asyncio.get_running_loop()

        def comes() -> None:
            loop.remove_reader(index.queue.descriptor)
            loop.run_in_executor(None, index.drain).add_done_callback(lambda _: again())

        def again() -> None:
            if self._indexes.get(index.root) is index:
                loop.add_reader(index.queue.descriptor, comes)

        loop.add_reader(index.queue.descriptor, comes)

    def close(self) -> None:
        """Stop watching."""
        closing, self._indexes = self._indexes, {}
        for index in closing.values():
            asyncio.get_running_loop().remove_reader(index.queue.descriptor)
            index.close()


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name


def _closed(place: str) -> bool:
    """Return whether no sandbox can read a folder, because sandboxes run as another user than the server."""
    return changes_user() and not os.lstat(place).st_mode & stat.S_IXOTH
