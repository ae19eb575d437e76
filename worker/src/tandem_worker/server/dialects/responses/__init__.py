"""`POST /v1/responses`: OpenAI's Responses API, translated into a chat and back. Pure."""
