"""``kvq doctor``: what is here, which path each mode takes on it and why, and whether it works."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Final

import click

from kvq_core.cli import output

_ENGINES: Final = ("transformers", "kvq-transformers", "vllm", "flashinfer-python", "numpy", "safetensors")


@click.command(epilog="Examples:\n\n\b\nkvq doctor\nkvq doctor --json > report.json     # to attach to an issue")
@output.output_options
def doctor(form: str) -> None:
    """GPU, driver, versions, the path each mode takes here and why, switches, and what is broken.

    Each mode writes and reads a few rows through the path it takes, and is held against its own specification. The exit status is 1 if
    an installed mode does not work.
    """
    from dataclasses import asdict

    from kvq_core.cli.list import checked
    from kvq_core.environment import SWITCHES, default_device, path_of
    from kvq_core.registry import IN_PROCESS, get_backend, list_backends

    device = default_device()
    versions, machine = _versions(), _machine()
    entries = list_backends()
    offers = [entry.mode for entry in entries]
    modes: list[dict[str, Any]] = []
    for entry in entries:
        line = checked(entry, offers.count(entry.mode))
        name = entry.mode if entry.distribution == IN_PROCESS else f"{entry.distribution}:{entry.mode}"
        route = path_of(get_backend(name), device) if line.status != "broken" else None
        modes.append({**asdict(line), "path": route.name if route else "", "why": route.why if route else ""})
    switches = {name: os.environ.get(name) for name in SWITCHES}
    plans, wrong = _plans()
    if form == "json":
        click.echo(output.as_json({"machine": machine, "versions": versions, "plans": plans, "switches": switches, "modes": modes}))
    elif form == "csv":
        click.echo(output.as_csv(modes))
    else:
        _tell({**machine, "plans": wrong or ", then ".join(map(_in_words, plans))}, versions, switches, modes)
    if wrong or any(mode["status"] == "broken" for mode in modes):
        raise SystemExit(1)


def _machine() -> dict[str, str]:
    from kvq_core.environment import cpu_name, gpus, nvidia_driver, why_no_gpu

    found = gpus()
    seen = [f"{gpu.name}, {gpu.capability}, {gpu.memory / 2**30:.0f} GiB" for gpu in found]
    return {
        "GPU": "; ".join(seen) if seen else f"none that torch can use: {why_no_gpu()}",
        "driver": nvidia_driver() or "none",
        "CPU": f"{cpu_name()}, {os.cpu_count()} cores",
        "system": platform.platform(),
        **_in_engines(),
    }


def _in_engines() -> dict[str, str]:
    """What packages that put kvq into engines say of them: entry points in the group ``kvq.doctor``."""
    from importlib.metadata import entry_points

    found: dict[str, str] = {}
    for point in entry_points(group="kvq.doctor"):
        try:
            found |= point.load()()
        except Exception as problem:
            found[point.name] = f"cannot be asked: {type(problem).__name__}: {problem}"
    return found


def _plans() -> tuple[list[dict[str, Any]], str]:
    """The tables that launch plans are looked up in on the first GPU, in their order; and what is wrong with one's own, if anything."""
    import torch

    from kvq_core.environment import architecture
    from kvq_core.errors import PlanTableError
    from kvq_core.plans import tables_for
    from kvq_core.plans.lookup import SHIPPED

    arch = architecture(torch.cuda.get_device_properties(0)) if torch.cuda.is_available() else ""
    try:
        tables = tables_for(arch)
    except PlanTableError as problem:
        return [], f"broken: {problem}"
    return [
        {
            "arch": table.arch,
            "file": table.source,
            "own": SHIPPED not in Path(table.source).parents,
            "classes": sum(map(len, table.entries.values())),
            "measured": sorted({f"{run.gpu}, triton {run.triton}" for run in table.runs.values()}),
        }
        for table in tables
    ], ""


def _in_words(table: dict[str, Any]) -> str:
    whose = table["file"] if table["own"] else f"kvq's {table['arch']}"
    return whose + (f" ({'; '.join(table['measured'])})" if table["measured"] else "")


def _versions() -> dict[str, str | None]:
    import torch

    from kvq_core.environment import installed

    names = ("triton", *_ENGINES)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU build"
    return {"python": platform.python_version(), "torch": f"{torch.__version__} ({built})", **{name: installed(name) for name in names}}


def _tell(machine: dict[str, str], versions: dict[str, str | None], switches: dict[str, str | None], modes: list[dict[str, Any]]) -> None:
    from kvq_core.environment import SWITCHES

    width = max(map(len, [*machine, *versions, *switches])) + 2
    for name, value in [*machine.items(), *((name, found or "not installed") for name, found in versions.items())]:
        click.echo(f"{name:<{width}}{value}")
    click.echo()
    for name, setting in switches.items():
        click.echo(f"{name:<{width}}{'not set' if setting is None else repr(setting):<9}{SWITCHES[name]}")
    header = ["mode", "package", "version", "status", "path here", "why"]
    lines = [[m["mode"], m["package"], m["version"], m["status"], m["path"], m["why"]] for m in modes]
    click.echo("\n" + output.table(header, lines, left=range(6)))
    for mode in modes:
        if mode["error"]:
            click.echo(f"\n{mode['status']}: {mode['mode']} from {mode['package']}: {mode['error']}")
