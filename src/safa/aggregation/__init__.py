"""What the updates of a step make of the global model."""
