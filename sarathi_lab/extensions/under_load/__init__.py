"""Requests that arrive over time: experiments, and the highest rate within an objective."""
