"""LangGraph with an agent that has a name, as supervisors and swarms need it."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from task import ADDRESS, ASKS, KEY, SYSTEM, TOOL, report

model = ChatOpenAI(model="policy", base_url=ADDRESS, api_key=KEY)
agent = create_agent(model, [TOOL], system_prompt=SYSTEM, name="weather_agent")
messages, answers = [], []
for ask in ASKS:
    messages = agent.invoke({"messages": [*messages, {"role": "user", "content": ask}]})["messages"]
    assert messages[-1].name == "weather_agent"
    answers.append(messages[-1].content)
report(*answers)
