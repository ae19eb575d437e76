"""openai-agents: agents over the Responses API, its default."""

import asyncio
import os

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

set_default_openai_client(AsyncOpenAI(base_url=os.environ["TANDEM_URL"] + "/v1", api_key="unused"))
set_tracing_disabled(True)  # traces would go to OpenAI
settings = {"model": "smollm2", "model_settings": ModelSettings(temperature=0)}
question = "What is the capital of France? Answer in one sentence."


class City(BaseModel):
    name: str
    country: str


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return f"It is sunny in {city}."


async def main() -> None:
    # Plain
    result = await Runner.run(Agent(name="Guide", **settings), question)
    print("plain:", result.final_output)

    # Streamed
    streamed = Runner.run_streamed(Agent(name="Guide", **settings), question)
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    print("streamed:", "|".join(deltas))

    # Structured
    result = await Runner.run(Agent(name="Guide", output_type=City, **settings), question)
    print("structured:", result.final_output.model_dump_json())

    # Tools
    agent = Agent(
        name="Reporter",
        model="smollm2",
        model_settings=ModelSettings(temperature=0, tool_choice="required"),
        tools=[get_weather],
        tool_use_behavior="stop_on_first_tool",
    )
    result = await Runner.run(agent, "What is the weather in Paris?")
    call = result.new_items[0].raw_item
    print("tool:", call.name, call.arguments)
    print("tool result:", result.final_output)

    # A free choice of tools needs a model whose chat template has a place for them
    try:
        result = await Runner.run(Agent(name="Reporter", tools=[get_weather], **settings), "How is the weather?")
        print("free choice:", result.final_output)
    except BadRequestError as error:
        print("free choice:", error.body["message"])


asyncio.run(main())
