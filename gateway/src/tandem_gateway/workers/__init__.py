"""Who the workers are and how they do: discovery, what they tell about themselves, links and keys."""
