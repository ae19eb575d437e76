"""instructor: answers are Pydantic models, by a tool that must be called (its default) or by a schema."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel

openai = OpenAI(base_url=os.environ["TANDEM_URL"] + "/v1", api_key="unused")
client = instructor.from_openai(openai)
messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


class City(BaseModel):
    """A city."""

    name: str
    country: str


# Plain
answer = client.create(model="smollm2", messages=messages, response_model=None, temperature=0)
print("plain:", answer.choices[0].message.content)

# Streamed: the model again and again, with what is known of it so far
parts = client.create_partial(model="smollm2", messages=messages, response_model=City, temperature=0)
print("streamed:", "|".join(part.model_dump_json() for part in parts))

# Tools: what instructor makes of a response model by default
city = client.create(model="smollm2", messages=messages, response_model=City, temperature=0)
print("tool:", "City", city.model_dump_json())

# Structured: the schema as `response_format`
by_schema = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
city = by_schema.create(model="smollm2", messages=messages, response_model=City, temperature=0)
print("structured:", city.model_dump_json())
