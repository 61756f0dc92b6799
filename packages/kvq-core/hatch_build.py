"""The benchmark suite goes into the wheel as ``kvq_core/bench``, so that ``kvq bench`` runs where kvq is installed."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BenchmarksBuildHook(BuildHookInterface):
    """Adds the ``benchmarks`` of the repository, or those that the source distribution has beside this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        target = "benchmarks" if self.target_name == "sdist" else "kvq_core/bench"
        for place in (root / "benchmarks", root.parent.parent / "benchmarks"):
            if place.is_dir():
                build_data["force_include"].update({str(file): f"{target}/{file.name}" for file in sorted(place.glob("*.py"))})
                return
