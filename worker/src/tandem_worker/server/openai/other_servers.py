"""Options of vLLM's and SGLang's servers that this one does not have: refused by name, with what to write instead.

Where the value that is given changes nothing (their default, as a rule), it is taken. Options that are other names for
something there is stand where that is read: `output_format`, `options`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem_worker.server.openai.fields import Fields

_REFUSED: Mapping[str, tuple[str, Sequence[object]]] = {
    # Both
    "lora_path": ("adapters are not served: remove it", []),
    # vLLM
    "use_beam_search": ("beam search is not supported: ask for several choices with 'n'", [False]),
    "length_penalty": ("it belongs to beam search, which is not supported: remove it", [1, 1.0]),
    "early_stopping": ("it belongs to beam search, which is not supported: remove it", [False]),
    "logprob_token_ids": ("'logprobs' tells the likeliest tokens", [[]]),
    "truncation_side": ("'truncate_prompt_tokens' takes the end of a prompt: leave it out or 'left'", ["left"]),
    "guided_decoding_backend": ("grammars have one implementation: leave it out", ["auto", "guidance"]),
    "guided_whitespace_pattern": ("white space between JSON tokens cannot be chosen: remove it", []),
    "include_reasoning": ("reasoning is always told apart, as 'reasoning_content': leave it out or true", [True]),
    "thinking_token_budget": ("reasoning cannot be bounded by itself: use 'max_tokens'", []),
    "request_id": ("send it as the header x-request-id", []),
    "kv_transfer_params": ("the gateway decides where a prompt is computed: remove it", []),
    "vllm_xargs": ("it means nothing here: remove it", [{}]),
    "logits_processors": ("clients' own code is not run: remove it", [[]]),
    "prompt_embeds": ("prompts are text or token ids: give 'prompt'", []),
    "mm_processor_kwargs": ("this model reads text only: remove it", [{}]),
    "media_io_kwargs": ("this model reads text only: remove it", [{}]),
    "enable_response_messages": ("/tokenize tells a prompt's tokens", [False]),
    "previous_input_messages": ("send the whole conversation in 'input'", []),
    # SGLang
    "separate_reasoning": ("reasoning is always told apart, as 'reasoning_content': leave it out or true", [True]),
    "stream_reasoning": ("reasoning is streamed as the answer is: leave it out or true", [True]),
    "return_hidden_states": ("hidden states are not told: leave it out or false", [False]),
    "return_routed_experts": ("experts are not told: leave it out or false", [False]),
    "session_params": ("answers do not go on from earlier ones: send the whole conversation", [{}]),
    "custom_logit_processor": ("clients' own code is not run: remove it", [""]),
    "custom_params": ("clients' own code is not run: remove it", [{}]),
    "extra_key": ("use 'cache_salt'", [""]),
    "rid": ("send it as the header x-request-id", []),
    "bootstrap_host": ("the gateway decides where a prompt is computed: remove it", []),
    "bootstrap_port": ("the gateway decides where a prompt is computed: remove it", []),
    "bootstrap_room": ("the gateway decides where a prompt is computed: remove it", []),
    "data_parallel_rank": ("the gateway decides where a prompt is computed: remove it", []),
}


def refuse_other_servers(fields: Fields) -> None:
    """Take what changes nothing. Raises RequestError for the rest."""
    # Few requests have any of them, so what is left is looked up and not the other way round.
    for key in fields.left():
        if key in _REFUSED:
            sentence, harmless = _REFUSED[key]
            fields.unsupported(key, f"'{key}' is not supported: {sentence}.", harmless=harmless)
