"""What a request passes before the engine sees it: checks, and the list of those inside."""

from __future__ import annotations

from tandem_worker.engine.errors import ContextLengthError, RequestError
from tandem_worker.engine.schedule.params import GenerationRequest, Grammar
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.host.errors import WorkerError


class OpenRequests:
    """Ids of the requests inside. Any thread adds to them; the engine thread takes out what is over."""

    def __init__(self) -> None:
        self.clients: set[str] = set()
        """From `submit` until their last delta is delivered."""
        self.peers: set[str] = set()
        """Prompts of other workers, from `submit_prefill` until they are released."""
        self.aborting: set[str] = set()
        """Those of `clients` whose end is on its way to the engine thread."""
        self.releasing: set[str] = set()

    @property
    def empty(self) -> bool:
        """Nothing is inside, and all that was has been delivered or released."""
        return not self.clients and not self.peers

    def is_abandoned(self, plan: StepPlan) -> bool:
        """Every request of this step is being aborted or released."""
        if not self.aborting and not self.releasing:
            return False
        return all(
            request.id in (self.releasing if request.serves_peer else self.aborting)
            for request in (sequence.request for sequence in plan.sequences())
        )


def check_request(request: GenerationRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Raises RequestError, or ContextLengthError with both lengths."""
    check_prompt(request.prompt_token_ids, vocab_size=vocab_size, max_model_len=max_model_len)
    sampling = request.sampling
    num_prompt = len(request.prompt_token_ids)
    if request.n < 1:
        raise RequestError("n must be at least 1", param="n")
    if sampling.max_tokens < 0:
        raise RequestError("max_tokens must not be negative", param="max_tokens")
    if num_prompt + sampling.max_tokens > max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. You requested "
            f"{num_prompt + sampling.max_tokens} tokens ({num_prompt} in the prompt, {sampling.max_tokens} for the "
            "answer). Shorten the prompt or the answer.",
            param="max_tokens",
        )
    _check_resumed(request, vocab_size)
    if request.prediction and (min(request.prediction) < 0 or max(request.prediction) >= vocab_size):
        raise RequestError(f"the prediction has token ids outside 0 to {vocab_size - 1}", param="prediction")
    for token_id in sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"logit_bias names token {token_id}; tokens are 0 to {vocab_size - 1}", param="logit_bias"
            )


def _check_resumed(request: GenerationRequest, vocab_size: int) -> None:
    if request.resumed is None:
        return
    if len(request.resumed) != request.n or all(tokens is None for tokens in request.resumed):
        raise _cannot_resume("it must tell the tokens of every choice, one of which is open")
    for choice, tokens in enumerate(request.resumed):
        if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
            raise _cannot_resume(f"choice {choice} has token ids outside 0 to {vocab_size - 1}")
        if tokens and len(tokens) >= request.sampling.max_tokens:
            raise _cannot_resume(f"choice {choice} has all of its {request.sampling.max_tokens} tokens")


def replay_grammars(request: GenerationRequest) -> tuple[Grammar | None, ...]:
    """A grammar for each choice that has accepted the choice's tokens; None where there is none to go on with.

    Raises RequestError (409) where a grammar forbids a token, or has ended.
    """
    factory = request.sampling.grammar
    if factory is None or request.resumed is None:
        return ()
    grammars: list[Grammar | None] = []
    for choice, tokens in enumerate(request.resumed):
        if tokens is None:
            grammars.append(None)
            continue
        grammar = factory.new()
        try:
            for token in tokens:
                grammar.accept(token)
        except WorkerError as error:
            raise _cannot_resume(f"the tokens of choice {choice} do not follow its grammar: {error}") from error
        if grammar.terminated:
            raise _cannot_resume(f"choice {choice} is complete")
        grammars.append(grammar)
    return tuple(grammars)


def _cannot_resume(why: str) -> RequestError:
    return RequestError(f"The request cannot be resumed: {why}.", code="cannot_resume", status=409)


def check_prompt(token_ids: tuple[int, ...], *, vocab_size: int, max_model_len: int) -> None:
    """Raises RequestError for a prompt that is empty or has ids outside the vocabulary, ContextLengthError."""
    if not token_ids:
        raise RequestError("the prompt is empty", param="prompt")
    if len(token_ids) > max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has {len(token_ids)}. "
            "Shorten the prompt.",
            param="prompt",
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise RequestError(f"the prompt has token ids outside 0 to {vocab_size - 1}", param="prompt")
