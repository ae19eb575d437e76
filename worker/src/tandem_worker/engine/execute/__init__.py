"""Running a planned step on the model: batches, recorded graphs, host copies, memory."""
