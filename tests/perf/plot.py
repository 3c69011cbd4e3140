"""The picture of a run, drawn by Glovebox itself: one ``run_python`` call with the numbers, and the file it writes."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mcp_types as types
from tests.perf import clients
from tests.perf.clients import Setup

NAME = "performance.png"
#: What is drawn beside the bare interpreter: everything that was timed as a whole call or as a program.
SHOWN = (
    "bare", "print", "docker", "gvisor", "cold-bubblewrap", "cold-docker", "cold-gvisor", "bare-pandas", "pandas",
    "docker-run", "sandbox-runtime", "llm-sandbox", "mcp-run-python",
)  # fmt: skip
_CODE = """
import json
import matplotlib
matplotlib.use("Agg")
from matplotlib import pyplot as plot

series = json.loads({data!r})
names = list(reversed(series))
figure, axes = plot.subplots(figsize=(9, 0.42 * len(names) + 1.3))
for height, name in enumerate(names):
    each = series[name]
    colour = "#888888" if name.startswith("bare") else "#c4552d" if each["peer"] else "#1f6f8b"
    axes.plot([each["p50"], each["p99"]], [height, height], color=colour, linewidth=1.2)
    axes.plot([each["p95"]], [height], "|", color=colour, markersize=9)
    axes.plot([each["p50"]], [height], "o", color=colour, markersize=6)
    shown = "%g" % float("%.3g" % each["p50"])
    axes.annotate(shown, (each["p50"], height), xytext=(0, 6), textcoords="offset points",
                  ha="center", fontsize=7, color=colour)
for name in ("bare", "bare-pandas"):
    if name in series:
        axes.axvline(series[name]["p50"], color="#888888", linewidth=0.7, linestyle=":")
axes.set_xscale("log")
axes.xaxis.set_major_formatter("{{x:g}}")
axes.xaxis.set_minor_formatter("")
axes.set_yticks(range(len(names)), names)
axes.set_ylim(-0.7, len(names) - 0.2)
axes.set_xlabel("ms, whole call: p50 (dot), p95 (bar), p99 (end of line)")
axes.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
figure.savefig("/output/{name}", dpi=130)
plot.close(figure)
"""


def program(report: Mapping[str, Any], peers: tuple[str, ...]) -> str:
    """The program that draws; empty where there is nothing to draw."""
    series = report["series"]
    data = {
        key: {**{name: series[key][name] for name in ("p50", "p95", "p99")}, "peer": key in peers}
        for key in SHOWN
        if key in series
    }
    return _CODE.format(data=json.dumps(data), name=NAME) if data else ""


async def drawn(report: Mapping[str, Any], peers: tuple[str, ...], directory: Path) -> bytes | None:
    """The picture, as PNG; None where there is nothing to draw."""
    code = program(report, peers)
    if not code:
        return None
    workspace = directory / "workspace"
    workspace.mkdir(exist_ok=True, mode=0o755)
    async with clients.over_stdio(Setup(directory=directory / "plot", workspace=workspace)) as client:
        found = await clients.answered(client, "run_python", {"code": code}, "bubblewrap")
        uri = next(each["uri"] for each in found["artifacts"] if each["name"] == NAME)
        content = (await client.read_resource(uri)).contents[0]
    if not isinstance(content, types.BlobResourceContents):
        raise TypeError("the picture is no picture")
    return base64.b64decode(content.blob)
