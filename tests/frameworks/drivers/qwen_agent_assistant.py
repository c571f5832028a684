"""Qwen-Agent as it comes: it offers tools in the system text, and reads calls in what was said."""

import json

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool
from task import ADDRESS, ASKS, KEY, SYSTEM, look_up, report


class LookUp(BaseTool):
    name = "look_up"
    description = "Look the weather of a city up."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"city": {"type": "string"}, "number": {"type": "integer"}},
        "required": ["city", "number"],
    }

    def call(self, params: str, **_: object) -> str:
        return look_up(**json.loads(params))


llm = {"model": "policy", "model_type": "oai", "model_server": ADDRESS, "api_key": KEY}
agent = Assistant(function_list=[LookUp()], llm=llm, system_message=SYSTEM)
messages, answers = [], []
for ask in ASKS:
    messages.append({"role": "user", "content": ask})
    *_, said = agent.run(messages)
    messages += said
    answers.append(said[-1]["content"])
report(*answers)
