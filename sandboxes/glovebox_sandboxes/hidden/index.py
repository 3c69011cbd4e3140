"""Knows at every moment which files of a directory are named as secrets are, by watching all of its folders.

What is one says ``_glovebox_guest.workspace.hidden``, as for jobs of our own. Walking and reading changes is done in
threads; on the event loop it is only asked whether a change waits to be read. What cannot be watched is not served.
"""

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import anyio
import anyio.to_thread

from _glovebox_guest.workspace.hidden import Kind, kind_of, may_be_among
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.hidden.covers import FIELD, above, folded, named, shown
from glovebox_sandboxes.hidden.links import Links
from glovebox_sandboxes.host import mounts, watches
from glovebox_sandboxes.host.identity import changes_user

_MOST_KNOWN = 16
"""Sets of paths shown all the same whose masks are kept: profiles differ in them, and canaries come and go."""
_MOST_BYTES = 3500
"""Of a folder's path, for names in it and the path of its cover to be short enough for the kernel (PATH_MAX)."""
Found = tuple[tuple[str, tuple[str, ...]], ...]
"""What is to be covered, folders with a slash at the end; and for each the paths of which one is to be shown for it to
be shown: its own, and where that is not the name of a secret those of links to it."""


class SecretFileGuard:
    """Whether one program has been kept from every such file so far."""

    def __init__(self, index: "SecretFileIndex", revealed: frozenset[str], broke: Callable[[], None]) -> None:
        """Take what is shown to it all the same, and what is called, in any thread, when the answer becomes no."""
        self._index = index
        self._revealed = revealed
        self._broke = broke
        self.broken = False
        """Whether such a file has appeared, or has taken the place of one that was covered."""

    @property
    def holds(self) -> bool:
        """Whether it is sure, without waiting, that it has been."""
        return self._index.settled and not self.broken

    def tell(self, *paths: str) -> None:
        """Hear of such a file, by the paths of which one is to be shown for it to be; none for what was not seen."""
        if not self.broken and not any(shown(path, self._revealed) for path in paths):
            self.broken = True
            self._broke()


