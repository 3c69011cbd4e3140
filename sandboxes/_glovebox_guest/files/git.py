"""Keeps files that git runs or obeys out of patches. Pure; standard library only.

git takes for a repository any folder named ``.git``, and any other with the parts of one: HEAD beside objects and refs,
or beside commondir, which points to those (``is_git_directory`` in its setup.c). Its config names programs that ``git
status`` runs. A patch may be applied on another system: names are compared without case, and as Windows and macOS may
read them (``is_ntfs_dotgit`` in git's path.c, ``is_hfs_dotgit`` in its utf8.c).
"""

from __future__ import annotations

from _glovebox_guest.stdlib import Iterable, Mapping

_OBEYED = frozenset((".git", ".gitattributes", ".gitconfig", ".gitmodules", ".hg", ".jj", ".sl", ".svn", ".bzr"))
"""Folders of git and similar systems, git's sources of submodules, and what has it hand files to programs."""
_MAKING = frozenset(("head", "commondir"))
"""Files without which no folder is a repository, or shares another one's contents."""
_REST = frozenset(("objects", "refs"))
_LAYOUT = _MAKING | _REST
_ENDS = tuple(_LAYOUT)
_REPOSITORY = "git takes its folder for a repository, or may, and runs what its config names"
# Short names that Windows may give them; git's path.c has the two that begin with gi7.
_SHORT = {
    **{name[1:]: name for name in _OBEYED if len(name) <= 4},
    "gitmod": ".gitmodules",
    "gi7eba": ".gitmodules",
    "gitatt": ".gitattributes",
    "gi7d29": ".gitattributes",
    "common": "commondir",
}
# Invisible marks and letters, beside those of category Cf.
_INVISIBLE = frozenset((0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F)) | frozenset(
    (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
)


def folded(name: str) -> str:
    """Return a path as the most lenient file system compares it."""
    return "/".join([_part(part) for part in name.replace("\\", "/").split("/")])


def _part(part: str) -> str:
    part = part.partition(":")[0]
    if not part.isascii():
        import unicodedata

        # Case folding can undo normalization and the reverse, hence twice: Unicode 3.13, D146.
        once = unicodedata.normalize("NFKC", unicodedata.normalize("NFD", part)).upper().casefold()
        part = "".join(
            each
            for each in unicodedata.normalize("NFKC", once)
            if unicodedata.category(each) != "Cf" and ord(each) not in _INVISIBLE
        )
    part = part.casefold().rstrip(" .")
    stem, tilde, number = part.rpartition("~")
    return _SHORT.get(stem, part) if tilde and number.isdigit() else part


def layout(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the folders among these paths that hold parts of a git repository, and which; folded."""
    found: dict[str, set[str]] = {}
    for name in names:
        # Most names need no closer look.
        if name.isascii() and "~" not in name and ":" not in name and not name.rstrip(" .").lower().endswith(_ENDS):
            continue
        folder, _, last = folded(name).rpartition("/")
        if last in _LAYOUT:
            found.setdefault(folder, set()).add(last)
    return found


def why_not(name: str, found: Mapping[str, set[str]]) -> str:
    """Return why a patch may not change this path; empty where it may.

    Two patches may be applied independently: none carries the file that makes a folder a repository, and none carries
    the rest to where that file lies. ``found`` is the ``layout`` of the workspace before and now.
    """
    parts = folded(name).split("/")
    if not _OBEYED.isdisjoint(parts):
        return "git runs or obeys what lies there"
    if parts[-1] in _MAKING:
        return _REPOSITORY
    for end, part in enumerate(parts):
        has = found.get("/".join(parts[:end]), set())
        if not _MAKING.isdisjoint(has) and part in _REST:
            return _REPOSITORY
        if "head" in has and ("commondir" in has or has >= _REST):
            return _REPOSITORY
    return ""
