"""Names of output files: which are refused, which are kept with a warning, and what the caller is told."""

import pytest

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.artifacts.names import (
    MAX_DEPTH,
    MAX_NAME_BYTES,
    MAX_SEGMENT_BYTES,
    CallNames,
    check_name,
    name_risks,
)

ORDINARY = [
    "result.csv",
    "plots/a.png",
    "Umsätze 2026/Köln (1).xlsx",
    "図/結果.json",
    "a-b_c+d,e@f~.txt",
    "x" * (MAX_SEGMENT_BYTES - 4) + ".csv",
    "/".join(["d"] * (MAX_DEPTH - 1) + ["d.txt"]),
    *(f"report.{kind}" for kind in ("csv", "tsv", "txt", "json", "md", "pdf", "xlsx", "PNG", "jpg", "parquet", "npy")),
    "🙂.png",
]


UNLISTED = [
    "no-extension", "x" * MAX_SEGMENT_BYTES, "/".join(["d"] * MAX_DEPTH), "Kbuild", "tags", "x.ninja", "x.rake", "x.nf",
    "nginx.conf", "x.cgi", "x.jsx", "weights.bin", "x.h5", "go.mod", "a.csv.1", "Makefile.local", "x.xml",
    "lefthook.toml",
]  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_name_is_kept_without_a_warning(name: str) -> None:
    """Control run for every refusal below."""
    check_name(name)
    assert name_risks(name) == ()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("a//b", "empty part"),
        ("a/", "empty part"),
        ("..", ". or .."),
        ("../x", ". or .."),
        ("a/../../x", ". or .."),
        ("./x", ". or .."),
        ("a\\..\\b", "special on some systems"),
        ("C:x", "special on some systems"),
        ("a.txt:stream", "special on some systems"),
        ("what?.txt", "special on some systems"),
        ("a\nb", "control character"),
        ("a\0b", "control character"),
        ("a\x1b[2Jb", "control character"),
        ("a\x7fb", "control character"),
        ("invoice\u202egpj.exe", "text-direction"),
        ("a\u200bb", "invisible formatting"),
        ("a\ufeffb", "invisible formatting"),
        ("a\u3164b", "invisible character"),
        *((f"a{each}b", "invisible character") for each in "\u2d7f\U0001107f\U00016fe4\U0001d159"),
        ("a\ufe0fb", "invisible character"),
        ("a\u00a0b", "unusual space"),
        ("a\u2028b", "line separator"),
        ("a\ud800b", "half of a surrogate pair"),
        ("a\ue000b", "private-use"),
        ("a\u0378b", "not assigned"),
        ("u\u0308.txt", "normal form NFC"),
        ("nul", "device on Windows"),
        ("plots/COM1.txt", "device on Windows"),
        ("com¹", "device on Windows"),
        ("aux .log", "device on Windows"),
        ("a.", "ends with a dot"),
        ("a. /b", "ends with a space"),
        (" a", "begins or ends with a space"),
        ("x" * (MAX_SEGMENT_BYTES + 1), f"longer than {MAX_SEGMENT_BYTES} bytes"),
        ("ä" * (MAX_SEGMENT_BYTES // 2 + 1), f"longer than {MAX_SEGMENT_BYTES} bytes"),
        ("x/" * 10_000_000, f"longer than {MAX_NAME_BYTES} bytes"),
        ("/".join(["d" * 90] * 6), f"longer than {MAX_NAME_BYTES} bytes"),
        ("/".join(["ä" * 40] * 7), f"longer than {MAX_NAME_BYTES} bytes"),
        ("/".join(["d"] * (MAX_DEPTH + 1)), f"deeper than {MAX_DEPTH} folders"),
    ],
)
def test_an_unsafe_name_is_refused_with_its_reason(name: str, reason: str) -> None:
    """F6, F10: whatever a later copy or a shell would stumble over does not become a name."""
    with pytest.raises(RefusedError, match="was not kept") as refused:
        check_name(name)
    assert refused.value.rule == "artifacts.name"
    assert reason in refused.value.reason
    assert refused.value.hint
    assert len(refused.value.reason) < 1000
    assert refused.value.reason.isprintable()


def test_the_refusal_of_a_decomposed_name_says_the_fix() -> None:
    """A model on macOS data meets this first: the hint is the code that fixes it."""
    with pytest.raises(RefusedError) as refused:
        check_name("Ko\u0308ln.csv")
    assert 'unicodedata.normalize("NFC", name)' in refused.value.hint


