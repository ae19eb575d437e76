"""A model whose gateway is told to keep responses does so from then on, and no pod is replaced for it."""

from __future__ import annotations

import openai
import pytest

from e2e.suite.fleet import Fleet, until

SETTLES = 240
"""Seconds until the gateway has read what the model says now."""


def test_responses_are_kept_while_the_model_says_so(main: Fleet) -> None:
    def gateways() -> set[str]:
        return {pod["metadata"]["uid"] for pod in main.pods("main", "gateway")}

    with main.openai("main") as client:

        def keeps() -> bool:
            """Raises what is no refusal because of the store."""
            try:
                client.responses.create(model="main", input="Hello.", store=True, max_output_tokens=16)
            except openai.BadRequestError as error:
                if "responseStore" in error.message:
                    return False
                raise
            return True

        before = gateways()
        assert not keeps()
        main.patch("main", {"gateway": {"responseStore": {"maxBytes": "16Mi"}}})
        until("the gateway keeps responses", keeps, within=SETTLES)
        first = client.responses.create(model="main", input="Name a color.", max_output_tokens=16)
        second = client.responses.create(
            model="main", input="Another one.", previous_response_id=first.id, max_output_tokens=16
        )
        assert first.usage
        assert second.usage
        assert second.usage.input_tokens > first.usage.input_tokens + 16
        assert client.responses.retrieve(second.id).output_text == second.output_text
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with client.responses.stream(
            model="main", input="And now?", previous_response_id=second.id, max_output_tokens=16
        ) as events:
            # Not `get_final_response`, which knows no answer that has come to its bound.
            (third,) = [event.response for event in events if event.type == "response.created"]
        assert client.responses.retrieve(third.id).previous_response_id == second.id
        main.patch("main", {"gateway": {"responseStore": None}})
        until("the gateway keeps none", lambda: not keeps(), within=SETTLES)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(third.id)
        assert gateways() == before
