"""A tiny random Qwen2.5-VL with its image processor, for engine tests: it sees, and its images take few tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnlog.infra.embedded.tiny_model import CONTEXT, VOCABULARY, tiny_tokenizer, written

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content or [] %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIXELS = 28 * 28
"""Of one token."""


def make_tiny_vision(folder: Path, *, seed: int = 0) -> Path:
    """Write config, weights, tokenizer, chat template and image processor; the same seed gives the same bytes."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    network: Any = Qwen2_5_VLForConditionalGeneration
    processor: Any = Qwen2VLImageProcessor
    video_processor: Any = Qwen2VLVideoProcessor
    tokenizer = tiny_tokenizer(SPECIAL, CHAT_TEMPLATE)
    number = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "initializer_range": 0.2,
            "bos_token_id": None, "eos_token_id": number("<|im_end|>"),
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [1], "in_channels": 3,
        },
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    written(folder, tokenizer, network, config, seed)
    processor(min_pixels=PIXELS, max_pixels=16 * PIXELS).save_pretrained(folder)
    video_processor().save_pretrained(folder)
    for name in ("preprocessor_config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text()) | {"processor_class": "Qwen2_5_VLProcessor"}
        (folder / name).write_text(json.dumps(values))
    return folder
