"""Pydantic AI, over chat completions or, with API=responses, over responses."""

import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from task import ADDRESS, ASKS, KEY, SYSTEM, look_up, report

models = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
model = models[os.environ["API"]]("policy", provider=OpenAIProvider(base_url=ADDRESS, api_key=KEY))
agent = Agent(model, instructions=SYSTEM)
agent.tool_plain(look_up)
messages, answers = [], []
for ask in ASKS:
    done = agent.run_sync(ask, message_history=messages)
    messages = done.all_messages()
    answers.append(done.output)
report(*answers)
