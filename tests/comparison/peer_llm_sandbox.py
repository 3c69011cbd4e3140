"""Runs one program in llm-sandbox, with that library's own Python: a job on standard input, a result on output."""

import json
import sys

from llm_sandbox import SandboxSession  # type: ignore[import-not-found]

job = json.loads(sys.stdin.readline())
result = {"stdout": "", "stderr": "", "code": 0, "problem": ""}
try:
    with SandboxSession(
        lang="python",
        image=job["image"],
        keep_template=True,
        skip_environment_setup=True,
        execution_timeout=job["seconds"],
        runtime_configs=job["settings"],
    ) as session:
        found = session.run(job["code"])
        result |= {"stdout": found.stdout, "stderr": found.stderr, "code": found.exit_code}
except Exception as problem:  # noqa: BLE001 - whatever it says is what is shown
    result["problem"] = f"{type(problem).__name__}: {problem}"
sys.stdout.write(json.dumps(result) + "\n")
