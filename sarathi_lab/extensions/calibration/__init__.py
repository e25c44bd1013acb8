"""The task `calibrate`: a device measured for `executor=simulated`."""

from sarathi_lab.extensions.calibration.task import Calibrate

__all__ = ["Calibrate"]
