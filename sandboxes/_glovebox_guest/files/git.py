"""Keeps files that git runs or obeys out of patches. Pure; standard library only.

git takes for a repository any folder named ``.git``, and any other with the parts of one: HEAD beside objects and refs,
or beside commondir, which points to those (``is_git_directory`` in its setup.c). Its config names programs that ``git
status`` runs. A patch may be applied on another system: names are compared without case, and as Windows and macOS may
read them (``is_ntfs_dotgit`` in git's path.c, ``is_hfs_dotgit`` in its utf8.c).
"""

from __future__ import annotations

from _glovebox_guest.stdlib import Iterable, Mapping

_OBEYED = frozenset((".git", ".gitconfig", ".gitmodules", ".hg", ".jj", ".sl", ".svn", ".bzr"))
"""Obeyed whatever their contents: folders of git and similar systems, and git's sources of submodules."""
_MAKING = frozenset(("head", "commondir"))
"""Files without which no folder is a repository, or shares another one's contents."""
_REST = frozenset(("objects", "refs"))
_LAYOUT = _MAKING | _REST
_ENDS = tuple(_LAYOUT)
_REPOSITORY = "git takes its folder for a repository, or may, and runs what its config names"
_ATTRIBUTES = ".gitattributes"
# Short names that Windows may give them; git's path.c has the two that begin with gi7.
_SHORT = {
    **{name[1:]: name for name in _OBEYED if len(name) <= 4},
    "gitmod": ".gitmodules",
    "gi7eba": ".gitmodules",
    "gitatt": _ATTRIBUTES,
    "gi7d29": _ATTRIBUTES,
    "common": "commondir",
}
_HARMLESS = frozenset(
    b"text eol crlf binary whitespace encoding working-tree-encoding ident delta conflict-marker-size".split()
    + b"export-ignore export-subst".split()
)
"""Attributes that run nothing. Any other may be a driver, or a macro that names one: see gitattributes(5)."""
_DRIVERS = frozenset((b"filter", b"diff", b"merge", b"binary"))
"""Attributes that name programs, or unset others: ``binary`` is ``-diff -merge -text``."""
_BLANKS = b" \t\r"
_CONTROLS = frozenset((*range(0x20), 0x7F)) - frozenset(b"\t\r")
"""Controls in a line: no pattern needs them, and git's versions may differ in reading them."""
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


def hands_to_programs(name: str, old: bytes, new: bytes) -> bool:
    """Return whether this is a ``.gitattributes`` whose change may have git run something on files.

    The last line that matches a file decides, so a changed order or a removed line is as good as an added one. New
    lines behind all others, or a file without drivers before and after, can be judged line by line.
    """
    if folded(name).rpartition("/")[2] != _ATTRIBUTES or old == new:
        return False
    before, after = _lines(old), _lines(new)
    if before == after[: len(before)]:
        macros = any(line.lstrip(_BLANKS).startswith(b"[attr]") for line in before)
        return macros or not all(map(_runs_nothing, after[len(before) :]))
    return not all(_runs_nothing(line) and _DRIVERS.isdisjoint(_attributes(line)) for line in (*before, *after))


def _lines(content: bytes) -> list[bytes]:
    # git ends a line at a line feed alone; to it a carriage return is a blank.
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _words(line: bytes) -> list[bytes]:
    # Where bytes.split() and attr.c differ in what is a blank, _runs_nothing takes the line for a driver.
    return line.split()


def _attributes(line: bytes) -> set[bytes]:
    return {word.lstrip(b"-!").partition(b"=")[0] for word in _words(line)[1:]}


def _runs_nothing(line: bytes) -> bool:
    words = _words(line)
    if _CONTROLS.intersection(line):
        return False
    if not words or words[0].startswith(b"#"):
        return True
    # A quoted pattern may hold spaces, and [attr] defines a macro: neither is worth taking apart.
    return not words[0].startswith((b'"', b"[attr]")) and all(map(_harmless, words[1:]))


def _harmless(word: bytes) -> bool:
    attribute, equals, _ = word.lstrip(b"-!").partition(b"=")
    if attribute in (b"diff", b"merge", b"filter"):
        return not equals and (attribute != b"filter" or word.startswith((b"-", b"!")))
    return attribute in _HARMLESS or attribute.startswith(b"linguist-")
