"""What models of each family sample, and what their chat templates write behind it: the answers of one conversation
with tools. Token sequences follow the real templates, of which trl ships some; those in `templates` write the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

from turnlog.producers.gateway.parsers.parser import ParsedCall

TEMPLATES = Path(__file__).parent / "templates"
PROPERTIES = {"city": {"type": "string", "description": "c"}, "days": {"type": "integer", "description": "n"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in ("weather", "stop")
]
CALLS = [ParsedCall("weather", '{"city":"Tromsø \\"x\\"","days":5}'), ParsedCall("stop", '{"city":"Oslo"}')]
FIRST, SECOND = '{"city": "Tromsø \\"x\\"", "days": 5}', '{"city": "Oslo"}'
"""Arguments of CALLS as JSON."""
REASONING, TEXT, LAST = "Two cities.", "Let me see.", "All is fine."


class ModelFormat(NamedTuple):
    """A conversation of one family: a question, an answer with calls, their results, a last answer, and a question."""

    real: tuple[str, ...]
    """Names of the real templates, as packages have them."""
    source: str
    """File in `templates` that writes the same; empty where trl ships a real one."""
    calls: str
    """Format of calls, by its name in [gateway] tool_calls."""
    asks: str
    """What the model samples, with the mark that ends it."""
    results: str
    """What the template writes behind it: the results r0 and r1."""
    ends: str
    """The last answer, with its end."""
    question: str
    """What the template writes behind it: the question `And?`. Empty if it writes earlier messages in another way."""
    eos: tuple[str, ...]
    """Marks that generation_config.json names."""
    reasons: bool = False
    parallel: bool = True
    """Whether an answer may have two calls; else the first alone is sampled, and r0 is the only result."""
    text: bool = True
    """Whether an answer has a text beside calls."""


def _file(name: str) -> Path:
    own = TEMPLATES / f"{name}.jinja"
    found = importlib.util.find_spec("trl")  # which is not imported
    assert found is not None, "the environment of tests has it"
    assert found.origin is not None
    return own if own.exists() else Path(found.origin).parent / f"chat_templates/{name}.jinja"


def has_source(name: str) -> bool:
    """Return whether the installation has a template."""
    return _file(name).exists()


def source_of(name: str) -> str:
    """Return a template's source: a file of `templates`, or one that trl ships."""
    return _file(name).read_text()


def _hermes() -> str:
    calls = zip(("weather", "stop"), (FIRST, SECOND), strict=True)
    said = [f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls]
    return "\n".join([TEXT, *said]) + "<|im_end|>"


