"""The OpenAI API on the wire: requests parsed and checked, answers and chunks encoded. Pure."""
