"""litellm: the provider is `openai`, told where to go by `api_base`."""

import os

import litellm
from pydantic import BaseModel

server = {"model": "openai/smollm2", "api_base": os.environ["TANDEM_URL"] + "/v1", "api_key": "unused"}
messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]

# Plain
answer = litellm.completion(messages=messages, temperature=0, **server)
print("plain:", answer.choices[0].message.content)

# Streamed
stream = litellm.completion(messages=messages, temperature=0, stream=True, **server)
print("streamed:", "|".join(chunk.choices[0].delta.content or "" for chunk in stream))


# Structured
class City(BaseModel):
    name: str
    country: str


answer = litellm.completion(messages=messages, temperature=0, response_format=City, **server)
print("structured:", City.model_validate_json(answer.choices[0].message.content).model_dump_json())

# Tools
asked = [{"role": "user", "content": "What is the weather in Paris?"}]
get_weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
answer = litellm.completion(messages=asked, temperature=0, tools=[get_weather], tool_choice="required", **server)
call = answer.choices[0].message.tool_calls[0].function
print("tool:", call.name, call.arguments)

# A free choice of tools needs a model whose chat template has a place for them
try:
    print("free choice:", litellm.completion(messages=asked, tools=[get_weather], **server).choices[0].message)
except litellm.BadRequestError as error:
    print("free choice:", error.message)
