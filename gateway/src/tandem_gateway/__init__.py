"""The Tandem gateway: token-aware routing of OpenAI requests to prefill and decode workers"""
