"""The models and tokenizers that transformers reads from a folder with a GGUF file."""

from __future__ import annotations

import functools
import json
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import transformers
from gguf import dequantize
from numpy.typing import NDArray

from agentflow.engine.store.gguf.file import find_gguf, open_gguf
from agentflow.engine.text.tokenizer_files import read_tokenizer


def transformers_model(folder: Path, **options: Any) -> transformers.PreTrainedModel:
    """The model as transformers reads the file, dequantised."""
    file = find_gguf(folder)
    assert file is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", _reader)
        patch.setattr(gguf, "get_tensor_name_map", _tensor_name_map)
        patch.setattr(gguf, "dequantize", _dequantize)
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            **options,
        )
    return model


class _Reader(gguf.GGUFReader):
    """Skips long arrays, which are the vocabulary: no model needs it, and it takes most of the time."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data = memoryview(self.data)
        kind, length = struct.unpack_from("<IQ", data, orig_offs)
        if length < 1000:
            return super()._get_field_parts(orig_offs, raw_type)
        end = int(orig_offs) + 12
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(length):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
        else:
            end += length * np.dtype(self.gguf_scalar_to_np[gguf.GGUFValueType(kind)]).itemsize
        return end - int(orig_offs), [], [], [gguf.GGUFValueType.ARRAY]


def _dequantize(data: NDArray[Any], kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """Like ``gguf.dequantize``, which takes 16 rows at a time, but with longer rows; no ``memmap``, whose
    slices are slow."""
    *rows, width = data.shape
    joined = math.gcd(math.prod(rows), 8)
    return dequantize(np.asarray(data).reshape(-1, joined * width), kind).reshape(*rows, -1)


# transformers reads the file twice, and makes this map again for each module.
_reader = functools.lru_cache(maxsize=1)(_Reader)
_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


def library_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer. Not as transformers reads the file: it takes another pre-tokenizer."""
    return tokenizers.Tokenizer.from_str(json.dumps(read_tokenizer(folder)))


def transformers_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    """The same in transformers, with its chat template."""
    file = find_gguf(folder)
    assert file is not None
    words = open_gguf(file).vocabulary
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library_tokenizer(folder),
        chat_template=words.chat_template,
        clean_up_tokenization_spaces=False,
        **words.named_tokens,
    )
