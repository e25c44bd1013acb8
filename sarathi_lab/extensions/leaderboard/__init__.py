"""Groups of policies that are distinguished: `experiment=leaderboard`, or `python -m sarathi_lab
leaderboard`.
"""

from sarathi_lab.extensions.leaderboard.command import main
from sarathi_lab.extensions.leaderboard.task import Leaderboard

__all__ = ["Leaderboard", "main"]
