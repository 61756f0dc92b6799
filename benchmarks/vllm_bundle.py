"""Pack vLLM for a GPU machine that reaches no package index: ``python benchmarks/vllm_bundle.py`` (needs an index itself, some minutes).

It makes two files that ``benchmarks/vllm_gpu.py stage`` unpacks there, one after the other or both at once:

``.bundle/vllm/vllm.tar``      vLLM's Python files, the one extension that it always imports, and FlashAttention 3, its default for bf16
                               on Hopper (40 MiB)
``.bundle/wheels/wheels.tar``  the wheels that it needs, and its extension for mixtures of experts (38 MiB)

The machine brings torch and Triton. Left out: extensions and third-party kernels that a dense Llama does not reach, and machine code of
other architectures (their headers stay, so that the driver's choice is unchanged).
"""

from __future__ import annotations

import argparse
import lzma
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = Path(__file__).parent / "vllm_requirements.txt"
EXTENSIONS = {
    "vllm": ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"),
    "wheels": ("vllm/_moe_C_stable_libtorch.abi3.so",),
}
THIRD_PARTY = ("deep_gemm", "flashmla", "fmha_sm100", "tml_fa4")
SMALL = 1 << 20
_FATBIN = struct.pack("<I", 0xBA55ED50)
_ELF = 2


def pruned(binary: bytes, arch: int) -> bytes:
    """A CUDA shared object with the machine code of all architectures but ``arch`` zeroed, which then compresses to nothing."""
    data, first = bytearray(binary), 0
    while (first := data.find(_FATBIN, first)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, first)
        end = first + header + size
        if header != 16 or end > len(data):
            first += 4
            continue
        entry = first + header
        while entry + 64 <= end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, entry)
            (found,) = struct.unpack_from("<I", data, entry + 28)
            if kind not in (1, _ELF) or header < 40 or entry + header + size > end:
                break
            if kind == _ELF and found != arch:
                data[entry + header : entry + header + size] = bytes(size)
            entry += header + size
        first = end
    return bytes(data)


def download(folder: Path, python: str, *what: str) -> None:
    """Wheels for the other machine's Python and system."""
    systems = ("manylinux_2_34", "manylinux_2_31", "manylinux_2_28", "manylinux2014")
    platforms = [option for name in systems for option in ("--platform", f"{name}_x86_64")]
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--python-version", python)
    subprocess.run([*pip, *platforms, "--platform", "any", "-d", str(folder), *what], check=True)


def wanted(entry: zipfile.ZipInfo) -> bool:
    """Whether a file of vLLM's wheel comes along as it is."""
    name = entry.filename
    if any(f"third_party/{skipped}" in name for skipped in THIRD_PARTY) or "/static/" in name or "vllm-rs" in name:
        return False
    return not name.endswith(".so") or (name.endswith(".abi3.so") and entry.file_size < SMALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".bundle")
    parser.add_argument("--version", default="0.26.0", help="of vLLM; REQUIREMENTS fit 0.26.0")
    parser.add_argument("--python", default="3.12", help="of the GPU machine")
    parser.add_argument("--arch", type=int, default=90, help="compute capability of its GPU")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        made = {name: Path(scratch) / name for name in EXTENSIONS}
        download(made["wheels"] / "wheels", options.python, "-r", str(REQUIREMENTS))
        download(Path(scratch), options.python, f"vllm=={options.version}")
        wheel = zipfile.ZipFile(next(Path(scratch).glob("vllm-*.whl")))
        for entry in filter(wanted, wheel.infolist()):
            wheel.extract(entry, Path(scratch) / "tree")
        for name, folder in made.items():
            for extension in EXTENSIONS[name]:
                packed = folder / f"{extension}.xz"
                packed.parent.mkdir(parents=True, exist_ok=True)
                packed.write_bytes(lzma.compress(pruned(wheel.read(extension), options.arch)))
        with tarfile.open(made["vllm"] / "python.tar.xz", "w:xz") as tar:
            for path in sorted((Path(scratch) / "tree").iterdir()):
                tar.add(path, path.name)
        for name, folder in made.items():
            file = options.out / name / f"{name}.tar"
            file.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(file, "w") as tar:
                tar.add(folder, ".")
    for path in sorted(options.out.rglob("*.*")):
        print(path, f"{path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
