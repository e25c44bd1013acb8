"""A server that speaks OpenAI's API, driven with the lab's workloads and recorded as the lab's own runs are."""
