"""Import me as `arenarl.envs`: two names for one module would mean two copies of each class."""

if __name__ != "arenarl.envs":
    raise ImportError(f"import arenarl.envs, not {__name__}")