CHATML = (
    "\n<|im_start|>user\n<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)
CHATML_ASKS = "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
CODER = (
    f'{TEXT}\n\n<tool_call>\n<function=weather>\n<parameter=city>\nTromsø "x"\n</parameter>\n<parameter=days>\n5\n'
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>\n<parameter=city>\nOslo\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>"
)
IM_END = ("<|im_end|>", "<|endoftext|>")
GLM = (
    f"\n<think>{REASONING}</think>\n{TEXT}\n<tool_call>weather\n<arg_key>city</arg_key>\n"
    '<arg_value>Tromsø "x"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n'
    "<tool_call>stop\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call><|observation|>"
)
GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
SENTENCE = "<｜end▁of▁sentence｜>"
OUTPUTS = "".join(f"<｜tool▁output▁begin｜>r{at}<｜tool▁output▁end｜>" for at in range(2))
KIMI = "<|tool_call_begin|>functions.%s:%d<|tool_call_argument_begin|>%s<|tool_call_end|>"
KIMI_CALLS = (
    f"<|tool_calls_section_begin|>{KIMI % ('weather', 0, FIRST)}{KIMI % ('stop', 1, SECOND)}"
    "<|tool_calls_section_end|><|im_end|>"
)
RETURNS = (
    "<|im_system|>tool<|im_middle|>## Return of functions.weather:0\nr0<|im_end|>"
    "<|im_system|>tool<|im_middle|>## Return of functions.stop:1\nr1<|im_end|><|im_assistant|>assistant<|im_middle|>"
)
KIMI_ASKS = "<|im_user|>user<|im_middle|>And?<|im_end|><|im_assistant|>assistant<|im_middle|>"
LLAMA_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
MODEL_FORMATS: dict[str, ModelFormat] = {
    "Qwen2.5": ModelFormat(
        ("qwen2_5", "Qwen-Qwen2.5-7B-Instruct"), "", "hermes", _hermes(), CHATML, f"{LAST}<|im_end|>", CHATML_ASKS,
        IM_END,
    ),
    "Qwen3": ModelFormat(
        ("qwen3", "Qwen-Qwen3-0.6B"), "", "hermes", f"<think>\n{REASONING}\n</think>\n\n{_hermes()}", CHATML,
        f"<think>\n{REASONING}\n</think>\n\n{LAST}<|im_end|>", CHATML_ASKS, IM_END, reasons=True,
    ),
    "Qwen3-Instruct-2507": ModelFormat(
        ("qwen3_instruct_2507",), "", "hermes", _hermes(), CHATML, f"{LAST}<|im_end|>", CHATML_ASKS, IM_END
    ),
    "Qwen3-VL": ModelFormat(
        ("qwen3_vl",), "", "hermes", _hermes(), CHATML, f"{LAST}<|im_end|>", CHATML_ASKS, IM_END
    ),
    "Qwen3-Coder": ModelFormat(
        ("Qwen3-Coder",), "qwen3_coder", "qwen3_coder", CODER,
        CHATML.replace("</tool_response><|im_end|>", "</tool_response>\n<|im_end|>"), f"{LAST}<|im_end|>", CHATML_ASKS,
        IM_END,
    ),
    "Qwen3.5": ModelFormat(
        ("qwen3_5_think", "qwen3_6", "qwen3_8", "Qwen3.5-4B"), "", "qwen3_coder", f"{REASONING}\n</think>\n\n{CODER}",
        f"{CHATML}<think>\n", f"{REASONING}\n</think>\n\n{LAST}<|im_end|>", f"{CHATML_ASKS}<think>\n", IM_END,
        reasons=True,
    ),
    "GLM-4.5": ModelFormat(
        ("glm4moe", "GLM-4.6"), "", "glm45", GLM,
        "\n<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response><|assistant|>",
        f"\n<think>{REASONING}</think>\n{LAST}<|user|>", "\nAnd?<|assistant|>", GLM_ENDS, reasons=True,
    ),
    "GLM-4.7": ModelFormat(
        ("GLM-4.7-Flash",), "glm47", "glm45", GLM.replace("\n", "").removeprefix("<think>"),
        "<tool_response>r0</tool_response><tool_response>r1</tool_response><|assistant|><think>",
        f"{REASONING}</think>{LAST}<|user|>", "And?<|assistant|><think>", GLM_ENDS, reasons=True,
    ),
    "DeepSeek-V3": ModelFormat(
        ("deepseekv3",), "", "deepseek",
        f"{REASONING}\n</think>\n\n{TEXT}<｜tool▁calls▁begin｜>{V3 % ('weather', FIRST)}\n{V3 % ('stop', SECOND)}"
        f"<｜tool▁calls▁end｜>{SENTENCE}", f"<｜tool▁outputs▁begin｜>{OUTPUTS}<｜tool▁outputs▁end｜>",
        f"{LAST}{SENTENCE}", "<｜User｜>And?<｜Assistant｜><think>\n", (SENTENCE,), reasons=True,
    ),
    "DeepSeek-V3.1": ModelFormat(
        ("deepseek-ai-DeepSeek-V3.1",), "deepseek_v31", "deepseek",
        f"{TEXT}<｜tool▁calls▁begin｜>{V31 % ('weather', FIRST)}{V31 % ('stop', SECOND)}<｜tool▁calls▁end｜>{SENTENCE}",
        OUTPUTS, f"{LAST}{SENTENCE}", "<｜User｜>And?<｜Assistant｜></think>", (SENTENCE,),
    ),
    "DeepSeek-V3.2": ModelFormat(
        ("deepseek-ai-DeepSeek-V3.2",), "deepseek_v32", "deepseek_v32",
        f'{TEXT}\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Tromsø "x"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="stop">\n<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n</｜DSML｜function_calls>{SENTENCE}",
        "\n\n<function_results>\n<result>r0</result>\n<result>r1</result>\n</function_results>\n\n<think></think>",
        f"{LAST}{SENTENCE}", "<｜User｜>And?<｜Assistant｜><think></think>", (SENTENCE,),
    ),
    "Kimi-K2": ModelFormat(
        ("moonshotai-Kimi-K2",), "", "kimi_k2", f"{TEXT}{KIMI_CALLS}", RETURNS.replace("\nr", "\\nr"),
        f"{LAST}<|im_end|>", KIMI_ASKS, ("<|im_end|>",),
    ),
    "Kimi-K2-Thinking": ModelFormat(
        (), "kimi_k2", "kimi_k2", f"<think>{REASONING}</think>{TEXT}{KIMI_CALLS}", RETURNS,
        f"<think>{REASONING}</think>{LAST}<|im_end|>", KIMI_ASKS, ("<|im_end|>",), reasons=True,
    ),
    "gpt-oss": ModelFormat(
        ("gptoss", "openai-gpt-oss-120b"), "", "gpt_oss",
        f"<|channel|>analysis<|message|>{REASONING}<|end|><|start|>assistant<|channel|>commentary<|message|>{TEXT}"
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{FIRST}<|call|>",
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"r0"<|end|><|start|>assistant',
        f"<|channel|>analysis<|message|>{REASONING}<|end|><|start|>assistant<|channel|>final<|message|>{LAST}<|return|>",
        "<|start|>user<|message|>And?<|end|><|start|>assistant", ("<|return|>", "<|endoftext|>", "<|call|>"),
        reasons=True, parallel=False,
    ),
    "Mistral Small 3.2": ModelFormat(
        ("Mistral-Small-3.2-24B-Instruct-2506",), "mistral", "mistral",
        f"[TOOL_CALLS]weather[CALL_ID]aB3dE6gH9[ARGS]{FIRST}[TOOL_CALLS]stop[CALL_ID]zY8xW5vU2[ARGS]{SECOND}</s>",
        "[TOOL_RESULTS]aB3dE6gH9[TOOL_CONTENT]r0[/TOOL_RESULTS][TOOL_RESULTS]zY8xW5vU2[TOOL_CONTENT]r1[/TOOL_RESULTS]",
        f"{LAST}</s>", "", ("</s>",), text=False,
    ),
    "Ministral 3": ModelFormat(
        ("mistralai-Ministral-3-14B-Reasoning-2512",), "ministral", "mistral",
        f"[THINK]{REASONING}[/THINK]{TEXT}[TOOL_CALLS]weather[ARGS]{FIRST}[TOOL_CALLS]stop[ARGS]{SECOND}</s>",
        "[TOOL_RESULTS]r0[/TOOL_RESULTS][TOOL_RESULTS]r1[/TOOL_RESULTS]",
        f"[THINK]{REASONING}[/THINK]{LAST}</s>", "[INST]And?[/INST]", ("</s>",), reasons=True,
    ),
    "Llama 3": ModelFormat(
        ("llama3_1", "llama3_2", "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"), "",
        "llama3", f'{{"name": "weather", "parameters": {FIRST}}}<|eot_id|>',
        '<|start_header_id|>ipython<|end_header_id|>\n\n"r0"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        f"{LAST}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        LLAMA_ENDS, parallel=False, text=False,
    ),
}  # fmt: skip
GEMMA_3 = ModelFormat(
    ("gemma3",),
    "",
    "",
    "",
    "",
    f"{LAST}<end_of_turn>",
    "\n<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n",
    ("<end_of_turn>", "<eos>"),
)
"""Its template has no role for tools and writes none: agents with tools write calls as text themselves."""
