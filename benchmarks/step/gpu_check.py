"""``make gpu-check``: whether the model runs correctly on this machine's GPU, and how close it is to the
GPU's limits.

Needs Python, torch, numpy and a few small packages; the Makefile's ``WHEELS=`` supplies missing ones. Without
a GPU it prints a line and exits with 0; with one, it exits with 1 if a check or a section fails. The results
are written after each section, so it can be stopped at any time. ``--only`` runs single sections.
``--device cpu --tiny`` tests the program itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path


def main() -> int:
    if importlib.util.find_spec("torch") is None:
        print("gpu-check: torch is not installed here, so nothing was checked")
        return 0
    import torch

    from benchmarks.step.gpu_sections import SECTIONS, run

    parser = argparse.ArgumentParser(prog="python -m benchmarks.step.gpu_check")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes instead of Llama 3.1 8B's")
    parser.add_argument(
        "--only",
        action="append",
        choices=SECTIONS,
        metavar="SECTION",
        help=f"run only this one of {', '.join(SECTIONS)}; may be repeated",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="instead of benchmarks/results/GPU/gpu.json"
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: there is no CUDA GPU here, so nothing was checked")
        return 0
    return run(options.device, options.tiny, options.only or [*SECTIONS], options.json)


if __name__ == "__main__":
    sys.exit(main())
