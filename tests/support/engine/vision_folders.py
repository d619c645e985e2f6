"""Complete folders of small models with vision: random weights, a tokenizer, a chat template and the settings
of images; and the answers of transformers, whose processors expand the same texts and images."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from support.engine.vision_models import IMAGE_TOKEN, VIDEO_TOKEN, VISION_MODELS, config_of, random_image
from support.small_tokenizers import added_token, byte_level_of, write_folder

VOCABULARY = 320
NUM_WORDS = 280
END = "<|im_end|>"
EARLIER = "<extra_0>"
PICTURES = {"cat": (120, 70), "dog": (70, 130)}

_CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_SMOLVLM = """<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}\
{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}\
{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}\
{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
_LLAVA = """{% for m in messages %}{{ m['role'].upper() + ': ' }}\
{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}<image>
{% endfor %}{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}\
{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""


@dataclass(frozen=True)
class Family:
    """``image_token``: the token in the place of features. ``markup``: further special tokens. ``images``,
    ``joint``: transformers' processors of images, and of texts and images, in their modules. ``options``: of
    the latter."""

    template: str
    images: str
    joint: str
    options: dict[str, Any]
    image_token: str = "<image>"
    markup: tuple[str, ...] = ()
    has_videos: bool = False


_CLIP = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_TILES = tuple([f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)])


def _qwen(name: str, kind: str) -> Family:
    return Family(
        _CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
        f"{name}.processing_{name}.{kind}",
        {},
        "<|image_pad|>",
        ("<|vision_start|>", "<|vision_end|>"),
        has_videos=True,
    )


FAMILIES = {
    "smolvlm": Family(
        _SMOLVLM,
        "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
        "idefics3.processing_idefics3.Idefics3Processor",
        {"image_seq_len": 16},
        markup=("<fake_token_around_image>", "<global-img>", *_TILES),
    ),
    "llava": Family(
        _LLAVA,
        "llava.image_processing_pil_llava.LlavaImageProcessorPil",
        "llava.processing_llava.LlavaProcessor",
        _CLIP,
    ),
    "llava_next": Family(
        _CHATML.replace("IMAGE", "<image>\n"),
        "llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil",
        "llava_next.processing_llava_next.LlavaNextProcessor",
        _CLIP,
    ),
    "llava_next_video": Family(
        _CHATML.replace("IMAGE", "<image>\n"),
        "llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil",
        "llava_next_video.processing_llava_next_video.LlavaNextVideoProcessor",
        _CLIP,
        has_videos=True,
    ),
    "llava_onevision": Family(
        _CHATML.replace("IMAGE", "<image>"),
        "llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil",
        "llava_onevision.processing_llava_onevision.LlavaOnevisionProcessor",
        {"num_image_tokens": 49, "vision_feature_select_strategy": "full"},
        has_videos=True,
    ),
    "gemma3": Family(
        _CHATML.replace("IMAGE", "<start_of_image>"),
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        "gemma3.processing_gemma3.Gemma3Processor",
        {"image_seq_length": 16},
        "<image_soft_token>",
        ("<start_of_image>", "<end_of_image>"),
    ),
    "qwen2_5_vl": _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen("qwen3_vl", "Qwen3VLProcessor"),
}


def picture_file(name: str) -> bytes:
    """A PNG file."""
    file = io.BytesIO()
    random_image(*PICTURES[name], seed=len(name) + ord(name[0])).save(file, "PNG")
    return file.getvalue()


class VisionFolder:
    """A model of a family, saved to ``path``."""

    def __init__(self, name: str, path: Path) -> None:
        self.path, self.family = path, FAMILIES[name]
        self.tokenizer = self._save_tokenizer()
        end = self.tokenizer.convert_tokens_to_ids(END)
        torch.manual_seed(0)
        config = config_of(name)
        # Tied, random embeddings would repeat the last token of the prompt.
        config.text_config.tie_word_embeddings = config.tie_word_embeddings = False
        config.text_config.eos_token_id = config.eos_token_id = end
        self.model = transformers.AutoModelForImageTextToText.from_config(config).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
        self.model.generation_config.eos_token_id = end
        self.model.generation_config.pad_token_id = 0
        self.model.save_pretrained(path)
        settings = dict(VISION_MODELS[name].settings)
        settings.pop("is_onevision", None)
        (path / "preprocessor_config.json").write_text(json.dumps(settings))
        joint = _found(self.family.joint)
        if self.family.has_videos:  # their processor of videos needs a package that is not installed
            joint = type(joint.__name__, (joint,), {"check_argument_for_proper_class": lambda *_: None})
        arguments = {"image_processor": _found(self.family.images)(**settings), "tokenizer": self.tokenizer}
        arguments |= {"video_processor": None} if self.family.has_videos else {}
        self._processor = joint(**arguments, **self.family.options)

    def _save_tokenizer(self) -> transformers.PreTrainedTokenizerFast:
        """Each id is a text, so that answers can be compared as texts."""
        family = self.family
        letters = "abcdefghijklmnopqrstuvwxyz"
        spec = byte_level_of(["\n\n", *[one + other for one in letters for other in letters]])
        vocabulary: dict[str, int] = spec["model"]["vocab"]
        signs = {chr(code) for code in range(33, 127)} | {"Ġ", "Ċ"}
        kept = [word for word in vocabulary if len(word) > 1 or word in signs][:NUM_WORDS]
        spec["model"]["vocab"] = {word: number for number, word in enumerate(kept)}
        spec["model"]["merges"] = [
            merge for merge in spec["model"]["merges"] if "".join(merge) in spec["model"]["vocab"]
        ]
        names = iter(["<|im_start|>", END, *family.markup, *[f"<extra_{n}>" for n in range(VOCABULARY)]])
        fixed = {IMAGE_TOKEN: family.image_token, VIDEO_TOKEN: "<video>"}
        spec["added_tokens"] = [
            added_token(number, fixed[number] if number in fixed else next(names))
            for number in range(NUM_WORDS, VOCABULARY)
        ]
        write_folder(self.path, spec, {"eos_token": END}, family.template)
        specials = [token["content"] for token in spec["added_tokens"]]
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(self.path / "tokenizer.json"), additional_special_tokens=specials
        )
        named = {"image_token": family.image_token}
        if family.image_token == "<image_soft_token>":
            named |= {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        for name, text in named.items():
            setattr(tokenizer, name, text)
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(text))
        return tokenizer

    def answer(
        self, turns: Sequence[tuple[str, Sequence[str]]], max_tokens: int, earlier: Sequence[int] = ()
    ) -> tuple[str, list[int]]:
        """The likeliest answer of transformers' model, and the prompt's ids and its own.

        Args:
            turns: the roles and contents; parts that begin with # are pictures.
            max_tokens: the length of the answer.
            earlier: the ids of an earlier answer, which the text ``EARLIER`` stands for.
        """
        names = [part[1:] for _, parts in turns for part in parts if part.startswith("#")]
        messages = [
            {
                "role": role,
                "content": [
                    {"type": "image"} if part.startswith("#") else {"type": "text", "text": part}
                    for part in parts
                ],
            }
            for role, parts in turns
        ]
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=self.family.template, tokenize=False, add_generation_prompt=True
        )
        images = [Image.open(io.BytesIO(picture_file(name))).convert("RGB") for name in names]
        given = {**self._processor(text=[text], images=[images], return_tensors="pt")}
        if earlier:
            prompt = given["input_ids"][0].tolist()
            at = prompt.index(self.tokenizer.convert_tokens_to_ids(EARLIER))
            given["input_ids"] = torch.tensor([[*prompt[:at], *earlier, *prompt[at + 1 :]]])
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        is_image = (given["input_ids"] == IMAGE_TOKEN).long()
        if self.family.joint.startswith("qwen"):
            given["mm_token_type_ids"] = is_image
        if "boi_token" in vars(self.tokenizer):
            given["token_type_ids"] = is_image
        else:
            given.pop("token_type_ids", None)
        num_prompt = given["input_ids"].shape[1]
        ids = self.model.generate(**given, do_sample=False, max_new_tokens=max_tokens)[0]
        return self.tokenizer.decode(ids[num_prompt:], skip_special_tokens=True), ids.tolist()


def _found(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)
