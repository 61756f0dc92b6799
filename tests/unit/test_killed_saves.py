"""A process killed while it saves never leaves a file that loads as anything but what was saved."""

import random
import subprocess
import sys
import time

import pytest
import torch

import killed_saves
from kvq_core import PagedKVCache, SnapshotError
from programs import environment

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL"),
    pytest.mark.usefixtures("torch_path"),
]


def start_saving(path, *moment):
    """A process of killed_saves.py that has begun, and the line that it printed."""
    command = [sys.executable, killed_saves.__file__, str(path), *moment]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(OMP_NUM_THREADS="1"))
    assert process.stdout.readline() == "saving\n"
    return process


def assert_old_or_new(path):
    """The file is one of the two, whole; what a killed save left beside it has the documented name, and is refused, or whole as well."""
    caches = {(0,): killed_saves.filled(0), (0, 1): killed_saves.filled(1)}
    for file in path.parent.iterdir():
        assert file == path or file.match(".kv.*.part")
        try:
            loaded = PagedKVCache.load(file)
        except SnapshotError:
            assert file != path, "the file itself was lost"
            continue
        saved = caches[loaded.sequences]
        for mine, theirs in zip(vars(saved.layer(0)).values(), vars(loaded.layer(0)).values(), strict=True):
            assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
    return loaded.sequences


@pytest.mark.parametrize("moment", ["half", "whole", "named"])
def test_a_save_killed_at_its_worst_moment(moment, tmp_path):
    process = start_saving(tmp_path / "kv", moment)
    assert process.stdout.readline() == "here\n"
    process.kill()
    process.wait()
    assert_old_or_new(tmp_path / "kv")
    assert PagedKVCache.load(tmp_path / "kv").sequences == ((0, 1) if moment == "named" else (0,))


def test_saves_killed_at_any_moment(tmp_path):
    drawn = random.Random(1)
    for attempt in range(3):
        path = tmp_path / str(attempt) / "kv"
        path.parent.mkdir()
        process = start_saving(path)
        time.sleep(drawn.uniform(0, 0.05))
        process.kill()
        process.wait()
        assert_old_or_new(path)
