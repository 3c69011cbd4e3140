"""Checks relative file names from a sandbox, and the paths in its patches: refuses some, and warns of others.

A name is a label in a record, never a path on the host: the store files content under its hash. The rules make a later
copy to a real folder safe on Linux, macOS and Windows. Must never be imported here: what touches a disk.

A patch without the form of ``diff_form``, in which an overlay writes it, is marked as a whole, as paths may be missed;
any word of its lines that may name a path is checked. A patch is never applied here; ``git apply`` writes each path
into a real folder. Pure: no I/O.
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import Final

from glovebox_audit.printable import UNSEEN
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.artifacts.diff_form import FILES, LONGEST, WorkBudget, read_patch, unescaped

MAX_NAME_BYTES: Final = 512
"""UTF-8 bytes of a whole name: an eighth of Linux's PATH_MAX, so a destination still fits before it."""
MAX_SEGMENT_BYTES: Final = 140
"""UTF-8 bytes between two slashes: ext4 and APFS stop at 255, some encrypted folders at 143."""
MAX_DEPTH: Final = 8
"""Segments in a name: plenty for results, too few for a tree that makes a later copy slow."""
MAX_QUOTED: Final = 60
"""Characters of a hostile name that an error message repeats."""

# Names that look the same must be the same: so variation selectors of emoji are refused too.
_INVISIBLE: Final = UNSEEN | {0xFE0E, 0xFE0F}
_REFUSED_CATEGORIES: Final = {
    "Cc": "a control character",
    "Cf": "an invisible formatting or text-direction character",
    "Cn": "a character Unicode has not assigned",
    "Co": "a private-use character",
    "Cs": "half of a surrogate pair",
    "Zl": "a line separator",
    "Zp": "a paragraph separator",
}
# https://learn.microsoft.com/windows/win32/fileio/naming-a-file: reserved with any extension; ¹²³ are digits too.
_WINDOWS_DEVICE: Final = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|clock\$|(?:com|lpt)[0-9¹²³])", re.IGNORECASE)
_WINDOWS_CHARACTERS: Final = frozenset('<>:"|?*')
_HINT: Final = "Write the file under a plain relative name such as plots/result.png."


def _by_name(text: str) -> dict[str, str]:
    """Return the reason of each name. A reason begins a line; indented lines continue its names."""
    found = re.findall(r"^(\S.*?): (.*(?:\n    .*)*)", text, re.MULTILINE)
    return {name: reason for reason, names in found for name in names.split()}


CODE: Final = "it is code that a program may import or run"
"""Of a source file that came alone, and not of one among the files of a patch."""
UNKNOWN: Final = "it is of a kind that is not known to be harmless: programs may run or obey it"
"""Of a name with no other reason, and not of the files of a patch: all of a patch is reviewed."""
_INSTRUCTIONS: Final = "agents read it as instructions"
_BUILD: Final = "build tools run or obey it"

