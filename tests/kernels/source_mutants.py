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
BLOCKS_OF_24, TWO_SIZES = "test_attention interpret block_size=24", "test_attention interpret head_size_v=64"
SPLITS, SMOOTHED = "test_planned_splits interpret", "test_smoothed_attention interpret"
SPLIT_HEADS = f"{SMOOTHED} seq_lens=560x270"


@dataclass(frozen=True)
class Mutant:
    """``edit``: a text of ``source`` and its change, as ``git diff --word-diff`` prints them: ``[-removed-]``, ``{+added+}``.

    ``by``: words in the id of a test that must catch it; nothing: the quick tests must.
    """

    mode: str
    source: Path
    name: str
    edit: str
    by: str = ""

    @property
    def catcher(self) -> str:
        return self.by.partition(" ")[0] or QUICK

    @property
    def package(self) -> Path:
        """The folder that is copied."""
        return next(folder for folder in self.source.parents if folder.name == "src")

    @property
    def file(self) -> str:
        return self.source.relative_to(self.package).as_posix()

    def mutated(self) -> str:
        """The source after the edit. ``ValueError`` if the text before it does not occur exactly once."""
        old, new = EDIT.sub(r"\1", self.edit), EDIT.sub(r"\2", self.edit)
        source = self.source.read_text(encoding="utf-8")
        if source.count(old) != 1 or old == new:
            raise ValueError(f"{self.name}: {self.file} has {source.count(old)} times {old!r}, need one")
        return source.replace(old, new)


