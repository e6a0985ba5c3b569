"""arenarl: train tool-using language-model agents on the ranking of a tournament between their own attempts.

Importing it registers the environments with Gymnasium, and nothing heavier.
"""

import gymnasium

__version__ = "0.1.0"

gymnasium.register("arenarl/Travel-v0", entry_point="arenarl.envs.travel:TravelEnv")

__all__ = ["__version__"]
