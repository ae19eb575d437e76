"""Tiers below memory: KV blocks that were computed once are found again after memory has given them up."""
