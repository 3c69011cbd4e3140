"""Hides secret files of the workspace from callers, by name. Standard library only.

A list of names as data, each with its content: the list of ``docs/operate/secret-files.csv``, which a test compares.
Case is ignored, and editors' copies count as the file.
"""

from __future__ import annotations

import os
import re
import stat

from _glovebox_guest.stdlib import Iterable, Sequence

MAX_LOOKED = 256 * 1024
"""Bytes of a file whose content decides; a larger one of these names is hidden unread."""

KINDS = {
    "what a program takes from its environment, passwords and keys among it": ".env* *.env",
    "private keys": (
        "id_rsa id_dsa id_ecdsa id_ecdsa_sk id_ed25519 id_ed25519_sk *.key *.ppk *.p8 *.p12 *.pfx *.jks *.keystore "
        "*.kdbx .ssh .gnupg"
    ),
    "a private key": "*.pem *.asc *.crt *.cer",
    "the keys of a cloud account": (
        ".aws/credentials .aws/cli .aws/sso .azure .config/gcloud application_default_credentials.json "
        "credentials.json client_secret*.json service-account*.json service_account*.json .boto .s3cfg rclone.conf"
    ),
    "the keys of a cluster": ".kube/config kubeconfig *.kubeconfig",
    "sign-in to registries": ".docker/config.json .dockercfg containers/auth.json",
    "passwords and tokens of tools": (
        ".netrc _netrc .git-credentials .config/gh/hosts.yml .config/hub .vault-token .pgpass .my.cnf .htpasswd "
        ".cargo/credentials .cargo/credentials.toml .gem/credentials .composer/auth.json .terraformrc "
        "credentials.tfrc.json .databrickscfg"
    ),
    "a password or token of a tool": ".npmrc .yarnrc.yml .pypirc pip.conf .m2/settings.xml gradle.properties",
    "a password in an address": ".git/**/config .git/**/config.worktree",
    "the state of an infrastructure, passwords among it": "*.tfstate *.tfstate.backup",
    "what its name says": "secrets.json secrets.toml secrets.yaml secrets.yml",
    "what an editor keeps of a file that may be any of these": "*.swp *.swo",
    "what was typed, passwords at times": (
        ".bash_history .zsh_history .python_history .node_repl_history .psql_history .mysql_history"
    ),
}
"""The secret, and names of its files. In these ``*`` is any letters, ``/`` follows the folder they lie in, ``/**/`` one
they lie anywhere below."""

CONTENTS = {
    "a private key": rb"PRIVATE KEY",
    "a password or token of a tool": rb"(?i)://[^/\s:@]*:[^/\s@]+@|(?:auth|authtoken|password|passwd|token|secret)\b[\"']?\s*[=:>]\s*[\"']?(?!true|false)[^\s\"'$<]|://[^/\s:@$]{16,}@",
    "a password in an address": rb"(?i)://[^/\s:@]*:[^/\s@]+@|://[^/\s:@]{20,}@|extraheader|(?:password|token)\s*=",
}
"""Content that a file must have to count; of the other kinds the name is enough."""

EXAMPLES = (".example", ".sample", ".template", ".dist")
"""Endings of files that show a format, and hold no secret."""
_COPIES = ("~", ".bak", ".old", ".orig", ".save")
"""Endings of copies by editors and people; Emacs also ``#NAME#`` and ``NAME.~1~``."""

