"""pydantic-ai: agents over an OpenAI-compatible chat model."""

import os

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["TANDEM_URL"] + "/v1", api_key="unused")
model = OpenAIChatModel("smollm2", provider=provider, settings={"temperature": 0})
question = "What is the capital of France? Answer in one sentence."

# Plain
print("plain:", Agent(model).run_sync(question).output)

# Streamed
stream = Agent(model).run_stream_sync(question)
print("streamed:", "|".join(stream.stream_text(delta=True, debounce_by=None)))


# Structured
class City(BaseModel):
    """A city."""

    name: str
    country: str


print("structured:", Agent(model, output_type=NativeOutput(City)).run_sync(question).output.model_dump_json())

# Tools: an output type is a tool that must be called (its default)
print("tool:", "final_result", Agent(model, output_type=City).run_sync(question).output.model_dump_json())

# A free choice of tools needs a model whose chat template has a place for them
agent = Agent(model)


@agent.tool_plain
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return f"It is sunny in {city}."


try:
    print("free choice:", agent.run_sync("What is the weather in Paris?").output)
except ModelHTTPError as error:
    print("free choice:", error.body["message"])
