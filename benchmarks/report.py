"""From rows to what is shown: ratios, aligned tables, the comparison with an earlier run, and the plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from rows import COPY, FLASHATTENTION, FLASHINFER, OTHERS, Row

FORMAT = 1
SAME = 0.05
"""A change of time below this share is called none."""
_PEER_OF = {"decode": FLASHINFER, "prefill": FLASHINFER, "write": COPY}


@dataclass(frozen=True)
class Line:
    """A row beside its like: how many times as fast as ``none``, as the peer and as FlashAttention 3, the share of the memory bus, and
    TFLOP/s."""

    row: Row
    hbm: float | None
    tflops: float | None
    x_none: float | None
    x_peer: float | None
    x_flash_attention: float | None = None


def lines(rows: Sequence[Row], bandwidth: float) -> list[Line]:
    """``rows`` with what follows from them; ``bandwidth`` in bytes a second is 100 % of the memory bus."""
    times = {(r.op, r.setting, r.mode): r.us for r in rows}

    def times_as_fast(r: Row, as_what: str) -> float | None:
        other = times.get((r.op, r.setting, as_what))
        return other / r.us if other and r.us else None

    return [
        Line(
            row=r,
            hbm=r.bytes / r.us * 1e6 / bandwidth if r.us else None,
            tflops=r.flops / r.us / 1e6 if r.us and r.flops else None,
            x_none=times_as_fast(r, "none"),
            x_peer=times_as_fast(r, _PEER_OF[r.op]),
            x_flash_attention=times_as_fast(r, FLASHATTENTION),
        )
        for r in rows
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def table(op: str, everything: Sequence[Line]) -> str:
    """The table of one operation, setting by setting; an error stands after its row's setting."""
    peer = "x copy" if op == "write" else "x FlashInfer"
    columns = {"us": "us", "hbm": "% HBM", "tflops": "TFLOP/s", "none": "x none", "peer": peer, "fa3": "x FA3"}
    columns |= {"host": "host us", "temporary": "temp. MiB"}
    mine = [line for line in everything if line.row.op == op]
    unknown = ("fa3",) if all(line.x_flash_attention is None for line in mine) else ()
    for name in {"decode": ("tflops",), "prefill": (), "write": ("tflops", "temporary")}[op] + unknown:
        del columns[name]
    body = []
    for line in mine:
        r = line.row
        if r.error:
            body.append([r.setting, r.mode, "error", *[""] * (len(columns) - 1)])
            continue
        cells = {
            "us": _number(r.us, ".1f") + (" (eager)" if r.method == "eager" else ""),
            "hbm": _number(None if line.hbm is None else 100 * line.hbm, ".0f"),
            "tflops": _number(line.tflops, ".0f"),
            "none": _number(line.x_none, ".2f"),
            "peer": _number(line.x_peer, ".2f"),
            "fa3": _number(line.x_flash_attention, ".2f"),
            "host": _number(r.host_us, ".0f"),
            "temporary": _number(None if r.temporary is None else r.temporary / 2**20, ".1f"),
        }
        body.append([r.setting, r.mode, *(cells[name] for name in columns)])
    head = ["setting", "mode", *columns.values()]
    text = tabulate(body, head, tablefmt="simple", disable_numparse=True, colalign=("left", "left", *["right"] * (len(head) - 2)))
    errors = [f"  {line.row.setting}, {line.row.mode}: {line.row.error}" for line in mine if line.row.error]
    return "\n".join([text, *(["", f"errors in {op}:", *errors] if errors else [])])


# -- an earlier run ---------------------------------------------------------------------------------------------------------


def as_json(facts: dict[str, Any], rows: Sequence[Row], bandwidth: float) -> dict[str, Any]:
    """What is kept of a run."""
    found = [asdict(line.row) | {k: v for k, v in asdict(line).items() if k != "row"} for line in lines(rows, bandwidth)]
    return {"format": FORMAT, "machine": facts, "rows": found}


def load(path: Path) -> dict[str, Any]:
    """A run that :func:`as_json` kept; ``ValueError`` if the file is something else."""
    try:
        kept = json.loads(path.read_text())
        rows_ok = kept["format"] == FORMAT and all({"op", "mode", "setting", "us"} <= set(row) for row in kept["rows"])
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise ValueError(f"{path} holds no earlier run: {cause}") from cause
    if not rows_ok:
        raise ValueError(f"{path} holds a run of format {kept['format']}; this is format {FORMAT}")
    return dict(kept)


