"""The anthropic package, by the Messages API: its base URL has no /v1."""

import os

from anthropic import Anthropic, BadRequestError
from pydantic import BaseModel

client = Anthropic(base_url=os.environ["TANDEM_URL"], api_key="unused")
messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]

settings = {"model": "smollm2", "max_tokens": 200, "extra_body": {"temperature": 0}}

# Plain
message = client.messages.create(messages=messages, **settings)
print("plain:", message.content[0].text)

# Streamed
with client.messages.stream(messages=messages, **settings) as stream:
    print("streamed:", "|".join(stream.text_stream))


# Structured
class City(BaseModel):
    name: str
    country: str


parsed = client.messages.parse(messages=messages, output_format=City, **settings)
print("structured:", parsed.parsed_output.model_dump_json())

# Tools
asked = [{"role": "user", "content": "What is the weather in Paris?"}]
get_weather = {
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
message = client.messages.create(messages=asked, tools=[get_weather], tool_choice={"type": "any"}, **settings)
print("tool:", message.content[0].name, message.content[0].input)

# A free choice of tools needs a model whose chat template has a place for them
try:
    message = client.messages.create(messages=asked, tools=[get_weather], **settings)
    print("free choice:", message.content)
except BadRequestError as error:
    print("free choice:", error.body["error"]["message"])
