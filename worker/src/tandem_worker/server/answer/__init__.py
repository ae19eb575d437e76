"""From a plan to what its client is sent: journals, embeddings, traces."""