# Whole segments, case-folded. The reason names the program that loads it: a reviewer can check it. Only folders and
# names with an ending of ``_INERT`` are needed; the others are marked anyway.
_LOADED_BY_NAME: Final = _by_name(f"""
git runs or obeys what lies there: .git .gitattributes .gitmodules .gitconfig .husky .githooks .lfsconfig
git may take its folder for a repository, and run what its config names: head commondir
git runs it as a hook: applypatch-msg pre-applypatch post-applypatch pre-commit prepare-commit-msg commit-msg
    post-commit pre-merge-commit pre-rebase post-rewrite post-checkout post-merge pre-push pre-receive post-receive
    post-update push-to-checkout pre-auto-gc reference-transaction fsmonitor-watchman sendemail-validate
    .pre-commit-config.yaml .pre-commit-hooks.yaml lefthook.yml lefthook.yaml
version control runs or obeys what lies there: .hg .hgrc .jj .sl .svn .bzr _darcs cvs .fossil-settings
editors run tasks and settings from it: .vscode .idea .devcontainer .editorconfig .vim .zed .fleet .dir-locals.el .exrc
    .nvim.lua
agents start servers or take orders from it: .mcp.json mcp.json .claude .cursor .codex .gemini .windsurf .cursorrules
    skill.md .clinerules .roo .roorules .continue .windsurfrules .kiro .junie .agents .aider.conf.yml .goosehints
    .opencode opencode.json crush.json mcp_config.json mcp-config.json mcp_settings.json cline_mcp_settings.json
    hooks.json opencode.jsonc gemini-extension.json plugin.json settings.local.json
{_INSTRUCTIONS}: claude.md claude.local.md agents.md agents.override.md gemini.md qwen.md copilot-instructions.md
    claude_desktop_config.json warp.md conventions.md agent.md codex.md opencode.md amazonq.md crush.md replit.md
    iflow.md grok.md codebuddy.md devin.md knowledge.md system_prompt.md llms.txt soul.md tools.md identity.md
    heartbeat.md memory.md memory-bank
the shell runs it on entering: .envrc .bashrc .profile .zshrc .bash_profile .zshenv
programs take their environment from it: .env
Python runs it at start: sitecustomize.py usercustomize.py pyvenv.cfg python311._pth
test and task runners import it: conftest.py noxfile.py fabfile.py dodo.py tasks.py
{_BUILD}: makefile gnumakefile justfile taskfile.yml taskfile.yaml setup.py setup.cfg pyproject.toml tox.ini pytest.ini
    cmakelists.txt meson.build configure sconstruct build.rs cargo.toml .cargo package.json gruntfile.js gulpfile.js
    rakefile gemfile build.gradle build.gradle.kts settings.gradle gradlew mvnw settings.gradle.kts pom.xml build.sbt
    mix.exs composer.json binding.gyp deno.json bunfig.toml .npmrc .yarnrc.yml .pnpmfile.cjs pip.conf flake.nix
    default.nix shell.nix build.bazel module.bazel workspace.bazel wscript snakefile earthfile tiltfile brewfile
    requirements.txt pipfile uv.toml pnpm-workspace.yaml gradle.properties init.gradle directory.build.props
    directory.build.targets babel.config.json package.swift podfile go.work mise.toml .mise.toml .tool-versions
    rust-toolchain rust-toolchain.toml makefile.am makefile.in configure.ac ansible.cfg tsconfig.json nuget.config
    lerna.json nx.json turbo.json npm-shrinkwrap.json package-lock.json cmakepresets.json cmakeuserpresets.json
    angular.json rush.json workspace.json project.json wrangler.json biome.json tslint.json jsconfig.json nodemon.json
    lefthook.json devbox.json cdk.json dub.json global.json meson_options.txt entry_points.txt constraints.txt
    conanfile.txt build.ninja
continuous integration runs it: .github .gitlab-ci.yml .gitlab .circleci .travis.yml jenkinsfile .drone.yml
    azure-pipelines.yml azure-pipelines.yaml bitbucket-pipelines.yml .buildkite .gitea .woodpecker .woodpecker.yml
    .forgejo appveyor.yml .appveyor.yml cloudbuild.yaml action.yml action.yaml buildspec.yml .cirrus.yml netlify.toml
    vercel.json cloudbuild.json copilot-setup-steps.yml
container tools run or obey it: dockerfile containerfile vagrantfile docker-compose.yml docker-compose.yaml compose.yml
    compose.yaml procfile compose.override.yml compose.override.yaml docker-compose.override.yml docker-bake.json
it lets others in, or runs at set times: authorized_keys crontab
the desktop acts on it when a folder is opened: autorun.inf desktop.ini
""")  # noqa: S608 - no query
# Case-folded endings of ordinary output that nothing runs. A name needs one of them to have no mark: the
# kinds that programs obey are too many to be listed.
_INERT: Final = _by_name("""
nothing runs or obeys it: .csv .tsv .txt .log .json .jsonl .ndjson .geojson .md .pdf .xlsx .docx .pptx .parquet .feather
    .arrow .npy .sqlite .png .jpg .jpeg .gif .webp .patch .diff
""")
# Endings of names that some program runs, imports or installs.
_RUN_BY_ENDING: Final = _by_name(f"""
Python runs lines of it at start: .pth ._pth
it is compiled code, which cannot be read and a program may import or run: .pyc .pyo .pyd .so .dylib .class .wasm .node
{CODE}: .py .pyw .js .cjs .mjs .ts .rb .pl .php .lua .sh .bash .zsh .fish .r .rprofile .mk
Windows runs it on a double click: .exe .dll .com .scr .bat .cmd .ps1 .psm1 .vbs .vbe .hta .msi .msp .msix .appx
    .application .reg .lnk .url .scf .wsf .jse .cpl .chm .inf .iso .vhd .vhdx .library-ms
the desktop starts programs from it: .desktop .service .appimage .command .app .webloc .jnlp .scpt .workflow .terminal
    .mobileconfig
it installs or runs code: .whl .egg .jar .war .deb .rpm .apk .dmg .pkg .vsix .run .gem .nupkg .snap .flatpakref .crx
    .xpi
editors run tasks and settings from it: .code-workspace
{_BUILD}: .kts .bzl .gemspec .cmake .tf .podspec .csproj .fsproj .vbproj .vcxproj
{_INSTRUCTIONS}: .mdc
loading it runs code (pickle): .pkl .pickle .joblib .pt .ckpt .dill .rds .rdata .rda .p .pck
it can hold macros: .xlsm .xlsb .xltm .docm .dotm .pptm .xla .xlam .xll .odb .xls .doc .ppt .xlt .dot .pot .pps .ppam
    .ppsm .potm .mdb .accdb .ods .odt .odp
what is packed in it was not looked at: .zip .tar .gz .tgz .bz2 .xz .zst .7z .rar .npz
it holds code and active output: .ipynb
a browser runs scripts in it: .html .htm .xhtml .shtml .mht .mhtml .svg .svgz
""")
# As ``_LOADED_BY_NAME``, but only for last segments: folders often have such names.
_LOADED_AS_FILE: Final = (
    (re.compile(r".+\.config\.(?:c|m)?(?:js|ts)"), "JavaScript tools run *.config.js files"),
    (re.compile(r".+\.(?:instructions|prompt|chatmode|agent)\.md"), _INSTRUCTIONS),
    (re.compile(r"build|buck|workspace|(?:.+[-_.])?requirements(?:[-_.].*)?\.txt"), _BUILD),
    (re.compile(r"tsconfig\..*json|.+\.(?:tf|pkr|nomad)\.json"), _BUILD),
)
_SHORT_NAME: Final = re.compile(r"[^.]{1,6}~[0-9]+(?:\..{0,3})?")
_SHELL_CHARACTERS: Final = frozenset("$`;&!'{}[]#%^=")


