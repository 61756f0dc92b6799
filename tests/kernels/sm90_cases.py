"""What the tests of warp groups share, those for many query rows (test_sm90_prefill.py) and those for a few (test_decode_multirow.py)."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from exact_reads import rows_alone
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.launch import dispatch
from kvq_core.launch.offline import Device, planning_for
from kvq_core.plan import Entry, Groups, Table, lookup
from kvq_core.plan.lookup import listening
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.interpret.gluon import interpreted_gluon
from kvq_core.testing.places import Place
from kvq_core.testing.scene import Scene

H200 = Device("cuda", 90, 32, 132, "sm_90", overlaps=True)


def use_kvq_s_tables_and_a_known_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lookup.SWITCH, "")
    monkeypatch.setattr(lookup, "_TABLES", lookup._Tables())
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(dispatch, "triton_is_known", lambda: True)
    elif not dispatch.triton_is_known():
        pytest.skip("this Triton's Gluon is not known to kvq")


@dataclass(frozen=True)
class Where:
    """A place where warp groups' kernels run, and tables by which calls are planned with them and without."""

    place: Place
    taking: Table
    without: Table

    def build(self, mode: str, case: Case, most: int = 250) -> Scene:
        """The case, filled; in the interpreter with fewer and shorter sequences, of fewer than ``most`` keys."""
        if self.place.name == "interpret":
            queries = tuple(min(query, 40) for query in case.query_lens[:3])
            keys = tuple(max(query, min(keys, most - 100 + keys % 100)) for query, keys in zip(queries, case.seq_lens, strict=False))
            case = replace(case, query_lens=queries, seq_lens=keys)
        return scene.build(case, get_backend(mode), self.place.device).fill()


@contextlib.contextmanager
def entered(name: str, monkeypatch: pytest.MonkeyPatch, gpu_s: Table, choice: Groups, *kernels: str) -> Iterator[Where]:
    """Place ``name``: a GPU with the table ``gpu_s``, or the interpreter, in which the modules ``kernels`` are planned by ``choice``."""
    place = places.enter(name, monkeypatch)
    if name == "gpu":
        yield Where(place, gpu_s, table_of("sm_90", replace(choice, groups=0)))
        return
    monkeypatch.setattr(dispatch, "sm90_fits", lambda attention, form: True)
    with interpreted_gluon(*kernels):
        yield Where(place, table_of("", choice), table_of("", replace(choice, groups=0)))


def table_of(arch: str, choice: Groups) -> Table:
    return Table(arch, {"groups": (Entry({}, choice),)})


def refused(plain: Case) -> dict[str, Case]:
    """What no kernel of warp groups can do, by its name: ``plain``, which they can, and that."""
    return {
        "window": replace(plain, window=500),
        "softcap": replace(plain, softcap=20.0),
        "alibi": replace(plain, alibi=True),
        "query-query bias": replace(plain, qq_bias=8),
        "prefix": replace(plain, mm_prefix=(((3, 20),), ((0, 3),), *[()] * (plain.num_seqs - 2))),
        "fp8 output": replace(plain, output=torch.float8_e4m3fn),
        "heads of 64": replace(plain, head_size=64),
        "values of 64": replace(plain, head_size_v=64),
        "sinks that see the mean": replace(plain, sinks=True, smoothing="mean"),
    }


def kinds_asked(mode: str, case: Case, table: Table, device: Device = H200, **overrides: Any) -> set[str]:
    """The kinds of choices that a read is planned with. "groups": warp groups could take its rows; no "prefill", no "decode": they do."""
    built = scene.build(case, get_backend(mode), torch.device("cpu"))
    arguments = built.read_arguments() | rows_alone(built) | overrides
    with ops.planning_with(table), planning_for(device), listening() as questions:
        built.backend.unified_attention(out=built.fresh_out(len(arguments["q"]))["rows"], **arguments)
    return {kind for kind, _ in questions}


def table_with_holes(built: Scene) -> torch.Tensor:
    """The block table without some blocks of the first two sequences, of which the second's is no block's number."""
    table = built.block_table.clone()
    table[0, 3], table[0, 7], table[1, 1] = -1, built.num_blocks, 2**31 - 1
    return table


def spoil_unseen(built: Scene) -> None:
    """NaN for fp8 codes after each sequence's last key, in the same block: lengths end within one."""
    table, block_size = built.block_table.tolist(), built.case.block_size
    for name in ("key_cache", "value_cache"):
        codes = built.pages.integers(name)
        for row, length in zip(table, built.case.seq_lens, strict=False):  # padding sequences have rows, too
            codes[row[length // block_size], length % block_size :] = 0x7F


def assert_alike(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """To within what the two kernels' roundings allow, for results of a 16-bit output."""
    assert torch.isfinite(wanted).all()
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=8e-3 * float(wanted.abs().max()))
