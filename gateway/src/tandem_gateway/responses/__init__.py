"""Responses that are kept: `store`, `previous_response_id`, and what clients do with a response's id.

Workers know nothing of it: a request that continues a response becomes one with the whole conversation before it is
routed. `store` keeps and forgets (pure), `conversation` reads and writes requests (pure), `recording` follows an
answer, `service` is what the gateway uses.
"""