def quoted(name: str) -> str:
    """Return a hostile name, even with lone surrogates, as bounded printable ASCII for messages and logs."""
    escaped = ascii(name[:MAX_QUOTED])
    return escaped if len(name) <= MAX_QUOTED else f"{escaped}…"


def _refused(name: str, reason: str, hint: str = _HINT) -> RefusedError:
    return RefusedError("artifacts.name", f"The output file {quoted(name)} was not kept: {reason}.", hint)


def check_name(name: str) -> None:
    """Raise if a name from a sandbox is not a safe path relative to ``/output``.

    Raises RefusedError: rule ``artifacts.name``, with the reason and how to name the file.
    """
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:  # before what costs more time per character
        raise _refused(name, f"its name is longer than {MAX_NAME_BYTES} bytes")
    for character in name:
        if what := _REFUSED_CATEGORIES.get(unicodedata.category(character)):
            raise _refused(name, f"its name contains {what}")
        if ord(character) in _INVISIBLE or (character.isspace() and character != " "):
            raise _refused(name, "its name contains an invisible character or an unusual space")
        if character == "\\" or character in _WINDOWS_CHARACTERS:
            raise _refused(name, f"its name contains {character}, which is special on some systems")
    if unicodedata.normalize("NFC", name) != name:
        fix = 'Use the composed spelling: unicodedata.normalize("NFC", name).'
        raise _refused(name, "its name is not in Unicode normal form NFC", fix)
    segments = name.split("/")
    if len(segments) > MAX_DEPTH:
        raise _refused(name, f"it lies deeper than {MAX_DEPTH} folders")
    for segment in segments:
        _check_segment(name, segment)


