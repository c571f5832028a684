"""semantic-kernel, which names the assistant's messages."""

import asyncio

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function
from task import ADDRESS, ASKS, KEY, SYSTEM, look_up, report


async def main() -> None:
    client = AsyncOpenAI(base_url=ADDRESS, api_key=KEY)
    service = OpenAIChatCompletion(ai_model_id="policy", async_client=client)
    agent = ChatCompletionAgent(
        service=service, name="weather_agent", instructions=SYSTEM, plugins=[type("W", (), {"f": tool})()]
    )
    thread, answers = None, []
    for ask in ASKS:
        answer = await agent.get_response(messages=ask, thread=thread)
        thread = answer.thread
        answers.append(answer.content)
    report(*answers)


@kernel_function(name="look_up")
def tool(self: object, city: str, number: int, unit: str = "celsius") -> str:
    """Look the weather of a city up."""
    return look_up(city, number, unit)


asyncio.run(main())
