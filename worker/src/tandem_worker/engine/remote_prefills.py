"""Decode side of disaggregation: prompts that prefill workers compute, from the order to the first token's logits."""

from __future__ import annotations

import itertools
import logging

import torch

from tandem_worker.engine.contract import PrefillClient, RemotePrefill, RemotePrefillResult
from tandem_worker.engine.execute.executor import ModelExecutor
from tandem_worker.engine.schedule.meter import Totals
from tandem_worker.engine.schedule.prefix_cache import name_prompt
from tandem_worker.engine.schedule.request import Request, Sequence, SequenceState
from tandem_worker.engine.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)


class RemotePrefills:
    """On the engine thread. An attempt has a number, its generation: what is told of an older one is ignored."""

    def __init__(
        self, scheduler: Scheduler, executor: ModelExecutor, *, requests: dict[str, Request], totals: Totals
    ) -> None:
        self.client: PrefillClient | None = None
        """None: every prompt is prefilled here. It is built around this engine's KV cache, so it comes later."""
        self._scheduler = scheduler
        self._executor = executor
        self._requests = requests
        self._totals = totals
        self._generations = itertools.count(1)

    def start(self, sequence: Sequence) -> None:
        """Order what a RECEIVING sequence lacks; it is computed here where that fails."""
        request = sequence.request
        request.generation = next(self._generations)
        tokens = (*request.prompt, *sequence.output)
        order = RemotePrefill(
            request_id=request.id,
            generation=request.generation,
            token_ids=tokens,
            num_cached_tokens=sequence.num_computed,
            block_ids=tuple(sequence.block_ids),
            endpoints=request.endpoints,
            kv_source=request.kv_source,
            kv_source_tokens=request.kv_source_tokens,
            cache_salt=request.cache_salt,
            priority=request.priority,
            prompt_name=self._name(sequence, tokens),
            trace=request.trace,
        )
        assert self.client is not None
        try:
            self.client.start(order)
        except Exception as error:
            logger.exception("remote prefill could not be started")
            self._fall_back(sequence, str(error))

    def has_begun(self, sequence: Sequence) -> bool:
        """Whether a prefill worker computes this RECEIVING sequence."""
        assert self.client is not None, "it was given the order"
        return self.client.has_begun(sequence.request.id, sequence.request.generation)

    def withdraw(self, sequence: Sequence) -> None:
        """Its blocks are others' now, or are filled here: before any step writes to them no late write may come."""
        assert self.client is not None, "it gave the order"
        self.client.cancel(sequence.request.id, sequence.request.generation)
        if sequence.state is SequenceState.RUNNING:
            logger.warning("remote prefill of %s has not begun and others lack its blocks, prefilling here",
                           sequence.request.id)  # fmt: skip
            self._totals.prefills_fallback += 1

    def cancel(self, sequence: Sequence) -> None:
        """Nothing is written any more to the blocks of this RECEIVING sequence."""
        if self.client is not None:
            self.client.cancel(sequence.request.id, sequence.request.generation)

    def overdue(self, request_id: str, generation: int) -> None:
        """The prefill worker takes long to begin. Ignored when the attempt is an older one."""
        sequence = self._find(request_id, generation)
        if sequence is not None:
            sequence.overdue = True

    def done(self, result: RemotePrefillResult) -> tuple[Sequence, torch.Tensor] | None:
        """All blocks are filled: whose first token is chosen from which logits. An older attempt's is ignored.

        Logits of the wrong size are a failed attempt: the prompt is prefilled here.
        """
        sequence = self._find(result.request_id, result.generation)
        if sequence is None:
            return None
        logits = self._executor.load_logits(result.logits)
        if logits is None:
            self._fall_back(sequence, f"its logits have {len(result.logits)} bytes")
            return None
        request = sequence.request
        request.num_cached_tokens = result.num_cached_tokens
        request.prefill_worker = result.worker
        self._totals.prefills_remote += 1
        self._scheduler.receive_done(sequence)
        return sequence, logits

    def failed(self, request_id: str, generation: int, reason: str) -> None:
        """Prefill here instead. Ignored when the attempt is an older one."""
        sequence = self._find(request_id, generation)
        if sequence is not None:
            self._fall_back(sequence, reason)

    def _find(self, request_id: str, generation: int) -> Sequence | None:
        """The sequence that waits for this attempt; None when the message is late."""
        request = self._requests.get(request_id)
        if request is None or request.generation != generation:
            return None
        sequence = request.choices[0]
        return sequence if sequence.state is SequenceState.RECEIVING else None

    def _fall_back(self, sequence: Sequence, reason: str) -> None:
        logger.warning("remote prefill of %s failed, prefilling here: %s", sequence.request.id, reason)
        self._totals.prefills_fallback += 1
        self._scheduler.receive_failed(sequence)

    def _name(self, sequence: Sequence, tokens: tuple[int, ...]) -> bytes:
        """The name of a prompt with what a resumed choice has said."""
        block_size = self._scheduler.blocks.block_size
        chain = sequence.name_blocks(len(tokens) // block_size, block_size)
        return name_prompt(sequence.request.chain_root, chain, tokens, block_size)
