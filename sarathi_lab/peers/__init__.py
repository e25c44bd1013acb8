"""Other engines on the same model and requests, each in a process, and where wanted an environment, of its own."""
