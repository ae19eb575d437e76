"""What is kept of requests for people and the operator: metrics, the access log, spans, traffic."""
