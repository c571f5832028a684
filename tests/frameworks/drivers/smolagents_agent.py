"""smolagents' ToolCallingAgent with the option that sessions which train want (TOOL_CHOICE: its own is "required")."""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool
from task import ADDRESS, ASKS, KEY, SYSTEM, look_up, report

model = OpenAIModel("policy", api_base=ADDRESS, api_key=KEY, tool_choice=os.environ["TOOL_CHOICE"])
agent = ToolCallingAgent([tool(look_up)], model, instructions=SYSTEM)
report(*(agent.run(ask, reset=False) for ask in ASKS))
