"""A mode and the options of its cache in one spelling: ``int2:residual_length=64,sink_tokens=4``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvq_core.errors import ArgumentError
from kvq_core.registry import get_backend, list_backends
from kvq_core.residual.window import ResidualWindow
from kvq_core.smoothing.calibration import CALIBRATED, FIRST_PREFILL, KEY_BIAS, ROTARY_ORDERED, WEIGHTS, ModelSmoothing

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend
    from kvq_core.evaluation.subject import Passage, Subject


NOTHING: Final = "none"
_KINDS: Final = (NOTHING, WEIGHTS, KEY_BIAS, FIRST_PREFILL, *CALIBRATED)


@dataclass(frozen=True)
class Option:
    """A keyword of the cache: how its value is spelled. ``parse`` raises ``ValueError`` for what it does not take."""

    name: str
    parse: Callable[[str], Any]
    takes: str


def _smoothing(text: str) -> str:
    if text not in _KINDS and not Path(text).is_file():
        raise ValueError(text)
    return text


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


SMOOTHING: Final = Option("smoothing", _smoothing, f"{', '.join(_KINDS)}, or a file that ModelSmoothing.save wrote")
RESIDUAL_LENGTH: Final = Option("residual_length", _count, "a number of tokens: the newest, which are kept exact")
SINK_TOKENS: Final = Option("sink_tokens", _count, "a number of tokens: the first, which are kept exact")
RESIDUAL_MODE: Final = Option("residual_mode", str, "a mode: what exact rows are kept in")
_BLOCK_SIZE: Final = 16
"""Of the caches that subjects make."""
OPTIONS: Final = {option.name: option for option in (SMOOTHING, RESIDUAL_LENGTH, SINK_TOKENS, RESIDUAL_MODE)}


@dataclass(frozen=True)
class CacheConfig:
    """A mode with the options of its cache, as they were spelled. ``cache_arguments`` makes them the cache's keyword arguments."""

    backend: QuantKVBackend
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The mode's full name with the options, by which results are named."""
        spelled = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.backend.mode}:{spelled}" if spelled else self.backend.mode

    @property
    def digest(self) -> str:
        """Of who provides the modes, in which version, and of the contents of a smoothing file, which the label leaves open."""
        halves = [half for mode in (self.backend, self.exact_backend) for half in (mode.key_half, mode.value_half)]
        offers = [(o.distribution, o.version) for o in list_backends() if o.mode in {half.mode for half in halves}]
        digest = sha256(repr(([(type(half).__module__, type(half).__qualname__) for half in halves], offers)).encode())
        smoothing = self.options.get(SMOOTHING.name, NOTHING)
        if smoothing not in _KINDS:
            digest.update(Path(smoothing).read_bytes())
        return digest.hexdigest()[:16]

    @property
    def shares_mean(self) -> bool:
        """Whether what is read side by side has a part in one mean of the keys."""
        return bool(self.options.get(SMOOTHING.name) == FIRST_PREFILL)

    def with_default(self, name: str, value: Any) -> CacheConfig:
        """This one, with an option that it does not set itself."""
        return replace(self, options={name: value, **self.options})

    @property
    def exact_backend(self) -> QuantKVBackend:
        """The mode of exact rows."""
        return get_backend(self.options.get(RESIDUAL_MODE.name, NOTHING))

    @property
    def window(self) -> ResidualWindow | None:
        """Of exact rows, as asked for."""
        length, sinks = (self.options.get(option.name, 0) for option in (RESIDUAL_LENGTH, SINK_TOKENS))
        return ResidualWindow.of(length, sinks, _BLOCK_SIZE, self.exact_backend.mode)

    def exact_tokens(self, context: int) -> int:
        """Slots of exact rows that a sequence of ``context`` tokens has beside its packed pages."""
        window = self.window
        if window is None or not window.serves(self.backend.mode):
            return 0
        return min(window.blocks_per_sequence, -(-context // window.block_size)) * window.block_size


def split_modes(text: str) -> list[str]:
    """Modes in a list with commas; ``name=value`` belongs to the mode before it."""
    found: list[str] = []
    for part in map(str.strip, text.split(",")):
        before, equals, _ = part.partition("=")
        if equals and ":" not in before and found and "=" in found[-1]:
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    return found


def parse_mode(text: str) -> CacheConfig:
    """``MODE[:name=value,...]`` as a mode and options in the order of ``OPTIONS``. MODE is what :func:`~kvq_core.get_backend` takes.

    Raises:
        ArgumentError: an option that is not known or given twice, or a value that it does not take.
        KVQError: as :func:`~kvq_core.get_backend`.
    """
    before, equals, _ = text.partition("=")
    mode, colon, first = before.rpartition(":")
    if not equals:
        if colon and first in OPTIONS:
            raise ArgumentError("--mode", repr(text), f"a value: {mode}:{first}=..., {OPTIONS[first].takes}")
        return CacheConfig(get_backend(text))
    if not mode:
        raise ArgumentError("--mode", repr(text), "MODE:name=value, such as int4:smoothing=first_prefill")
    options: dict[str, Any] = {}
    for part in text[len(mode) + 1 :].split(","):
        name, equals, value = map(str.strip, part.partition("="))
        if name not in OPTIONS or not equals:
            raise ArgumentError("--mode", f"{text!r} with option {part!r}", f"name=value, the name one of {', '.join(OPTIONS)}")
        if name in options:
            raise ArgumentError("--mode", f"{text!r}, {name} twice", "each option once")
        try:
            options[name] = OPTIONS[name].parse(value)
        except ValueError:
            raise ArgumentError(f"--mode, {name}", repr(value), OPTIONS[name].takes) from None
    config = CacheConfig(get_backend(mode), {name: options[name] for name in OPTIONS if name in options})
    window = config.window
    if window is not None and not window.serves(config.backend.mode):
        raise ArgumentError("--mode", f"{text!r}: rows are as exact without", "a mode whose rows are less exact than its exact rows")
    return config


def check_supported(config: CacheConfig, subject: Subject) -> None:
    """Refuse options that the cache of ``subject`` has no keyword for, and an order of channels where the mode takes none.

    Raises:
        ArgumentError: there is one.
    """
    for name in config.options:
        if name not in subject.cache_keywords:
            raise ArgumentError("--mode", f"{config.label}: {name} is not supported by {subject.cache_name}", "an option that it has")
    if config.options.get(SMOOTHING.name) == ROTARY_ORDERED and not config.backend.key_half.order_multiple:
        raise ArgumentError("--mode", config.label, f"another smoothing: mode {config.backend.mode} takes no order of channels")


def cache_arguments(configs: Sequence[CacheConfig], subject: Subject, calibration: Passage) -> list[dict[str, Any]]:
    """The cache's keyword arguments for each of ``configs``. A smoothing from ``calibration`` is estimated once."""
    known: dict[str, Any] = {NOTHING: None, **{kind: kind for kind in (WEIGHTS, KEY_BIAS, FIRST_PREFILL)}}

    def smoothing(kind: str) -> Any:
        if kind not in known:
            if kind in CALIBRATED:
                known[kind] = subject.calibrate(calibration, kind)
            else:
                known[kind] = ModelSmoothing.load(kind, device=subject.device)
        return known[kind]

    return [{name: smoothing(value) if name == SMOOTHING.name else value for name, value in c.options.items()} for c in configs]
