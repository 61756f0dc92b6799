"""kvq's own kernels, codecs and host code with one mistake each, and which of them the conformance suite catches::

    python tests/kernels/source_mutants.py                    # every mutant, as the table of docs/dev/mutants.md
    python tests/kernels/source_mutants.py --only "last block"

A mutant is an edit of one source file. The suite of a mode (``tests/kernels/test_backends.py``, as a third party would run it:
``BackendTests`` and the mode's bounds, no other test of kvq's) runs on a copy of the package with that edit, in a process of its own, until
a test fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "tests" / "kernels" / "test_backends.py"
EDIT = re.compile(r"\[-(.*?)-\]|\{\+(.*?)\+\}", re.DOTALL)
QUICK = "quick"
BLOCKS_OF_24, TWO_SIZES = ("test_attention", "interpret", "block_size=24"), ("test_attention", "interpret", "head_size_v=64")
SPLITS, SPLIT_HEADS = ("test_planned_splits", "interpret"), ("test_smoothed_attention", "interpret", "seq_lens=560x270")


@dataclass(frozen=True)
class Mutant:
    """``edit`` is a text of ``file`` and its change, as ``git diff --word-diff`` prints them: ``[-removed-]``, ``{+added+}``.

    ``by``: what the id of a test that must catch it contains; nothing: the quick tests must.
    """

    name: str
    file: str
    edit: str
    by: tuple[str, ...] = ()
    suite: str = "TestInt8PerTokenHead"

    @property
    def catcher(self) -> str:
        return self.by[0] if self.by else QUICK

    @property
    def package(self) -> Path:
        """The folder that ``file`` is relative to."""
        (source,) = ROOT.glob(f"packages/*/src/{self.file}")
        return Path(str(source).removesuffix(self.file))

    def mutated(self) -> str:
        """The text of ``file`` after the edit. ``ValueError`` if the text before it does not occur exactly once."""
        old, new = EDIT.sub(r"\1", self.edit), EDIT.sub(r"\2", self.edit)
        source = (self.package / self.file).read_text(encoding="utf-8")
        if source.count(old) != 1 or old == new:
            raise ValueError(f"{self.name}: {self.file} has {source.count(old)} times {old!r}, need one")
        return source.replace(old, new)


INT4_SUITE = "TestInt4PerTokenHead"

MUTANTS = (
    # Which keys.
    Mutant(
        "last block lost in a table without spare columns",
        "kvq_core/kernels/scheduler.py",
        "[-table_width-]{+(table_width - 1)+} * C.shape.block_size)",
    ),
    Mutant("newest key lost", "kvq_core/kernels/scheduler.py", "tl.maximum(end_position, 0), seq_len{+ - 1+})"),
    Mutant(
        "last tile lost where it has one key",
        "kvq_core/kernels/paged_kv.py",
        "tl.cdiv(work.stop{+ - 1+}, C.tile.keys) - (end - begin)",
    ),
    Mutant(
        "a split a tile too short",
        "kvq_core/kernels/scheduler.py",
        "(unit + count) * length{+ - tl.where(count > 1, C.tile.keys, 0)+}, high)",
    ),
    Mutant("causal mask hides the diagonal", "kvq_core/kernels/masks.py", "seen = j [-<=-]{+<+} p\n"),
    Mutant("window a key too narrow", "kvq_core/kernels/masks.py", "(p - j [-<=-]{+<+} scoring.window_left)"),
    Mutant("window a key too wide", "kvq_core/kernels/masks.py", "(p - j <= scoring.window_left{+ + 1+})"),
    Mutant(
        "window's start rounded up to a tile",
        "kvq_core/kernels/scheduler.py",
        "{+tl.cdiv(+}tl.maximum(context_len - window_left, 0)[- // KEYS-]{+, KEYS)+} * KEYS",
    ),
    Mutant(
        "ids outside the cache are read", "kvq_core/kernels/paged_kv.py", "[-        valid = valid & block_exists(block, num_blocks)\n-]"
    ),
    # Where they lie.
    Mutant("block table taken for contiguous", "kvq_core/launch/attention.py", "batch.block_table.[-stride(0)-]{+shape[1]+},"),
    Mutant(
        "block table's row of the first sequence",
        "kvq_core/kernels/paged_kv.py",
        "table = batch.block_table + {+0 * +}work.seq.to(tl.int64) * table_stride\n    if C.tile.decode:",
    ),
    Mutant(
        "entries wrong where blocks do not divide tiles",
        "kvq_core/kernels/paged_kv.py",
        "entry, offset = [-(-]number * COUNT{+ // SIZE+} + i[-)-] // SIZE,",
        BLOCKS_OF_24,
    ),
    Mutant("value codes at the keys' strides", "kvq_core/kernels/paged_kv.py", "v = row_offset(tile, [-values-]{+keys+}, C)", TWO_SIZES),
    Mutant(
        "planes' strides taken for the same",
        "kvq_core/launch/attention.py",
        "same_strides=[-strides_of(attention.keys) == strides_of(attention.values)-]{+True+}",
        TWO_SIZES,
    ),
    Mutant("scales at the codes' head stride", "kvq_core/kernels/paged_kv.py", "k_at = head * keys.[-scale_-]head_stride + k_offset"),
    Mutant(
        "query heads interleaved over kv heads",
        "kvq_core/kernels/scheduler.py",
        "kv_head [-* C.shape.group -]+ r % C.shape.group{+ * tl.num_programs(1)+}",
    ),
    # What is computed.
    Mutant("accumulator not rescaled", "kvq_core/kernels/mma.py", "before = acc[i] * [-by_row(alpha, C)-]{+1.0+}"),
    Mutant("sum of weights not rescaled", "kvq_core/kernels/softmax.py", "total = state.sum [-* by_row(alpha, C) -]+ "),
    Mutant("softcap's tanh of half the score", "kvq_core/kernels/scores.py", "return [-2.0 * -]LOG2E / scoring.softcap"),
    Mutant("softcap unseen by the sinks", "kvq_core/kernels/softmax.py", "tl.fma(state.max, unit, [-base-]{+0.0+})"),
    Mutant("int8's offset of 127", "kvq_int8fp8/format.py", "exponent_scale=2.0**24, zero=[-128-]{+127+}.0"),
    Mutant(
        "a lane's two codes swapped in the read",
        "kvq_int8fp8/format.py",
        "ways = ((offset [-& 0x00FF-]{+>> 8+}).to(tl.float16, bitcast=True), (offset [->> 8-]{+& 0x00FF+}).to(tl.float16, bitcast=True))",
    ),
    Mutant(
        "signs of the rotation inverted", "kvq_core/kernels/hadamard.py", "minus = ([-~-]words >> (channel % 32)) & 1", suite=INT4_SUITE
    ),
    Mutant(
        "signs of the rotation repeat after 32 channels",
        "kvq_core/kernels/hadamard.py",
        "words = [-tl.where(channel // 32 == word, sign_word(SIGNS, word, channel), words)-]{+words+}",
        suite=INT4_SUITE,
    ),
    # Split and combined.
    Mutant(
        "partials not weighted by their maximum",
        "kvq_core/kernels/combine.py",
        "tl.exp2(one.max - safe), tl.exp2([-two-]{+one+}.max - safe)",
        SPLITS,
    ),
    Mutant("last of many splits lost", "kvq_core/kernels/combine.py", "exists = numbers < block.num_splits{+ - 1+}\n"),
    Mutant(
        "sinks counted in each split, too",
        "kvq_core/kernels/epilogue.py",
        "            write_partial(acc, [-state-]{+add_sink(state, rows.head, rows.valid, scoring)[0]+}, rows, work,",
        SPLITS,
    ),
    Mutant(
        "query heads interleaved in the combine kernel",
        "kvq_core/kernels/combine.py",
        "head = kv_head [-* C.shape.group -]+ r % C.shape.group{+ * num_kv_heads+}",
        SPLIT_HEADS,
    ),
    # Writes.
    Mutant("slot after the last one taken", "kvq_core/kernels/store.py", "valid = slot [-<-]{+<=+} num_slots.to(tl.uint64)"),
    Mutant(
        "slot and head strides swapped",
        "kvq_core/kernels/store.py",
        "strides(rows.slot, [-slot-]{+head+}_stride) + strides(rows.head, [-head-]{+slot+}_stride)",
    ),
    Mutant(
        "scales stored at the codes' slot stride", "kvq_core/kernels/store.py", "plane.scale_block_stride, plane.[-scale_-]slot_stride,"
    ),
    Mutant("int8 written towards zero", "kvq_int8fp8/quantize.py", "floor_bits(tl.abs(x)[- + 0.5-], ASM)"),
    Mutant(
        "zero rows divide by zero",
        "kvq_int8fp8/quantize.py",
        "return peak, [-tl.maximum(-]peak * PER_LARGEST[-, MIN_SCALE)-]",
        ("test_random_rows", "interpret"),
    ),
    Mutant("int4's codes clamped at 16", "kvq_int4/quantize.py", "0.0), [-15-]{+16+}.5)", suite=INT4_SUITE),
    Mutant("int4's zero point not stored", "kvq_int4/quantize.py", "& -16) | {+(+}zero.to(tl.int32){+ & 7)+}", suite=INT4_SUITE),
    # Codecs: kernels are held to them, and they to their own mathematics.
    Mutant(
        "int8 encoded towards zero",
        "kvq_int8fp8/codec.py",
        "torch.trunc(scaled[- + torch.copysign(torch.full_like(scaled, 0.5), scaled)-])",
    ),
    Mutant("int8 clamped at 63", "kvq_int8fp8/codec.py", "torch.clamp(rounded, -[-128-]{+64+}, [-127-]{+63+})"),
    Mutant(
        "int4's nibbles packed in the other order",
        "kvq_int4/codec.py",
        "return codes[..., [-0-]{+1+}::2] | codes[..., [-1-]{+0+}::2] << 4",
        suite=INT4_SUITE,
    ),
    Mutant(
        "int4 decoded without its zero point", "kvq_int4/codec.py", "(unpack(codes).float() - [-zero[..., None]-]{+8+})", suite=INT4_SUITE
    ),
    # A rotary mean.
    Mutant(
        "phase of a tile's first key lost", "kvq_core/kernels/rotary.py", "rotary.steps * [-(rotary.first + tile.first)-]{+rotary.first+}"
    ),
    Mutant(
        "sequences' first positions taken for 0",
        "kvq_core/kernels/rotary.py",
        "[-tl.load(batch.first_positions + work.seq)-]{+0+}",
    ),
    Mutant(
        "rotary mean of the inverse embedding in the write",
        "kvq_core/kernels/rotary.py",
        "* cosine [-+-]{+-+} tl.load(at + HEADS.size",
    ),
    Mutant(
        "second keys of lane rows at the first's positions",
        "kvq_core/kernels/rotary.py",
        "step[None, :] * own{+ * 0+}, C)",
        ("test_smoothed_attention", "interpret"),
        "TestInt2PerTokenHead",
    ),
    # The host.
    Mutant(
        "too few programs for ragged rows",
        "kvq_core/launch/attention.py",
        "attention.q.shape[0] // config.tokens + [-batch.num_seqs-]{+1+})",
    ),
    Mutant(
        "row blocks rounded down",
        "kvq_core/plan/planner.py",
        "row_blocks = [--(--]{+max(1, +}problem.max_seqlen_q // (tile.rows // problem.group))",
    ),
    Mutant("workspace without room for sums", "kvq_core/launch/workspace.py", "rows * (head_size_v + [-2-]{+1+})\n"),
    Mutant("workspace without room for ragged splits", "kvq_core/plan/planner.py", '"equal", programs, programs[- + blocks-],', SPLITS),
    Mutant("batch not validated", "kvq_core/call/spec.py", "[-        self.batch.validate(device)\n-]"),
    Mutant("planes need not match", "kvq_core/call/spec.py", "fits = [-values.codes.shape[:3] == keys.codes.shape[:3]-]{+True+}"),
    Mutant("torch path keeps no slot bounds", "kvq_core/call/torch_path.py", "(rows.slot_mapping [-<-]{+<=+} num_slots)"),
)


def first_failure(mutant: Mutant, quick: bool, pipe: Any) -> None:
    """Run the suite of the mutant's mode, and send the first test that fails ("" for none) down ``pipe``."""
    import pytest

    failed: list[str] = []

    class Watch:
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            if not quick:
                items[:] = [item for item in items if all(word in item.nodeid for word in mutant.by)]

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.append(report.nodeid.partition("[")[0].rpartition("::")[2])

    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(mutant.package, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        Path(folder, mutant.file).write_text(mutant.mutated(), encoding="utf-8")
        sys.path.insert(0, folder)
        import kvq_core
        from kvq_core.testing.places import choose_interpreter

        assert "kvq_core" not in mutant.file or kvq_core.__file__.startswith(folder)
        choose_interpreter()
        plain = ["-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib", "-q", "-x", "--tb=line", "-p", "no:cacheprovider"]
        chosen = ["-o", f"python_classes={mutant.suite}", "-m", "quick" if quick else "not gpu"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = pytest.main([*plain, *chosen, str(SUITE)], plugins=[Watch()])
        if not failed and status != 0:
            failed.append(f"no test ran: pytest's status {status}")
    pipe.send(failed[0] if failed else "")


def in_a_child(mutant: Mutant, quick: bool) -> str:
    """:func:`first_failure` in a process that begins as this one: with torch and Triton imported, and nothing of kvq's."""
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=first_failure, args=(mutant, quick, there))
    child.start()
    there.close()
    try:
        return str(here.recv())
    except EOFError:
        return "the process died"
    finally:
        child.join()


def line(mutant: Mutant, test: str) -> str:
    mode = mutant.suite.removeprefix("Test").removesuffix("PerTokenHead").lower()
    return f"| {mutant.name} | `{mutant.file}` | {mode} | {mutant.catcher} | `{test or 'nobody'}` |"


HEADER = "| mistake | in | suite of | must be caught by | first test that fails |\n|---|---|---|---|---|"


def prepare() -> None:
    """Import what takes long and no mutant is of."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import triton.language

    triton.knobs.runtime.interpret = True
    torch.set_num_threads(1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Which mistakes the conformance suite catches.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help="mutants whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="run the quick tests for those mutants, too, that others must catch")
    chosen = parser.parse_args(argv)
    prepare()
    tried, missed = 0, []
    print(HEADER)
    for mutant in MUTANTS:
        if any(words in mutant.name for words in chosen.only):
            mutant.mutated()  # here, where a ValueError ends the run: a child that dies counts as a catch
            test = in_a_child(mutant, chosen.quick or not mutant.by) or (in_a_child(mutant, False) if mutant.by else "")
            print(line(mutant, test), flush=True)
            tried += 1
            missed += [] if test else [mutant.name]
    print(f"{tried} mutants, {len(missed)} not caught{': ' + ', '.join(missed) if missed else ''}", file=sys.stderr)
    return 1 if missed or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
