"""Kernels run in Triton's interpreter unless there is a GPU. This must be decided before anything imports triton."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("kvq_core.testing")

import torch  # noqa: E402

from kvq_core import registry  # noqa: E402
from kvq_core.evaluation.tiny_model import Config, TinyModel, save_model  # noqa: E402
from kvq_core.testing import places  # noqa: E402 - after the line above, by design

places.choose_interpreter()


@pytest.fixture
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU with the torch path: for what lies before the kernels, behind which the interpreter would only be slow."""
    places.enter("eager", monkeypatch)


@pytest.fixture(params=places.params("eager", "gpu"))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU with the torch path, then the GPU with the kernels, if there is one."""
    return places.enter(request.param, monkeypatch).device


@pytest.fixture(params=places.params("interpret"))
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU with the kernels in Triton's interpreter: slow, so for what only kernels can get wrong."""
    return places.enter(request.param, monkeypatch).device


@pytest.fixture(params=["growing", "fixed"])
def capacity(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What KVQCache is told of its pages: nothing, or how many tokens they must hold."""
    from transformers_families import CAPACITIES

    return CAPACITIES[request.param]


@pytest.fixture(scope="session")
def small_model() -> TinyModel:
    """Random weights of a very small tiny model, scaled to attention that prefers some keys and logits with a clear winner."""
    torch.manual_seed(1)
    model = TinyModel(Config(dim=64, num_layers=2, num_query_heads=4, num_kv_heads=1, hidden=96, max_len=256)).requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter *= 3
    return model


@pytest.fixture(scope="session")
def small_weights(small_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of :func:`small_model`."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_model(small_model, path)
    return path


OFFERED = "from kvq_core.none import NoneBackend\n\nclass Backend(NoneBackend):\n    mode = {mode!r}\n"


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that has loaded nothing yet."""
    monkeypatch.setattr(registry, "_REGISTRY", registry._Registry())
    monkeypatch.delenv("KVQ_BACKENDS", raising=False)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """``install(distribution, mode, source)``: put one distribution offering one mode on ``sys.path``; returns its folder."""
    before = set(sys.modules)

    def install(distribution: str, mode: str, source: str | None = None, *, folder: str = "site", version: str = "1.0") -> Path:
        site = tmp_path / folder
        module = distribution.replace("-", "_")
        info = site / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[kvq.backends]\n{mode} = {module}:Backend\n")
        (site / f"{module}.py").write_text(OFFERED.format(mode=mode) if source is None else source)
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(site)
        invalidate_caches()
        return site

    yield install
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
