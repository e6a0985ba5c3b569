"""arenarl: train tool-using language-model agents on the ranking of a tournament between their own attempts.

Importing it registers the environments with Gymnasium, and nothing heavier: a file of ``arenarl/envs`` that defines a class
``NameTasks`` is the environment ``arenarl/Name-v0``.
"""

import re
from pathlib import Path

import gymnasium

__version__ = "0.1.0"


def _register_environments() -> None:
    for file in sorted((Path(__file__).parent / "envs").glob("*.py")):
        for name in re.findall(r"^class (\w+)Tasks\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            gymnasium.register(
                f"arenarl/{name}-v0", entry_point="arenarl.env:ToolGymEnv",
                vector_entry_point="arenarl.vector_env:ToolVectorEnv",
                kwargs={"taskset": f"arenarl.envs.{file.stem}:{name}Tasks"},
            )  # fmt: skip


_register_environments()

__all__ = ["__version__"]
