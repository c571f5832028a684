"""CrewAI, which drops the text beside calls."""

from crewai import LLM, Agent
from crewai.tools import tool
from task import ADDRESS, ASKS, KEY, SYSTEM, look_up, report

llm = LLM(model="openai/policy", base_url=ADDRESS, api_key=KEY)
agent = Agent(role="forecaster", goal=SYSTEM, backstory=SYSTEM, llm=llm, tools=[tool("look_up")(look_up)])
messages, answers = [], []
for ask in ASKS:
    messages.append({"role": "user", "content": ask})
    answers.append(agent.kickoff(messages).raw)
    messages.append({"role": "assistant", "content": answers[-1]})
report(*answers)