@dataclass(frozen=True)
class Change:
    """One row then and now, microseconds; ``None``: an error, or it was not measured."""

    op: str
    setting: str
    mode: str
    before: float | None
    now: float | None

    @property
    def ratio(self) -> float | None:
        """Times as fast as before."""
        return self.before / self.now if self.before and self.now else None

    @property
    def verdict(self) -> str:
        if self.now is None:
            return "broke" if self.before else "no figure"
        if self.ratio is None:
            return "new"
        return "same" if 1 - SAME <= self.ratio <= 1 / (1 - SAME) else "faster" if self.ratio > 1 else "SLOWER"


def compare(old: dict[str, Any], rows: Sequence[Row]) -> list[Change]:
    """Each of ``rows`` against the row of the same operation, setting and mode of an earlier run."""
    before = {(r["op"], r["setting"], r["mode"]): r["us"] for r in old["rows"]}
    return [Change(r.op, r.setting, r.mode, before.get((r.op, r.setting, r.mode)), r.us) for r in rows]


def changes_table(old: dict[str, Any], facts: dict[str, Any], changes: Sequence[Change]) -> str:
    """The comparison as text; it says so if the machines or the versions differ."""
    then = old.get("machine", {})
    differs = [f"{k}: {then.get(k)} then, {facts.get(k)} now" for k in ("gpu", "driver", "torch", "triton") if then.get(k) != facts.get(k)]
    body = [[c.op, c.setting, c.mode, _number(c.before, ".1f"), _number(c.now, ".1f"), _number(c.ratio, ".2f"), c.verdict] for c in changes]
    head = ["op", "setting", "mode", "us then", "us now", "x", ""]
    align = ("left", "left", "left", "right", "right", "right", "left")
    text = tabulate(body, head, tablefmt="simple", disable_numparse=True, colalign=align)
    return "\n".join([f"against commit {then.get('commit', 'unknown')}", *(f"  but {d}" for d in differs), text])


# -- the plot ---------------------------------------------------------------------------------------------------------------


def plot(everything: Sequence[Line], title: str, path: Path) -> None:
    """Ratio to the bf16 baseline of each operation (its peer, or ``none`` without one), and decode's share of the memory bus."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    good = [line for line in everything if not line.row.error]
    ops = [op for op in _PEER_OF if any(line.row.op == op for line in good)]
    panels = [*ops, *(["hbm"] if "decode" in ops else [])]
    if not panels:
        return
    # A mode has its color in every panel.
    color = {mode: f"C{i}" for i, mode in enumerate(dict.fromkeys(line.row.mode for line in good))}
    most = max(len({line.row.setting for line in good if line.row.op == op}) for op in ops)
    size = (max(12, 1.3 * most), 3.2 * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    for panel, axis in zip(panels, axes[:, 0], strict=True):
        op = "decode" if panel == "hbm" else panel
        mine = [line for line in good if line.row.op == op]
        peer = any(line.x_peer is not None for line in mine)
        # What has no such figure, as a setting that the peer does not serve, has no place in the panel.
        shown = {(line.row.mode, line.row.setting): height for line in mine if (height := _height(line, panel, peer)) is not None}
        settings = list(dict.fromkeys(setting for _, setting in shown))
        modes = [mode for mode in dict.fromkeys(mode for mode, _ in shown) if panel == "hbm" or mode not in OTHERS]
        width = 0.84 / max(len(modes), 1)
        for i, mode in enumerate(modes):
            at = [j + (i - (len(modes) - 1) / 2) * width for j, setting in enumerate(settings) if (mode, setting) in shown]
            values = [shown[mode, setting] for setting in settings if (mode, setting) in shown]
            bars = axis.bar(at, values, width * 0.92, label=mode, color=color[mode])
            axis.bar_label(bars, [f"{v:.2f}" if panel != "hbm" else f"{v:.0f}" for v in values], fontsize=6)
        axis.set_xticks(range(len(settings)), settings)
        if panel == "hbm":
            axis.set_ylabel("decode: % of HBM bandwidth")
            axis.axhline(100, color="black", linewidth=0.8)
        else:
            axis.set_ylabel(f"{op}: times as fast as\n{_PEER_OF[op] if peer else 'none'}")
            axis.axhline(1, color="black", linewidth=0.8)
            # Half as fast and twice as fast are equally far from the baseline.
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
            heights = [1.0, *(bar.get_height() for bar in axis.patches)]
            axis.set_ylim(0.8 * min(0.5, *heights), 1.25 * max(heights))
    handles = {label: bar for axis in axes[:, 0] for bar, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _height(line: Line, panel: str, peer: bool) -> float | None:
    if panel == "hbm":
        return None if line.hbm is None else 100 * line.hbm
    return line.x_peer if peer else line.x_none
