"""agno, which writes the keys of a tool in another order than other clients."""

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai.like import OpenAILike
from task import ADDRESS, ASKS, KEY, SYSTEM, TOOL, report

model = OpenAILike(id="policy", base_url=ADDRESS, api_key=KEY)
agent = Agent(
    model=model, tools=[TOOL], instructions=SYSTEM, telemetry=False, db=InMemoryDb(), add_history_to_context=True
)
report(*(agent.run(ask, session_id="one").content for ask in ASKS))
