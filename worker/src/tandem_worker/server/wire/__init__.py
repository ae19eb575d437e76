"""HTTP and what lies below a request: ports, bodies, errors."""
