"""The processors by ``model_type`` in ``config.json``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from agentflow.engine.media.processors.gemma3 import Gemma3Processor
from agentflow.engine.media.processors.idefics3 import Idefics3Processor
from agentflow.engine.media.processors.llava import LlavaProcessor
from agentflow.engine.media.processors.llava_next import LlavaNextProcessor
from agentflow.engine.media.processors.llava_onevision import LlavaOnevisionProcessor
from agentflow.engine.media.processors.pixels import Processor
from agentflow.engine.media.processors.qwen_vl import QwenVLProcessor
from agentflow.engine.media.settings import MediaSettings

PROCESSORS: Final[dict[str, Callable[[MediaSettings], Processor]]] = {
    "gemma3": Gemma3Processor,
    "idefics3": Idefics3Processor,
    "llava": LlavaProcessor,
    "llava_next": LlavaNextProcessor,
    "llava_next_video": LlavaNextProcessor,
    "llava_onevision": LlavaOnevisionProcessor,
    "qwen2_5_vl": QwenVLProcessor,
    "qwen3_vl": QwenVLProcessor,
    "smolvlm": Idefics3Processor,
}
