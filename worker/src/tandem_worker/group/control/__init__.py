"""The control channel of a group: how ranks meet, get their steps, and learn of a loss."""
