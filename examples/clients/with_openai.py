"""The openai package: chats, structured output and tools, and the same by the Responses API."""

import os

from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=os.environ["TANDEM_URL"] + "/v1", api_key="unused")
messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]

# Plain
answer = client.chat.completions.create(model="smollm2", messages=messages, temperature=0)
print("plain:", answer.choices[0].message.content)

# Streamed
stream = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, stream=True)
print("streamed:", "|".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))


# Structured: a Pydantic model is the answer's schema
class City(BaseModel):
    name: str
    country: str


parsed = client.chat.completions.parse(model="smollm2", messages=messages, temperature=0, response_format=City)
print("structured:", parsed.choices[0].message.parsed.model_dump_json())


# Tools
class GetWeather(BaseModel):
    """Get the current weather of a city."""

    city: str


asked = [{"role": "user", "content": "What is the weather in Paris?"}]
tools = [pydantic_function_tool(GetWeather)]
answer = client.chat.completions.create(
    model="smollm2", messages=asked, tools=tools, tool_choice="required", temperature=0
)
call = answer.choices[0].message.tool_calls[0].function
print("tool:", call.name, call.arguments)

# A free choice of tools needs a model whose chat template has a place for them
try:
    answer = client.chat.completions.create(model="smollm2", messages=asked, tools=tools, temperature=0)
    print("free choice:", answer.choices[0].message)
except BadRequestError as error:
    print("free choice:", error.body["message"])

# The Responses API
answer = client.responses.create(model="smollm2", input=messages[0]["content"], temperature=0)
print("responses plain:", answer.output_text)
with client.responses.stream(model="smollm2", input=messages[0]["content"], temperature=0) as events:
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    print("responses streamed:", "|".join(deltas))
parsed = client.responses.parse(model="smollm2", input=messages[0]["content"], temperature=0, text_format=City)
print("responses structured:", parsed.output_parsed.model_dump_json())
