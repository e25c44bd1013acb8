"""The task `validate`: a recorded run of a real server beside its simulated replay, as it was run
and with other settings.
"""

from sarathi_lab.extensions.replay.validation import Validate

__all__ = ["Validate"]
