"""OpenAI's Agents SDK, over chat completions or, with API=responses, over responses."""

import os

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI
from task import ADDRESS, ASKS, KEY, SYSTEM, look_up, report

models = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
model = models[os.environ["API"]]("policy", AsyncOpenAI(base_url=ADDRESS, api_key=KEY))
agent = Agent("weather_agent", instructions=SYSTEM, tools=[function_tool(look_up)], model=model)
messages, answers = [], []
for ask in ASKS:
    messages.append({"role": "user", "content": ask})
    done = Runner.run_sync(agent, messages, run_config=RunConfig(tracing_disabled=True))
    messages = done.to_input_list()
    answers.append(done.final_output)
report(*answers)
