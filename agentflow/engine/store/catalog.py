"""The short names of good small models, in one table.

Each name stands for a repository of the Hugging Face hub; only the default model, smollm2-135m, is pulled
from another source (``model_store``). The shapes are copied from ``config.json``, so that the memory of a
model can be shown before it is pulled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# parameters: in memory; tied ones count once. GB: the files to pull. licence: the hub's id.
_TABLE: Final = """
name          repository                           licence     parameters     GB  context  layers kv_heads head_dim  vocabulary
smollm2-135m  HuggingFaceTB/SmolLM2-135M-Instruct  apache-2.0   134515008   0.09     8192      30        3       64       49152
smollm2-360m  HuggingFaceTB/SmolLM2-360M-Instruct  apache-2.0   361821120   0.73     8192      32        5       64       49152
smollm2-1.7b  HuggingFaceTB/SmolLM2-1.7B-Instruct  apache-2.0  1711376384   3.43     8192      24       32       64       49152
smollm3-3b    HuggingFaceTB/SmolLM3-3B             apache-2.0  3075098624   6.17    65536      36        4      128      128256
qwen2.5-0.5b  Qwen/Qwen2.5-0.5B-Instruct           apache-2.0   494032768   1.00    32768      24        2       64      151936
qwen2.5-1.5b  Qwen/Qwen2.5-1.5B-Instruct           apache-2.0  1543714304   3.10    32768      28        2      128      151936
qwen2.5-7b    Qwen/Qwen2.5-7B-Instruct             apache-2.0  7615616512  15.25    32768      28        4      128      152064
qwen3-0.6b    Qwen/Qwen3-0.6B                      apache-2.0   596049920   1.52    40960      28        8      128      151936
qwen3-1.7b    Qwen/Qwen3-1.7B                      apache-2.0  1720574976   4.08    40960      28        8      128      151936
qwen3-4b      Qwen/Qwen3-4B                        apache-2.0  4022468096   8.06    40960      36        8      128      151936
llama-3.2-1b  meta-llama/Llama-3.2-1B-Instruct     llama3.2    1235814400   2.49   131072      16        8       64      128256
llama-3.2-3b  meta-llama/Llama-3.2-3B-Instruct     llama3.2    3212749824   6.44   131072      28        8      128      128256
gemma-3-1b    google/gemma-3-1b-it                 gemma        999885952   2.04    32768      26        1      256      262144
phi-4-mini    microsoft/Phi-4-mini-instruct        mit         3836021760   7.69   131072      32        8      128      200064
olmo-2-1b     allenai/OLMo-2-0425-1B-Instruct      apache-2.0  1484916736   2.98     4096      16       16      128      100352
"""  # noqa: E501
_GATED: Final = ("llama3.2", "gemma")


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model with a short name. ``is_gated``: the hub requires an account that has accepted its terms."""

    name: str
    repository: str  # on the hub
    licence: str  # the hub's id
    parameters: int
    disk_bytes: int
    context: int  # in tokens
    layers: int  # layers, kv_heads and head_dim: the shape of its KV cache
    kv_heads: int
    head_dim: int
    vocabulary: int  # the size of its vocabulary

    @property
    def is_gated(self) -> bool:
        return self.licence in _GATED

    @property
    def kv_numbers_per_token(self) -> int:
        """How many numbers the keys and values of one token have."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def _read(table: str) -> Mapping[str, CatalogModel]:
    models = {}
    for line in table.strip().splitlines()[1:]:
        name, repository, licence, parameters, gigabytes, *shape = line.split()
        disk_bytes = int(float(gigabytes) * 1e9)
        models[name] = CatalogModel(name, repository, licence, int(parameters), disk_bytes, *map(int, shape))
    return models


CATALOG: Final = _read(_TABLE)
"""The models by short name."""
