"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from tandem_worker.errors import RequestError
from tandem_worker.server.chat_request import parse_chat
from tandem_worker.server.completion_request import check_token_ids
from tandem_worker.server.fields import Fields, wrong_type
from tandem_worker.server.model import ServedModel


async def tokenize(body: Any, model: ServedModel) -> dict[str, Any]:
    """Of a `prompt`, or of `messages` with the options of a chat request. Raises RequestError."""
    if isinstance(body, dict) and "messages" in body:
        # The same parser as for a chat: what is counted here is what a chat would be charged.
        chat = parse_chat(body, model.vocab_size)
        model.check_name(chat.model)
        tokens = await model.prompter.encode(model.prompter.render(chat), add_special_tokens=False)
    else:
        fields = Fields(body)
        name = fields.string("model")
        prompt = fields.required_string("prompt")
        add_special_tokens = fields.boolean("add_special_tokens", default=True)
        fields.finish()
        if name is not None:
            model.check_name(name)
        tokens = await model.prompter.encode(prompt, add_special_tokens=add_special_tokens)
    return {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens}


def detokenize(body: Any, model: ServedModel) -> dict[str, Any]:
    fields = Fields(body)
    name = fields.string("model")
    raw = fields.required("tokens")
    fields.finish()
    if name is not None:
        model.check_name(name)
    if not isinstance(raw, list):
        wrong_type("tokens", "an array of token ids", raw)
    if len(raw) > model.max_model_len:
        raise RequestError(f"'tokens' has {len(raw)} ids; at most {model.max_model_len} are taken.", param="tokens")
    tokens = check_token_ids(raw, "tokens", model.vocab_size) if raw else ()
    return {"prompt": model.prompter.decode(tokens)}
