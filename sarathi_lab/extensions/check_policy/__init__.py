"""`lab.check_policy`: random queues served with a policy, until one breaks a rule."""

from sarathi_lab.extensions.check_policy.check import PolicyCheck, check_policy
from sarathi_lab.extensions.check_policy.rules import Checker, PolicyFault, hold

__all__ = ["Checker", "PolicyCheck", "PolicyFault", "check_policy", "hold"]
