"""What kvq tells vLLM's log once."""

from __future__ import annotations

import logging
from functools import cache


@cache
def warn_once(message: str) -> None:
    """A warning, at its first call in a process."""
    logging.getLogger("vllm.kvq").warning(message)
