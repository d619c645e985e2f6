"""``agentflow key``: makes an API key, and the lines of the keys file that let it in."""

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
        "tenant", nargs="?", default="default", metavar="TENANT", help="whom it names (%(default)s)"
    )


def _run(options: argparse.Namespace) -> int:
    from agentflow.server.tenants.keys import MAX_NAME_CHARS, new_key

    tenant: str = options.tenant
    if not tenant.strip() or len(tenant) > MAX_NAME_CHARS or not tenant.isprintable():
        raise BadArgument(f"a tenant's name is 1 to {MAX_NAME_CHARS} printable characters, not {tenant!r}")
    name = tenant if _BARE_KEY.fullmatch(tenant) else json.dumps(tenant, ensure_ascii=False)
    key, hashed = new_key()
    # Apart from the lines for the file, into which the key itself must not come.
    print(
        f"The key of {tenant}, shown only now:\n\n  {key}\n\nFor the keys file:\n",
        file=sys.stderr,
        flush=True,
    )
    print(f'[tenants.{name}]\nkeys = ["{hashed}"]', flush=True)
    print("\nSIGHUP makes a running server read its keys file again.", file=sys.stderr)
    return 0


COMMAND = Command(
    name="key",
    summary="make an API key",
    description="""\
Makes a key for a tenant: shows it, once, and the lines for the file that
`agentflow serve --keys-file` reads. These have only the key's hash, and alone
go to standard output.""",
    examples="""\
agentflow key alice                     a key, and what the file needs
agentflow key bob >> keys.toml          the key is still shown
agentflow serve --keys-file keys.toml
agentflow chat --url ws://127.0.0.1:8410 --api-key af-...
""",
    add_options=_add_options,
    run=_run,
)
