"""Every error kvq raises on purpose. Bad input is always a ``ValueError`` (or a subclass)."""

import reprlib


def described(value: object) -> str:
    """What came, for an error: its type and no more of it than fits. Waits for no device."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__ == "builtins" or name in ("torch.dtype", "torch.device"):
        return reprlib.repr(value)
    try:
        shape = getattr(value, "shape", None)
    except RuntimeError:  # of a nested tensor
        return name
    return f"{name} of shape {tuple(shape)}" if isinstance(shape, tuple) else f"{name} {reprlib.repr(value)}"


class KVQError(ValueError):
    """Base class: bad input to kvq. Also a :class:`ValueError`, so callers need not import it."""


class ArgumentError(KVQError):
    """One argument is wrong.

    The message always has the same three parts, in this order: the argument's name, what came, what is needed.
    """

    def __init__(self, argument: str, got: object, need: str) -> None:
        self.argument, self.got, self.need = argument, got, need
        super().__init__(f"{argument}: got {got}, need {need}")


class UnknownModeError(KVQError):
    """No installed package provides the mode asked for."""


class DuplicateModeError(KVQError):
    """Two distributions provide the same mode and nothing says which one to take."""


class BrokenBackendError(KVQError):
    """A mode's package is installed but its backend cannot be imported or does not fit the contract."""


class OutOfBlocksError(KVQError):
    """The paged cache has too few free blocks for what was asked; nothing was handed out."""


class SnapshotError(KVQError):
    """A saved cache does not fit: wrong format version, wrong mode, wrong geometry, or a damaged file."""


class PlanTableError(KVQError):
    """A table of launch plans cannot be used: not JSON, of another format, or a field of it is wrong.

    The message names the file, the field, what it holds and what is needed.
    """

    def __init__(self, source: str, field: str, got: object, need: str) -> None:
        self.source, self.field, self.got, self.need = source, field, got, need
        super().__init__(f"{source}: {field}: got {got!r}, need {need}")


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether memory ran out, of a device or the host: torch, its CPU allocator, CUDA and Triton raise different types."""
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return isinstance(problem, RuntimeError) and any(said in str(problem) for said in ("out of memory", "can't allocate memory"))


def told(problem: BaseException) -> str:
    """An exception of other people's code in words: its type, and what it says if it can say it."""
    try:
        return f"{type(problem).__name__}: {problem}"
    except Exception:
        return type(problem).__name__