class SecretFileIndex:
    """Such files of one directory. All but ``settled`` and ``masks`` is done in threads, one at a time."""

    def __init__(self, root: str, changed: Callable[[], None] = lambda: None) -> None:
        """Watch nothing yet: ``rebuild`` begins. ``changed`` is called, in any thread, when there are others."""
        self._root = root
        self._changed = changed
        self._mounts = watches.MountWatch()
        try:
            self._queue = watches.Inotify()
        except OSError:
            self._mounts.close()
            raise
        self._lock = threading.Lock()
        self._folders: dict[int, str] = {}
        self._files: dict[int, set[str]] = {}
        self._numbers: dict[str, int] = {}
        self._below: dict[str, set[str]] = {}
        self._present: dict[str, bool] = {}
        self._links = Links()
        self._led: dict[str, tuple[str, bool]] = {}
        self._inside: tuple[str, ...] = ()
        self._identity: tuple[int, int] | None = None
        self._mounted = False
        self._closed = False
        self._guards: set[SecretFileGuard] = set()
        self._found: Found = ()
        self._masks: dict[frozenset[str], tuple[Found, tuple[str, ...]]] = {}
        self.problem: tuple[str, str] | None = None
        """Why it cannot be known, and what to do; None where it can."""

    @property
    def root(self) -> str:
        """The directory."""
        return self._root

    @property
    def descriptor(self) -> int:
        """Readable when a change waits."""
        return self._queue.descriptor

    @property
    def count(self) -> int:
        """How many such files and folders there are."""
        return len(self._found)

    @property
    def settled(self) -> bool:
        """Whether every change so far has been taken in. In this order: who reads changes has the lock before."""
        # A server that ends closes it under whoever is still being prepared for.
        if self._closed:
            return True
        # Engines mount for every container: only what is mounted here has to be taken in.
        if self._mounts.changed() and (self._lock.locked() or self._mounted_here()):
            self._mounted = True
        return not self._mounted and not self._queue.pending and not self._lock.locked()

    @property
    def current(self) -> bool:
        """Whether it is of the directory that is there now."""
        return self.problem is None and self._identity == _identity(self._root)

    def masks(self, revealed: frozenset[str]) -> tuple[str, ...]:
        """Return what is to be covered for a program that is shown ``revealed`` all the same; folders end with a slash.

        Raises:
            UnsupportedSpecError: it is not known, or is too much.
        """
        if self.problem is not None:
            reason, fix = self.problem
            raise UnsupportedSpecError(FIELD, f"secrets in it cannot be hidden from programs: {reason}", fix)
        found = self._found
        known = self._masks.get(revealed)
        if known is None or known[0] is not found:
            hidden = {mask: names for mask, names in found if not any(shown(name, revealed) for name in names)}
            if "/" in hidden:
                reason = f"the link {named(hidden['/'][-1])} is named as a secret, and leads to all of it, or too far"
                raise UnsupportedSpecError(FIELD, reason, "Remove or rename it, or show it (files.reveal).")
            masks = folded(hidden)
            if len(self._masks) >= _MOST_KNOWN:
                self._masks.clear()
            known = self._masks[revealed] = found, masks
        return known[1]

    @contextmanager
    def guarding(self, revealed: frozenset[str], broke: Callable[[], None]) -> Iterator[SecretFileGuard]:
        """Guard one program, for the length of the block."""
        guard = SecretFileGuard(self, revealed, broke)
        self._guards.add(guard)
        try:
            yield guard
        finally:
            self._guards.discard(guard)

    def rebuild(self) -> None:
        """Begin anew, with the directory that is there now."""
        with self._lock:
            if not self._closed:
                self._rebuild()

    def drain(self) -> None:
        """Take in every change so far."""
        with self._lock:
            if self._closed:
                return
            mounted, self._mounted = self._mounted, False
            if mounted and self._mounted_here():
                self._rebuild()
            for number, mask, name in self._queue.read():
                self._take(number, mask, name)
            self._publish()

    def close(self) -> None:
        """Watch no more."""
        with self._lock:
            self._closed = True
            self._queue.close()
            self._mounts.close()

    def _mounted_here(self) -> bool:
        """Return whether another directory is there than was taken in, or other mounts are below it."""
        return (self._identity, self._inside) != (_identity(self._root), mounts.inside(self._root))

    def _rebuild(self) -> None:
        for number in (*self._folders, *self._files):
            self._queue.remove(number)
        for each in (self._folders, self._files, self._numbers, self._below, self._present, self._links, self._led):
            each.clear()
        self.problem = None
        self._identity = _identity(self._root)
        self._inside = mounts.inside(self._root)
        self._tell()
        for path in self._inside:  # what is seen there is not what lies below, which some sandboxes have
            with suppress(OSError):
                self._keep(path, folder=stat.S_ISDIR(os.lstat(_joined(self._root, path)).st_mode))
        self._scan("")
        self._publish()

    def _publish(self) -> None:
        """Follow links, once all is watched that they may pass, and say what there is."""
        for link, target, came in self._links.followed(self._root):
            self._lead(link, target, came=came)
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
            self._changed()

    def _tell(self, *paths: str) -> None:
        for guard in tuple(self._guards):
            guard.tell(*paths)

    def _take(self, number: int, mask: int, name: str) -> None:
        if mask & watches.IN_Q_OVERFLOW:
            self._rebuild()
        elif mask & watches.IN_IGNORED:
            for path in (self._folders.pop(number, ""), *self._files.pop(number, ())):
                if self._numbers.get(path) == number:
                    del self._numbers[path]
        elif number in self._files:
            for path in sorted(self._files[number]):
                self._links.changed(path, came=False)
                folder, _, name = path.rpartition("/")
                self._look(folder, name)
        elif number in self._folders and name:
            self._change(self._folders[number], name, mask)

    def _change(self, folder: str, name: str, mask: int) -> None:
        path = _joined(folder, name)
        is_folder = bool(mask & watches.IN_ISDIR)
        came = bool(mask & (watches.IN_CREATE | watches.IN_MOVED_TO))
        self._links.changed(path, came=came)
        if mask & watches.IN_ATTRIB:
            # Its owner may have opened what nobody could look into.
            if is_folder and path not in self._numbers and not self._present.get(path):
                self._scan(path)
            elif not is_folder and path not in self._present:
                self._look(folder, name, came=False)
            return
        self._forget(path)
        # Of two names that are exchanged, the second is told gone after what came there: it is there all the same.
        if not came and not os.path.lexists(_joined(self._root, path)):
            return
        if not self._look(folder, name) and (is_folder or not came):
            self._scan(path)

    def _forget(self, path: str) -> None:
        """Know nothing any more of what had this path, nor of what lay below: it is gone, or is called otherwise."""
        self._below.get(above(path), set()).discard(path)
        waiting = [path]
        while waiting:
            path = waiting.pop()
            waiting += self._below.pop(path, ())
            self._present.pop(path, None)
            self._led.pop(path, None)
            self._links.gone(path)
            self._unwatch(path)

    def _watch(self, path: str, mask: int) -> int:
        """Watch a file or folder by this path; returns the number of its changes. Raises OSError."""
        number = self._queue.add(_joined(self._root, path), mask)
        if self._numbers.get(path, number) != number:
            self._unwatch(path)
        self._numbers[path] = number
        self._know(path)
        return number

    def _unwatch(self, path: str) -> None:
        number = self._numbers.pop(path, None)
        if number is None:
            return
        if self._folders.get(number) == path:
            del self._folders[number]
            self._queue.remove(number)
        elif path in self._files.get(number, ()):
            self._files[number].discard(path)
            if not self._files[number]:  # it may have a name elsewhere
                del self._files[number]
                self._queue.remove(number)

    def _know(self, path: str) -> None:
        self._below.setdefault(above(path), set()).add(path)

    def _scan(self, top: str) -> None:
        waiting = [top]
        while waiting and self.problem is None:
            folder = waiting.pop()
            place = _joined(self._root, folder)
            try:
                if folder and (folder in self._inside or _closed(place)):
                    continue
                if len(os.fsencode(place)) > _MOST_BYTES:
                    self._keep(folder, folder=True)
                    continue
                # Watched before it is read: what comes in between is told.
                self._folders[self._watch(folder, watches.FOLDER)] = folder
                with os.scandir(place) as listed:
                    entries = list(listed)
                names = [each.name for each in entries]
                doubtful = may_be_among(names)
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
        """Look at one name, and keep it if it is that of a secret; returns whether it is.

        A link ``came`` unless it is the one that was there.
        """
        kind = kind_of(name, folder)
        if kind is None:
            return False
        path = _joined(folder, name)
        place = _joined(self._root, path)
        try:
            mode = os.lstat(place).st_mode
            if stat.S_ISLNK(mode):
                self._links.found(path, came=came)
                self._know(path)
                return True
            if kind.content is not None and not self._holds(kind, path, mode):
                return False
        except FileNotFoundError:
            self._tell(path)  # gone by now: whether it was one is not known any more
        except OSError as error:
            self._fail(error)
        else:
            self._keep(path, folder=stat.S_ISDIR(mode))
        return True

    def _lead(self, link: str, target: str | None, *, came: bool) -> None:
        """Keep what a link leads to that is named as a secret; ``came`` where it may have led elsewhere before."""
        kind, before = kind_of(link.rpartition("/")[2], above(link)), self._led.pop(link, None)
        if kind is None:
            return
        try:
            mode = None if target is None else os.lstat(_joined(self._root, target)).st_mode
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
        """Whether a file holds what makes it one; it is watched from before it is looked into. Raises OSError."""
        if not stat.S_ISREG(mode):
            return False
        place = _joined(self._root, path)
        with suppress(PermissionError):  # nor may a sandbox read it then
            self._files.setdefault(self._watch(path, watches.FILE), set()).add(path)
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
            where = named(os.path.relpath(error.filename or self._root, self._root))
            fix = "Move it elsewhere, or serve another directory (--workspace)."
            self.problem = f"{where} cannot be watched ({error.strerror})", fix
        self._tell()