# A FIFO without a writer blocks open(2), and a terminal would become ours.
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Kind:
    """One kind of secret files."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.content = CONTENTS.get(what)
        """Content it must have to be hidden; None where its name is enough."""

    def held_by(self, descriptor: int) -> bool:
        """Return whether an open file is hidden, by its name or also its content. Raises OSError."""
        if self.content is None:
            return True
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        data = os.pread(descriptor, MAX_LOOKED + 1, 0)
        return len(data) > MAX_LOOKED or re.search(self.content, data) is not None

    def held_at(self, place: str) -> bool:
        """Return the same for a path in the sandbox; a file that cannot be opened discloses nothing."""
        if self.content is None:
            return True
        try:
            file = open(place, "rb", 0, opener=lambda name, _: os.open(name, FLAGS))  # noqa: SIM115 - closed below
        except OSError:
            return False
        with file:
            try:
                return self.held_by(file.fileno())
            except OSError:
                return True


# One that is hidden by its name needs no read.
_RANKED = [Kind(what) for what in sorted(KINDS, key=lambda what: what in CONTENTS)]
_NAMES = " ".join(KINDS.values()).split()
_LAST = [name.rpartition("/")[2] for name in _NAMES]
_WHOLE = frozenset(last for last in _LAST if "*" not in last)
_BEGINNINGS = tuple(last.partition("*")[0] for last in _LAST if "*" in last[1:])
_TAILS = frozenset(each[-3:] for each in (*(last for last in _LAST if last[0] == "*"), *_COPIES[1:]))
_ANYWHERE = sorted({each.partition("/**/")[0] for each in _NAMES if "/**/" in each})
_NEAREST = max(each.count("/") for each in _NAMES)
"""Folders above a name that count, besides those of _ANYWHERE."""
_WITHIN = (f"{_COPIES[0]}/", "#/", *(f"/{each}" for each in _BEGINNINGS))


def _expression(names: str) -> str:
    """Return a group that matches a path in lower case if its end is one of these names."""
    found = (re.escape(name).replace(r"/\*\*/", "/(?:.*/)?").replace(r"\*", "[^/]*") for name in names.split())
    return f"((?:.*/)?(?:{'|'.join(found)}))"


_SECRET = "|".join(_expression(KINDS[kind.what]) for kind in _RANKED)


def may_be_among(names: Sequence[str]) -> bool:
    """Return whether any of these names may be secret: a quick check that rules out most folders."""
    text = f"/{'/'.join(names)}/".lower()
    lower = text.split("/")
    return not (
        _WHOLE.isdisjoint(lower)
        and _TAILS.isdisjoint([name[-3:] for name in lower])
        and not any(part in text for part in _WITHIN)
    )


def kind_of(name: str, above: str) -> Kind | None:
    """Return the kind of a name in a folder, None for most names, quickly."""
    if not may_be_among([name]):
        return None
    name = name.lower()
    if name.startswith("#") and name.endswith("#"):
        name = name[1:-1]
    while name.endswith(_COPIES):
        name = name[: -1 if name[-1] == "~" else name.rindex(".")]
        original, _, number = name.rpartition(".~")
        if number.isdigit():
            name = original or name
    if name.endswith(EXAMPLES):
        return None
    folders = above.lower().strip("/").split("/")
    # Not the whole path, over which matching would take quadratic time.
    count = [each for each in _ANYWHERE if each in folders] + folders[-_NEAREST:]
    found = re.fullmatch(_SECRET, "/".join([*count, name]), re.DOTALL)
    return _RANKED[(found.lastindex or 0) - 1] if found else None


class HiddenPaths:
    """The files of the workspace hidden from one call."""

    def __init__(self, revealed: Iterable[str] = ()) -> None:
        """Take paths, relative to the workspace, that are revealed with all below them."""
        self._revealed = frozenset(path.strip("/") for path in revealed)

    def kind(self, names: Sequence[str]) -> Kind | None:
        """Return the kind that hides a path of these names; its content is still to be checked."""
        for at, name in enumerate(names):
            kind = kind_of(name, "/".join(names[:at]))
            if kind is not None and (kind.content is None or at == len(names) - 1):
                return None if self._shows(names) else kind
        return None

    def bars(self, folder: Sequence[str], name: str) -> bool:
        """Return whether the name alone hides an entry, and nothing below it is revealed."""
        kind = kind_of(name, "/".join(folder))
        if kind is None or kind.content is not None or self._shows([*folder, name]):
            return False
        inside = "/".join([*folder, name, ""])
        return not any(path.startswith(inside) for path in self._revealed)

    def hides(self, folder: str, name: str, place: str) -> bool:
        """Return whether an entry of a visible folder is hidden; ``place`` is its path in the sandbox."""
        kind = kind_of(name, folder)
        return kind is not None and not self._shows([*folder.strip("/").split("/"), name]) and kind.held_at(place)

    def _shows(self, names: Sequence[str]) -> bool:
        names = [name for name in names if name]
        return bool(self._revealed) and any("/".join(names[: at + 1]) in self._revealed for at in range(len(names)))
