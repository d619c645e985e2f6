"""``python -m agentflow.kernels FOLDER``: compiles the native kernels for all levels of instructions, for a
package or an image. ``AGENTFLOW_COMPILED_KERNELS=FOLDER`` makes engines load them."""

import argparse
import sys
from pathlib import Path

from agentflow.kernels.native_library import NoNativeKernels, compile_ahead


def main() -> int:
    """Compiles and prints the files. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m agentflow.kernels", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    try:
        for path in compile_ahead(parser.parse_args().folder):
            print(path)
    except NoNativeKernels as error:
        print(f"agentflow.kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
