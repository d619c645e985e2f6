"""Translates grammars in EBNF (GBNF, as in llama.cpp, vLLM and SGLang) into Lark's notation."""

from __future__ import annotations

from llguidance.gbnf_to_lark import gbnf_to_lark

from agentflow.errors import BadArgument

MAX_EBNF_CHARS = 20_000


def lark_of_ebnf(source: str) -> str:
    """Returns the grammar in Lark's notation. Raises ``BadArgument`` if it is not valid.

    >>> lark_of_ebnf('root ::= "yes"')
    'start: "yes"\\n'
    """
    if len(source) > MAX_EBNF_CHARS:
        raise BadArgument(f"an EBNF grammar has at most {MAX_EBNF_CHARS:,} characters, not {len(source):,}")
    try:
        return str(gbnf_to_lark(source)).removeprefix("%llguidance {}").lstrip()
    except RecursionError:
        raise BadArgument("the EBNF grammar nests too deeply") from None
    except Exception as error:  # the library raises its own errors and plain ones
        raise BadArgument(f"the EBNF grammar is not valid: {error}") from None
