"""``kvq doctor``: what is here, which path each mode takes on it and why, and whether it works."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvq_core.cli import output

if TYPE_CHECKING:
    import torch

_ENGINES: Final = ("transformers", "kvq-transformers", "vllm", "flashinfer-python", "numpy", "safetensors")


@click.command(epilog="Examples:\n\n\b\nkvq doctor\nkvq doctor --json > report.json     # to attach to an issue")
@output.output_options
def doctor(form: str) -> None:
    """GPU, driver, versions, switches, kernels that are off here and why, the path each mode takes, and what is broken.

    Each mode writes and reads a few rows through the path it takes, and is held against its own specification. The exit status is 1 if
    an installed mode does not work, or an environment variable is wrong; such variables are told, and taken as not set.
    """
    from dataclasses import asdict

    from kvq_core import variables
    from kvq_core.cli.list import FAILED, checked
    from kvq_core.environment import default_device, path_of
    from kvq_core.registry import IN_PROCESS, get_backend, list_backends

    switches = {name: os.environ.get(name) for name in variables.VARIABLES}
    with variables.without_faults() as faults:
        device = default_device()
        versions, machine, families = _versions(), _machine(), _families(device)
        modes: list[dict[str, Any]] = []
        for entry in list_backends():
            line = checked(entry)
            name = entry.mode if entry.distribution == IN_PROCESS else f"{entry.distribution}:{entry.mode}"
            route = path_of(get_backend(name), device) if line.status != "broken" else None
            modes.append({**asdict(line), "path": route.name if route else "", "why": route.why if route else ""})
        plans, wrong = _plans()
    told = {name: str(fault) for name, fault in faults.items()}
    if form == "json":
        content = {"machine": machine, "versions": versions, "plans": plans, "wrong_plans": wrong, "switches": switches}
        output.say(output.as_json({**content, "wrong_switches": told, "families": families, "modes": modes}))
    elif form == "csv":
        output.say(output.as_csv(modes))
        output.say_beside([*_wrong(told), *filter(None, [wrong])], form)
    else:
        _tell({**machine, "plans": "; ".join(filter(None, (", then ".join(map(_in_words, plans)), wrong)))}, versions, switches, told)
        _tell_kernels(families, modes)
    if wrong or told or any(mode["status"] in FAILED for mode in modes):
        raise SystemExit(1)


def _families(device: torch.device) -> list[dict[str, Any]]:
    """Each family of kernels: whether it runs here, what is missing if not, and which calls it takes."""
    from kvq_core.environment import installed

    try:
        from kvq_core.launch.dispatch import machine_of
        from kvq_core.launch.families import FAMILIES
    except ImportError as problem:  # no Triton for this system
        return [{"family": "Triton kernels", "serves": "reads and writes", "on": False, "why": str(problem), "takes": []}]
    machine, found = machine_of(device), []
    here = f"here: {machine.arch or 'no GPU'}, Triton {installed('triton')}"
    for family in FAMILIES:
        missing = list(family.missing(machine))
        why = f"needs {'; '.join(missing)} ({here})" if missing else ""
        found.append(
            {"family": family.name, "serves": family.serves, "on": not missing, "why": why, "takes": [rule.need for rule in family.call]}
        )
    return found


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
    from kvq_core.errors import KVQError
    from kvq_core.plan import Table, tables_for
    from kvq_core.plan.lookup import SHIPPED, own_files

    arch = architecture(torch.cuda.get_device_properties(0)) if torch.cuda.is_available() else ""
    tables: tuple[Table, ...] = ()
    wrong = ""
    try:
        tables = tables_for(arch)
        for path in own_files():
            Table.read(path)  # those for other GPUs, too
    except KVQError as problem:
        wrong = f"broken: {problem}"
    found = [
        {
            "arch": table.arch,
            "file": table.source,
            "own": SHIPPED not in Path(table.source).parents,
            "classes": sum(map(len, table.entries.values())),
            "measured": sorted({f"{run.gpu}, triton {run.triton}" for run in table.runs.values()}),
        }
        for table in tables
    ]
    return found, wrong


def _in_words(table: dict[str, Any]) -> str:
    whose = table["file"] if table["own"] else f"kvq's {table['arch']}"
    return whose + (f" ({'; '.join(table['measured'])})" if table["measured"] else "")


def _versions() -> dict[str, str | None]:
    import torch

    from kvq_core.environment import installed

    names = ("triton", *_ENGINES)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU build"
    return {"python": platform.python_version(), "torch": f"{torch.__version__} ({built})", **{name: installed(name) for name in names}}


def _wrong(faults: dict[str, str]) -> list[str]:
    return [f"wrong: {fault}" for fault in faults.values()]


def _tell(machine: dict[str, str], versions: dict[str, str | None], switches: dict[str, str | None], faults: dict[str, str]) -> None:
    from kvq_core.variables import VARIABLES

    width = max(map(len, [*machine, *versions, *switches])) + 2
    settings = {name: "not set" if setting is None else repr(setting) for name, setting in switches.items()}
    of_settings = max(map(len, settings.values()), default=0) + 2
    # Packages may tell of an engine themselves.
    told = {name.casefold() for name in machine}
    others = [(name, found or "not installed") for name, found in versions.items() if name.casefold() not in told]
    for name, value in [*machine.items(), *others]:
        output.say(f"{name:<{width}}{value}")
    output.say()
    for name, setting in settings.items():
        output.say(f"{name:<{width}}{setting:<{of_settings}}{VARIABLES[name].does} ({VARIABLES[name].takes})")
    for line in _wrong(faults):
        output.say(line)


def _tell_kernels(families: list[dict[str, Any]], modes: list[dict[str, Any]]) -> None:
    output.say()
    for family in families:
        output.say(f"{family['family']} ({family['serves']}): {'on' if family['on'] else 'off: ' + family['why']}")
        if family["on"] and family["takes"]:
            output.say(f"  for calls with {'; '.join(family['takes'])}")
    header = ["mode", "package", "version", "status", "path here", "why"]
    lines = [[m["mode"], m["package"], m["version"], m["status"], m["path"], m["why"]] for m in modes]
    output.say("\n" + output.table(header, lines, left=range(6)))
    for mode in modes:
        if mode["error"]:
            output.say(f"\n{mode['status']}: {mode['mode']} from {mode['package']}: {mode['error']}")
