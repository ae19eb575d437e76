"""Blocks by Mooncake's Transfer Engine: the prefill worker writes into landing slots that the decode worker owns."""