def _check_segment(name: str, segment: str) -> None:
    for unsafe, why in (
        (segment == "", "its name is empty, absolute, or has an empty part between slashes"),
        (segment in {".", ".."}, "its name contains . or .. as a part"),
        (len(segment.encode()) > MAX_SEGMENT_BYTES, f"a part of its name is longer than {MAX_SEGMENT_BYTES} bytes"),
        (
            segment.strip(" ") != segment or segment.endswith("."),
            "a part of its name begins or ends with a space, or ends with a dot",
        ),
        (_WINDOWS_DEVICE.fullmatch(segment.split(".", 1)[0].rstrip(" ")), "a part of its name is a device on Windows"),
    ):
        if unsafe:
            raise _refused(name, why)


def name_risks(name: str) -> tuple[str, ...]:
    """Return why a file of this accepted name must not reach a real folder unseen; may be empty."""
    return tuple(f"{quoted(segment)}: {reason}" for reason, segment in reasons(name).items())


def reasons(name: str) -> dict[str, str]:
    """Return each reason against putting a file of this path into a real folder, with its first segment."""
    # File systems that ignore case may treat compatibility forms alike too: check the folded name.
    segments = _folded(name).split("/")
    last = segments[-1]
    ending = "." + last.rsplit(".", 1)[-1] if "." in last else ""
    told = [(reason, segment) for segment in segments for reason in _of_segment(segment)]
    told += [(_RUN_BY_ENDING[ending], ending)] if ending in _RUN_BY_ENDING else []
    told += [(reason, last) for pattern, reason in _LOADED_AS_FILE if pattern.fullmatch(last)]
    if not told and ending not in _INERT:
        told.append((UNKNOWN, ending or last))
    if any(character in _SHELL_CHARACTERS for character in name):
        told.append(("its name contains characters that a shell interprets", last))
    found: dict[str, str] = {}
    for reason, segment in told:
        found.setdefault(reason, segment)
    return found


def _of_segment(segment: str) -> Iterator[str]:
    if reason := _LOADED_BY_NAME.get(segment):
        yield reason
    elif segment.startswith("."):
        yield "it is hidden, and programs load hidden files without being asked"
    if segment.startswith(("-", "~")):
        yield f"it begins with {segment[0]}, which command lines read as an instruction"
    if _SHORT_NAME.fullmatch(segment):
        yield "it may be the short name of another file on Windows"


def _folded(name: str) -> str:
    # Case folding can undo normalization and the reverse, hence twice: Unicode 3.13, D146.
    # Upper case first: some file systems compare that, and only there the dotless i is an I.
    once = unicodedata.normalize("NFKC", unicodedata.normalize("NFD", name)).upper().casefold()
    return unicodedata.normalize("NFKC", once).casefold()


class CallNames:
    """The distinct names of one call's files. Bounded by the call's file limit."""

    __slots__ = ("_is_file",)

    def __init__(self) -> None:
        self._is_file: dict[str, bool] = {}
        """By name; False for a folder."""

    def add(self, name: str) -> None:
        """Add an accepted name.

        Raises RefusedError: rule ``artifacts.name``; an earlier file of this call has the same name, at most in other
        case or compatibility form, or one name is both a file and a folder.
        """
        parts = _folded(name).split("/")
        *folders, key = ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
        fix = "Give each file of a call a name of its own."
        if self._is_file.get(key):
            raise _refused(name, "an earlier file of this call has this name, at most spelled differently", fix)
        if key in self._is_file or any(map(self._is_file.get, folders)):
            raise _refused(name, "this call uses the same name for a file and for a folder", fix)
        self._is_file |= {**dict.fromkeys(folders, False), key: True}


