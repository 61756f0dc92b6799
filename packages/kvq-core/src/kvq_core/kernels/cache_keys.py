"""Keys of compiled kernels on disk that are the same in every process.

Triton computes a jit function's key when it first needs it, and leaves out the global constants of functions that it calls and whose keys
were not known yet (``DependenciesFinder._update_hash``, Triton 3.6). So a process that needs keys in another order finds none of the
kernels that this one compiled.
"""

from triton import knobs
from triton.runtime.jit import JITCallable

_SETTLED: set[int] = set()


def settle(function: object) -> None:
    """Have the keys of what ``function`` calls computed before its own. What is no jit function has none, nor what is interpreted."""
    if not isinstance(function, JITCallable) or id(function) in _SETTLED or knobs.runtime.interpret:
        return
    _SETTLED.add(id(function))
    for name in function.fn.__code__.co_names:
        settle(function.fn.__globals__.get(name))
    _ = function.cache_key
