"""``kvq eval``: what each mode costs a trained model, measured through the cache."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvq_core.cli import eval_report, output
from kvq_core.cli.modes import backends_of
from kvq_core.cli.progress import Progress
from kvq_core.cli.unused import refuse
from kvq_core.errors import ArgumentError, KVQError, told

if TYPE_CHECKING:
    import torch

    from kvq_core.evaluation import CacheConfig, Document, Evaluation, Journal, Passage, Subject
    from kvq_core.evaluation.tasks import Task, TaskRun

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILES: Final = (".safetensors", ".bin", ".gguf", ".json", ".pt")
DTYPES: Final = ("bfloat16", "float16", "float32")
KL: Final = "kl"
"""The task whose figures are of every prediction of a text."""
_LONG: Final = 2048
"""Tokens of a passage above which larger chunks are the default: on a CPU each chunk dequantizes all that comes before it."""
_EXAMPLES = """Examples:

\b
kvq eval                                              the bundled tiny model, from a checkout
kvq eval --mode int4,int2 --length 2000 --documents 8
kvq eval --model smollm2 --text book.txt --text code.py --mode int4,int4:smoothing=first_prefill
kvq eval --model gemma3-270m --text book.txt --mode k8v4,int8/int4 --length 8192 --resume run.jsonl
kvq eval --model smollm2 --text book.txt --mode int4,k4v2 --task copy,passkey,arithmetic,generate --items 40
kvq eval --model Qwen/Qwen3-0.6B --text book.txt --mode int8,int4 --device cuda --out results

A mode's options follow it: MODE:name=value,name=value. smoothing=KIND is as --smoothing; residual_length=N and sink_tokens=N leave the
newest and the first N tokens exact, or with residual_mode=MODE in that mode.

TEXT is UTF-8. A line "#### name" opens a document; a text without such lines is one. Documents are cut into passages of --length
tokens. Standard errors are over documents, or over the passages of a single one.

