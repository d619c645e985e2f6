"""``agentflow key``: creates an API key and its lines for the keys file."""

from __future__ import annotations

import argparse
import json
import re
import sys

from agentflow.cli.command import Command
from agentflow.errors import BadArgument

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tenant", nargs="?", default="default", metavar="TENANT", help="the tenant of the key (%(default)s)"
    )


def _run(options: argparse.Namespace) -> int:
    from agentflow.server.tenants.keys import MAX_NAME_CHARS, new_key

    tenant: str = options.tenant
    if not tenant.strip() or len(tenant) > MAX_NAME_CHARS or not tenant.isprintable():
        raise BadArgument(f"a tenant's name is 1 to {MAX_NAME_CHARS} printable characters, not {tenant!r}")
    name = tenant if _BARE_KEY.fullmatch(tenant) else json.dumps(tenant, ensure_ascii=False)
    key, hashed = new_key()
    # On standard error, so that the key cannot get into the file.
    print(
        f"The key of {tenant}, shown only now:\n\n  {key}\n\nFor the keys file:\n",
        file=sys.stderr,
        flush=True,
    )
    print(f'[tenants.{name}]\nkeys = ["{hashed}"]', flush=True)
    print("\nA running server reads its keys file again at SIGHUP.", file=sys.stderr)
    return 0


COMMAND = Command(
    name="key",
    summary="create an API key",
    description="""\
Creates an API key for a tenant and shows it once, with the lines for the file
that `agentflow serve --keys-file` reads. The lines contain only the hash of the
key. They are written to standard output, everything else to standard error.""",
    examples="""\
agentflow key alice                     a key, and its lines for the file
agentflow key bob >> keys.toml          the key is still shown
agentflow serve --keys-file keys.toml
agentflow chat --url ws://127.0.0.1:8410 --api-key af-...
""",
    add_options=_add_options,
    run=_run,
)
