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
    "🙂.png",
    "x" * (MAX_SEGMENT_BYTES - 4) + ".csv",
    "/".join(["d"] * (MAX_DEPTH - 1) + ["d.txt"]),
    *(f"report.{kind}" for kind in ["csv", "tsv", "txt", "json", "md", "pdf", "xlsx", "PNG", "jpg", "parquet", "npy"]),
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


WARNED = {
    "git runs": ".git/hooks/pre-commit .GIT/config sub/.Git/config .gıt/config",
    "agents start servers": ".mcp.json .claude/settings.json mcp_config.json",
    "editors run tasks": ".vscode/tasks.json a.code-workspace",
    "agents read it": "CLAUDE.md AmazonQ.md",
    "agents read it as instructions": "AGENT.md a.instructions.md a.mdc",
    "the shell runs": ".envrc .bashrc",
    "hidden": ".anything docs/.hidden/x.txt",
    "test and task runners": "conftest.py",
    "Python runs it at start": "sitecustomize.py usercustomize.py",
    "Python runs lines": "evil.pth",
    "build tools": "Makefile makefile \uff2dakefile package.json main.tf.json CMakePresets.json",
    "JavaScript tools": "vite.config.mjs",
    "build tools run or obey it": "requirements.txt requirements-dev.txt Pipfile pnpm-workspace.yaml gradle.properties "
    "a.kts a.csproj Directory.Build.props BUILD WORKSPACE a.bzl Package.swift Podfile a.gemspec babel.config.json "
    "rust-toolchain go.work mise.toml uv.toml a.cmake Makefile.am ansible.cfg a.tf tsconfig.json",
    "continuous integration": "action.yml",
    "version control": "_darcs/x CVS/Root",
    "container tools": "Dockerfile",
    "import or run": "helper.py",
    "pickle": "model.pkl",
    "macros": "book.xlsm report.xls",
    "browser": "page.HTML",
    "desktop": "start.desktop",
    "short name": "GIT~1/config",
    "command lines": "-rf a/--checkpoint-action=exec.txt ~root",
    "of a kind that is not known to be harmless": " ".join(UNLISTED),
    "what is packed in it was not looked at": "a.zip df.pkl.gz a.npz",
    "shell": "$(id).csv a;b.csv",
}


@pytest.mark.parametrize(("name", "who"), [(name, who) for who, names in WARNED.items() for name in names.split()])
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
    """F1: where case is ignored the second would replace the first. The control: only real collisions, in one call."""
    names = CallNames()
    names.add(first)
    with pytest.raises(RefusedError) as refused:
        names.add(second)
    assert refused.value.rule == "artifacts.name"
    assert "name" in refused.value.reason
    assert "of its own" in refused.value.hint
    names = CallNames()
    for name in ["plots/a.png", "plots/b.png", "Plots/c.png", "a.png", "plots.png"]:
        names.add(name)
    CallNames().add("a.png")
