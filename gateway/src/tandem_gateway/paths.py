"""The paths of requests that workers answer, and what the gateway knows of them."""

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
EMBEDDINGS = "/v1/embeddings"
SCORES = frozenset(("/v1/score", "/score", "/v1/rerank", "/rerank"))
MODELS = "/v1/models"
GENERATES = frozenset((CHAT, COMPLETIONS, RESPONSES, MESSAGES))
COMPUTES = GENERATES | SCORES | {EMBEDDINGS}
"""What the model is run for."""
TOKENIZER_INFO = "/tokenizer_info"
INFERENCE_PATHS = COMPUTES | frozenset((COUNT, "/tokenize", "/detokenize", TOKENIZER_INFO))
