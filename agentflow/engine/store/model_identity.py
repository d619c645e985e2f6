"""The identity of a model: a digest of its files, independent of the path of their folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from agentflow.engine.store.gguf.file import find_gguf
from agentflow.engine.store.gguf.names import find_mmproj
from agentflow.engine.store.model_folder import gguf_parts, weight_files

STRIDE = 2**20
SAMPLE = 4096


def model_identity(path: Path) -> str:
    """Returns the identity of the model in a folder or GGUF file.

    The digest covers the config, the size of each file of weights, and the first ``SAMPLE`` of every
    ``STRIDE`` bytes: reading a whole large model would take as long as loading it. Models that differ in
    fewer than ``STRIDE`` adjacent bytes may have the same identity.

    Raises:
        BadModelFolder: The files cannot be found.
    """
    gguf = find_gguf(path)
    digest = hashlib.sha256()
    if gguf is not None:
        files = [gguf.with_name(name) for name in gguf_parts(gguf.name)]
        files += filter(None, [find_mmproj(gguf)])
    else:
        files = [path / name for name in weight_files(path)]
        digest.update((path / "config.json").read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb", buffering=0) as opened:
            for start in range(0, size, STRIDE):
                opened.seek(start)
                digest.update(opened.read(SAMPLE))
    return digest.hexdigest()
