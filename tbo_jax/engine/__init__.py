"""The decode engine: requests, key/value pages, scheduling and the loop that runs the model."""
