"""Options of vLLM's and SGLang's servers that this one does not have: refused by name, with what to write instead.

Where the value that is given changes nothing (their default, as a rule), it is taken. Options that are other names for
something there is stand where that is read: `output_format`, `options`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem_worker.server.dialects.fields import Fields

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
    "watermarking": ("answers have no watermark: leave it out or false", [False]),
    "return_weight_versions": ("'system_fingerprint' tells the revision: leave it out or false", [False]),
    "routed_experts_prompt_start": ("experts are not told: leave it out or 0", [0]),
    "return_token_offsets": ("offsets of a prompt's tokens are not told: leave it out or false", [False]),
    "return_prompt_text": ("/tokenize and /detokenize tell a prompt's text: leave it out or false", [False]),
    "mm_payload": ("this model reads text only: remove it", ["tensors", "none"]),
    "return_mm_kwargs": ("this model reads text only: remove it", [False, True]),
    "ec_transfer_params": ("this model reads text only: remove it", [{}]),
    "repetition_detection": ("repetitions end no answer: use 'stop', 'max_tokens' or 'frequency_penalty'", []),
    "stream_interval": ("chunks are sent as tokens come: leave it out or 1", [1]),
    # SGLang
    "separate_reasoning": ("reasoning is always told apart, as 'reasoning_content': leave it out or true", [True]),
    "stream_reasoning": ("reasoning is streamed as the answer is: leave it out or true", [True]),
    "stop_regex": ("regexes end no answer: use 'stop' or 'stop_token_ids'", [[]]),
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
    "routed_dp_rank": ("the gateway decides where a prompt is computed: remove it", []),
    "disagg_prefill_dp_rank": ("the gateway decides where a prompt is computed: remove it", []),
    "routed_experts_start_len": ("experts are not told: leave it out or 0", [0]),
    "return_cached_tokens_details": ("'usage' tells how many tokens were cached: leave it out or false", [False]),
    "return_meta_info": ("'usage' and the choices tell what there is: leave it out or false", [False]),
    "return_prompt_token_ids": ("use 'return_token_ids'", [False]),
    "reasoning": ("use 'reasoning_effort'", [{}]),
    "task": ("this model knows no tasks: write it into a message", []),
    "input_ids": ("send token ids as the 'prompt' of /v1/completions", []),
    "ngram_corpus_id": ("tokens are not guessed from a corpus: remove it", []),
    "custom_labels": ("metrics have no labels of clients: remove it", [{}]),
    "images_config": ("this model reads text only: remove it", [{}]),
    "max_dynamic_patch": ("this model reads text only: remove it", []),
    "min_dynamic_patch": ("this model reads text only: remove it", []),
    "use_audio_in_video": ("this model reads text only: leave it out or false", [False]),
}


def refuse_other_servers(fields: Fields) -> None:
    """Take what changes nothing. Raises RequestError for the rest."""
    # Few requests have any of them, so what is left is looked up and not the other way round.
    for key in fields.left():
        if key in _REFUSED:
            sentence, harmless = _REFUSED[key]
            fields.unsupported(key, f"'{key}' is not supported: {sentence}.", harmless=harmless)
