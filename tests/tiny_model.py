"""Tiny random Qwen3 and Qwen2-VL models with a byte-level tokenizer and a ChatML template, for engine tests.

Their weights have a standard deviation of 0.2, ten times the usual, so that the output varies with the input.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 384
CONTEXT = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
CORPUS = (
    "What is 12 + 34? The tool answers with a number.",
    '{"name":"calc","arguments":{"expr":"12*(3+4)"}}',
    "system user assistant tool 0123456789 + - * / ( ) = . ,",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name":{{ call.function.name | tojson }},"arguments":{{ call.function.arguments if call.function.arguments '
    "is string else call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder: Path, *, seed: int = 0, **shape: Any) -> Path:
    """Write config, weights, tokenizer and chat template into `folder`; the same seed gives the same bytes. `shape`:
    values of the config that differ."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tiny_tokenizer()
    return write_model(folder, tokenizer, Qwen3ForCausalLM, Qwen3Config(**_shape(tokenizer) | shape), seed)


def make_tiny_moe(folder: Path, *, seed: int = 0) -> Path:
    """Write the same as a Qwen3 mixture of experts: two layers of eight experts, two of them per token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = tiny_tokenizer()
    config = Qwen3MoeConfig(
        **_shape(tokenizer), num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    return write_model(folder, tokenizer, Qwen3MoeForCausalLM, config, seed)


def _shape(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    }


def write_model(folder: Path, tokenizer: Any, network: Any, config: Any, seed: int) -> Path:
    """Write a random model of `config` and its tokenizer into `folder`; the same seed gives the same bytes."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network(config).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer(special: Sequence[str] = SPECIAL, chat_template: str = CHAT_TEMPLATE) -> Any:
    """Return a byte-level BPE tokenizer, trained on a few lines, in transformers' wrapper."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    wrapped: Any = PreTrainedTokenizerFast
    return wrapped(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_template
    )


VISION_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
VISION_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content or [] %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"depth": 2, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]},
    "qwen3_vl": {
        "depth": 3, "patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
    },
}  # fmt: skip
"""Kind of model -> its tower."""
ROPES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "qwen3_vl": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
}
"""Kind of model -> the rotary positions of its decoder."""


def make_tiny_vision(folder: Path, kind: str = "qwen2_5_vl", *, seed: int = 0) -> Path:
    """Write config, weights, tokenizer, chat template and processors; the same seed gives the same bytes."""
    import transformers
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    architecture = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    network: Any = getattr(transformers, f"{architecture}ForConditionalGeneration")
    processor: Any = transformers.Qwen2VLImageProcessor
    video_processor: Any = Qwen3VLVideoProcessor if kind == "qwen3_vl" else Qwen2VLVideoProcessor
    tokenizer = tiny_tokenizer(VISION_SPECIAL, VISION_CHAT_TEMPLATE)
    number = tokenizer.convert_tokens_to_ids
    heads = {"head_dim": 16} if kind == "qwen3_vl" else {}
    config = network.config_class(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
            "rope_scaling": ROPES[kind], "initializer_range": 0.2, "bos_token_id": None,
            "eos_token_id": number("<|im_end|>"), **heads,
        },
        vision_config={
            "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, **TOWERS[kind],
        },
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    write_model(folder, tokenizer, network, config, seed)
    patch = TOWERS[kind]["patch_size"]
    pixels = (2 * patch) ** 2  # per token
    sizes = {"shortest_edge": pixels, "longest_edge": 16 * pixels}  # areas, whatever the names say
    processor(patch_size=patch, size=sizes).save_pretrained(folder)
    video_processor().save_pretrained(folder)
    for name in ("preprocessor_config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text()) | {"processor_class": f"{architecture}Processor"}
        (folder / name).write_text(json.dumps(values))
    return folder
