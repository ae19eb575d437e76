"""The worker's end of the native link: the same API as over HTTP, for gateways that keep one connection for all."""