EDITS: dict[str, tuple[tuple[str, ...], ...]] = {
    "int8 kernels/scheduler.py": (
        ("last block lost in a table without spare columns", "high), [-table_width-]{+(table_width - 1)+} * C"),
        ("newest key lost", "tl.maximum(end_position, 0), seq_len{+ - 1+})"),
        ("a split a tile too short", "(unit + count) * length{+ - tl.where(count > 1, C.tile.keys, 0)+}"),
        ("window's start rounded up to a tile", "{+tl.cdiv(+}tl.maximum(context_len - window_left, 0)[- // KEYS-]{+, KEYS)+}"),
        ("query heads interleaved over kv heads", "kv_head [-* C.shape.group -]+ r % C.shape.group{+ * tl.num_programs(1)+}"),
    ),
    "int8 kernels/paged_kv.py": (
        ("last tile lost where it has one key", "work.stop{+ - 1+}, KEYS) - gap"),
        ("ids outside the cache are read", "[-        valid = valid & block_exists(block, num_blocks)\n-]"),
        ("block table's row of the first sequence", "{+0 * +}work.seq.to(tl.int64) * table_stride\n    if C.tile.decode"),
        ("entries wrong where blocks do not divide tiles", "entry, offset = [-(-]number * COUNT{+ // SIZE+} + i[-)-] //", BLOCKS_OF_24),
        ("value codes at the keys' strides", "v = row_offset(tile, [-values-]{+keys+}, V_VECTOR, C)", TWO_SIZES),
        ("scales at the codes' head stride", "k_at = head * keys.[-scale_-]head_stride + k_offset"),
    ),
    "int8 kernels/masks.py": (
        ("causal mask hides the diagonal", "seen = j [-<=-]{+<+} p\n"),
        ("window a key too narrow", "(p - j [-<=-]{+<+} scoring.window_left)"),
        ("window a key too wide", "(p - j <= scoring.window_left{+ + 1+})"),
    ),
    "int8 launch/bundles.py": (("block table taken for contiguous", "BlockTable(batch.block_table.[-stride(0)-]{+shape[1]+},"),),
    "int8 launch/attention.py": (
        ("planes' strides taken for the same", "[-strides_of(attention.keys) == strides_of(attention.values)-]{+True+}", TWO_SIZES),
        ("too few programs for ragged rows", "attention.q.shape[0] // config.tokens + [-batch.num_seqs-]{+1+}"),
    ),
    "int8 kernels/mma.py": (("accumulator not rescaled", "before = acc[i] * [-by_row(alpha, C)-]{+1.0+}"),),
    "int8 kernels/softmax.py": (
        ("sum of weights not rescaled", "total = state.sum [-* by_row(alpha, C) -]+ "),
        ("softcap unseen by the sinks", "tl.fma(state.max, unit, [-base-]{+0.0+})"),
        ("another read's keys joined without rescaling", "factor = factor[- * kept-]"),
    ),
    "int8 kernels/queries.py": (("another read's result not in the output", "x += {+0 * +}share * tl.load(output.other"),),
    "int8 kernels/scores.py": (("softcap's tanh of half the score", "return [-2.0 * -]LOG2E / scoring.softcap"),),
    "int8 kvq_int8fp8/format.py": (
        ("int8's offset of 127", "exponent_scale=2.0**24, zero=[-128-]{+127+}.0"),
        (
            "a lane's two codes swapped in the read",
            "(offset [-& 0x00FF-]{+>> 8+}).to(tl.float16, bitcast=True), (offset [->> 8-]{+& 0x00FF+}).to(",
        ),
    ),
    "int4 kernels/hadamard.py": (
        ("signs of the rotation inverted", "minus = ([-~-]words >> (channel % 32)) & 1"),
        (
            "signs of the rotation repeat after 32 channels",
            "[-tl.where(channel // 32 == word, sign_word(SIGNS, word, channel), words)-]{+words+}",
        ),
    ),
    "int8 kernels/combine.py": (
        ("partials not weighted by their maximum", "tl.exp2([-two-]{+one+}.max - safe)", SPLITS),
        ("last of many splits lost", "exists = numbers < block.num_splits{+ - 1+}\n"),
        (
            "query heads interleaved in the combine kernel",
            "kv_head [-* C.shape.group -]+ r % C.shape.group{+ * num_kv_heads+}",
            SPLIT_HEADS,
        ),
    ),
    "int8 kernels/epilogue.py": (
        (
            "sinks counted in each split, too",
            "        else:\n            write_partial(acc, [-state-]{+add_sink(state, rows.head, rows.valid, scoring)[0]+},",
            SPLITS,
        ),
    ),
    "int8 kernels/store.py": (
        ("slot after the last one taken", "valid = slot [-<-]{+<=+} num_slots.to(tl.uint64)"),
        ("slot and head strides swapped", "(rows.slot, [-slot-]{+head+}_stride) + strides(rows.head, [-head-]{+slot+}_stride)"),
        ("scales stored at the codes' slot stride", "scale_block_stride, plane.[-scale_-]slot_stride,"),
    ),
    "int8 kvq_int8fp8/quantize.py": (
        ("int8 written towards zero", "floor_bits(tl.abs(x)[- + 0.5-], ASM)"),
        ("zero rows divide by zero", "[-tl.maximum(-]peak * PER_LARGEST[-, MIN_SCALE)-]", "test_random_rows interpret"),
    ),
    "int4 kvq_int4/quantize.py": (
        ("int4's codes clamped at 16", "0.0), [-15-]{+16+}.5)"),
        ("int4's zero point not stored", "tl.int32, bitcast=True) | {+(+}zero.to(tl.int32){+ & 7)+}"),
    ),
    "int8 kvq_int8fp8/codec.py": (
        ("int8 encoded towards zero", "scaled[- + torch.copysign(torch.full_like(scaled, 0.5), scaled)-]"),
        ("int8 clamped at 63", "torch.clamp(rounded, -[-128-]{+64+}, [-127-]{+63+})"),
    ),
    "int4 kvq_int4/codec.py": (
        ("int4's nibbles packed in the other order", "codes[..., [-0-]{+1+}::2] | codes[..., [-1-]{+0+}::2]"),
        ("int4 decoded without its zero point", "unpack(codes).float() - [-zero[..., None]-]{+8+}"),
    ),
    "int8 kernels/rotary.py": (
        ("phase of a tile's first key lost", "[-(rotary.first + tile.first)-]{+rotary.first+}"),
        ("sequences' first positions taken for 0", "[-tl.load(batch.first_positions + work.seq)-]{+0+}"),
        ("rotary mean of the inverse embedding in the write", "* cosine [-+-]{+-+} tl.load(at + HEADS.size"),
    ),
    "int2 kernels/rotary.py": (("second keys of lane rows at the first's positions", "step[None, :] * own{+ * 0+}, C)", SMOOTHED),),
    "int8 plan/planner.py": (
        ("row blocks rounded down", "[--(--]{+max(1, +}problem.max_seqlen_q // (tile.rows // problem.group))"),
        ("workspace without room for ragged splits", '"equal", programs, programs[- + blocks-],', SPLITS),
    ),
    "int8 launch/workspace.py": (("workspace without room for sums", "rows * (head_size_v + [-2-]{+1+})\n"),),
    "int8 call/spec.py": (
        ("batch not validated", "[-        self.batch.validate(device)\n-]"),
        ("planes need not match", "fits = [-values.codes.shape[:3] == keys.codes.shape[:3]-]{+True+}"),
    ),
    "int8 call/torch_path.py": (("torch path keeps no slot bounds", "(rows.slot_mapping [-<-]{+<=+} num_slots)"),),
}
"""A mode, of whose suite a test must fail, and a file: name, edit and what must catch it."""


def mutants(mode: str, file: str) -> list[Mutant]:
    (source,) = ROOT.glob(f"packages/*/src/**/{file}")
    return [Mutant(mode, source, *edit) for edit in EDITS[f"{mode} {file}"]]


MUTANTS = [mutant for where in EDITS for mutant in mutants(*where.split())]
SUITES = {"int8": "TestInt8PerTokenHead", "int4": "TestInt4PerTokenHead", "int2": "TestInt2PerTokenHead"}


def first_failure(mutant: Mutant, quick: bool, pipe: Any) -> None:
    """Run the suite of the mutant's mode, and send the first test that fails ("" for none) down ``pipe``."""
    import pytest

    failed: list[str] = []

    class Watch:
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            if not quick:
                items[:] = [item for item in items if all(word in item.nodeid for word in mutant.by.split())]

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
        chosen = ["-o", f"python_classes={SUITES[mutant.mode]}", "-m", "quick" if quick else "not gpu"]
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
    return f"| {mutant.name} | `{mutant.file}` | {mutant.mode} | {mutant.catcher} | `{test or 'nobody'}` |"


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
