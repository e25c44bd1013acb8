"""The highest rate of requests that an engine serves within a service level objective (task `capacity`)."""