Tasks: kl is what the description above says. copy: a list of random words, twice. passkey: a number in a haystack, by depth. Both have
--length tokens. arithmetic: word problems with examples, right where the examples have the answer (strict) or in the last number
(flexible). generate: greedy text after a passage, beside none's.
"""


def _split(ctx: click.Context, parameter: click.Parameter, given: Sequence[str]) -> tuple[str, ...]:
    from kvq_core.evaluation.options import split_modes

    return tuple(mode for part in given for mode in split_modes(part))


def _tasks(ctx: click.Context, parameter: click.Parameter, given: Sequence[str]) -> tuple[str, ...]:
    from kvq_core.evaluation.tasks import TASKS

    known = (KL, *TASKS)
    names = tuple(dict.fromkeys(name.strip() for part in given for name in part.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise ArgumentError("--task", repr(name), f"some of {', '.join(known)}")
    return names or (KL,)


@click.command("eval", epilog=_EXAMPLES)
@click.option(
    "--model",
    metavar="MODEL",
    help="smollm2, gemma3-270m, a GGUF file, a Hugging Face model's folder or id, or a tiny model's weights."
    "  [default: the bundled tiny model]",
)
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="What to score; may be given several times.  [default: the tiny model's held-out text]",
)
@click.option(
    "--mode",
    "--modes",
    "modes",
    multiple=True,
    metavar="MODE[:OPTIONS][,...]",
    callback=_split,
    help="Only these modes, each with options of its own.",
)
@click.option(
    "--task",
    "--tasks",
    "tasks",
    multiple=True,
    metavar="TASK[,...]",
    callback=_tasks,
    help="kl, copy, passkey, arithmetic, generate.  [default: kl]",
)
@click.option("--items", type=click.IntRange(min=1), default=20, show_default=True, help="Items of each task but kl.")
@click.option("--length", type=click.IntRange(min=2), default=1024, show_default=True, help="Tokens a passage.")
@click.option("--documents", "most", type=click.IntRange(min=1), default=16, show_default=True, help="Passages, at most.")
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    help=f"Tokens of a passage that are fed at once.  [default: 128; 512 for a --length above {_LONG:,}]",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="Passages, or items of a task, side by side.  [default: 16; 1 for a Hugging Face model]",
)
@click.option(
    "--smoothing",
    metavar="KIND",
    help="Smooth the keys of all modes but none: none, weights, key_bias, first_prefill; from a passage that is not scored mean, balanced,"
    " rotary, rotary_balanced or rotary_ordered; or the FILE of a ModelSmoothing.  [default: weights]",
)
@click.option(
    "--balance-values",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="First balance a Hugging Face model's values (kvq_transformers.balance_values) on this text, which should not be scored, for the"
    " least residual_length and sink_tokens of the modes.",
)
@click.option("--device", help="cpu, cuda, cuda:1 ...  [default: a GPU if there is one]")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Of a Hugging Face model and of the rows that it gives its cache.  [default: on a GPU the checkpoint's, of a GGUF file"
    " bfloat16; on a CPU float32]",
)
@click.option(
    "--resume",
    type=output.NewFile(),
    metavar="FILE",
    help="Keep what is done in FILE (JSON lines), and go on from it if the run was interrupted.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write eval.json, eval.csv and eval.png there; tasks but kl into tasks.csv and tasks.png.",
)
@output.output_options
def evaluate(
    model: str | None,
    texts: tuple[Path, ...],
    modes: tuple[str, ...],
    tasks: tuple[str, ...],
    items: int,
    length: int,
    most: int,
    chunk: int | None,
    batch: int | None,
    smoothing: str | None,
    balance_values: Path | None,
    device: str | None,
    dtype: str | None,
    resume: Path | None,
    out: Path | None,
    form: str,
) -> None:
    """Bits per byte and perplexity through the cache, with standard errors, for each mode.

    Text is fed in chunks; each chunk's keys and values go into the pages, and every prediction attends over what the pages hold. The
    mode none always runs; differences, KL divergence and agreement of the likeliest token are against it, position by position.
    """
    from kvq_core.environment import default_device
    from kvq_core.evaluation import Journal
    from kvq_core.evaluation import evaluate as measure
    from kvq_core.evaluation.journal import identity_of
    from kvq_core.evaluation.tasks import TASKS
    from kvq_core.evaluation.tasks.generation import Generation
    from kvq_core.evaluation.tiny_model import usable_device

    others = [TASKS[name] for name in tasks if name != KL]
    if not others:
        refuse("items", got="no task but kl", need=f"some of {', '.join(TASKS)}")
    if not {KL, Generation.name} & {*tasks}:
        refuse("most", got=f"tasks {', '.join(tasks)}", need=f"{KL} or {Generation.name}, which read passages")
    if form == "csv" and others and KL in tasks:
        raise ArgumentError("--csv", f"tasks {', '.join(tasks)}", "kl alone or without kl: its columns are others; --json prints both")
    configs, faults = _configs(modes, smoothing)
    if out:
        eval_report.writable(out, kl=KL in tasks, tasks=bool(others))
    subject = load_subject(model, usable_device(device) if device else default_device(), dtype)
    _check(configs, subject, named=bool(modes))
    if balance_values:
        _balance(subject, balance_values, length, configs[1:])
    passages, calibration = passages_of(subject, documents_of(texts, model), length, most)
    if calibration in passages:
        click.echo("one passage: what calibrates is scored, too; more text, or a smaller --length, keeps them apart", err=True)
    chunk = chunk or (128 if length <= _LONG else 512)
    batch = batch or (1 if is_huggingface(subject) else 16)
    journal = Journal(resume, identity_of(subject, calibration, chunk)) if resume else Journal()
    found: Evaluation | None = None
    runs: list[TaskRun] = []
    failures = list(faults)
    if KL in tasks:
        with Progress(len(passages), sum(p.num_predicted for p in passages) * len(configs), "token") as progress:
            found = measure(
                subject,
                configs,
                passages,
                calibration=calibration,
                chunk=chunk,
                batch=batch,
                tick=progress.tick,
                report=lambda passage, tallies: progress.line(
                    f"{passage.document or 'passage'}, {passage.num_predicted:,} tokens",
                    [f"{mode} KL {t.kl / t.predicted:.5f}" for mode, t in list(tallies.items())[1:]],
                ),
                journal=journal,
            )
        failures += [f"{mode}: {told(problem)}" for mode, problem in found.failures.items()]
    for task in others:
        runs.append(_run(task, subject, configs, passages, calibration, length, items, chunk, batch, journal))
        failures += [f"{task.name}, {mode}: {told(problem)}" for mode, problem in runs[-1].failures.items()]
    facts = eval_report.facts_of(subject, passages, length, chunk) | ({"smoothing": smoothing} if smoothing else {})
    facts |= {"values_balanced_on": str(balance_values)} if balance_values else {}
    eval_report.tell(found, runs, facts, failures, form, out)
    if failures:
        raise SystemExit(1)


def _configs(modes: Sequence[str], smoothing: str | None) -> tuple[list[CacheConfig], list[str]]:
    """The mode none, then those asked for, each once; by default all installed ones, with what is wrong with those that do not load.

    Raises:
        KVQError: a mode asked for, or an option, does not exist.
    """
    from kvq_core.evaluation.options import SMOOTHING, CacheConfig, parse_mode

    if smoothing:
        try:
            SMOOTHING.parse(smoothing)
        except ValueError:
            raise ArgumentError("--smoothing", repr(smoothing), SMOOTHING.takes) from None
    (exact, *backends), faults = backends_of(() if not modes else ("none",))
    given = [parse_mode(mode) for mode in modes] if modes else [CacheConfig(backend) for backend in backends]
    others = [config for config in given if config.backend is not exact or config.options]
    if smoothing:
        if all(SMOOTHING.name in config.options for config in others):
            need = f"one beside none without a {SMOOTHING.name} of its own"
            raise ArgumentError("--smoothing", "no mode that takes it", need)
        others = [config.with_default(SMOOTHING.name, smoothing) for config in others]
    return list({config.label: config for config in [CacheConfig(exact), *others]}.values()), faults


def _balance(subject: Subject, text: Path, length: int, configs: Sequence[CacheConfig]) -> None:
    """Balance the model's values on ``text``, for caches that keep exact what every one of ``configs`` does."""
    from kvq_core.evaluation import read_documents
    from kvq_core.evaluation.huggingface import HuggingFaceSubject
    from kvq_core.evaluation.options import RESIDUAL_LENGTH, SINK_TOKENS

    if not isinstance(subject, HuggingFaceSubject):
        raise ArgumentError("--balance-values", "a tiny model", "a Hugging Face model")
    names = (RESIDUAL_LENGTH.name, SINK_TOKENS.name)
    exact = {name: min((config.options.get(name, 0) for config in configs), default=0) for name in names}
    try:
        subject.balance_values(read_documents(text), length, **exact)
    except ArgumentError as problem:
        raise KVQError(f"--balance-values {text}: {problem}") from problem


