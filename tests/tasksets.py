"""Task sets with faults, named by "tests.tasksets:Name" in tests of bad input."""

import sys

from arenarl.envs.travel import TravelTasks
from arenarl.mcp import ServerSpec


class NoTasks(TravelTasks):
    def tasks(self, split, count, seed):
        return []


class MissingCommand(TravelTasks):
    def servers(self):
        return (ServerSpec(name="ghost", command="no-such-command-anywhere"),)


class ExitsAtStart(TravelTasks):
    def servers(self):
        code = "import sys; print('missing API key', file=sys.stderr); sys.exit(3)"
        return (ServerSpec(name="broken", command=sys.executable, args=("-c", code)),)
