"""``python -m agentflow`` is the command ``agentflow``."""

import sys

from agentflow.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