def _check(configs: Sequence[CacheConfig], subject: Subject, *, named: bool) -> None:
    """Find bad input before any work: options that the cache does not have, and modes ``named`` by the user that do not fit its heads.

    Raises:
        KVQError: there is one.
    """
    from kvq_core.contract import blamed
    from kvq_core.evaluation.options import check_supported

    for config in configs:
        check_supported(config, subject)
        if named:
            with blamed(config.backend.mode):
                subject.bytes_per_token(config.backend)


def _run(
    task: Task,
    subject: Subject,
    configs: Sequence[CacheConfig],
    passages: Sequence[Passage],
    calibration: Passage,
    length: int,
    count: int,
    chunk: int,
    batch: int,
    journal: Journal,
) -> TaskRun:
    """One task, with its progress."""
    from kvq_core.evaluation.tasks import run_task

    with Progress(count, count, "item") as progress:

        def report(found: int, scores: Mapping[str, Mapping[str, tuple[float, int]]]) -> None:
            progress.count = found
            progress.tick(task.name, 1)
            figures = [(mode, next(iter(score.values()))) for mode, score in scores.items()]
            progress.line(task.name, [f"{mode} {right:g}/{of}" for mode, (right, of) in figures])

        return run_task(
            task,
            subject,
            configs,
            passages,
            calibration=calibration,
            length=length,
            count=count,
            chunk=chunk,
            batch=batch,
            report=report,
            journal=journal,
        )


