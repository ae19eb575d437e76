"""What the operator tells gateways, and what they tell it about workers."""