ENDINGS: Final = (".patch", ".diff")
MAX_NAMES: Final = 5
"""Paths listed for one reason; the rest are counted."""
# In units of ``WorkBudget``. Checking a line takes as long as a hundred bytes of a longer one.
_BYTE_COST: Final = 6
_LINE_END_COST: Final = 128
_SIGN_COST: Final = 32
_NAME_COST: Final = 3072
_CHARACTER_COST: Final = 192
_REST: Final = "it was not read in full: not all of its paths were looked at"
_CHANGES: Final = "it changes files when it is applied"
_UNREAD: Final = "it cannot be read in full: look at what it makes"
_RUNS: Final = "it may be run as a program"
_LINK: Final = "it makes a symbolic link or a submodule"
# patch(1) strips blanks and X before a line. A line of a file starts with a sign, and binary parts have no spaces.
_LINE: Final = re.compile(
    rb"^[ \tX]*+(?:- [ \tX]*+)*+"
    rb"(?:(?:(?:diff --git|\+\+\+|---|\*\*\*|(?:rename|copy) (?:from|to|old|new)) |Index:)(?P<names>.+)"
    rb"|(?:new|new file) mode (?P<mode>.*))",
    re.MULTILINE,
)


class _Marks:
    """The first paths and their number, by reason."""

    def __init__(self, budget: WorkBudget) -> None:
        self._budget = budget
        self._found: dict[str, tuple[list[str], int]] = {}
        self._last = ""

    def look_at(self, path: str, *more: str) -> bool:
        """Note the reasons of a path; return False if the budget is spent."""
        if path != self._last and not self._budget.spend(_NAME_COST + _CHARACTER_COST * len(path)):
            return False
        new = reasons(path).keys() - {CODE, UNKNOWN} if path != self._last else ()
        self._last = path
        for reason in (*new, *more):
            names, count = self._found.get(reason, ([], 0))
            self._found[reason] = ([*names, quoted(path)][:MAX_NAMES], count + 1)
        return True

    def look_for(self, patch: bytes) -> bool:
        """Note the paths that any line names; return False if the budget is spent."""
        for found in _LINE.finditer(patch):
            names = found["names"] or b""
            if not self._budget.spend(_NAME_COST + _CHARACTER_COST * min(len(names), LONGEST)):
                return False
            if (mode := found["mode"]) is not None and (mode := mode.rstrip(b"\r")) != FILES[0]:
                self.look_at(self._last, _RUNS if mode == FILES[1] else _LINK)
            # No name or ending that is marked has blanks, so words have the reasons of a path with blanks.
            line = unescaped(names) if len(names) <= LONGEST else b""
            for word in re.split(r'[\s"]+', line.decode("utf-8", "replace")):
                path = word[2:] if word.startswith(("a/", "b/")) else word
                if path not in {"", "/dev/null"} and not self.look_at(path):
                    return False
        return True

    def told(self) -> tuple[str, ...]:
        """Return a sentence for each reason."""
        return tuple(
            f"it touches {', '.join(names)}{f' and {count - len(names)} more' * (count > len(names))}: {reason}"
            for reason, (names, count) in self._found.items()
        )


def patch_risks(patch: bytes | None, budget: WorkBudget) -> tuple[str, ...]:
    """Return one sentence for each reason to review a patch; None is one that is too large to be read.

    ``budget`` is shared by all patches of a call.
    """
    if patch == b"":
        return ()
    if patch is None or not budget.spend(
        _BYTE_COST * len(patch) + _LINE_END_COST * patch.count(b"\n") + _SIGN_COST * patch.count(b"- ")
    ):
        return _REST, _CHANGES
    marks = _Marks(budget)
    try:
        for name, head, _ in read_patch(patch, budget):
            runs = FILES[1] in head.group("mode", "changed")
            if not marks.look_at(name, *[_RUNS] * runs):
                return *marks.told(), _REST, _CHANGES
    except ValueError:
        marks = _Marks(budget)
        unread = _UNREAD if marks.look_for(patch) else _REST
        return *marks.told(), unread, _CHANGES
    return *marks.told(), _CHANGES
