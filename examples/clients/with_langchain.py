"""langchain-openai: a chat model like any other of LangChain's."""

import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import BadRequestError
from pydantic import BaseModel

model = ChatOpenAI(model="smollm2", base_url=os.environ["TANDEM_URL"] + "/v1", api_key="unused", temperature=0)
question = "What is the capital of France? Answer in one sentence."

# Plain
print("plain:", model.invoke(question).content)

# Streamed
print("streamed:", "|".join(chunk.content for chunk in model.stream(question)))


# Structured
class City(BaseModel):
    """A city."""

    name: str
    country: str


print("structured:", model.with_structured_output(City).invoke(question).model_dump_json())


# Tools
@tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return f"It is sunny in {city}."


call = model.bind_tools([get_weather], tool_choice="any").invoke("What is the weather in Paris?").tool_calls[0]
print("tool:", call["name"], call["args"])

# A free choice of tools needs a model whose chat template has a place for them
try:
    print("free choice:", model.bind_tools([get_weather]).invoke("What is the weather in Paris?"))
except BadRequestError as error:
    print("free choice:", error.body["message"])
