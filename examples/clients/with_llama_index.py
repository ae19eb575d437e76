"""llama-index: OpenAILike, told what the server can do."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError
from pydantic import BaseModel

llm = OpenAILike(
    model="smollm2",
    api_base=os.environ["TANDEM_URL"] + "/v1",
    api_key="unused",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
    temperature=0,
)
messages = [ChatMessage(role="user", content="What is the capital of France? Answer in one sentence.")]

# Plain
print("plain:", llm.chat(messages).message.content)

# Streamed
print("streamed:", "|".join(part.delta for part in llm.stream_chat(messages)))


# Structured
class City(BaseModel):
    """A city."""

    name: str
    country: str


print("structured:", llm.as_structured_llm(City).chat(messages).raw.model_dump_json())


# Tools
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return f"It is sunny in {city}."


tools = [FunctionTool.from_defaults(get_weather)]
answer = llm.chat_with_tools(tools, user_msg="What is the weather in Paris?", tool_required=True)
call = llm.get_tool_calls_from_response(answer)[0]
print("tool:", call.tool_name, call.tool_kwargs)

# A free choice of tools needs a model whose chat template has a place for them
try:
    print("free choice:", llm.chat_with_tools(tools, user_msg="What is the weather in Paris?").message)
except BadRequestError as error:
    print("free choice:", error.body["message"])
