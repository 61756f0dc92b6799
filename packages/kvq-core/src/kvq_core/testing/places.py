"""Where a test runs: eagerly on the CPU, through Triton's interpreter on the CPU, or compiled on a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvq_core.environment import check_interpreter
from kvq_core.testing.interpret.speedup import speed_up

NAMES = ("eager", "interpret", "gpu")


@dataclass(frozen=True)
class Place:
    """``name`` is ``eager``, ``interpret`` or ``gpu``."""

    name: str

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.name == "gpu" else "cpu")

    @property
    def kernels(self) -> bool:
        """Whether the Triton kernels run here, rather than the torch path."""
        return self.name != "eager"

    def unit_roundoff(self, dtype: torch.dtype) -> float:
        """The largest relative error of a conversion to ``dtype`` here: half the distance from 1 to the next number.

        Triton's interpreter (3.7) truncates to bfloat16, where hardware rounds: twice that.
        """
        half = torch.finfo(dtype).eps / 2
        return 2 * half if self.name == "interpret" and dtype == torch.bfloat16 else half

    @property
    def examples(self) -> int:
        """How many random examples a property is tried on. On a GPU each is a new kernel to compile, some seconds."""
        return {"eager": 30, "interpret": 6, "gpu": 8}[self.name]

    @property
    def scenarios(self) -> int:
        """How many scenarios the suite fuzzes a mode with."""
        return {"eager": 40, "interpret": 34, "gpu": 32}[self.name]

    @property
    def same_kernels(self) -> int:
        """How many scenarios after another share what kernels are compiled for."""
        return 16 if self.name == "gpu" else 1


def choose_interpreter() -> None:
    """Have kernels interpreted unless there is a GPU. Call it before anything imports triton, whose own functions decide at import.

    The knob stays set where :func:`enter` takes the variable away, so that kernels first imported there are interpreted later, too.

    Raises:
        ArgumentError: numpy is none that the interpreter of this Triton takes.
    """
    if not torch.cuda.is_available():
        check_interpreter()
        os.environ["TRITON_INTERPRET"] = "1"
        import triton

        triton.knobs.runtime.interpret = True
        speed_up()


def params(*names: str) -> list[Any]:
    """The pytest parameters of the places named (none: all)."""
    return [pytest.param(name, marks=pytest.mark.gpu if name == "gpu" else ()) for name in names or NAMES]


def each(cases: tuple[Any, ...], large: tuple[Any, ...] = (), quick: tuple[Any, ...] = (), names: tuple[str, ...] = NAMES) -> Any:
    """Parametrize ``place`` and ``case``: every case in every place, the large ones on the GPU only; ``quick`` ones get that marker."""
    pairs = []
    for name in names:
        for case in cases + (large if name == "gpu" else ()):
            marks = [pytest.mark.gpu] if name == "gpu" else [pytest.mark.quick] if case in quick else []
            pairs.append(pytest.param(name, case, marks=marks, id=f"{name}-{case}"))
    return pytest.mark.parametrize(("place", "case"), pairs, indirect=["place"])


def enter(name: str, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Make this process's doors take the path of place ``name`` for one test; skip the test where that is impossible."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if name == "gpu" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if name == "gpu" and interpreting:
        pytest.skip("TRITON_INTERPRET=1 is set: kernels of this process are interpreted")
    if name == "interpret" and not interpreting:
        pytest.skip("TRITON_INTERPRET=1 is not set: kernels of this process are compiled")
    if name == "eager":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("KVQ_DEBUG", raising=False)
    return Place(name)
