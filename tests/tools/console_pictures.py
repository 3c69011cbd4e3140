"""``python -m tests.tools.console_pictures DIRECTORY``: pictures of the console, which shows real calls."""

import shutil
import subprocess  # noqa: TID251 - commands as a person types them
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from tests.perf.machine import ROOT

GLOVEBOX = str(ROOT / ".venv/bin/glovebox")
PORT = "8329"
POLICY = """version = 1
default = "analyst"
[roles.analyst]
tools = ["run_python", "read_workspace_file", "fetch_url"]
[[roles.analyst.approval]]
name = "programs"
tool = "run_python"
[[example]]
principal = "local:0"
call = { tool = "run_python", arguments = { code = "1" } }
expect = "ask"
"""
PROGRAM = """import pandas as pd

sales = pd.read_csv("/workspace/sales.csv")
top = sales.groupby("region")["amount"].sum().nlargest(3)
print(top)  # for the weekly report
"""
SECONDS = 15


def main() -> None:
    """Make calls, and take the pictures."""
    there = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch, "sales")
        project.mkdir()
        shutil.copy(ROOT / "examples/sales.csv", project)
        state = ["--state-dir", f"{scratch}/state", "--workspace", str(project)]

        def call(tool: str, *words: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen([GLOVEBOX, "call", tool, *words, *state], stdout=subprocess.DEVNULL)

        call("run_python", "--code", "import pandas; print(pandas.read_csv('/workspace/sales.csv').describe())").wait()
        call("read_workspace_file", "--args", '{"path": "sales.csv"}').wait()
        call("fetch_url", "--args", '{"url": "https://pastebin.example/upload"}').wait()
        Path(scratch, "policy.toml").write_text(POLICY)
        asking = call("run_python", "--code", PROGRAM, "--policy", f"{scratch}/policy.toml")
        running = call("run_python", "--code", f"import time; time.sleep({SECONDS})")
        console = subprocess.Popen([GLOVEBOX, "console", "--port", PORT, *state[:2]], stderr=subprocess.DEVNULL)
        time.sleep(4)
        link = subprocess.check_output(
            [GLOVEBOX, "console", "link", "--name", "anna", "--role", "operator", "--port", PORT, *state[:2]], text=True
        )
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1000, "height": 640}, device_scale_factor=1)
            page.goto(link.strip())
            page.get_by_role("button").click()
            page.wait_for_url("**/now")
            take(page, there)
            browser.close()
        for each in (console, running, asking):
            each.terminate()
            each.wait()


def take(page: Page, there: Path) -> None:
    """Write each page's picture."""
    base = page.url.rpartition("/")[0]
    for name in ("now", "waiting", "history"):
        page.goto(f"{base}/{name}")
        page.screenshot(path=there / f"console-{name}.png")
    page.get_by_role("link", name="c_").last.click()
    page.get_by_text("is signed, for this call").wait_for()
    page.screenshot(path=there / "console-call.png")


if __name__ == "__main__":
    main()
