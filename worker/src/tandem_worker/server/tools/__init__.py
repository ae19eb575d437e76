"""Tool calls: from the text formats that models write to OpenAI's `tool_calls`, incrementally."""