class SecretFileIndexes:
    """The indexes of one server: of each served directory one, from the first time that it is asked for."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        """Have none yet; ``close`` closes them. ``changed`` is called, in any thread, when one has others."""
        self._changed = changed
        self._indexes: dict[str, SecretFileIndex] = {}
        self._making = anyio.Lock()

    async def of(self, root: str) -> SecretFileIndex:
        """Return the index of a directory as it is now.

        Raises:
            UnsupportedSpecError: there cannot be one.
        """
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
        """Have a thread take in changes as they come: the kernel keeps only so many."""
        loop = asyncio.get_running_loop()

        def comes() -> None:
            loop.remove_reader(index.descriptor)
            loop.run_in_executor(None, index.drain).add_done_callback(lambda _: again())

        def again() -> None:
            if self._indexes.get(index.root) is index:
                loop.add_reader(index.descriptor, comes)

        loop.add_reader(index.descriptor, comes)

    def close(self) -> None:
        """Watch no more."""
        loop = asyncio.get_running_loop()
        for index in self._indexes.values():
            loop.remove_reader(index.descriptor)
        closing, self._indexes = self._indexes, {}
        for index in closing.values():
            index.close()


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name


def _closed(place: str) -> bool:
    """Return whether no sandbox can look into a folder, because it is another user than the server."""
    return changes_user() and not os.lstat(place).st_mode & stat.S_IXOTH


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - at each call
    except OSError:
        return None
    return status.st_dev, status.st_ino
