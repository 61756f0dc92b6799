"""Keys of compiled kernels on disk that are the same in every process.

Triton computes a jit function's key when it first needs it, and leaves out the global constants of functions that it calls and whose keys
were not known yet (``DependenciesFinder._update_hash``, Triton 3.6). So a process that needs keys in another order finds none of the
kernels that this one compiled.
"""

import threading

from triton import knobs
from triton.runtime.jit import JITCallable

_SETTLED: dict[int, JITCallable] = {}
"""By identity: their hashes are made of their keys. Kept, so that no other function comes to have the identity of one that is gone."""
_SETTLING = threading.RLock()
"""Another thread must not find a function here before the keys of what it calls are known."""


def settle(function: object) -> None:
    """Have the keys of what ``function`` calls computed before its own. What is no jit function has none, nor what is interpreted."""
    if not isinstance(function, JITCallable) or knobs.runtime.interpret:
        return
    with _SETTLING:
        if id(function) in _SETTLED:
            return
        _SETTLED[id(function)] = function
        for name in function.fn.__code__.co_names:
            settle(function.fn.__globals__.get(name))
        _ = function.cache_key
