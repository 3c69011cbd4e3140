"""Runs programs in llm-sandbox, with that library's own Python: a job a line on standard input, a result on output.

The first job is a whole session; with ``pool`` it makes so many containers, which all later jobs take turns in.
"""

import json
import sys
from typing import Any

from llm_sandbox import SandboxSession  # type: ignore[import-not-found]


def ran(code: str, **settings: Any) -> None:
    """Run a program in a session, and say what came of it."""
    result = {"stdout": "", "stderr": "", "code": 0, "problem": ""}
    try:
        with SandboxSession(lang="python", execution_timeout=job["seconds"], **settings) as session:
            found = session.run(code)
            result |= {"stdout": found.stdout, "stderr": found.stderr, "code": found.exit_code}
    except Exception as problem:  # noqa: BLE001 - whatever it says is what is shown
        result["problem"] = f"{type(problem).__name__}: {problem}"
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


job = json.loads(sys.stdin.readline())
made = {
    "image": job["image"], "keep_template": True, "skip_environment_setup": True, "runtime_configs": job["settings"],
}  # fmt: skip
if "pool" not in job:
    ran(job["code"], **made)
    sys.exit()

from llm_sandbox.pool import PoolConfig, create_pool_manager  # type: ignore[import-not-found]  # noqa: E402

sized = PoolConfig(max_pool_size=job["pool"], min_pool_size=job["pool"])
with create_pool_manager(backend="docker", config=sized, lang="python", **made) as pool:
    for line in sys.stdin:
        ran(json.loads(line)["code"], pool=pool)