def load_subject(model: str | None, device: torch.device, dtype: str | None = None) -> Subject:
    """The model that ``--model`` names, in the dtype that ``--dtype`` names, one of :data:`DTYPES`.

    Raises:
        KVQError: there is none, it cannot be read, or what it needs is not installed; or a dtype is given for a tiny model.
    """
    import torch

    from kvq_core.evaluation import TinySubject
    from kvq_core.evaluation.pretrained import PRETRAINED
    from kvq_core.evaluation.tiny_model import load_model
    from kvq_core.evaluation.tiny_subject import bundled

    chosen = getattr(torch, dtype) if dtype else None
    path = bundled("model.safetensors") if model is None else Path(model)
    if model is not None and model in PRETRAINED and not path.exists():
        from kvq_core.evaluation.huggingface import load_gguf

        return load_gguf(PRETRAINED[model].file(), device, PRETRAINED[model].licence, chosen)
    if path.suffix == ".gguf" and path.is_file():
        from kvq_core.evaluation.huggingface import load_gguf

        return load_gguf(path, device, dtype=chosen)
    if path.is_dir() and not (path / "config.json").exists():
        path = path / "model.safetensors"
    if path.is_file():
        if chosen:
            raise ArgumentError("--dtype", repr(dtype), "none: the tiny model's rows are bfloat16")
        return TinySubject(load_model(path, device, torch.bfloat16 if device.type == "cuda" else torch.float32))
    if not path.is_dir() and (not _HUB_ID.fullmatch(str(model)) or path.suffix in _FILES):
        need = f"{', '.join(PRETRAINED)}, a GGUF file, a Hugging Face model's folder or id, or a tiny model's weights"
        raise ArgumentError("model", f"{model}: no such file or folder", need)
    from kvq_core.evaluation.huggingface import load

    if not path.is_dir():
        # Before transformers, which tries a hub that does not answer for most of a minute.
        click.echo(f"no folder {model} here: taken for an id on the Hugging Face hub", err=True)
    return load(str(model), device, chosen)


def is_huggingface(subject: Subject) -> bool:
    from kvq_core.evaluation import TinySubject

    return not isinstance(subject, TinySubject)


def documents_of(texts: Sequence[Path], model: str | None) -> list[Document]:
    """The documents of the files that ``--text`` names, or of the bundled held-out text, which the tiny model has not seen."""
    from kvq_core.evaluation import Document, read_documents
    from kvq_core.evaluation.tiny_subject import bundled

    if not texts:
        try:
            texts = (bundled("heldout.txt"),)
        except ArgumentError:
            if model is None:
                raise
            raise ArgumentError("--text", "none", "a UTF-8 text file to score") from None
    found = [(text, document) for text in dict.fromkeys(texts) for document in read_documents(text)]
    names = [document.name for _, document in found]
    return [Document(f"{text}: {d.name}", d.text) if names.count(d.name) > 1 else d for text, d in found]


def passages_of(subject: Subject, documents: Sequence[Document], length: int, most: int) -> tuple[list[Passage], Passage]:
    """What is scored, and what calibrates and warms up: the last passage that is at least half as long as the longest. It is kept out of
    the score if there are others."""
    every = [p for p in subject.passages(documents, length) if p.num_predicted]
    if not every:
        raise ArgumentError("text", f"{', '.join(d.name for d in documents)}: no two tokens", "more text")
    enough = max(p.num_predicted for p in every) / 2
    last = max(n for n, p in enumerate(every) if p.num_predicted >= enough)
    scored = every[:last] + every[last + 1 :] or every
    count = min(len(scored), most)
    return [scored[n * len(scored) // count] for n in range(count)], every[last]
