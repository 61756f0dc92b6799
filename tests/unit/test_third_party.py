"""What a mode in a package of its own takes from kvq, and what comes with kvq does with it: ``packages/kvq-int3`` is the example.

Its conformance suite is in its own ``tests``; the demo, the engine and the command line are tested with every installed mode.
"""

import ast
import importlib
from pathlib import Path

import pytest
import torch

import modes
from kvq_core import KVQError, PagedKVCache, get_backend, selfcheck

ROOT = Path(__file__).parents[2]
MODE = "int3_per_token_head"

pytestmark = pytest.mark.usefixtures("torch_path")


def test_it_imports_public_names_only() -> None:
    """What it takes from kvq is listed by a package, or documented in the API reference by its module."""
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "packages" / "kvq-int3" / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvq_core"):
                public = importlib.import_module(node.module)
                for alias in node.names:
                    assert alias.name in getattr(public, "__all__", ()) or f":: {node.module}.{alias.name}" in reference, alias.name


def test_the_self_check_the_cache_and_the_benchmark_take_it() -> None:
    found = selfcheck.check(get_backend(MODE))
    assert found.bits_per_element == 3.25 and found.relative_mse == pytest.approx(0.0368, rel=0.1)
    cache = PagedKVCache(MODE, num_blocks=4, num_kv_heads=2, head_size=96, head_size_v=80, dtype=torch.float32, device="cpu")
    assert cache.bytes_per_token == 2 * (96 * 3 // 8 + 4 + 80 * 3 // 8 + 4)
    for names in (None, [MODE]):
        assert MODE in [backend.mode for backend in modes.backends_of(names)]


def test_a_mode_that_forgets_its_scales_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = get_backend(MODE)
    encode = backend.encode
    monkeypatch.setattr(type(backend), "encode", lambda self, x, **given: (encode(x, **given)[0], None))
    cache = PagedKVCache(MODE, num_blocks=4, num_kv_heads=2, head_size=96, dtype=torch.float32, device="cpu")
    step = cache.append({cache.allocate_sequence(): 3})
    with pytest.raises(KVQError, match=f"mode {MODE}: encode returned no scales"):
        cache.write(0, torch.randn(3, 2, 96), torch.randn(3, 2, 96), step)
