"""A process killed while it saves never leaves a file that loads as anything but what was saved."""

import subprocess
import sys

import pytest
import torch

import killed_saves
from kvq_core import PagedKVCache, SnapshotError
from programs import environment

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL"),
    pytest.mark.usefixtures("torch_path"),
]


@pytest.mark.parametrize("moment", ["half", "whole", "named"])
def test_a_save_killed_at_its_worst_moments(moment, tmp_path):
    """The file is one of the two, whole; what a killed save left beside it has the documented name, and is refused, or whole as well."""
    path = tmp_path / "kv"
    command = [sys.executable, killed_saves.__file__, str(path), moment]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(OMP_NUM_THREADS="1"))
    assert process.stdout.readline() == "here\n"
    process.kill()
    process.wait()
    assert PagedKVCache.load(path).sequences == ((0, 1) if moment == "named" else (0,))
    for file in tmp_path.iterdir():
        assert file == path or file.match(".kv.*.part")
        try:
            loaded = PagedKVCache.load(file)
        except SnapshotError:
            assert file != path and moment == "half"
            continue
        saved = killed_saves.filled(len(loaded.sequences) - 1)
        for mine, theirs in zip(vars(saved.layer(0)).values(), vars(loaded.layer(0)).values(), strict=True):
            assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