@pytest.mark.parametrize(
    ("name", "who"),
    [
        (".git/hooks/pre-commit", "git runs"),
        (".GIT/config", "git runs"),
        ("sub/.Git/config", "git runs"),
        (".mcp.json", "agents start servers"),
        (".vscode/tasks.json", "editors run tasks"),
        (".claude/settings.json", "agents start servers"),
        ("CLAUDE.md", "agents read it"),
        (".envrc", "the shell runs"),
        (".bashrc", "the shell runs"),
        (".anything", "hidden"),
        ("docs/.hidden/x.txt", "hidden"),
        ("conftest.py", "test and task runners"),
        ("sitecustomize.py", "Python runs it at start"),
        ("usercustomize.py", "Python runs it at start"),
        ("evil.pth", "Python runs lines"),
        ("Makefile", "build tools"),
        ("makefile", "build tools"),
        ("\uff2dakefile", "build tools"),
        (".gıt/config", "git runs"),
        ("package.json", "build tools"),
        ("vite.config.mjs", "JavaScript tools"),
        *(
            (name, "build tools run or obey it")
            for name in (
                "requirements.txt",
                "requirements-dev.txt",
                "Pipfile",
                "pnpm-workspace.yaml",
                "gradle.properties",
                "a.kts",
                "a.csproj",
                "Directory.Build.props",
                "BUILD",
                "WORKSPACE",
                "a.bzl",
                "Package.swift",
                "Podfile",
                "a.gemspec",
                "babel.config.json",
                "rust-toolchain",
                "go.work",
                "mise.toml",
                "uv.toml",
                "a.cmake",
                "Makefile.am",
                "ansible.cfg",
                "a.tf",
                "tsconfig.json",
            )
        ),
        *((name, "agents read it as instructions") for name in ("AGENT.md", "a.instructions.md", "a.mdc")),
        ("a.code-workspace", "editors run tasks"),
        ("action.yml", "continuous integration"),
        ("_darcs/x", "version control"),
        ("CVS/Root", "version control"),
        ("Dockerfile", "container tools"),
        ("helper.py", "import or run"),
        ("model.pkl", "pickle"),
        ("book.xlsm", "macros"),
        ("page.HTML", "browser"),
        ("start.desktop", "desktop"),
        ("GIT~1/config", "short name"),
        ("-rf", "command lines"),
        ("a/--checkpoint-action=exec.txt", "command lines"),
        ("~root", "command lines"),
        *((name, "of a kind that is not known to be harmless") for name in UNLISTED),
        *((name, "what is packed in it was not looked at") for name in ("a.zip", "df.pkl.gz", "a.npz")),
        ("main.tf.json", "build tools"),
        ("CMakePresets.json", "build tools"),
        ("AmazonQ.md", "agents read it"),
        ("mcp_config.json", "agents start servers"),
        ("report.xls", "macros"),
        ("$(id).csv", "shell"),
        ("a;b.csv", "shell"),
    ],
)
def test_a_name_that_the_host_may_run_is_kept_with_a_warning(name: str, who: str) -> None:
    """F5: such a file stays in quarantine under its hash; the reason says who would load it."""
    check_name(name)
    assert any(who in risk for risk in name_risks(name)), name_risks(name)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a.txt", "a.txt"),
        ("a.txt", "A.TXT"),
        ("straße", "STRASSE"),
        ("ﬁle", "file"),
        ("fıle", "FILE"),
        ("K.txt", "k.txt"),
        ("plots/a", "Plots/A"),
        ("a", "a/b"),
        ("A/b", "a"),
    ],
)
def test_two_names_that_are_one_file_somewhere_are_refused(first: str, second: str) -> None:
    """F1: on a file system that ignores case the second would silently replace the first."""
    names = CallNames()
    names.add(first)
    with pytest.raises(RefusedError) as refused:
        names.add(second)
    assert refused.value.rule == "artifacts.name"
    assert "name" in refused.value.reason
    assert "of its own" in refused.value.hint


def test_different_names_in_one_folder_do_not_collide() -> None:
    """Control run: only real collisions are refused, and calls do not see each other's names."""
    names = CallNames()
    for name in ["plots/a.png", "plots/b.png", "Plots/c.png", "a.png", "plots.png"]:
        names.add(name)
    CallNames().add("a.png")
