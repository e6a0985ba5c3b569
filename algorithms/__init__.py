"""Import me as `arenarl.algorithms`: two names for one module would mean two copies of each class."""

if __name__ != "arenarl.algorithms":
    raise ImportError(f"import arenarl.algorithms, not {__name__}")
