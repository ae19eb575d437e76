"""Between text and token ids: prompts, detokenization, stop strings, reasoning, choices."""
