"""What every native kernel shares: compiling, loading, register tiles."""
